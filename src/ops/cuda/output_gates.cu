#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/sums.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kGateWarps = 4;
constexpr int kGateBlock = kGateWarps * kWarp;
/// Heads of a partial sum of the weight's gradient: at least so many, and at most so many sums.
constexpr std::int64_t kMinGateGroup = 64, kMaxGateGroups = 1024;
/// The widest head whose gradient of the weight fits into shared memory without asking for more.
constexpr std::int64_t kMaxGatedHead = 48 * 1024 / (kGateWarps * static_cast<std::int64_t>(sizeof(float)));

// Heads of up to kNarrowHead elements: a lane has kVec of them, so that a warp has two heads. In which form a head is read follows from
// rows, but the order of its sums from its size alone.
constexpr int kHeadLanes = 16, kNarrowHead = kHeadLanes * kVec, kWarpHeads = kWarp / kHeadLanes;
/// Blocks of the forward pass for each multiprocessor: as many as fit. Each reads the weight once.
constexpr std::int64_t kNarrowBlocks = 10;
/// Of the gradient: two blocks fit on a multiprocessor, of which an H100 or H200 has 132. Sums follow the number of groups, which
/// therefore depends on no device.
constexpr int kNarrowGradientBlock = 512, kNarrowGradientWarps = kNarrowGradientBlock / kWarp;
constexpr std::int64_t kMaxNarrowGroups = 264;

template <typename T>
struct GatedNormArgs {
  T *y, *dgate;  ///< y: dx of the gradient
  const T *x, *gate, *dy;
  const float* w;
  float* partial_dw;  ///< [groups, D]
  std::int64_t y_stride, dgate_stride, x_stride, gate_stride, dy_stride, num_heads, heads_of_token, group_heads;
  int step_tokens, step_heads;  ///< from a warp's heads to its next ones, where they are narrow
  int head_dim;
  float inverse_dim, eps;
  /// Where a head begins in a view of this stride.
  __device__ std::int64_t at(std::int64_t head, std::int64_t stride) const {
    return head / heads_of_token * stride + head % heads_of_token * head_dim;
  }
};

/// kVec elements, rounded in pairs.
template <bool kWide, typename T>
__device__ __forceinline__ void store_rounded(T* p, const float (&v)[kVec], int count) {
  if constexpr (kWide && std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  } else {
    store<kWide>(p, v, count);
  }
}
/// Those of a lane: `count` elements from p, perhaps none.
template <bool kWide, typename T>
__device__ __forceinline__ void load_some(float (&v)[kVec], const T* p, int count) {
  if (count > 0) {
    load<kWide>(v, p, count);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = 0.0f;
}

/// Where a lane of narrow heads stands. Steps are without divisions, which would take longer than a head.
struct NarrowHead {
  int token, head;  ///< head: of the token
  template <typename T>
  __device__ __forceinline__ NarrowHead(const GatedNormArgs<T>& a, std::int64_t index)
      : token(static_cast<int>(index / a.heads_of_token)), head(static_cast<int>(index % a.heads_of_token)) {}
  template <typename T>
  __device__ __forceinline__ std::int64_t at(const GatedNormArgs<T>& a, std::int64_t stride, int column) const {
    return static_cast<std::int64_t>(token) * stride + (head * a.head_dim + column);
  }
  template <typename T>
  __device__ __forceinline__ void move_on(const GatedNormArgs<T>& a) {
    token += a.step_tokens, head += a.step_heads;
    if (head >= a.heads_of_token) head -= static_cast<int>(a.heads_of_token), ++token;
  }
};

/// Warps of all blocks take kWarpHeads heads each, then the next.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kGateBlock) narrow_gated_norm_kernel(const GatedNormArgs<T> a) {
  let_next_begin();
  const int column = static_cast<int>(threadIdx.x) % kHeadLanes * kVec, count = a.head_dim - column;
  float w[kVec];
  load_some<kWide>(w, a.w + column, count);
  const int of_warp = static_cast<int>(threadIdx.x) % kWarp / kHeadLanes;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kGateBlock + threadIdx.x) / kWarp * kWarpHeads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * (kGateBlock / kHeadLanes);
  NarrowHead here(a, first + of_warp);
  wait_for_previous();
  // Warps go on as a whole: their sums are over all of their lanes.
  for (std::int64_t left = a.num_heads - first; left > 0; left -= step, here.move_on(a)) {
    const int there = of_warp < left ? count : 0;
    float x[kVec], gate[kVec], squares = 0.0f;
    load_some<kWide>(x, a.x + here.at(a, a.x_stride, column), there);
    load_some<kWide>(gate, a.gate + here.at(a, a.gate_stride, column), there);
#pragma unroll
    for (int i = 0; i < kVec; ++i) squares = fmaf(x[i], x[i], squares);
    const float scale = norm_scale(warp_sum<kHeadLanes>(squares), a.inverse_dim, a.eps);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = x[i] * scale * w[i] * (gate[i] * sigmoid(gate[i]));
    if (there > 0) store_rounded<kWide>(a.y + here.at(a, a.y_stride, column), x, there);
  }
}

/// A block has a group of heads, of which its warps take kWarpHeads each, then the next. A lane sums the weight's gradient of its columns;
/// then its two heads' sums are added, and those of the warps in order.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kNarrowGradientBlock, 2) narrow_gated_norm_backward_kernel(const GatedNormArgs<T> a) {
  __shared__ float sums[kNarrowGradientWarps][kNarrowHead];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, column = static_cast<int>(threadIdx.x) % kHeadLanes * kVec,
            count = a.head_dim - column;
  float w[kVec], dw[kVec] = {};
  load_some<kWide>(w, a.w + column, count);
  const int of_warp = static_cast<int>(threadIdx.x) % kWarp / kHeadLanes;
  const std::int64_t first = blockIdx.x * a.group_heads;
  NarrowHead here(a, first + warp * kWarpHeads + of_warp);
  int left = static_cast<int>(min(a.group_heads, a.num_heads - first)) - warp * kWarpHeads;
  for (; left > 0; left -= kNarrowGradientBlock / kHeadLanes, here.move_on(a)) {
    const int there = of_warp < left ? count : 0;
    float x[kVec], gate[kVec], d[kVec];
    load_some<kWide>(x, a.x + here.at(a, a.x_stride, column), there);
    load_some<kWide>(gate, a.gate + here.at(a, a.gate_stride, column), there);
    load_some<kWide>(d, a.dy + here.at(a, a.dy_stride, column), there);
    float2 part = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float open = quick_sigmoid(gate[i]), silu = gate[i] * open;
      gate[i] = d[i] * fmaf(silu, 1.0f - open, open) * w[i];
      d[i] *= silu;
      part.x = fmaf(x[i], x[i], part.x);
      part.y = fmaf(d[i] * w[i], x[i], part.y);
    }
    const float scale = norm_scale(warp_sum<kHeadLanes>(part.x), a.inverse_dim, a.eps);
    const float k = warp_sum<kHeadLanes>(part.y) * scale * scale * scale * a.inverse_dim;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const float v = x[i] * scale;
      dw[i] = fmaf(d[i], v, dw[i]);
      gate[i] *= v;
      d[i] = fmaf(-k, x[i], d[i] * w[i] * scale);
    }
    if (there <= 0) continue;
    store_rounded<kWide>(a.dgate + here.at(a, a.dgate_stride, column), gate, there);
    store_rounded<kWide>(a.y + here.at(a, a.y_stride, column), d, there);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kVec; ++i) dw[i] += __shfl_xor_sync(kFullWarp, dw[i], kHeadLanes);
  if (threadIdx.x % kWarp < kHeadLanes) store<true>(sums[warp] + column, dw, kVec);
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i >= a.head_dim) return;
  float total = sums[0][i];
#pragma unroll
  for (int other = 1; other < kNarrowGradientWarps; ++other) total += sums[other][i];
  a.partial_dw[blockIdx.x * static_cast<std::int64_t>(a.head_dim) + i] = total;
}

/// One warp per head, wider than narrow ones; a lane has every 32nd element.
template <typename T>
__global__ void __launch_bounds__(kGateBlock) gated_norm_kernel(const GatedNormArgs<T> a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t head = static_cast<std::int64_t>(blockIdx.x) * kGateWarps + threadIdx.x / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (head >= a.num_heads) return;
  const T *x = a.x + a.at(head, a.x_stride), *gate = a.gate + a.at(head, a.gate_stride);
  T* y = a.y + a.at(head, a.y_stride);
  float squares = 0.0f;
  for (int i = lane; i < a.head_dim; i += kWarp) squares = fmaf(to_float(x[i]), to_float(x[i]), squares);
  const float scale = norm_scale(warp_sum(squares), a.inverse_dim, a.eps);
  for (int i = lane; i < a.head_dim; i += kWarp) {
    const float g = to_float(gate[i]);
    y[i] = from_float<T>(to_float(x[i]) * scale * a.w[i] * (g * sigmoid(g)));
  }
}

/// A block has a group of heads, which its warps take in turn; each warp sums the weight's gradient in a row of shared memory.
template <typename T>
__global__ void __launch_bounds__(kGateBlock) gated_norm_backward_kernel(const GatedNormArgs<T> a) {
  extern __shared__ float sums[];  // [kGateWarps, D]
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp, D = a.head_dim;
  float* const dw = sums + warp * D;
  for (int i = lane; i < D; i += kWarp) dw[i] = 0.0f;
  const std::int64_t first = blockIdx.x * a.group_heads, last = min(a.num_heads, first + a.group_heads);
  for (std::int64_t head = first + warp; head < last; head += kGateWarps) {
    const T *x = a.x + a.at(head, a.x_stride), *gate = a.gate + a.at(head, a.gate_stride), *dy = a.dy + a.at(head, a.dy_stride);
    T *dx = a.y + a.at(head, a.y_stride), *dgate = a.dgate + a.at(head, a.dgate_stride);
    float2 part = make_float2(0.0f, 0.0f);
    for (int i = lane; i < D; i += kWarp) {
      const float v = to_float(x[i]), g = to_float(gate[i]);
      part.x = fmaf(v, v, part.x);
      part.y = fmaf(to_float(dy[i]) * (g * sigmoid(g)) * a.w[i], v, part.y);
    }
    const float scale = norm_scale(warp_sum(part.x), a.inverse_dim, a.eps);
    const float k = warp_sum(part.y) * scale * scale * scale * a.inverse_dim;
    for (int i = lane; i < D; i += kWarp) {
      const float v = to_float(x[i]), g = to_float(gate[i]), d = to_float(dy[i]), open = sigmoid(g), silu = g * open;
      dw[i] = fmaf(d * silu, v * scale, dw[i]);
      dgate[i] = from_float<T>(d * (v * scale * a.w[i]) * fmaf(silu, 1.0f - open, open));
      dx[i] = from_float<T>(fmaf(-k, v, d * silu * a.w[i] * scale));
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < D; i += kGateBlock) {
    float total = sums[i];
    for (int w = 1; w < kGateWarps; ++w) total += sums[w * D + i];
    a.partial_dw[blockIdx.x * static_cast<std::int64_t>(D) + i] = total;
  }
}

template <typename T>
GatedNormArgs<T> gated_norm_args(const TensorView& y, const ConstTensorView& x, const ConstTensorView& gate, const ConstTensorView& w,
                                 float eps) {
  const std::int64_t D = w.shape[0], heads = x.shape.num_cols() / D;
  return {.y = y.as<T>(),
          .x = x.as<T>(),
          .gate = gate.as<T>(),
          .w = w.as<float>(),
          .y_stride = y.row_stride,
          .x_stride = x.row_stride,
          .gate_stride = gate.row_stride,
          .num_heads = x.shape.num_rows() * heads,
          .heads_of_token = heads,
          .head_dim = static_cast<int>(D),
          .inverse_dim = 1.0f / static_cast<float>(D),
          .eps = eps};
}

template <typename T>
void set_step(GatedNormArgs<T>& a, std::int64_t heads) {
  a.step_tokens = static_cast<int>(heads / a.heads_of_token);
  a.step_heads = static_cast<int>(heads % a.heads_of_token);
}

template <typename T>
void launch_narrow_gated_norm(OpContext& ctx, GatedNormArgs<T> a, bool wide) {
  constexpr std::int64_t kBlockHeads = kGateBlock / kHeadLanes;
  // As many rounds as the largest grid takes, then no more blocks than fill them.
  const std::int64_t all = ceil_div(a.num_heads, kBlockHeads), rounds = ceil_div(all, kNarrowBlocks * num_multiprocessors(ctx));
  const std::int64_t blocks = ceil_div(all, rounds);
  set_step(a, blocks * kBlockHeads);
  with_bool(wide, [&](auto is_wide_form) {
    launch_chained(stream_of(ctx), narrow_gated_norm_kernel<T, decltype(is_wide_form)::value>, dim3(static_cast<unsigned>(blocks)),
                   dim3(kGateBlock), 0, a);
  });
}

template <typename T>
void launch_gated_norm_backward(OpContext& ctx, GatedNormArgs<T> a, std::int64_t groups, bool wide) {
  const auto grid = static_cast<unsigned>(groups);
  if (a.head_dim > kNarrowHead) {
    gated_norm_backward_kernel<T>
        <<<grid, kGateBlock, static_cast<std::size_t>(kGateWarps * a.head_dim) * sizeof(float), stream_of(ctx)>>>(a);
  } else {
    set_step(a, kNarrowGradientBlock / kHeadLanes);
    with_bool(wide, [&](auto is_wide_form) {
      narrow_gated_norm_backward_kernel<T, decltype(is_wide_form)::value><<<grid, kNarrowGradientBlock, 0, stream_of(ctx)>>>(a);
    });
  }
  PRL_CUDA_CHECK(cudaGetLastError());
}

/// Whether heads begin where kVec elements can be read at once.
bool has_wide_heads(const ConstTensorView& w) { return is_aligned(w.data, 16) && w.shape[0] % kVec == 0; }

/// Attention heads with gates among other columns, in Units of an element or of 16 bytes. Column c of a row without gates is that of
/// `gated(c)` in a row with them.
struct GatedColumns {
  std::int64_t num_rows, num_queries, head_dim, plain_cols, plain_stride, gated_stride;
  __device__ std::int64_t gated(std::int64_t c) const { return c < num_queries ? c + c / head_dim * head_dim : c + num_queries; }
};

template <typename Unit>
__global__ void __launch_bounds__(kGateBlock) drop_gates_kernel(Unit* plain, Unit* with_gates, bool is_reverse, const GatedColumns a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kGateBlock + threadIdx.x;
  if (c >= a.plain_cols) return;
  for (std::int64_t t = blockIdx.y; t < a.num_rows; t += gridDim.y) {
    Unit &without = plain[t * a.plain_stride + c], &with = with_gates[t * a.gated_stride + a.gated(c)];
    if (is_reverse)
      with = without;
    else
      without = with;
  }
}

constexpr std::int64_t kMaxGateRows = 32768;

template <typename Unit>
void launch_drop_gates(OpContext& ctx, const TensorView& plain, const TensorView& with_gates, bool is_reverse, std::int64_t num_heads,
                       std::int64_t head_dim) {
  const std::int64_t of_unit = static_cast<std::int64_t>(sizeof(Unit) / size_of(plain.dtype));
  const GatedColumns a{.num_rows = plain.shape.num_rows(),
                       .num_queries = num_heads * head_dim / of_unit,
                       .head_dim = head_dim / of_unit,
                       .plain_cols = plain.shape.num_cols() / of_unit,
                       .plain_stride = plain.row_stride / of_unit,
                       .gated_stride = with_gates.row_stride / of_unit};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.plain_cols, kGateBlock)), static_cast<unsigned>(std::min(a.num_rows, kMaxGateRows)));
  launch_chained(stream_of(ctx), drop_gates_kernel<Unit>, grid, dim3(kGateBlock), 0, plain.as<Unit>(), with_gates.as<Unit>(), is_reverse,
                 a);
}
void move_ungated(OpContext& ctx, const TensorView& plain, const TensorView& with_gates, bool is_reverse, std::int64_t num_heads,
                  std::int64_t head_dim) {
  const auto is_whole = [&](std::int64_t elements) { return elements * static_cast<std::int64_t>(size_of(plain.dtype)) % 16 == 0; };
  const bool is_one_row = plain.shape.num_rows() <= 1;
  if (is_aligned(plain.data, 16) && is_aligned(with_gates.data, 16) && is_whole(head_dim) && is_whole(plain.shape.num_cols()) &&
      (is_one_row || (is_whole(plain.row_stride) && is_whole(with_gates.row_stride))))
    return launch_drop_gates<uint4>(ctx, plain, with_gates, is_reverse, num_heads, head_dim);
  with_type(plain.dtype, [&](auto t) { launch_drop_gates<decltype(t)>(ctx, plain, with_gates, is_reverse, num_heads, head_dim); });
}
/// Reads through a view that only this file's kernels see as writable.
TensorView unlocked(const ConstTensorView& v) { return {const_cast<void*>(v.data), v.shape, v.dtype, v.device, v.row_stride}; }

template <typename T>
struct GateArgs {
  T *y, *din;  ///< y: dx of the gradient
  const T *x, *in, *dy;
  std::int64_t y_stride, din_stride, x_stride, in_stride, dy_stride;
  GatedColumns columns;
};

template <typename T, bool kBackward>
__global__ void __launch_bounds__(kGateBlock) gate_heads_kernel(const GateArgs<T> a) {
  let_next_begin();
  wait_for_previous();
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kGateBlock + threadIdx.x;
  if (c >= a.columns.num_queries) return;
  const std::int64_t of_gate = a.columns.gated(c) + a.columns.head_dim;
  for (std::int64_t t = blockIdx.y; t < a.columns.num_rows; t += gridDim.y) {
    const float x = to_float(a.x[t * a.x_stride + c]), open = sigmoid(to_float(a.in[t * a.in_stride + of_gate]));
    if constexpr (kBackward) {
      const float d = to_float(a.dy[t * a.dy_stride + c]);
      a.din[t * a.din_stride + of_gate] = from_float<T>(d * x * (open * (1.0f - open)));
      a.y[t * a.y_stride + c] = from_float<T>(d * open);
    } else {
      a.y[t * a.y_stride + c] = from_float<T>(x * open);
    }
  }
}

template <typename T, bool kBackward>
void launch_gate_heads(OpContext& ctx, GateArgs<T> a, std::int64_t num_rows, std::int64_t num_heads, std::int64_t head_dim) {
  a.columns = {.num_rows = num_rows, .num_queries = num_heads * head_dim, .head_dim = head_dim};
  const dim3 grid(static_cast<unsigned>(ceil_div(a.columns.num_queries, kGateBlock)),
                  static_cast<unsigned>(std::min(num_rows, kMaxGateRows)));
  launch_chained(stream_of(ctx), gate_heads_kernel<T, kBackward>, grid, dim3(kGateBlock), 0, a);
}

}  // namespace

void gated_head_norm(OpContext& ctx, TensorView y_TV, ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  with_type(x_TV.dtype, [&](auto t) {
    using T = decltype(t);
    const GatedNormArgs<T> a = gated_norm_args<T>(y_TV, x_TV, gate_TV, w_D, eps);
    if (a.head_dim <= kNarrowHead)
      return launch_narrow_gated_norm(ctx, a, has_wide_heads(w_D) && is_wide(y_TV) && is_wide(x_TV) && is_wide(gate_TV));
    launch_chained(stream_of(ctx), gated_norm_kernel<T>, dim3(static_cast<unsigned>(ceil_div(a.num_heads, kGateWarps))), dim3(kGateBlock),
                   0, a);
  });
}

void gated_head_norm_backward(OpContext& ctx, TensorView dx_TV, TensorView dgate_TV, TensorView dw_D, ConstTensorView dy_TV,
                              ConstTensorView x_TV, ConstTensorView gate_TV, ConstTensorView w_D, float eps) {
  const std::int64_t D = w_D.shape[0], heads = x_TV.shape.num_elements() / D;
  if (D > kMaxGatedHead)
    fail(ErrorCode::kNotImplemented, "[gated_head_norm_backward] heads of {}; the kernel takes up to {}", D, kMaxGatedHead);
  const std::int64_t max_groups = D <= kNarrowHead ? kMaxNarrowGroups : kMaxGateGroups;
  const std::int64_t group = std::max(kMinGateGroup, ceil_div(heads, max_groups)), groups = ceil_div(heads, group);
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * D) * sizeof(float)));
  with_type(x_TV.dtype, [&](auto t) {
    using T = decltype(t);
    GatedNormArgs<T> a = gated_norm_args<T>(dx_TV, x_TV, gate_TV, w_D, eps);
    a.dgate = dgate_TV.as<T>();
    a.dgate_stride = dgate_TV.row_stride;
    a.dy = dy_TV.as<T>();
    a.dy_stride = dy_TV.row_stride;
    a.partial_dw = partial;
    a.group_heads = group;
    launch_gated_norm_backward(
        ctx, a, groups, has_wide_heads(w_D) && is_wide(dx_TV) && is_wide(dgate_TV) && is_wide(dy_TV) && is_wide(x_TV) && is_wide(gate_TV));
  });
  add_rows(ctx, dw_D.as<float>(), partial, groups, D);
}

void drop_gates(OpContext& ctx, TensorView out_TF, ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  move_ungated(ctx, out_TF, unlocked(in_TE), false, num_heads, head_dim);
}

void drop_gates_backward(OpContext& ctx, TensorView din_TE, ConstTensorView dout_TF, std::int64_t num_heads, std::int64_t head_dim) {
  move_ungated(ctx, unlocked(dout_TF), din_TE, true, num_heads, head_dim);
}

void gate_heads(OpContext& ctx, TensorView y_TQ, ConstTensorView x_TQ, ConstTensorView in_TE, std::int64_t num_heads,
                std::int64_t head_dim) {
  with_type(x_TQ.dtype, [&](auto t) {
    using T = decltype(t);
    launch_gate_heads<T, false>(ctx,
                                {.y = y_TQ.as<T>(),
                                 .x = x_TQ.as<T>(),
                                 .in = in_TE.as<T>(),
                                 .y_stride = y_TQ.row_stride,
                                 .x_stride = x_TQ.row_stride,
                                 .in_stride = in_TE.row_stride},
                                x_TQ.shape.num_rows(), num_heads, head_dim);
  });
}

void gate_heads_backward(OpContext& ctx, TensorView dx_TQ, TensorView din_TE, ConstTensorView dy_TQ, ConstTensorView x_TQ,
                         ConstTensorView in_TE, std::int64_t num_heads, std::int64_t head_dim) {
  with_type(x_TQ.dtype, [&](auto t) {
    using T = decltype(t);
    launch_gate_heads<T, true>(ctx,
                               {.y = dx_TQ.as<T>(),
                                .din = din_TE.as<T>(),
                                .x = x_TQ.as<T>(),
                                .in = in_TE.as<T>(),
                                .dy = dy_TQ.as<T>(),
                                .y_stride = dx_TQ.row_stride,
                                .din_stride = din_TE.row_stride,
                                .x_stride = x_TQ.row_stride,
                                .in_stride = in_TE.row_stride,
                                .dy_stride = dy_TQ.row_stride},
                               x_TQ.shape.num_rows(), num_heads, head_dim);
  });
}

}  // namespace prl::ops::cuda
