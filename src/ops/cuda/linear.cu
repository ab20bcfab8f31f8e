#include <cuda_fp8.h>

#include <type_traits>
#include <vector>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/few_rows_eight.cuh"
#include "ops/cuda/input_codes.cuh"
#include "ops/cuda/input_codes.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/map.cuh"
#include "ops/cuda/sums.hpp"
#include "ops/eight_bit.hpp"

namespace prl::ops::cuda {
namespace {

/// out[r] = sum[r] + bias, rounded once: for types that the library's own bias epilogue does not take.
template <typename T>
__global__ void __launch_bounds__(kMapBlock)
    add_bias_kernel(T* out, const float* sums, const float* bias, std::int64_t out_stride, int cols) {
  const int c = static_cast<int>(blockIdx.x * kMapBlock + threadIdx.x);
  const std::int64_t row = blockIdx.y + static_cast<std::int64_t>(blockIdx.z) * 65535;
  if (c < cols) out[row * out_stride + c] = from_float<T>(sums[row * cols + c] + bias[c]);
}

/// partial[group, n] = sum of a group of rows of dy, in order.
constexpr int kBiasGroupRows = 64;
template <typename T>
__global__ void __launch_bounds__(kMapBlock)
    column_sums_kernel(float* partial, const T* dy, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kMapBlock + threadIdx.x;
  if (c >= cols) return;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * kBiasGroupRows, end = min(rows, begin + kBiasGroupRows);
  float sum = 0.0f;
  for (std::int64_t r = begin; r < end; ++r) sum += to_float(dy[r * stride + c]);
  partial[blockIdx.y * cols + c] = sum;
}

void add_bias(OpContext& ctx, TensorView y, const float* sums, const float* bias) {
  const std::int64_t rows = y.shape.num_rows(), cols = y.shape.num_cols();
  for (std::int64_t first = 0; first < rows; first += 65535) {
    const dim3 grid(static_cast<unsigned>(ceil_div(cols, kMapBlock)), static_cast<unsigned>(std::min<std::int64_t>(65535, rows - first)));
    with_type(y.dtype, [&](auto t) {
      using T = decltype(t);
      add_bias_kernel<T><<<grid, kMapBlock, 0, stream_of(ctx)>>>(y.as<T>() + first * y.row_stride, sums + first * cols, bias, y.row_stride,
                                                                 static_cast<int>(cols));
    });
    PRL_CUDA_CHECK(cudaGetLastError());
  }
}

/// Threads of the block that rounds a row.
constexpr int kRoundThreads = 256;
/// What is kept beside the rounded values, each with its factors: codes as in EightBitCodes, or in ProductCodes, or null.
struct KeptCodes {
  unsigned char* codes = nullptr;
  std::uint16_t* factors = nullptr;
  unsigned char* plain = nullptr;
  float* plain_factors = nullptr;
};
union EightCodes {
  std::uint8_t bytes[kVec];
  uint2 all;
};
/// Vectors of kVec that a thread keeps of its row; it reads others twice.
constexpr int kKeptOfRow = 4;
/// A block for each row. kWide: its vectors are all whole and aligned.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kRoundThreads) round_to_eight_bits_kernel(T* w, std::int64_t cols, const KeptCodes kept) {
  const std::int64_t n_row = blockIdx.x;
  T* const row = w + n_row * cols;
  const auto vectors = static_cast<int>((cols + kVec - 1) / kVec);
  float held[kKeptOfRow][kVec];
  const auto read = [&](float(&v)[kVec], int vector) {
    load<kWide>(v, row + vector * kVec, static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - vector * kVec)));
  };
  const auto for_each = [&](auto&& use) {
#pragma unroll
    for (int j = 0; j < kKeptOfRow; ++j)
      if (const int vector = static_cast<int>(threadIdx.x) + j * kRoundThreads; vector < vectors) use(held[j], vector, true);
    for (int vector = static_cast<int>(threadIdx.x) + kKeptOfRow * kRoundThreads; vector < vectors; vector += kRoundThreads) {
      float v[kVec];
      use(v, vector, false);
    }
  };
  std::uint32_t greatest = 0;
  for_each([&](float(&v)[kVec], int vector, bool) {
    read(v, vector);
    greatest = greatest_of(v, greatest);
  });
  const int n = eight_bit_exponent(__uint_as_float(greatest_of_block<kRoundThreads>(greatest)));
  if (threadIdx.x == 0 && kept.codes != nullptr) kept.factors[n_row] = code_factor(n);
  if (threadIdx.x == 0 && kept.plain != nullptr) kept.plain_factors[n_row] = power_of_two(n);
  for_each([&](float(&v)[kVec], int vector, bool is_held) {
    if (!is_held) read(v, vector);
    EightCodes codes;
#pragma unroll
    for (int i = 0; i < kVec; ++i) codes.bytes[i] = eight_bit_code(v[i], n);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = eight_bit_value(codes.bytes[i], n);
    store<kWide>(row + vector * kVec, v, static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - vector * kVec)));
    if (kept.plain != nullptr) *reinterpret_cast<uint2*>(kept.plain + n_row * cols + vector * kVec) = codes.all;
    if (kept.codes == nullptr) return;
    EightCodes turned;
#pragma unroll
    for (int at = 0; at < kVec; ++at) turned.bytes[at] = codes.bytes[input_of_code(at)];
    constexpr int kOfBlock = kBlock / kCodesOfThread, kOfSixteen = kCodesOfThread / kVec;
    const int sixteen = vector / kOfSixteen;
    *reinterpret_cast<uint2*>(kept.codes + codes_at(gridDim.x, n_row, sixteen / kOfBlock, sixteen % kOfBlock) +
                              vector % kOfSixteen * kVec) = turned.all;
  });
}

constexpr int kWidenBlock = 256;
/// 16 codes a thread.
__global__ void __launch_bounds__(kWidenBlock)
    widen_codes_kernel(uint4* out, const uint4* codes, const float* factors, std::int64_t count, int of_row) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWidenBlock + threadIdx.x;
  if (i >= count) return;
  const float factor = factors[i / of_row];
  const uint4 from = codes[i];
  const auto pairs = [&](std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
    const auto pair = [&](std::uint32_t two) {
      const float2 v = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xffffu), __NV_E4M3)));
      const __nv_bfloat162 wide = __floats2bfloat162_rn(v.x * factor, v.y * factor);
      return *reinterpret_cast<const std::uint32_t*>(&wide);
    };
    low = pair(four);
    high = pair(four >> 16);
  };
  uint4 first, second;
  pairs(from.x, first.x, first.y);
  pairs(from.y, first.z, first.w);
  pairs(from.z, second.x, second.y);
  pairs(from.w, second.z, second.w);
  out[2 * i] = first;
  out[2 * i + 1] = second;
}

}  // namespace

void widen_codes(const OpContext& ctx, void* out, const ProductCodes& codes, std::int64_t rows, std::int64_t K) {
  const std::int64_t count = rows * K / 16;
  if (count == 0) return;
  widen_codes_kernel<<<static_cast<unsigned>(ceil_div(count, kWidenBlock)), kWidenBlock, 0, stream_of(ctx)>>>(
      static_cast<uint4*>(out), reinterpret_cast<const uint4*>(codes.codes), codes.factors, count, static_cast<int>(K / 16));
  PRL_CUDA_CHECK(cudaGetLastError());
}

CodeMemory take_code_memory(OpContext& ctx, std::int64_t count, std::int64_t N, std::int64_t K, DType compute) {
  if (eight_bit_product_bytes(N, K) == 0 || compute != DType::kBF16 || properties_of(ctx).major != 9) return {};
  return {Tensor::empty(ctx.runtime, {count * N, K}, DType::kU8), Tensor::empty(ctx.runtime, {count * N}, DType::kF32)};
}

DenseWeight::DenseWeight(OpContext& ctx, Tensor w, ConstTensorView bias, bool with_backward, WeightUse use, const CodeMemory& memory)
    : w_NK(std::move(w)), is_eight_bit_(is_eight_bit(use)) {
  num_outputs_ = w_NK.shape().num_rows();
  num_inputs_ = w_NK.shape().num_cols();
  dtype_ = w_NK.dtype();
  has_bias_ = bias.data != nullptr;
  has_backward_ = with_backward;
  rounds_inputs_ = use == WeightUse::kEightBitProduct;
  if (is_eight_bit_) {
    // Products with experts' matrices read the values.
    const bool has_codes = use == WeightUse::kEightBit && eight_bit_code_bytes(num_outputs_, num_inputs_) > 0;
    if (rounds_inputs_) {
      const CodeMemory own = memory.codes.defined() ? memory : cuda::take_code_memory(ctx, 1, num_outputs_, num_inputs_, dtype_);
      codes_ = own.codes;
      factors_ = own.factors;
    }
    if (has_codes && dtype_ == DType::kBF16 && properties_of(ctx).major == 9) {
      codes_ = Tensor::empty(ctx.runtime, {num_outputs_, num_inputs_}, DType::kU8);
      factors_ = Tensor::empty(ctx.runtime, {num_outputs_}, DType::kBF16);
    }
    round(ctx);
    if (memory.is_alone && codes_.defined() && rounds_inputs_) w_NK = {};
  }
  if (!has_bias_) return;
  bias_N = Tensor::empty(ctx.runtime, {num_outputs_}, DType::kF32);
  ctx.runtime->copy_within(bias_N.data(), bias.data, bias_N.num_bytes());
}

/// In place, row by row.
void DenseWeight::round(OpContext& ctx) {
  KeptCodes kept;
  if (codes_.defined() && rounds_inputs_)
    kept = {.plain = codes_.as<unsigned char>(), .plain_factors = factors_.as<float>()};
  else if (codes_.defined())
    kept = {.codes = codes_.as<unsigned char>(), .factors = factors_.as<std::uint16_t>()};
  with_type(dtype_, [&](auto t) {
    using T = decltype(t);
    const bool is_wide = num_inputs_ % kVec == 0 && is_aligned(w_NK.data(), 16);
    const auto kernel = is_wide ? round_to_eight_bits_kernel<T, true> : round_to_eight_bits_kernel<T, false>;
    kernel<<<static_cast<unsigned>(num_outputs_), kRoundThreads, 0, stream_of(ctx)>>>(w_NK.as<T>(), num_inputs_, kept);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

EightBitCodes DenseWeight::codes() const noexcept {
  return codes_.defined() && !rounds_inputs_ ? EightBitCodes{codes_.as<char>(), factors_.as<std::uint16_t>()} : EightBitCodes{};
}

ProductCodes DenseWeight::product_codes() const noexcept {
  return codes_.defined() && rounds_inputs_ ? ProductCodes{codes_.as<unsigned char>(), factors_.as<float>()} : ProductCodes{};
}

void DenseWeight::refill(OpContext& ctx, const Tensor& w, ConstTensorView bias) {
  PRL_CHECK(has_values(), "a weight of codes alone is refilled");
  PRL_CHECK(w.data() == w_NK.data() && w.shape() == w_NK.shape() && has_bias_ == (bias.data != nullptr),
            "a weight of shape [{}, {}] is refilled by another", num_outputs_, num_inputs_);
  if (is_eight_bit_) round(ctx);
  if (has_bias_) ctx.runtime->copy_within(bias_N.data(), bias.data, bias_N.num_bytes());
}

std::size_t DenseWeight::num_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Tensor* t : {&w_NK, &bias_N, &codes_, &factors_})
    if (t->defined()) bytes += t->num_bytes();
  return bytes;
}

void DenseWeight::unpack_rows(std::int64_t first, std::int64_t count, float* out) const {
  PRL_CHECK(first >= 0 && count >= 0 && first + count <= num_outputs_, "{} rows from {} on of {}", count, first, num_outputs_);
  const auto K = static_cast<std::size_t>(num_inputs_), num = static_cast<std::size_t>(count) * K, at = static_cast<std::size_t>(first) * K;
  if (!has_values()) {
    std::vector<std::uint8_t> codes(num);
    std::vector<float> factors(static_cast<std::size_t>(count));
    codes_.runtime()->copy_to_host(codes.data(), codes_.as<std::uint8_t>() + at, num);
    codes_.runtime()->copy_to_host(factors.data(), factors_.as<float>() + first, factors.size() * sizeof(float));
    for (std::size_t i = 0; i < num; ++i) out[i] = eight_bit_value(codes[i], 0) * factors[i / K];
    return;
  }
  if (dtype_ == DType::kF32) {
    w_NK.runtime()->copy_to_host(out, w_NK.as<float>() + at, num * sizeof(float));
    return;
  }
  std::vector<BFloat16> values(num);
  w_NK.runtime()->copy_to_host(values.data(), w_NK.as<BFloat16>() + at, num * sizeof(BFloat16));
  for (std::size_t i = 0; i < num; ++i) out[i] = to_f32(values[i]);
}

const DenseWeight& dense(const OpContext& ctx, const LinearWeight& w) {
  const auto* d = dynamic_cast<const DenseWeight*>(&w);
  PRL_CHECK(d != nullptr && d->device() == ctx.runtime->device(), "a weight packed for another device");
  return *d;
}

std::optional<Stacked> stacked(const OpContext& ctx, std::span<const LinearWeight* const> weights) {
  const DenseWeight& first = dense(ctx, *weights[0]);
  if (!first.has_values()) return std::nullopt;
  const auto* begin = first.w_NK.as<char>();
  const std::int64_t row_bytes = first.num_inputs() * static_cast<std::int64_t>(size_of(first.dtype()));
  const std::int64_t apart = weights.size() > 1 ? dense(ctx, *weights[1]).w_NK.as<char>() - begin : first.num_outputs() * row_bytes;
  if (apart <= 0 || apart % (8 * row_bytes) != 0 || !is_aligned(begin, 16)) return std::nullopt;
  for (std::size_t e = 0; e < weights.size(); ++e) {
    const DenseWeight& w = dense(ctx, *weights[e]);
    if (!w.has_values() || w.has_bias() || w.num_outputs() != first.num_outputs() || w.num_inputs() != first.num_inputs() ||
        w.dtype() != first.dtype() || w.w_NK.as<char>() != begin + static_cast<std::int64_t>(e) * apart)
      return std::nullopt;
  }
  return Stacked{&first, apart / row_bytes};
}

std::optional<ProductCodes> stacked_codes(const OpContext& ctx, std::span<const LinearWeight* const> weights) {
  const DenseWeight& first = dense(ctx, *weights[0]);
  const ProductCodes codes = first.product_codes();
  const std::int64_t N = first.num_outputs(), K = first.num_inputs();
  if (codes.codes == nullptr || !is_aligned(codes.codes, 16)) return std::nullopt;
  for (std::size_t e = 0; e < weights.size(); ++e) {
    const DenseWeight& w = dense(ctx, *weights[e]);
    const auto i = static_cast<std::int64_t>(e);
    if (w.has_bias() || w.num_outputs() != N || w.num_inputs() != K || w.product_codes().codes != codes.codes + i * N * K ||
        w.product_codes().factors != codes.factors + i * N)
      return std::nullopt;
  }
  return codes;
}

Product forward_product(const DenseWeight& w, const void* x, std::int64_t x_stride, std::int64_t M, std::int64_t first,
                        std::int64_t count) {
  Product p;
  p.M = M;
  p.N = count;
  p.K = w.num_inputs();
  p.a = x;
  p.a_stride = x_stride;
  if (w.has_values()) p.b = w.w_NK.as<char>() + static_cast<std::size_t>(first * p.K) * size_of(w.dtype());
  p.b_stride = p.K;
  p.transpose_b = true;
  p.in_dtype = w.dtype();
  p.out_dtype = DType::kF32;
  p.out_stride = count;
  return p;
}

Product linear_product(const DenseWeight& w, TensorView y_TN, ConstTensorView x_TK) {
  Product p = forward_product(w, x_TK.data, x_TK.row_stride, x_TK.shape.num_rows(), 0, w.num_outputs());
  p.out = y_TN.data;
  p.out_stride = y_TN.row_stride;
  p.out_dtype = y_TN.dtype;
  if (w.has_bias()) p.bias = w.bias_N.as<float>();
  p.b_codes = w.codes();
  return p;
}

LinearWeightPtr pack_linear(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias_N, DType compute, bool with_backward,
                            WeightUse use) {
  const Tensor w = Tensor::empty(ctx.runtime, {w_NK.shape.num_rows(), w_NK.shape.num_cols()}, compute);
  if (w_NK.dtype == compute)
    ctx.runtime->copy_within(w.data(), w_NK.data, w.num_bytes());
  else
    cuda::cast(ctx, w, w_NK);
  return std::make_shared<DenseWeight>(ctx, w, bias_N, with_backward, use);
}

LinearWeightPtr share_linear(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N, bool with_backward, WeightUse use,
                             const CodeMemory& memory) {
  return std::make_shared<DenseWeight>(ctx, w_NK, bias_N, with_backward, use, memory);
}

namespace {

/// Inputs that a weight rounds, in the workspace: as codes where products are of those, else as values.
struct RoundedInputs {
  InputCodes codes;
  void* values = nullptr;
  float* sums = nullptr;  ///< [M, N] fp32, if wanted
};
RoundedInputs take_memory(OpContext& ctx, const DenseWeight& w, std::int64_t M, bool wants_sums) {
  const std::int64_t K = w.num_inputs();
  RoundedInputs out;
  const auto carve = [&](void* memory) {
    Carver c(memory);
    if (w.product_codes().codes != nullptr) {
      out.codes = take_codes(c, M, K);
    } else if (w.rounds_inputs()) {
      out.values = c.take<char>(M * round_up(K, 8) * static_cast<std::int64_t>(size_of(w.dtype())));
    }
    if (wants_sums) out.sums = c.take<float>(M * w.num_outputs());
    return c.used();
  };
  (void)carve(ctx.workspace->require(carve(nullptr)));
  return out;
}

/// The product of such inputs, which are yet to be rounded.
Product rounded_product(const DenseWeight& w, TensorView y_TN, ConstTensorView x_TK, const RoundedInputs& inputs) {
  Product p = linear_product(w, y_TN, x_TK);
  p.a = inputs.codes.codes != nullptr ? inputs.codes.codes : inputs.values;
  p.a_stride = inputs.codes.codes != nullptr ? inputs.codes.stride : round_up(p.K, 8);
  if (inputs.codes.codes == nullptr) return p;
  p.in_dtype = DType::kU8;
  p.b = w.product_codes().codes;
  p.a_factors = inputs.codes.factors;
  p.b_factors = w.product_codes().factors;
  return p;
}

void round_into(OpContext& ctx, const RoundedInputs& inputs, ConstTensorView x_TK) {
  if (inputs.codes.codes != nullptr) return inputs_to_codes(ctx, inputs.codes, x_TK);
  round_inputs(ctx, {inputs.values, x_TK.shape, x_TK.dtype, x_TK.device, round_up(x_TK.shape.num_cols(), 8)}, x_TK);
}

}  // namespace

void linear(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& weight, const LinearWeight* /*next*/) {
  const DenseWeight& w = dense(ctx, weight);
  const std::int64_t T = x_TK.shape.num_rows();
  Product p = linear_product(w, y_TN, x_TK);
  RoundedInputs memory;
  if (w.rounds_inputs()) {
    memory = take_memory(ctx, w, T, w.has_bias());
    p = rounded_product(w, y_TN, x_TK, memory);
    round_into(ctx, memory, x_TK);
  }
  Blas& blas = blas_of(ctx);
  if (!w.has_bias() || blas.can_run(p)) {
    blas.run(ctx, p);
    return;
  }
  float* const sums = w.rounds_inputs() ? memory.sums : take_memory(ctx, w, T, true).sums;
  p.bias = nullptr;
  p.out = sums;
  p.out_stride = p.N;
  p.out_dtype = DType::kF32;
  blas.run(ctx, p);
  add_bias(ctx, y_TN, sums, w.bias_N.as<float>());
}

bool linear_fused(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& weight, const LinearFusion& fusion) {
  const FewRowsFusion f{.norm = fusion.norm_K.as<float>(),
                        .eps = fusion.eps,
                        .residual = fusion.residual_TN.data,
                        .residual_stride = fusion.residual_TN.row_stride,
                        .swiglu = fusion.swiglu,
                        .lora = fusion.lora};
  const DenseWeight& w = dense(ctx, weight);
  if (!w.rounds_inputs()) return run_few_rows(ctx, linear_product(w, y_TN, x_TK), f);
  if (w.product_codes().codes == nullptr) return false;
  const RoundedInputs inputs = take_memory(ctx, w, x_TK.shape.num_rows(), false);
  const Product p = rounded_product(w, y_TN, x_TK, inputs);
  FewRowsFusion behind = f;
  behind.norm = nullptr;
  const std::optional<FewRowsTile> tile = find_few_rows_tile(ctx, p, behind);
  if (!tile) return false;
  if (f.norm == nullptr)
    round_into(ctx, inputs, x_TK);
  else if (!norm_to_codes(ctx, inputs.codes, x_TK, fusion.norm_K, fusion.eps))
    return false;
  few_rows_product(ctx, p, *tile, behind);
  return true;
}

void linear_backward_input(OpContext& ctx, TensorView dx_TK, ConstTensorView dy_TN, const LinearWeight& weight, bool accumulate) {
  const DenseWeight& w = dense(ctx, weight);
  Product p;
  p.M = dy_TN.shape.num_rows();
  p.N = w.num_inputs();
  p.K = w.num_outputs();
  p.a = dy_TN.data;
  p.a_stride = dy_TN.row_stride;
  if (w.has_values()) {
    p.b = w.w_NK.data();
  } else {
    void* const values = ctx.workspace->require(static_cast<std::size_t>(p.K * p.N) * size_of(w.dtype()));
    widen_codes(ctx, values, w.product_codes(), p.K, p.N);
    p.b = values;
  }
  p.b_stride = w.num_inputs();
  p.in_dtype = w.dtype();
  p.out = dx_TK.data;
  p.out_stride = dx_TK.row_stride;
  p.out_dtype = dx_TK.dtype;
  p.accumulate = accumulate;
  blas_of(ctx).run(ctx, p);
}

void linear_backward_weight(OpContext& ctx, TensorView dw_NK, TensorView db_N, ConstTensorView dy_TN, ConstTensorView x_TK,
                            bool accumulate) {
  const std::int64_t T = x_TK.shape.num_rows(), N = dy_TN.shape.num_cols(), K = x_TK.shape.num_cols();
  Product p;
  p.M = N;
  p.N = K;
  p.K = T;
  p.a = dy_TN.data;
  p.a_stride = dy_TN.row_stride;
  p.transpose_a = true;
  p.b = x_TK.data;
  p.b_stride = x_TK.row_stride;
  p.in_dtype = x_TK.dtype;
  p.out = dw_NK.data;
  p.out_stride = K;
  p.out_dtype = DType::kF32;
  p.accumulate = accumulate;
  p.may_split = true;  // one order for these sizes is enough: gradients are compared between runs, not between batches
  blas_of(ctx).run(ctx, p);
  if (db_N.data == nullptr) return;
  const std::int64_t groups = ceil_div(T, kBiasGroupRows);
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * N) * sizeof(float)));
  PRL_CHECK(groups <= 65535, "the bias gradient of {} tokens in one launch", T);
  const dim3 grid(static_cast<unsigned>(ceil_div(N, kMapBlock)), static_cast<unsigned>(groups));
  with_type(dy_TN.dtype, [&](auto t) {
    using E = decltype(t);
    column_sums_kernel<E><<<grid, kMapBlock, 0, stream_of(ctx)>>>(partial, dy_TN.as<E>(), T, N, dy_TN.row_stride);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
  add_rows(ctx, db_N.as<float>(), partial, groups, N);
}

void matmul_f32(OpContext& ctx, TensorView out_MN, ConstTensorView a_MK, ConstTensorView b, bool transpose_b) {
  Product p;
  p.M = out_MN.shape.num_rows();
  p.N = out_MN.shape.num_cols();
  p.K = a_MK.shape.num_cols();
  p.a = a_MK.data;
  p.a_stride = p.K;
  p.b = b.data;
  p.b_stride = transpose_b ? p.K : p.N;
  p.transpose_b = transpose_b;
  p.out = out_MN.data;
  p.out_stride = p.N;
  blas_of(ctx).run(ctx, p);
}

}  // namespace prl::ops::cuda
