#include <type_traits>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/input_codes.cuh"
#include "ops/cuda/sums.hpp"

// Norms. A row is summed by `lanes` threads, each taking 8 neighbouring elements at a time; lanes depend on the width of the row
// alone, so a row's result does not depend on the others. In the forward pass a lane of a warp sums its vectors side by side.

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 256;      ///< threads when a warp or less holds a row
constexpr int kMaxLanes = 1024;  ///< threads when a block holds a row
constexpr int kWarpVectors = 4;  ///< vectors of 8 that a lane of a warp may hold
/// Blocks up to which weights are read before earlier kernels have ended.
constexpr unsigned kMaxEarly = 512;

/// Threads that share a row, and vectors that each holds of it.
struct RowShape {
  int lanes;  ///< a power of two up to a warp, else whole warps of one block
  int vectors;
};
RowShape row_shape(std::int64_t cols) {
  const std::int64_t vectors = ceil_div(cols, kVec);
  if (vectors <= kWarp) {
    int lanes = 8;
    while (lanes < vectors) lanes *= 2;
    return {lanes, 1};
  }
  if (vectors <= kWarp * kWarpVectors) return {kWarp, vectors <= 2 * kWarp ? 2 : kWarpVectors};
  // Two vectors a thread from 512 threads on: enough loads in flight, and room for two blocks on a multiprocessor.
  const std::int64_t wanted =
      vectors <= 512 ? vectors : std::min<std::int64_t>(kMaxLanes, std::max<std::int64_t>(512, ceil_div(vectors, 2)));
  const auto lanes = static_cast<int>(round_up(wanted, kWarp));
  return {lanes, static_cast<int>(ceil_div(vectors, lanes))};
}

using Bf16 = __nv_bfloat16;

/// Sums v over the threads of a row.
template <int kLanes>
__device__ __forceinline__ float row_sum(float v, float* scratch) {
  if constexpr (kLanes > 0)
    return warp_sum<kLanes>(v);
  else
    return block_sum(v, scratch);
}

/// Two sums at a time.
__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
template <int kLanes>
__device__ __forceinline__ float2 row_sums(float2 v, float2* scratch) {
  constexpr int kWidth = kLanes > 0 ? kLanes : kWarp;
  v = make_float2(warp_sum<kWidth>(v.x), warp_sum<kWidth>(v.y));
  if constexpr (kLanes > 0) return v;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  float2 total = scratch[0];
  for (int i = 1; i < static_cast<int>(blockDim.x) / kWarp; ++i) total = total + scratch[i];
  return total;
}

/// The value of the lane `step` away.
__device__ __forceinline__ float shuffled(float v, int step) { return __shfl_xor_sync(kFullWarp, v, step); }
__device__ __forceinline__ float2 shuffled(float2 v, int step) { return make_float2(shuffled(v.x, step), shuffled(v.y, step)); }

/// The sums of these two, with as many threads to a row as are told at run time.
template <typename V>
__device__ __forceinline__ V any_row_sum(V v, int lanes, V* scratch) {
#pragma unroll 1
  for (int step = min(lanes, kWarp) / 2; step > 0; step /= 2) v = v + shuffled(v, step);
  if (lanes <= kWarp) return v;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  V total = scratch[0];
  for (int i = 1; i < lanes / kWarp; ++i) total = total + scratch[i];
  return total;
}

struct RowPlace {
  std::int64_t row;
  int lane, lanes;
};
template <int kLanes>
__device__ __forceinline__ RowPlace row_place() {
  if constexpr (kLanes > 0) {
    const int rows = static_cast<int>(blockDim.x) / kLanes;
    return {static_cast<std::int64_t>(blockIdx.x) * rows + static_cast<int>(threadIdx.x) / kLanes, static_cast<int>(threadIdx.x) % kLanes,
            kLanes};
  } else {
    return {static_cast<std::int64_t>(blockIdx.x), static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  }
}

__device__ __forceinline__ RowPlace row_place(int lanes) {
  const int slots = lanes <= kWarp ? static_cast<int>(blockDim.x) / lanes : 1,
            slot = lanes <= kWarp ? static_cast<int>(threadIdx.x) / lanes : 0;
  return {static_cast<std::int64_t>(blockIdx.x) * slots + slot, static_cast<int>(threadIdx.x) - slot * lanes, lanes};
}

template <typename T>
struct NormArgs {
  T* y;
  T* sum;  ///< kAdd only
  const T* x;
  const T* residual;
  const float* w;
  std::int64_t rows, y_stride, sum_stride, x_stride, residual_stride;
  int cols;
  float inverse_cols = 0;  ///< set where it is launched
  float eps;
  int heads = 1;  ///< rows that lie end to end; strides count from one such group to the next
  InputCodes to;  ///< in place of y
};

/// Element at which a row begins.
__device__ __forceinline__ std::int64_t row_begin(std::int64_t row, std::int64_t stride, int heads, int cols) {
  if (heads == 1) return row * stride;
  const std::int64_t group = row / heads;
  return group * stride + (row - group * heads) * cols;
}

/// The greatest of the threads of a row.
template <int kLanes>
__device__ __forceinline__ std::uint32_t row_greatest(std::uint32_t bits) {
  if constexpr (kLanes == 0) {
    return greatest_of_block<kMaxLanes>(bits);
  } else {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(kFullWarp, bits, step));
    return bits;
  }
}

/// bf16 rows that are wide. kLanes == 0: a block per row. kVectors are kept in registers; a block reads what is beyond them again, but not
/// with kCodes, which have nothing beyond.
template <bool kAdd, int kLanes, int kVectors, bool kCodes>
__global__ void __launch_bounds__(kLanes > 0 ? kBlock : kMaxLanes) norm_kernel(const NormArgs<Bf16> a) {
  __shared__ float scratch[kMaxLanes / kWarp];
  const RowPlace p = row_place<kLanes>();
  const auto column = [&](int j) { return (p.lane + j * p.lanes) * kVec; };
  let_next_begin();
  const bool is_live = p.row < a.rows;
  const Bf16* x = a.x + row_begin(p.row, a.x_stride, a.heads, a.cols);
  Bf16* y_row = a.y + row_begin(p.row, a.y_stride, a.heads, a.cols);
  Bf16* sum_row = kAdd ? a.sum + p.row * a.sum_stride : nullptr;
  float w[kVectors][kVec];
  const auto read_weights = [&] {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.cols) load<true>(w[j], a.w + column(j), kVec);
  };
  // No recorded work writes them. A row's own loads come first where rows are many and weights in the cache.
  const bool are_few = gridDim.x <= kMaxEarly;
  if (are_few) read_weights();
  wait_for_previous();
  float kept[kVectors][kVec] = {};
  constexpr int kSums = kLanes > 0 ? kVectors : 1;
  float squares[kSums] = {};
  // Loads of a row are all on their way before the first store: no later load could pass it.
  const auto read = [&](int c, Raw<Bf16>& own, Raw<Bf16>& other) {
    own.read(x + c);
    if constexpr (kAdd) other.read(a.residual + p.row * a.residual_stride + c);
  };
  const auto take = [&](int c, float(&v)[kVec], const Raw<Bf16>& own, const Raw<Bf16>& other) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = kAdd ? own[i] + other[i] : own[i];
    if constexpr (kAdd) {
      round_all<Bf16>(v);
      store<true>(sum_row + c, v, kVec);
    }
  };
  const auto add_squares = [&](const float(&v)[kVec], int j) {
    float& sum = squares[kSums > 1 ? j : 0];
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum = fmaf(v[i], v[i], sum);
  };
  if (is_live) {
    Raw<Bf16> own[kVectors], other[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.cols) read(column(j), own[j], other[j]);
    if (!are_few) read_weights();
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.cols) take(column(j), kept[j], own[j], other[j]);
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.cols) add_squares(kept[j], j);
    if constexpr (kLanes == 0)
      for (int j = kVectors; column(j) < a.cols; ++j) {
        float v[kVec];
        Raw<Bf16> more, others;
        read(column(j), more, others);
        take(column(j), v, more, others);
        add_squares(v, 0);
      }
  }
  const float scale = norm_scale(row_sum<kLanes>(pair_sum(squares), scratch), a.inverse_cols, a.eps);
  if constexpr (kCodes) {
    std::uint32_t greatest = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!is_live || column(j) >= a.cols) continue;
#pragma unroll
      for (int i = 0; i < kVec; ++i) kept[j][i] = kept[j][i] * scale * w[j][i];
      round_all<Bf16>(kept[j]);
      greatest = greatest_of(kept[j], greatest);
    }
    const CodeScale of_row = code_scale(row_greatest<kLanes>(greatest));
    if (!is_live) return;
    if (p.lane == 0) a.to.factors[p.row] = of_row.factor;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (column(j) < a.cols) store_codes(a.to, p.row, column(j), kept[j], of_row.inverse);
    return;
  }
  if (!is_live) return;
  const auto put = [&](int c, float(&v)[kVec], const float(&by)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = v[i] * scale * by[i];
    store<true>(y_row + c, v, kVec);
  };
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (column(j) < a.cols) put(column(j), kept[j], w[j]);
  if constexpr (kLanes == 0)
    for (int j = kVectors; column(j) < a.cols; ++j) {
      float v[kVec], by[kVec];
      load<true>(v, (kAdd ? sum_row : x) + column(j), kVec);  // this thread's own
      load<true>(by, a.w + column(j), kVec);
      put(column(j), v, by);
    }
}

/// Rows of any other kind: the same operations in the same order, by one kernel for all shapes, which reads again what the others keep.
template <typename T, bool kAdd>
__global__ void __launch_bounds__(kMaxLanes) any_norm_kernel(const NormArgs<T> a, int lanes) {
  __shared__ float scratch[kMaxLanes / kWarp];
  const RowPlace p = row_place(lanes);
  let_next_begin();
  wait_for_previous();
  const bool is_live = p.row < a.rows;
  const T* x = a.x + row_begin(p.row, a.x_stride, a.heads, a.cols);
  T* y_row = a.y + row_begin(p.row, a.y_stride, a.heads, a.cols);
  T* sum_row = kAdd ? a.sum + p.row * a.sum_stride : nullptr;
  float squares[kWarpVectors] = {};
  int at = 0;
#pragma unroll 1
  for (int c = p.lane * kVec; is_live && c < a.cols; c += lanes * kVec) {
    float v[kVec];
    load<false>(v, x + c, a.cols - c);
    if constexpr (kAdd) {
      float other[kVec];
      load<false>(other, a.residual + p.row * a.residual_stride + c, a.cols - c);
#pragma unroll
      for (int i = 0; i < kVec; ++i) v[i] = rounded<T>(v[i] + other[i]);
      store<false>(sum_row + c, v, a.cols - c);
    }
#pragma unroll
    for (int j = 0; j < kWarpVectors; ++j) {
      if (j != at) continue;
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares[j] = fmaf(v[i], v[i], squares[j]);
    }
    if (lanes <= kWarp) ++at;
  }
  const float scale = norm_scale(any_row_sum(pair_sum(squares), lanes, scratch), a.inverse_cols, a.eps);
#pragma unroll 1
  for (int c = p.lane * kVec; is_live && c < a.cols; c += lanes * kVec) {
    float v[kVec], w[kVec];
    load<false>(v, (kAdd ? sum_row : x) + c, a.cols - c);  // this thread's own
    load<false>(w, a.w + c, a.cols - c);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = v[i] * scale * w[i];
    store<false>(y_row + c, v, a.cols - c);
  }
}

/// Calls body with the lanes of a warp that share a row, or 0 for a block per row, and the vectors that a thread keeps.
template <typename Body>
void with_shape(const RowShape& shape, Body&& body) {
  const auto call = [&](auto lanes, auto vectors) { body(lanes, vectors); };
  using std::integral_constant;
  if (shape.lanes == 8)
    call(integral_constant<int, 8>{}, integral_constant<int, 1>{});
  else if (shape.lanes == 16)
    call(integral_constant<int, 16>{}, integral_constant<int, 1>{});
  else if (shape.lanes == kWarp && shape.vectors == 1)
    call(integral_constant<int, kWarp>{}, integral_constant<int, 1>{});
  else if (shape.lanes == kWarp && shape.vectors == 2)
    call(integral_constant<int, kWarp>{}, integral_constant<int, 2>{});
  else if (shape.lanes == kWarp)
    call(integral_constant<int, kWarp>{}, integral_constant<int, kWarpVectors>{});
  else
    call(integral_constant<int, 0>{}, integral_constant<int, 1>{});
}

template <typename T, bool kAdd, bool kCodes = false>
void launch_norm(OpContext& ctx, NormArgs<T> a, bool wide) {
  a.inverse_cols = 1.0f / static_cast<float>(a.cols);
  const RowShape shape = row_shape(a.cols);
  const bool shares_block = shape.lanes <= kWarp;
  // Few rows are spread over many multiprocessors.
  const int block = !shares_block                                                                         ? shape.lanes
                    : a.rows * shape.lanes < static_cast<std::int64_t>(kBlock) * num_multiprocessors(ctx) ? kWarp
                                                                                                          : kBlock;
  const dim3 grid(static_cast<unsigned>(shares_block ? ceil_div(a.rows, block / shape.lanes) : a.rows)),
      threads(static_cast<unsigned>(block));
  if constexpr (std::is_same_v<T, Bf16>) {
    if (wide) {
      with_shape(shape, [&](auto lanes, auto vectors) {
        launch_chained(stream_of(ctx), norm_kernel<kAdd, decltype(lanes)::value, decltype(vectors)::value, kCodes>, grid, threads, 0, a);
      });
      return;
    }
  }
  launch_chained(stream_of(ctx), any_norm_kernel<T, kAdd>, grid, threads, 0, a, shape.lanes);
}

/// Rows are dealt to at most this many groups; each group sums its share of dw in order, then the groups are added in order. All of
/// them run at once on a device of 132 multiprocessors.
constexpr std::int64_t kMaxGroups = 264;
constexpr std::int64_t kMinGroupRows = 16;

template <typename T>
struct NormBackwardArgs {
  T* dx;
  const T* dy;
  const T* x;
  const float* w;
  float* partial_dw;  ///< [groups, cols]
  std::int64_t rows, group_rows, dx_stride, dy_stride, x_stride;
  int cols;
  float inverse_cols = 0;  ///< as in NormArgs
  float eps;
  bool accumulate;
  int heads = 1;  ///< as in NormArgs
};

/// bf16 rows that are wide, one block per group of rows. kLanes > 0: kBlock / kLanes rows at a time. kVectors: vectors of 8 a thread holds
/// of a row.
template <int kLanes, int kVectors>
__global__ void __launch_bounds__(kLanes > 0 ? kBlock : kMaxLanes, kLanes > 0 ? 2 : 1)
    norm_backward_kernel(const NormBackwardArgs<Bf16> a) {
  constexpr int kRows = kLanes > 0 ? kBlock / (kLanes > 0 ? kLanes : 1) : 1;
  __shared__ float2 scratch[kMaxLanes / kWarp];
  __shared__ __align__(16) float dw_rows[kLanes > 0 ? kBlock * kVec * kVectors : 1];
  const int lane = kLanes > 0 ? static_cast<int>(threadIdx.x) % (kLanes > 0 ? kLanes : 1) : static_cast<int>(threadIdx.x);
  const int lanes = kLanes > 0 ? kLanes : static_cast<int>(blockDim.x);
  const int slot = kLanes > 0 ? static_cast<int>(threadIdx.x) / (kLanes > 0 ? kLanes : 1) : 0;
  float dw[kVectors][kVec] = {};
  const std::int64_t begin = blockIdx.x * a.group_rows, end = min(a.rows, begin + a.group_rows);
  for (std::int64_t base = begin; base < end; base += kRows) {
    const std::int64_t row = base + slot;
    const bool is_live = row < end;
    Raw<Bf16> x[kVectors], dy[kVectors], before[kVectors];
    float squares = 0.0f, dots = 0.0f;
    Bf16* dx_row = nullptr;
    if (is_live) {
      const Bf16* x_row = a.x + row_begin(row, a.x_stride, a.heads, a.cols);
      const Bf16* dy_row = a.dy + row_begin(row, a.dy_stride, a.heads, a.cols);
      dx_row = a.dx + row_begin(row, a.dx_stride, a.heads, a.cols);
      // All that the row needs is on its way before any of it is used.
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int c = (lane + j * lanes) * kVec;
        if (c >= a.cols) continue;
        x[j].read(x_row + c);
        dy[j].read(dy_row + c);
        if (a.accumulate) before[j].read(dx_row + c);
      }
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const int c = (lane + j * lanes) * kVec;
        if (c >= a.cols) continue;
        float w[kVec];
        load<true>(w, a.w + c, kVec);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          squares = fmaf(x[j][i], x[j][i], squares);
          dots = fmaf(dy[j][i] * w[i], x[j][i], dots);
        }
      }
    }
    const float2 sums = row_sums<kLanes>(make_float2(squares, dots), scratch);
    const float scale = norm_scale(sums.x, a.inverse_cols, a.eps);
    const float k = sums.y * scale * scale * scale * a.inverse_cols;
    if (!is_live) continue;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int c = (lane + j * lanes) * kVec;
      if (c >= a.cols) continue;
      float w[kVec], d[kVec];
      load<true>(w, a.w + c, kVec);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        dw[j][i] = fmaf(dy[j][i], x[j][i] * scale, dw[j][i]);
        d[i] = fmaf(-k, x[j][i], dy[j][i] * w[i] * scale);
        if (a.accumulate) d[i] = before[j][i] + d[i];
      }
      store<true>(dx_row + c, d, kVec);
    }
  }
  float* out = a.partial_dw + static_cast<std::int64_t>(blockIdx.x) * a.cols;
  if constexpr (kLanes > 0) {
    // The rows that ran side by side are added in order.
    constexpr int kWidth = kLanes * kVectors * kVec;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int i = 0; i < kVec; i += 4)
        *reinterpret_cast<float4*>(dw_rows + slot * kWidth + (lane + j * kLanes) * kVec + i) =
            make_float4(dw[j][i], dw[j][i + 1], dw[j][i + 2], dw[j][i + 3]);
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < a.cols; c += kBlock) {
      float total = 0.0f;
      for (int r = 0; r < kRows; ++r) total += dw_rows[r * kWidth + c];
      out[c] = total;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int c = (lane + j * lanes) * kVec;
      if (c < a.cols) store<false>(out + c, dw[j], a.cols - c);
    }
  }
}

/// Rows of any other kind, as any_norm_kernel.
template <typename T>
__global__ void __launch_bounds__(kMaxLanes) any_norm_backward_kernel(const NormBackwardArgs<T> a, int lanes) {
  __shared__ float2 scratch[kMaxLanes / kWarp];
  __shared__ float dw_rows[kBlock * kVec * kWarpVectors];
  const bool shares_block = lanes <= kWarp;
  const int num_slots = shares_block ? kBlock / lanes : 1, slot = shares_block ? static_cast<int>(threadIdx.x) / lanes : 0;
  const int lane = static_cast<int>(threadIdx.x) - slot * lanes, width = lanes * kWarpVectors * kVec;
  float dw[kWarpVectors][kVec] = {};
  const std::int64_t begin = blockIdx.x * a.group_rows, end = min(a.rows, begin + a.group_rows);
#pragma unroll 1
  for (std::int64_t base = begin; base < end; base += num_slots) {
    const std::int64_t row = base + slot;
    const bool is_live = row < end;
    const T* x_row = a.x + row_begin(row, a.x_stride, a.heads, a.cols);
    const T* dy_row = a.dy + row_begin(row, a.dy_stride, a.heads, a.cols);
    T* dx_row = a.dx + row_begin(row, a.dx_stride, a.heads, a.cols);
    float2 sums = make_float2(0.0f, 0.0f);
    float x[kVec], dy[kVec], w[kVec];
    const auto read = [&](int c) {
      load<false>(x, x_row + c, a.cols - c);
      load<false>(dy, dy_row + c, a.cols - c);
      load<false>(w, a.w + c, a.cols - c);
    };
#pragma unroll 1
    for (int c = lane * kVec; is_live && c < a.cols; c += lanes * kVec) {
      read(c);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sums.x = fmaf(x[i], x[i], sums.x);
        sums.y = fmaf(dy[i] * w[i], x[i], sums.y);
      }
    }
    sums = any_row_sum(sums, lanes, scratch);
    const float scale = norm_scale(sums.x, a.inverse_cols, a.eps);
    const float k = sums.y * scale * scale * scale * a.inverse_cols;
#pragma unroll
    for (int j = 0; j < kWarpVectors; ++j) {
      const int c = (lane + j * lanes) * kVec;
      if (!is_live || c >= a.cols) continue;
      read(c);
      float d[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        dw[j][i] = fmaf(dy[i], x[i] * scale, dw[j][i]);
        d[i] = fmaf(-k, x[i], dy[i] * w[i] * scale);
      }
      if (a.accumulate) {
        load<false>(x, dx_row + c, a.cols - c);
#pragma unroll
        for (int i = 0; i < kVec; ++i) d[i] = x[i] + d[i];
      }
      store<false>(dx_row + c, d, a.cols - c);
    }
  }
  float* out = a.partial_dw + static_cast<std::int64_t>(blockIdx.x) * a.cols;
#pragma unroll
  for (int j = 0; j < kWarpVectors; ++j) {
    const int c = (lane + j * lanes) * kVec;
    if (c >= a.cols) continue;
    if (shares_block)
      store<false>(dw_rows + slot * width + c, dw[j], kVec);
    else
      store<false>(out + c, dw[j], a.cols - c);
  }
  if (!shares_block) return;
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < a.cols; c += kBlock) {
    float total = 0.0f;
    for (int r = 0; r < num_slots; ++r) total += dw_rows[r * width + c];
    out[c] = total;
  }
}

/// total[c] += sum over rows of partial[row, c]: 8 rows of threads take every eighth row each, then they are added in order.
constexpr int kSumRows = 8;
__global__ void add_rows_kernel(float* total, const float* partial, std::int64_t rows, std::int64_t cols) {
  __shared__ float sums[kSumRows][kWarp];
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (c < cols)
    for (std::int64_t r = threadIdx.y; r < rows; r += kSumRows) sum += partial[r * cols + c];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= cols) return;
  for (int i = 1; i < kSumRows; ++i) sum += sums[i][threadIdx.x];
  total[c] += sum;
}

template <typename T>
void launch_norm_backward(OpContext& ctx, NormBackwardArgs<T> a, std::int64_t groups, bool wide) {
  a.inverse_cols = 1.0f / static_cast<float>(a.cols);
  const RowShape shape = row_shape(a.cols);
  if (shape.vectors > kWarpVectors)
    fail(ErrorCode::kNotImplemented, "[rms_norm_backward] rows of {} columns; the kernel holds up to {}", a.cols,
         kWarpVectors * kMaxLanes * kVec);
  const auto grid = static_cast<unsigned>(groups);
  const int threads = shape.lanes <= kWarp ? kBlock : shape.lanes;
  if constexpr (std::is_same_v<T, Bf16>) {
    if (wide) {
      const auto launch = [&](auto lanes, auto vectors) {
        norm_backward_kernel<decltype(lanes)::value, decltype(vectors)::value><<<grid, threads, 0, stream_of(ctx)>>>(a);
      };
      with_shape(shape, [&](auto lanes, auto vectors) {
        if constexpr (decltype(lanes)::value > 0) {
          launch(lanes, vectors);
        } else {
          if (shape.vectors == 1)
            launch(lanes, std::integral_constant<int, 1>{});
          else if (shape.vectors == 2)
            launch(lanes, std::integral_constant<int, 2>{});
          else
            launch(lanes, std::integral_constant<int, kWarpVectors>{});
        }
      });
      PRL_CUDA_CHECK(cudaGetLastError());
      return;
    }
  }
  any_norm_backward_kernel<<<grid, threads, 0, stream_of(ctx)>>>(a, shape.lanes);
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void add_rows(OpContext& ctx, float* total, const float* partial, std::int64_t rows, std::int64_t cols) {
  add_rows_kernel<<<static_cast<unsigned>(ceil_div(cols, kWarp)), dim3(kWarp, kSumRows), 0, stream_of(ctx)>>>(total, partial, rows, cols);
  PRL_CUDA_CHECK(cudaGetLastError());
}

void rms_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, float eps) {
  with_type(x_RC.dtype, [&](auto t) {
    using T = decltype(t);
    const NormArgs<T> a{.y = y_RC.as<T>(),
                        .x = x_RC.as<T>(),
                        .w = w_C.as<float>(),
                        .rows = x_RC.shape.num_rows(),
                        .y_stride = y_RC.row_stride,
                        .x_stride = x_RC.row_stride,
                        .cols = static_cast<int>(x_RC.shape.num_cols()),
                        .eps = eps};
    launch_norm<T, false>(ctx, a, is_wide(y_RC) && is_wide(x_RC) && is_wide(w_C));
  });
}

bool norm_to_codes(OpContext& ctx, const InputCodes& to, ConstTensorView x_MK, ConstTensorView norm_K, float eps) {
  const RowShape shape = row_shape(x_MK.shape.num_cols());
  const bool is_kept = shape.lanes <= kWarp || shape.vectors == 1;
  if (!is_kept || x_MK.dtype != DType::kBF16 || !is_wide(x_MK) || !is_wide(norm_K)) return false;
  const NormArgs<Bf16> a{.x = x_MK.as<Bf16>(),
                         .w = norm_K.as<float>(),
                         .rows = x_MK.shape.num_rows(),
                         .x_stride = x_MK.row_stride,
                         .cols = static_cast<int>(x_MK.shape.num_cols()),
                         .eps = eps,
                         .to = to};
  launch_norm<Bf16, false, true>(ctx, a, true);
  return true;
}

void add_rms_norm(OpContext& ctx, TensorView y_RC, TensorView sum_RC, ConstTensorView x_RC, ConstTensorView residual_RC,
                  ConstTensorView w_C, float eps) {
  with_type(x_RC.dtype, [&](auto t) {
    using T = decltype(t);
    const NormArgs<T> a{.y = y_RC.as<T>(),
                        .sum = sum_RC.as<T>(),
                        .x = x_RC.as<T>(),
                        .residual = residual_RC.as<T>(),
                        .w = w_C.as<float>(),
                        .rows = x_RC.shape.num_rows(),
                        .y_stride = y_RC.row_stride,
                        .sum_stride = sum_RC.row_stride,
                        .x_stride = x_RC.row_stride,
                        .residual_stride = residual_RC.row_stride,
                        .cols = static_cast<int>(x_RC.shape.num_cols()),
                        .eps = eps};
    launch_norm<T, true>(ctx, a, is_wide(y_RC) && is_wide(sum_RC) && is_wide(x_RC) && is_wide(residual_RC) && is_wide(w_C));
  });
}

namespace {

/// [rows, cols] views, or [T, heads, D] ones whose strides count from token to token.
void run_norm_backward(OpContext& ctx, const TensorView& dx, const TensorView& dw, const ConstTensorView& dy, const ConstTensorView& x,
                       const ConstTensorView& w, std::int64_t heads, float eps, bool accumulate, bool wide) {
  const std::int64_t rows = x.shape.num_rows(), cols = x.shape.num_cols();
  const std::int64_t group_rows = std::max(kMinGroupRows, ceil_div(rows, kMaxGroups)), groups = ceil_div(rows, group_rows);
  auto* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(groups * cols) * sizeof(float)));
  with_type(x.dtype, [&](auto t) {
    using T = decltype(t);
    const NormBackwardArgs<T> a{.dx = dx.as<T>(),
                                .dy = dy.as<T>(),
                                .x = x.as<T>(),
                                .w = w.as<float>(),
                                .partial_dw = partial,
                                .rows = rows,
                                .group_rows = group_rows,
                                .dx_stride = dx.row_stride,
                                .dy_stride = dy.row_stride,
                                .x_stride = x.row_stride,
                                .cols = static_cast<int>(cols),
                                .eps = eps,
                                .accumulate = accumulate,
                                .heads = static_cast<int>(heads)};
    launch_norm_backward(ctx, a, groups, wide);
  });
  add_rows(ctx, dw.as<float>(), partial, groups, cols);
}

template <typename View>
View with_token_stride(View v, std::int64_t stride) {
  v.row_stride = stride;
  return v;
}
bool are_wide_heads(const ConstTensorView& v, std::int64_t token_stride) {
  return is_aligned(v.data, 16) && v.shape[2] % kVec == 0 && token_stride * static_cast<std::int64_t>(size_of(v.dtype)) % 16 == 0;
}

}  // namespace

void rms_norm_backward(OpContext& ctx, TensorView dx_RC, TensorView dw_C, ConstTensorView dy_RC, ConstTensorView x_RC, ConstTensorView w_C,
                       float eps, bool accumulate) {
  run_norm_backward(ctx, dx_RC, dw_C, dy_RC, x_RC, w_C, 1, eps, accumulate,
                    is_wide(dx_RC) && is_wide(dy_RC) && is_wide(x_RC) && is_wide(w_C));
}

void head_norm(OpContext& ctx, TensorView y_THD, std::int64_t y_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride,
               ConstTensorView w_D, float eps) {
  with_type(x_THD.dtype, [&](auto t) {
    using T = decltype(t);
    const NormArgs<T> a{.y = y_THD.as<T>(),
                        .x = x_THD.as<T>(),
                        .w = w_D.as<float>(),
                        .rows = x_THD.shape.num_rows(),
                        .y_stride = y_token_stride,
                        .x_stride = x_token_stride,
                        .cols = static_cast<int>(x_THD.shape.num_cols()),
                        .eps = eps,
                        .heads = static_cast<int>(x_THD.shape[1])};
    launch_norm<T, false>(ctx, a, are_wide_heads(y_THD, y_token_stride) && are_wide_heads(x_THD, x_token_stride) && is_wide(w_D));
  });
}

void head_norm_backward(OpContext& ctx, TensorView dx_THD, std::int64_t dx_token_stride, TensorView dw_D, ConstTensorView dy_THD,
                        std::int64_t dy_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride, ConstTensorView w_D, float eps) {
  const bool wide = are_wide_heads(dx_THD, dx_token_stride) && are_wide_heads(dy_THD, dy_token_stride) &&
                    are_wide_heads(x_THD, x_token_stride) && is_wide(w_D);
  run_norm_backward(ctx, with_token_stride(dx_THD, dx_token_stride), dw_D, with_token_stride(dy_THD, dy_token_stride),
                    with_token_stride(x_THD, x_token_stride), w_D, x_THD.shape[1], eps, false, wide);
}

}  // namespace prl::ops::cuda
