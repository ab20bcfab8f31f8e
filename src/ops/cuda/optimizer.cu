#include <cmath>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/map.cuh"
#include "ops/cuda/sums.hpp"
#include "ops/newton_schulz.hpp"
#include "ops/rounding.hpp"

namespace prl::ops::cuda {
namespace {

struct AdamW {
  float beta1, beta2, eps, decay, step_size, inverse_sqrt_correction2, grad_scale;
  /// In: param, m, v, grad. Out: param, m, v.
  __device__ void operator()(float (&out)[3][kVec], const float (&in)[4][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float d = in[3][i] * grad_scale;
      const float m = fmaf(beta1, in[1][i], (1.0f - beta1) * d);
      const float v = fmaf(beta2, in[2][i], (1.0f - beta2) * d * d);
      out[1][i] = m;
      out[2][i] = v;
      out[0][i] = in[0][i] * decay - step_size * m / fmaf(sqrtf(v), inverse_sqrt_correction2, eps);
    }
  }
};

/// A step with moments in `State`, whose result is also written in the type that weights have where `rounded` is not null, so that
/// no second pass rounds it.
template <typename State, typename Low>
struct TypedAdamW {
  float* param;
  State *m, *v;
  const float* grad;
  Low* rounded;
  std::int64_t count;
  std::uint32_t salt_m, salt_v;
  bool wide;  ///< all start 16-byte aligned
  AdamW f;

  template <bool kWide>
  __device__ void run(std::int64_t at, int n) const {
    float in[4][kVec], out[3][kVec];
    load<kWide>(in[0], param + at, n);
    load<kWide>(in[1], m + at, n);
    load<kWide>(in[2], v + at, n);
    load<kWide>(in[3], grad + at, n);
    f(out, in);
    if constexpr (sizeof(State) == 2) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const std::uint32_t other = __float_as_uint(out[0][i]);
        out[1][i] = __uint_as_float(round_stochastic(__float_as_uint(out[1][i]), other, salt_m));
        out[2][i] = __uint_as_float(round_stochastic(__float_as_uint(out[2][i]), other, salt_v));
      }
    }
    store<kWide>(param + at, out[0], n);
    store<kWide>(m + at, out[1], n);
    store<kWide>(v + at, out[2], n);
    if (rounded != nullptr) store<kWide>(rounded + at, out[0], n);
  }
};
template <typename State, typename Low>
__global__ void __launch_bounds__(kMapBlock) typed_adamw_kernel(const TypedAdamW<State, Low> a) {
  const std::int64_t at = (static_cast<std::int64_t>(blockIdx.x) * kMapBlock + threadIdx.x) * kVec;
  if (at >= a.count) return;
  const int n = static_cast<int>(min(static_cast<std::int64_t>(kVec), a.count - at));
  if (a.wide && n == kVec)
    a.template run<true>(at, n);
  else
    a.template run<false>(at, n);
}

struct Sgd {
  SgdArgs a;
  __device__ float direction(float w, float g) const { return fmaf(a.weight_decay, w, g * a.grad_scale); }
};
/// In: param, grad. Out: param.
struct PlainSgd : Sgd {
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = fmaf(-a.lr, direction(in[0][i], in[1][i]), in[0][i]);
  }
};
/// In: param, buffer, grad. Out: param, buffer.
struct MomentumSgd : Sgd {
  __device__ void operator()(float (&out)[2][kVec], const float (&in)[3][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float d = direction(in[0][i], in[2][i]);
      const float b = a.is_first_step ? d : fmaf(a.momentum, in[1][i], d);
      out[1][i] = b;
      out[0][i] = fmaf(-a.lr, a.nesterov ? fmaf(a.momentum, b, d) : b, in[0][i]);
    }
  }
};

struct SignSgd {
  float lr, weight_decay;
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float w = in[0][i], d = in[1][i];
      const float sign = d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : d;  // 0 and NaN pass through
      out[0][i] = fmaf(-lr, sign, fmaf(-(lr * weight_decay), w, w));
    }
  }
};

constexpr int kTransposeTile = 32;

/// out[cols, rows] = transpose of in[rows, cols] times 1 / (sqrt(*squares) + kMuonEps), or as it is where `squares` is null.
__global__ void transpose_kernel(float* out, const float* in, std::int64_t rows, std::int64_t cols, const double* squares) {
  __shared__ float tile[kTransposeTile][kTransposeTile + 1];
  const std::int64_t col0 = static_cast<std::int64_t>(blockIdx.x) * kTransposeTile,
                     row0 = static_cast<std::int64_t>(blockIdx.y) * kTransposeTile;
  const float factor = squares == nullptr ? 1.0f : static_cast<float>(1.0 / (sqrt(*squares) + kMuonEps));
  for (int j = static_cast<int>(threadIdx.y); j < kTransposeTile; j += 8)
    if (row0 + j < rows && col0 + threadIdx.x < cols) tile[j][threadIdx.x] = in[(row0 + j) * cols + col0 + threadIdx.x];
  __syncthreads();
  for (int j = static_cast<int>(threadIdx.y); j < kTransposeTile; j += 8)
    if (col0 + j < cols && row0 + threadIdx.x < rows) out[(col0 + j) * rows + row0 + threadIdx.x] = tile[threadIdx.x][j] * factor;
}

/// By 1 / (sqrt(*squares) + kMuonEps).
struct Normalise {
  const double* squares;
  __device__ void operator()(float (&out)[1][kVec], const float (&in)[1][kVec]) const {
    const auto factor = static_cast<float>(1.0 / (sqrt(*squares) + kMuonEps));
#pragma unroll
    for (int i = 0; i < kVec; ++i) out[0][i] = in[0][i] * factor;
  }
};

void transpose(OpContext& ctx, float* out, const float* in, std::int64_t rows, std::int64_t cols, const double* squares) {
  const dim3 grid(static_cast<unsigned>(ceil_div(cols, kTransposeTile)), static_cast<unsigned>(ceil_div(rows, kTransposeTile)));
  transpose_kernel<<<grid, dim3(kTransposeTile, 8), 0, stream_of(ctx)>>>(out, in, rows, cols, squares);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void axpby(OpContext& ctx, float* out, float a, const float* x, float b, const float* y, std::int64_t n) {
  map<float, float, 1, 2>(ctx, {dense_f32(out, n)}, {dense_f32(x, n), dense_f32(y, n)}, Axpby{a, b});
}

void product(OpContext& ctx, float* out, const float* a, const float* b, std::int64_t m, std::int64_t k, std::int64_t n, bool transpose_b) {
  Product p;
  p.M = m;
  p.N = n;
  p.K = k;
  p.a = a;
  p.a_stride = k;
  p.b = b;
  p.b_stride = transpose_b ? k : n;
  p.transpose_b = transpose_b;
  p.out = out;
  p.out_stride = n;
  p.may_split = true;
  blas_of(ctx).run(ctx, p);
}

}  // namespace

void adamw(OpContext& ctx, TensorView param, TensorView m, TensorView v, ConstTensorView grad, const AdamWArgs& args, TensorView rounded) {
  const auto step = static_cast<double>(args.step);
  const double correction1 = 1.0 - std::pow(static_cast<double>(args.beta1), step),
               correction2 = 1.0 - std::pow(static_cast<double>(args.beta2), step);
  const AdamW f{.beta1 = args.beta1,
                .beta2 = args.beta2,
                .eps = args.eps,
                .decay = 1.0f - args.lr * args.weight_decay,
                .step_size = static_cast<float>(static_cast<double>(args.lr) / correction1),
                .inverse_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
                .grad_scale = args.grad_scale};
  if (rounded.data == nullptr && m.dtype == DType::kF32) {
    map<float, float, 3, 4>(ctx, {param, m, v}, {param, m, v, grad}, f);
    return;
  }
  with_type(m.dtype, [&](auto state) {
    with_type(rounded.dtype, [&](auto low) {
      using State = decltype(state);
      using Low = decltype(low);
      const TypedAdamW<State, Low> a{.param = param.as<float>(),
                                     .m = m.as<State>(),
                                     .v = v.as<State>(),
                                     .grad = grad.as<float>(),
                                     .rounded = rounded.as<Low>(),
                                     .count = param.shape.num_elements(),
                                     .salt_m = first_salt(args.step),
                                     .salt_v = second_salt(args.step),
                                     .wide = is_aligned(param.data, 16) && is_aligned(m.data, 16) && is_aligned(v.data, 16) &&
                                             is_aligned(grad.data, 16) && is_aligned(rounded.data, 16),
                                     .f = f};
      const auto blocks = static_cast<unsigned>(ceil_div(a.count, std::int64_t{kMapBlock} * kVec));
      typed_adamw_kernel<State, Low><<<blocks, kMapBlock, 0, stream_of(ctx)>>>(a);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void sgd(OpContext& ctx, TensorView param, TensorView buffer, ConstTensorView grad, const SgdArgs& args) {
  if (args.momentum == 0.0f)
    map<float, float, 1, 2>(ctx, {param}, {param, grad}, PlainSgd{{args}});
  else
    map<float, float, 2, 3>(ctx, {param, buffer}, {param, buffer, grad}, MomentumSgd{{args}});
}

void sign_sgd(OpContext& ctx, TensorView param, ConstTensorView grad, float lr, float weight_decay) {
  map<float, float, 1, 2>(ctx, {param}, {param, grad}, SignSgd{lr, weight_decay});
}

void muon(OpContext& ctx, TensorView param_NK, TensorView momentum_NK, ConstTensorView grad_NK, const MuonArgs& args) {
  const std::int64_t N = param_NK.shape.num_rows(), K = param_NK.shape.num_cols(), count = N * K;
  const bool tall = N > K;  // the iteration multiplies the shorter side with itself
  const std::int64_t r = std::min(N, K), c = std::max(N, K);

  float *x = nullptr, *y = nullptr, *gram = nullptr, *poly = nullptr, *scratch = nullptr;
  double* squares = nullptr;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    x = carver.take<float>(count);
    y = carver.take<float>(count);
    gram = carver.take<float>(r * r);
    poly = carver.take<float>(r * r);
    scratch = carver.take<float>(sum_squares_floats(count));
    squares = carver.take<double>(1);
    return carver.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));

  float* m = momentum_NK.as<float>();
  axpby(ctx, m, args.mu, m, args.grad_scale, grad_NK.as<float>(), count);
  sum_squares_to(ctx, squares, scratch, m, count);
  if (tall)
    transpose(ctx, x, m, N, K, squares);
  else
    map<float, float, 1, 1>(ctx, {dense_f32(x, count)}, {dense_f32(static_cast<const float*>(m), count)}, Normalise{squares});
  for (const NewtonSchulzStep& step : kNewtonSchulzSteps) {
    product(ctx, gram, x, x, r, c, r, true);
    product(ctx, poly, gram, gram, r, r, r, false);
    axpby(ctx, poly, step.b, gram, step.c, poly, r * r);
    product(ctx, y, poly, x, r, r, c, false);
    axpby(ctx, x, step.a, x, 1.0f, y, count);
  }
  float* update = x;
  if (tall) {
    transpose(ctx, y, x, K, N, nullptr);
    update = y;
  }
  const float rate = args.lr * 0.2f * std::sqrt(static_cast<float>(c));
  float* p = param_NK.as<float>();
  axpby(ctx, p, 1.0f - args.lr * args.weight_decay, p, -rate, update, count);
}

}  // namespace prl::ops::cuda
