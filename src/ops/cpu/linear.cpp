#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/gemm.hpp"
#include "ops/cpu/linear_weight.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/table.hpp"
#include "ops/eight_bit.hpp"

namespace prl::ops::cpu {
namespace {

/// Tokens summed at a time into a weight gradient; part of the order of summation.
constexpr std::int64_t kGradientTokens = 1024;
/// Half of a small second-level cache.
constexpr std::size_t kReadAheadBytes = std::size_t{512} << 10;

/// Rounds finished tiles into a strided output, with bias or onto what is there.
struct StoreRows {
  const Kernels* kernels;
  TensorView out;
  const float* bias;
  bool accumulate;

  static void run(const void* self, const GemmTileResult& t) {
    const auto& s = *static_cast<const StoreRows*>(self);
    const auto size = static_cast<std::int64_t>(size_of(s.out.dtype));
    for (std::int64_t i = 0; i < t.rows; ++i) {
      char* row = static_cast<char*>(s.out.data) + ((t.row + i) * s.out.row_stride + t.col) * size;
      s.kernels->store_row(row, t.c + i * t.c_stride, s.bias == nullptr ? nullptr : s.bias + t.col, t.cols, s.accumulate, s.out.dtype);
    }
  }
};

/// A row of inputs as products of 8-bit numbers read it.
template <typename T>
void round_inputs(T* out, const T* x, std::int64_t count) {
  const auto value = [](T v) {
    if constexpr (std::is_same_v<T, float>)
      return v;
    else
      return to_f32(v);
  };
  const auto stored = [](float v) {
    if constexpr (std::is_same_v<T, float>)
      return v;
    else
      return to_bf16(v);
  };
  std::uint32_t greatest = 0;  // as bits: those of NaN are greater than all others
  for (std::int64_t k = 0; k < count; ++k) greatest = std::max(greatest, std::bit_cast<std::uint32_t>(value(x[k])) & 0x7fffffffu);
  if (greatest >= 0x7f800000u) {
    std::fill_n(out, count, stored(std::numeric_limits<float>::quiet_NaN()));
    return;
  }
  const int n = eight_bit_exponent(std::bit_cast<float>(greatest), kMaxInputExponent);
  const float factor = power_of_two(n), inverse = power_of_two(-n);
  for (std::int64_t k = 0; k < count; ++k) out[k] = stored(nearest_eight_bit(value(x[k]) * inverse) * factor);
}

/// `a` in `memory`, contiguous and rounded.
GemmLeft rounded_to_eight_bits(OpContext& ctx, const GemmLeft& a, char* memory) {
  parallel_rows(ctx, a.rows, a.depth, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t from = row * a.stride, to = row * a.depth;
      if (a.dtype == DType::kF32)
        round_inputs(reinterpret_cast<float*>(memory) + to, static_cast<const float*>(a.data) + from, a.depth);
      else
        round_inputs(reinterpret_cast<BFloat16*>(memory) + to, static_cast<const BFloat16*>(a.data) + from, a.depth);
    }
  });
  return {.data = memory, .dtype = a.dtype, .stride = a.depth, .rows = a.rows, .depth = a.depth};
}

void product(OpContext& ctx, const GemmKernels& k, TensorView out, GemmLeft a, const GemmRight& b, const float* bias, bool accumulate,
             bool rounds_inputs = false) {
  const bool direct = out.dtype == DType::kF32 && bias == nullptr;
  const GemmPlan plan = plan_gemm(ctx, k, a.rows, a.depth, b.cols, !direct);
  const std::size_t rounded_bytes = rounds_inputs ? aligned_bytes(static_cast<std::size_t>(a.rows * a.depth) * size_of(a.dtype)) : 0;
  char* memory = static_cast<char*>(ctx.workspace->require(plan.total_bytes + rounded_bytes));
  if (rounds_inputs) {
    a = rounded_to_eight_bits(ctx, a, memory);
    memory += rounded_bytes;
  }
  if (direct) {
    gemm(ctx, k, plan, a, b, {.c = out.as<float>(), .c_stride = out.row_stride, .accumulate = accumulate}, memory);
    return;
  }
  const StoreRows store{&kernels(ctx), out, bias, accumulate};
  gemm(ctx, k, plan, a, b, {.sink = StoreRows::run, .self = &store}, memory);
}

GemmLeft rows_of(const ConstTensorView& x) {
  return {.data = x.data, .dtype = x.dtype, .stride = x.row_stride, .rows = x.shape.num_rows(), .depth = x.shape.num_cols()};
}

}  // namespace

const GemmKernels& gemm_for(const OpContext& ctx, DType dtype, WeightUse use) {
  const Kernels& k = kernels(ctx);
  if (is_eight_bit(use)) return dtype == DType::kBF16 ? *k.gemm_bf16_eight : *k.gemm_f32_eight;
  if (dtype != DType::kBF16) return *k.gemm_f32;
  return use == WeightUse::kAdapter && k.gemm_bf16_narrow != nullptr ? *k.gemm_bf16_narrow : *k.gemm_bf16;
}

PackedWeight::PackedWeight(OpContext& ctx, ConstTensorView w, ConstTensorView bias, DType compute, bool with_backward, WeightUse use)
    : gemm(&gemm_for(ctx, compute, use)), backward_gemm(is_eight_bit(use) ? &gemm_for(ctx, compute) : gemm) {
  num_outputs_ = w.shape.num_rows();
  num_inputs_ = w.shape.num_cols();
  dtype_ = compute;
  has_bias_ = bias.data != nullptr;
  has_backward_ = with_backward;
  rounds_inputs_ = use == WeightUse::kEightBitProduct;
  const auto panels = [&](const GemmKernels& k, std::int64_t cols, std::int64_t depth) {
    return Tensor::empty(ctx.runtime, {static_cast<std::int64_t>(panels_bytes(k, cols, depth))}, DType::kU8);
  };
  forward_panels = panels(*gemm, num_outputs_, num_inputs_);
  if (with_backward) backward_panels = panels(*backward_gemm, num_inputs_, num_outputs_);
  if (has_bias_) bias_N = Tensor::empty(ctx.runtime, {num_outputs_}, DType::kF32);
  pack(ctx, w, bias);
}

void PackedWeight::pack(OpContext& ctx, ConstTensorView w, ConstTensorView bias) {
  pack_panels(ctx, *gemm, forward_panels.as<char>(), w.data, w.dtype, num_inputs_, num_outputs_, num_inputs_, false);
  if (has_backward_ && backward_gemm == gemm) {
    pack_panels(ctx, *gemm, backward_panels.as<char>(), w.data, w.dtype, num_inputs_, num_inputs_, num_outputs_, true);
  } else if (has_backward_) {
    const Tensor values = Tensor::empty(ctx.runtime, {num_outputs_, num_inputs_}, DType::kF32);
    parallel_rows(ctx, num_outputs_, num_inputs_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) unpack_row(n, values.as<float>() + n * num_inputs_);
    });
    pack_panels(ctx, *backward_gemm, backward_panels.as<char>(), values.data(), DType::kF32, num_inputs_, num_inputs_, num_outputs_, true);
  }
  if (has_bias_) ctx.runtime->copy_within(bias_N.data(), bias.data, bias_N.num_bytes());
}

void PackedWeight::refill(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias) {
  PRL_CHECK(w_NK.dtype() == dtype_ && w_NK.shape() == Shape({num_outputs_, num_inputs_}) && has_bias_ == (bias.data != nullptr),
            "a weight of shape [{}, {}] is refilled by another", num_outputs_, num_inputs_);
  pack(ctx, w_NK, bias);
}

std::size_t PackedWeight::num_bytes() const noexcept {
  return forward_panels.num_bytes() + (backward_panels.defined() ? backward_panels.num_bytes() : 0) +
         (bias_N.defined() ? bias_N.num_bytes() : 0);
}

void PackedWeight::unpack_row(std::int64_t n, float* out_K) const {
  PRL_CHECK(n >= 0 && n < num_outputs_, "row {} of {}", n, num_outputs_);
  gemm->unpack_column(out_K, forward_panels.as<char>() + static_cast<std::size_t>(n / gemm->col_tile) * gemm->panel_bytes(num_inputs_),
                      static_cast<int>(n % gemm->col_tile), num_inputs_);
}

const PackedWeight& packed(const OpContext& ctx, const LinearWeight& w) {
  const auto* p = dynamic_cast<const PackedWeight*>(&w);
  const auto is_of = [&](WeightUse use) { return p->gemm == &gemm_for(ctx, w.dtype(), use); };
  PRL_CHECK(p != nullptr && (is_of(WeightUse::kMatrix) || is_of(WeightUse::kAdapter) || is_of(WeightUse::kEightBit)),
            "a weight packed for another device or CPU kind");
  return *p;
}

GemmRight forward_operand(const PackedWeight& w, std::int64_t first_output, std::int64_t count) {
  const auto stride = static_cast<std::int64_t>(w.gemm->panel_bytes(w.num_inputs()));
  PRL_DCHECK(first_output % w.gemm->col_tile == 0);
  return {w.forward_panels.as<char>() + first_output / w.gemm->col_tile * stride, stride, count};
}

GemmRight backward_operand(const PackedWeight& w, std::int64_t first_output) {
  const GemmKernels& k = *w.backward_gemm;
  PRL_DCHECK(first_output % k.depth_multiple == 0);
  return {w.backward_panels.as<char>() + k.panel_bytes(first_output), static_cast<std::int64_t>(k.panel_bytes(w.num_outputs())),
          w.num_inputs()};
}

namespace {

/// Products of a single row are bound by reading weights. While the caller does the work between this product and the next, workers
/// prefetch the weights they will begin with: the first task is the caller's own.
void read_ahead(OpContext& ctx, const LinearWeight& next) {
  const PackedWeight& w = packed(ctx, next);
  const GemmPlan plan = plan_gemm(ctx, *w.gemm, 1, w.num_inputs(), w.num_outputs(), false);
  const std::size_t task = static_cast<std::size_t>(ceil_div(plan.task_cols, w.gemm->col_tile)) * w.gemm->panel_bytes(w.num_inputs());
  ctx.pool->read_ahead({w.forward_panels.as<char>(), task, std::min(task, kReadAheadBytes)});
}

}  // namespace

LinearWeightPtr pack_linear(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias_N, DType compute, bool with_backward,
                            WeightUse use) {
  return std::make_shared<PackedWeight>(ctx, w_NK, bias_N, compute, with_backward, use);
}

LinearWeightPtr share_linear(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N, bool with_backward, WeightUse use,
                             const CodeMemory& /*memory*/) {
  return cpu::pack_linear(ctx, w_NK, bias_N, w_NK.dtype(), with_backward, use);
}

void linear(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& weight, const LinearWeight* next) {
  const PackedWeight& w = packed(ctx, weight);
  if (next != nullptr && x_TK.shape.num_rows() == 1 && num_threads(ctx) > 1) read_ahead(ctx, *next);
  const float* bias = w.has_bias() ? w.bias_N.as<float>() : nullptr;
  product(ctx, *w.gemm, y_TN, rows_of(x_TK), forward_operand(w, 0, w.num_outputs()), bias, false, w.rounds_inputs());
}

void linear_backward_input(OpContext& ctx, TensorView dx_TK, ConstTensorView dy_TN, const LinearWeight& weight, bool accumulate) {
  const PackedWeight& w = packed(ctx, weight);
  product(ctx, *w.backward_gemm, dx_TK, rows_of(dy_TN), backward_operand(w, 0), nullptr, accumulate);
}

namespace {

struct AddedTo {
  float* data;
  std::int64_t stride;
  const Kernels* kernels;
};

void add_tile(const void* self, const GemmTileResult& tile) {
  const auto& to = *static_cast<const AddedTo*>(self);
  for (std::int64_t r = 0; r < tile.rows; ++r)
    to.kernels->accumulate(to.data + (tile.row + r) * to.stride + tile.col, tile.c + r * tile.c_stride, tile.cols, DType::kF32);
}

}  // namespace

std::size_t weight_gradient_bytes(const OpContext& ctx, const GemmKernels& k, std::int64_t T, std::int64_t N, std::int64_t K,
                                  bool accumulate) {
  const std::int64_t block = std::min(T, kGradientTokens);
  const std::size_t product = accumulate && T > block ? aligned_bytes(static_cast<std::size_t>(N * K) * sizeof(float)) : 0;
  return product + aligned_bytes(panels_bytes(k, K, block)) + plan_gemm(ctx, k, N, block, K, accumulate).total_bytes;
}

void weight_gradient(OpContext& ctx, const GemmKernels& k, TensorView dw_NK, ConstTensorView dy_TN, ConstTensorView x_TK, bool accumulate,
                     char* memory) {
  const std::int64_t T = x_TK.shape.num_rows(), N = dy_TN.shape.num_cols(), K = x_TK.shape.num_cols();
  const std::int64_t block = std::min(T, kGradientTokens);
  if (accumulate && T > block) {
    float* product = reinterpret_cast<float*>(memory);
    weight_gradient(ctx, k, {product, {N, K}, DType::kF32, dw_NK.device, K}, dy_TN, x_TK, false,
                    memory + aligned_bytes(static_cast<std::size_t>(N * K) * sizeof(float)));
    const Kernels& kn = kernels(ctx);
    parallel_rows(ctx, N, K, [&](std::int64_t begin, std::int64_t end) {
      kn.accumulate(dw_NK.as<float>() + begin * K, product + begin * K, (end - begin) * K, DType::kF32);
    });
    return;
  }
  const AddedTo added{dw_NK.as<float>(), K, &kernels(ctx)};
  const GemmPlan plan = plan_gemm(ctx, k, N, block, K, accumulate);
  const std::size_t panel_bytes = aligned_bytes(panels_bytes(k, K, block));
  for (std::int64_t t0 = 0; t0 < T; t0 += block) {
    const std::int64_t tokens = std::min(block, T - t0);
    const ConstTensorView x = x_TK.rows(t0, tokens), dy = dy_TN.rows(t0, tokens);
    pack_panels(ctx, k, memory, x.data, x.dtype, x.row_stride, K, tokens, true);
    const GemmLeft left{.data = dy.data, .dtype = dy.dtype, .stride = dy.row_stride, .transposed = true, .rows = N, .depth = tokens};
    gemm(ctx, k, plan, left, {memory, static_cast<std::int64_t>(k.panel_bytes(tokens)), K},
         {.c = dw_NK.as<float>(), .c_stride = K, .accumulate = t0 > 0, .sink = accumulate ? &add_tile : nullptr, .self = &added},
         memory + panel_bytes);
  }
}

void linear_backward_weight(OpContext& ctx, TensorView dw_NK, TensorView db_N, ConstTensorView dy_TN, ConstTensorView x_TK,
                            bool accumulate) {
  const Kernels& kn = kernels(ctx);
  const GemmKernels& k = gemm_for(ctx, x_TK.dtype);
  const std::int64_t T = x_TK.shape.num_rows(), N = dy_TN.shape.num_cols(), K = x_TK.shape.num_cols();
  weight_gradient(ctx, k, dw_NK, dy_TN, x_TK, accumulate,
                  static_cast<char*>(ctx.workspace->require(weight_gradient_bytes(ctx, k, T, N, K, accumulate))));
  if (db_N.data == nullptr) return;
  constexpr std::int64_t kCols = 256;
  const auto size = static_cast<std::int64_t>(size_of(dy_TN.dtype));
  parallel(ctx, (N + kCols - 1) / kCols, [&](std::int64_t i) {
    const std::int64_t col = i * kCols, cols = std::min(kCols, N - col);
    for (std::int64_t t = 0; t < T; ++t)
      kn.accumulate(db_N.as<float>() + col, static_cast<const char*>(dy_TN.data) + (t * dy_TN.row_stride + col) * size, cols, dy_TN.dtype);
  });
}

std::size_t matmul_bytes(const OpContext& ctx, std::int64_t m, std::int64_t k, std::int64_t n) {
  const GemmKernels& g = *kernels(ctx).gemm_f32;
  return aligned_bytes(panels_bytes(g, n, k)) + plan_gemm(ctx, g, m, k, n, false).total_bytes;
}

void matmul_with(OpContext& ctx, float* out, const float* a, const float* b, std::int64_t m, std::int64_t k, std::int64_t n,
                 bool transpose_b, char* memory) {
  const GemmKernels& g = *kernels(ctx).gemm_f32;
  const std::size_t bytes = aligned_bytes(panels_bytes(g, n, k));
  pack_panels(ctx, g, memory, b, DType::kF32, transpose_b ? k : n, n, k, !transpose_b);
  gemm(ctx, g, plan_gemm(ctx, g, m, k, n, false), {.data = a, .stride = k, .rows = m, .depth = k},
       {memory, static_cast<std::int64_t>(g.panel_bytes(k)), n}, {.c = out, .c_stride = n}, memory + bytes);
}

void matmul_f32(OpContext& ctx, TensorView out_MN, ConstTensorView a_MK, ConstTensorView b, bool transpose_b) {
  const std::int64_t m = a_MK.shape.num_rows(), k = a_MK.shape.num_cols(), n = out_MN.shape.num_cols();
  char* memory = static_cast<char*>(ctx.workspace->require(matmul_bytes(ctx, m, k, n)));
  matmul_with(ctx, out_MN.as<float>(), a_MK.as<float>(), b.as<float>(), m, k, n, transpose_b, memory);
}

}  // namespace prl::ops::cpu
