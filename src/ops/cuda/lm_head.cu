#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/embedding.hpp"
#include "ops/cuda/kept_softmax.cuh"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/log_softmax.cuh"
#include "ops/cuda/logit_stats.cuh"

namespace prl::ops::cuda {
namespace {

/// Columns of the vocabulary and rows that are in memory as logits at a time. The slice is a block of 8 warps of chunks.
constexpr std::int64_t kSlice = 8 * kVocabChunk;
constexpr std::int64_t kForwardRows = 2048;
/// The same of weights that gradients are made of.
constexpr std::int64_t kBackwardSlice = 2 * kSlice;
constexpr std::int64_t kBackwardRows = 8192;
constexpr int kBlock = 256, kBlockWarps = kBlock / kWarp;
/// A row's weights are relative to its target's logit unless the target has less than e^-kReach. The largest are then e^kReach, far from
/// where bf16 or a sum in fp32 ends.
constexpr float kReach = 40.0f;

/// The rows that count and the head: what logits are made from.
template <typename T>
struct HeadRows {
  LiveRows live;
  const T* h;  ///< of the rows that count
  const T* w;  ///< [V, H]
  std::int64_t h_stride;
  int H;
  bool is_wide;
  const std::int32_t* targets;
  const float* temperatures;

  /// A logit as a plain sum, scaled. By all lanes of a warp, in each of them.
  __device__ __forceinline__ float logit(std::int64_t row, std::int64_t column) const {
    const T *a = h + row * h_stride, *b = w + column * H;
    float sum = 0.0f;
    for (int i = static_cast<int>(threadIdx.x) % kWarp * kVec; i < H; i += kWarp * kVec) {
      float x[kVec], y[kVec];
      if (is_wide) {
        load<true>(x, a + i, kVec);
        load<true>(y, b + i, kVec);
      } else {
        load<false>(x, a + i, H - i);
        load<false>(y, b + i, H - i);
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) sum = fmaf(x[v], y[v], sum);
    }
    return scaled(warp_sum(sum), temperatures[live.of(row)]);
  }
  __device__ __forceinline__ float reference(std::int64_t row) const { return logit(row, targets[live.of(row)]); }
};
__device__ __forceinline__ std::int64_t row_of_warp() {
  return static_cast<std::int64_t>(blockIdx.x) * kBlockWarps + static_cast<int>(threadIdx.x) / kWarp;
}

/// Rows whose weights have to be relative to their lse, in any order.
struct FarRows {
  std::int32_t *count = nullptr, *rows = nullptr;
  static __device__ __forceinline__ bool has(float reference, float lse) { return lse - reference > kReach; }
  __device__ __forceinline__ void add(std::int64_t row) const { rows[atomicAdd(count, 1)] = static_cast<std::int32_t>(row); }
};

template <typename T>
__global__ void __launch_bounds__(kBlock)
    references_kernel(float* references, const __grid_constant__ HeadRows<T> head, std::int64_t count) {
  const std::int64_t row = row_of_warp();
  if (row >= count) return;
  const float reference = head.reference(row);
  if (threadIdx.x % kWarp == 0) references[row] = reference;
}

/// A warp's chunk of a row becomes weights, at `to`, which has its first column.
template <typename W>
__device__ __forceinline__ void write_chunk(W* to, WarpChunk& x, float reference, int target) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int first = WarpChunk::piece(half) * kPiece;
    const ChunkStats piece = piece_weights<true>(x.x[half]);
    write_weights(to + first, x.x[half], piece.max, reference, target - first);
  }
}

/// One warp per chunk, one block per row of a slice. stats[chunk * rows + row]; `target_logits` where the target lies in the chunk. Weights
/// of the first kept.rows rows of the slice.
template <typename W>
__global__ void __launch_bounds__(kBlock)
    slice_stats_kernel(ChunkStats* stats, float* target_logits, SoftmaxRows<W> kept, const float* logits, LiveRows live,
                       std::int64_t first_row, const std::int32_t* targets, const float* temperatures, std::int64_t first_col,
                       std::int64_t cols) {
  const std::int64_t row = blockIdx.x;
  const int chunk = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t begin = static_cast<std::int64_t>(chunk) * kVocabChunk;
  if (begin >= cols) return;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kVocabChunk), cols - begin));
  const std::int64_t t = live.of(first_row + row);
  WarpChunk x;
  x.load(logits + row * cols + begin, count, temperatures[t]);
  const ChunkStats s = x.stats();
  const auto target = static_cast<int>(targets[t] - first_col - begin);
  if (row < kept.rows) write_chunk(kept.at(row, begin), x, kept.references[row], target);
  if (threadIdx.x % kWarp != 0) return;
  if (target >= 0 && target < count) target_logits[first_row + row] = scaled(logits[row * cols + begin + target], temperatures[t]);
  stats[(first_col / kVocabChunk + chunk) * live.count + first_row + row] = s;
}
/// The weights alone.
template <typename W>
__global__ void __launch_bounds__(kBlock)
    slice_weights_kernel(SoftmaxRows<W> to, const float* logits, LiveRows live, std::int64_t first_row, const std::int32_t* targets,
                         const float* temperatures, std::int64_t first_col, std::int64_t cols) {
  const std::int64_t row = blockIdx.x, begin = static_cast<int>(threadIdx.x) / kWarp * kVocabChunk;
  if (begin >= cols) return;
  const std::int64_t t = live.of(first_row + row);
  WarpChunk x;
  x.load(logits + row * cols + begin, static_cast<int>(min(static_cast<std::int64_t>(kVocabChunk), cols - begin)), temperatures[t]);
  write_chunk(to.at(row, begin), x, to.references[row], static_cast<int>(targets[t] - first_col - begin));
}

/// Weights relative to lse of those of the rows from `first_row` on that are far, in the columns from `first_col` on. A warp per weight:
/// such rows are rare, and none of them must be wrong.
template <typename T>
__global__ void __launch_bounds__(kBlock)
    far_rows_kernel(SoftmaxRows<T> to, FarRows far, const __grid_constant__ HeadRows<T> head, const float* lse, std::int64_t first_row,
                    std::int64_t first_col, std::int64_t cols) {
  const int count = *far.count;
  for (int i = 0; i < count; ++i) {
    const std::int64_t row = far.rows[i];
    if (row < first_row || row >= first_row + to.rows) continue;
    const std::int64_t t = head.live.of(row);
    for (std::int64_t c = row_of_warp(); c < cols; c += static_cast<std::int64_t>(gridDim.x) * kBlockWarps) {
      const float e = expf(head.logit(row, first_col + c) - lse[t]);
      if (threadIdx.x % kWarp == 0) *to.at(row - first_row, c) = from_float<T>(first_col + c == head.targets[t] ? 0.0f : e);
    }
  }
}

__global__ void __launch_bounds__(kBlock)
    merge_kernel(float* logp, float* entropy, float* lse, const ChunkStats* stats, const float* target_logits, LiveRows live, int chunks,
                 const float* references, std::int64_t num_kept, FarRows far) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  if (row >= live.count) return;
  float max = -INFINITY;
#pragma unroll 16
  for (int c = 0; c < chunks; ++c) max = fmaxf(max, stats[c * live.count + row].max);
  float sum[kRowSums] = {}, weighted[kRowSums] = {};
  for (int c = 0; c < chunks; c += kRowSums) {
#pragma unroll
    for (int i = 0; i < kRowSums; ++i) {
      if (c + i >= chunks) continue;
      const ChunkStats part = part_of(stats[(c + i) * live.count + row], max);
      sum[i] += part.sum;
      weighted[i] += part.weighted;
    }
  }
#pragma unroll
  for (int level = 1; kRowSums >> level > 0; ++level) {
    const int step = kRowSums >> level;
#pragma unroll
    for (int i = 0; i < kRowSums / 2; ++i) {
      if (i >= step) break;
      sum[i] += sum[i + step];
      weighted[i] += weighted[i + step];
    }
  }
  const std::int64_t t = live.of(row);
  const float value = log_sum_exp(max, sum[0]);
  lse[t] = value;
  if (row < num_kept && FarRows::has(references[row], value)) far.add(row);
  logp[t] = target_logits[row] - value;
  entropy[t] = logf(sum[0]) - weighted[0] / sum[0];
}

/// What the backward pass needs of each row (kept_softmax.cuh).
struct RowScale {
  float weights;  ///< of the sum over its weights
  float target;   ///< of its target alone
};
template <typename T>
struct BackwardRows {
  RowScale* scales;
  float* references;
  std::int32_t* targets;
  T* scaled_h;  ///< [count, H]: h times the scale of weights
};
/// A warp per row.
template <typename T>
__global__ void __launch_bounds__(kBlock)
    backward_rows_kernel(const __grid_constant__ BackwardRows<T> out, const __grid_constant__ HeadRows<T> head, const float* dlogp,
                         const float* lse, FarRows far) {
  const std::int64_t row = row_of_warp();
  if (row >= head.live.count) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t t = head.live.of(row);
  const float reference = head.reference(row), coefficient = dlogp[t] / head.temperatures[t];
  const bool is_far = FarRows::has(reference, lse[t]);
  const RowScale scale{-coefficient * (is_far ? 1.0f : expf(reference - lse[t])), -coefficient * expm1f(reference - lse[t])};
  if (lane == 0) {
    out.scales[row] = scale;
    out.references[row] = reference;
    out.targets[row] = head.targets[t];
    if (is_far) far.add(row);
  }
  const T* h = head.h + row * head.h_stride;
  T* to = out.scaled_h + row * head.H;
  for (int i = lane * kVec; i < head.H; i += kWarp * kVec) {
    float x[kVec];
    if (head.is_wide)
      load<true>(x, h + i, kVec);
    else
      load<false>(x, h + i, head.H - i);
#pragma unroll
    for (float& v : x) v *= scale.weights;
    if (head.is_wide)
      store<true>(to + i, x, kVec);
    else
      store<false>(to + i, x, head.H - i);
  }
}

/// dh of rows from `first_row` on, whole and rounded, at their places.
template <typename T>
__global__ void __launch_bounds__(kBlock) finish_rows_kernel(T* dh, std::int64_t stride, const float* sums, const RowScale* scales,
                                                             const __grid_constant__ HeadRows<T> head, std::int64_t first_row) {
  const int c = static_cast<int>(blockIdx.y * kBlock + threadIdx.x);
  if (c >= head.H) return;
  const std::int64_t row = first_row + blockIdx.x, t = head.live.of(row);
  const RowScale scale = scales[row];
  const float target = to_float(head.w[static_cast<std::int64_t>(head.targets[t]) * head.H + c]);
  dh[t * stride + c] = from_float<T>(fmaf(scale.weights, sums[static_cast<std::int64_t>(blockIdx.x) * head.H + c], scale.target * target));
}

/// Rows with a target, from the host's list, and their h without gaps.
struct Gathered {
  LiveRows live;
  ConstTensorView h;
};
Gathered gather(OpContext& ctx, char* room, const ConstTensorView& h, const std::int32_t* index, std::int64_t count) {
  Gathered g{{index, count}, h};
  if (index == nullptr) return g;
  const TensorView dense{room, {count, h.shape.num_cols()}, h.dtype, h.device, h.shape.num_cols()};
  cuda::embedding(ctx, dense, h, ConstTensorView{index, {count}, DType::kI32, h.device, count});
  g.h = dense;
  return g;
}

/// Device list of the rows with targets; null if that is all of them. `count` is their number.
const std::int32_t* live_index(OpContext& ctx, std::span<const std::int32_t> targets, std::int64_t& count) {
  count = std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
  if (count == static_cast<std::int64_t>(targets.size()) || count == 0) return nullptr;
  std::vector<std::int32_t>& index = static_cast<Library*>(ctx.library)->index;
  index.clear();
  for (std::size_t t = 0; t < targets.size(); ++t)
    if (targets[t] >= 0) index.push_back(static_cast<std::int32_t>(t));
  return staged<std::int32_t>(ctx, index);
}

std::int64_t num_kept_rows(const ConstTensorView& kept, std::int64_t count) {
  return kept.data == nullptr ? 0 : std::min(count, kept.shape.num_rows());
}

void zero_rows(OpContext& ctx, const TensorView& v) {
  const std::size_t size = size_of(v.dtype);
  PRL_CUDA_CHECK(cudaMemset2DAsync(v.data, static_cast<std::size_t>(v.row_stride) * size, 0,
                                   static_cast<std::size_t>(v.shape.num_cols()) * size, static_cast<std::size_t>(v.shape.num_rows()),
                                   stream_of(ctx)));
}

template <typename T>
HeadRows<T> head_rows(const Gathered& g, const DenseWeight& w, const std::int32_t* targets, const float* temperatures) {
  const auto H = static_cast<int>(w.num_inputs());
  const bool is_wide = is_aligned(g.h.data, 16) && is_aligned(w.w_NK.as<char>(), 16) && H % kVec == 0 &&
                       g.h.row_stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
  return {g.live, g.h.as<T>(), w.w_NK.as<T>(), g.h.row_stride, H, is_wide, targets, temperatures};
}

/// The part of kept weights from a row and column on.
template <typename W>
SoftmaxRows<W> kept_part(const void* kept, std::int64_t width, const float* references, std::int64_t num_kept, std::int64_t row,
                         std::int64_t column) {
  if (row >= num_kept) return {};
  return {static_cast<W*>(const_cast<void*>(kept)) + row * width + column, width, num_kept - row, references + row};
}

template <typename T>
void mend_far_rows(const OpContext& ctx, const SoftmaxRows<T>& to, const FarRows& far, const HeadRows<T>& head, const float* lse,
                   std::int64_t first_row, std::int64_t first_col, std::int64_t cols) {
  const auto grid = static_cast<unsigned>(2 * num_multiprocessors(ctx));
  far_rows_kernel<T><<<grid, kBlock, 0, stream_of(ctx)>>>(to, far, head, lse, first_row, first_col, cols);
  PRL_CUDA_CHECK(cudaGetLastError());
}
unsigned warp_blocks(std::int64_t rows) { return static_cast<unsigned>(ceil_div(rows, kBlockWarps)); }

}  // namespace

void lm_head_logprob(OpContext& ctx, TensorView logp_T, TensorView entropy_T, TensorView lse_T, ConstTensorView h_TH,
                     const LinearWeight& weight, std::span<const std::int32_t> targets_T, std::span<const float> temperatures_T,
                     TensorView kept_RB) {
  const DenseWeight& w = dense(ctx, weight);
  const std::int64_t H = w.num_inputs(), V = w.num_outputs(), chunks = ceil_div(V, kVocabChunk);
  for (const TensorView& v : {logp_T, entropy_T, lse_T}) ctx.runtime->zero(v.data, targets_T.size() * sizeof(float));
  std::int64_t count = 0;
  const std::int32_t* index = live_index(ctx, targets_T, count);
  if (count == 0) return;
  const auto* targets = staged(ctx, targets_T);
  const auto* temperatures = staged(ctx, temperatures_T);
  const std::int64_t num_kept = num_kept_rows(kept_RB, count);

  // At once where kernels of ours take it, else slice after slice by way of memory.
  Product whole = forward_product(w, h_TH.data, h_TH.row_stride, count, 0, V);
  const bool is_whole = can_form_logit_stats(ctx, whole);
  const std::int64_t block = is_whole ? 0 : std::min(count, kForwardRows);
  ChunkStats* stats = nullptr;
  float *target_logits = nullptr, *logits = nullptr, *references = nullptr;
  FarRows far;
  char* dense_h = nullptr;
  const auto carve = [&](void* memory) {
    Carver c(memory);
    stats = c.take<ChunkStats>(chunks * count);
    target_logits = c.take<float>(count);
    logits = c.take<float>(block * std::min(V, kSlice));
    references = c.take<float>(num_kept);
    far = {c.take<std::int32_t>(1), c.take<std::int32_t>(num_kept)};
    dense_h = index == nullptr ? nullptr : c.take<char>(count * H * static_cast<std::int64_t>(size_of(w.dtype())));
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const Gathered g = gather(ctx, dense_h, h_TH, index, count);

  with_type(w.dtype(), [&](auto t) {
    using T = decltype(t);
    const HeadRows<T> head = head_rows<T>(g, w, targets, temperatures);
    const cudaStream_t stream = stream_of(ctx);
    const auto kept_from = [&](std::int64_t row, std::int64_t col) {
      return kept_part<T>(kept_RB.data, whole_chunks(V), references, num_kept, row, col);
    };
    if (num_kept > 0) {
      ctx.runtime->zero(far.count, sizeof *far.count);
      references_kernel<T><<<warp_blocks(num_kept), kBlock, 0, stream>>>(references, head, num_kept);
      PRL_CUDA_CHECK(cudaGetLastError());
    }
    if (is_whole) {
      whole.a = g.h.data;
      whole.a_stride = g.h.row_stride;
      if constexpr (std::is_same_v<T, __nv_bfloat16>)
        logit_stats(ctx, stats, target_logits, whole, kept_from(0, 0), g.live, targets, temperatures);
    } else {
      for (std::int64_t col = 0; col < V; col += kSlice) {
        const std::int64_t cols = std::min(kSlice, V - col);
        for (std::int64_t row = 0; row < count; row += block) {
          const std::int64_t rows = std::min(block, count - row);
          Product p = forward_product(w, g.h.rows(row, rows).data, g.h.row_stride, rows, col, cols);
          p.out = logits;
          blas_of(ctx).run(ctx, p);
          slice_stats_kernel<<<static_cast<unsigned>(rows), kBlock, 0, stream>>>(stats, target_logits, kept_from(row, col), logits, g.live,
                                                                                 row, targets, temperatures, col, cols);
          PRL_CUDA_CHECK(cudaGetLastError());
        }
      }
    }
    merge_kernel<<<static_cast<unsigned>(ceil_div(count, kBlock)), kBlock, 0, stream>>>(
        logp_T.as<float>(), entropy_T.as<float>(), lse_T.as<float>(), stats, target_logits, g.live, static_cast<int>(chunks), references,
        num_kept, far);
    PRL_CUDA_CHECK(cudaGetLastError());
    if (num_kept > 0) mend_far_rows(ctx, kept_from(0, 0), far, head, lse_T.as<float>(), 0, 0, V);
  });
}

void lm_head_logprob_backward(OpContext& ctx, TensorView dh_TH, TensorView dw_VH, ConstTensorView dlogp_T, ConstTensorView lse_T,
                              ConstTensorView h_TH, const LinearWeight& weight, std::span<const std::int32_t> targets_T,
                              std::span<const float> temperatures_T, bool accumulate, ConstTensorView kept_RB) {
  const DenseWeight& w = dense(ctx, weight);
  const std::int64_t H = w.num_inputs(), V = w.num_outputs();
  const DType dtype = w.dtype();
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  std::int64_t count = 0;
  const std::int32_t* index = live_index(ctx, targets_T, count);
  if (index != nullptr || count == 0) zero_rows(ctx, dh_TH);
  if (count == 0) {
    if (!accumulate && dw_VH.data != nullptr) zero_rows(ctx, dw_VH);
    return;
  }
  const auto* targets = staged(ctx, targets_T);
  const auto* temperatures = staged(ctx, temperatures_T);

  const std::int64_t num_kept = num_kept_rows(kept_RB, count), width = whole_chunks(V);
  const std::int64_t block = std::min(count, kBackwardRows);
  // Weights of a block of rows that are not all kept, and logits of those that are not.
  const std::int64_t formed_stride = std::min(width, kBackwardSlice), formed_rows = num_kept == count ? 0 : block;
  const std::int64_t logits_rows = std::min({formed_rows, count - num_kept, kForwardRows});
  float *logits = nullptr, *dh = nullptr, *references = nullptr;
  char *formed = nullptr, *dense_h = nullptr, *scaled_h = nullptr;
  RowScale* scales = nullptr;
  std::int32_t* row_targets = nullptr;
  FarRows far;
  Occurrences occurrences{};
  const auto carve = [&](void* memory) {
    Carver c(memory);
    logits = c.take<float>(logits_rows * std::min(V, kSlice));
    formed = c.take<char>(formed_rows * formed_stride * size);
    dh = c.take<float>(block * H);
    scaled_h = c.take<char>(count * H * size);
    scales = c.take<RowScale>(count);
    references = c.take<float>(count);
    row_targets = c.take<std::int32_t>(count);
    far = {c.take<std::int32_t>(1), c.take<std::int32_t>(count)};
    occurrences = {c.take<std::int32_t>(V), c.take<std::int32_t>(V)};
    dense_h = index == nullptr ? nullptr : c.take<char>(count * H * size);
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const Gathered g = gather(ctx, dense_h, h_TH, index, count);
  Blas& blas = blas_of(ctx);
  const cudaStream_t stream = stream_of(ctx);

  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const HeadRows<T> head = head_rows<T>(g, w, targets, temperatures);
    const auto* lse = lse_T.as<float>();
    ctx.runtime->zero(far.count, sizeof *far.count);
    const BackwardRows<T> of_rows{scales, references, row_targets, reinterpret_cast<T*>(scaled_h)};
    backward_rows_kernel<T><<<warp_blocks(count), kBlock, 0, stream>>>(of_rows, head, dlogp_T.as<float>(), lse, far);
    PRL_CUDA_CHECK(cudaGetLastError());

    for (std::int64_t row = 0; row < count; row += block) {
      const std::int64_t rows = std::min(block, count - row), from_kept = std::clamp<std::int64_t>(num_kept - row, 0, rows);
      for (std::int64_t col = 0; col < V; col += kBackwardSlice) {
        const std::int64_t cols = std::min(kBackwardSlice, V - col);
        SoftmaxRows<T> weights = kept_part<T>(kept_RB.data, width, references, num_kept, row, col);
        if (from_kept < rows) {
          const SoftmaxRows<T> kept = weights;
          weights = {reinterpret_cast<T*>(formed), formed_stride, rows, references + row};
          const auto pitch = [](std::int64_t elements) { return static_cast<std::size_t>(elements) * sizeof(T); };
          if (from_kept > 0)
            PRL_CUDA_CHECK(cudaMemcpy2DAsync(weights.weights, pitch(formed_stride), kept.weights, pitch(width), pitch(cols),
                                             static_cast<std::size_t>(from_kept), cudaMemcpyDeviceToDevice, stream));
          const auto formed_from = [&](std::int64_t first, std::int64_t column, std::int64_t n) {
            return SoftmaxRows<T>{weights.weights + (first - row) * formed_stride + column - col, formed_stride, n, references + first};
          };
          for (std::int64_t c = col; c < col + cols; c += kSlice)
            for (std::int64_t first = row + from_kept; first < row + rows; first += logits_rows) {
              const std::int64_t n = std::min(logits_rows, row + rows - first), width_here = std::min(kSlice, col + cols - c);
              Product forward = forward_product(w, g.h.rows(first, n).data, g.h.row_stride, n, c, width_here);
              forward.out = logits;
              blas.run(ctx, forward);
              slice_weights_kernel<<<static_cast<unsigned>(n), kBlock, 0, stream>>>(formed_from(first, c, n), logits, g.live, first,
                                                                                    targets, temperatures, c, width_here);
              PRL_CUDA_CHECK(cudaGetLastError());
            }
          mend_far_rows(ctx, formed_from(row + from_kept, col, rows - from_kept), far, head, lse, row + from_kept, col, cols);
        }

        Product input;  // dh[rows, H] += weights[rows, cols] W[col.., H]
        input.M = rows;
        input.N = H;
        input.K = cols;
        input.a = weights.weights;
        input.a_stride = weights.stride;
        input.b = w.w_NK.as<char>() + col * H * size;
        input.b_stride = H;
        input.out = dh;
        input.out_stride = H;
        input.in_dtype = dtype;
        input.accumulate = col > 0;
        input.may_split = true;
        blas.run(ctx, input);

        if (dw_VH.data == nullptr) continue;
        Product weight_gradient;  // dw[col.., H] += weights^T[cols, rows] scaled_h[rows, H]
        weight_gradient.M = cols;
        weight_gradient.N = H;
        weight_gradient.K = rows;
        weight_gradient.a = weights.weights;
        weight_gradient.a_stride = weights.stride;
        weight_gradient.transpose_a = true;
        weight_gradient.b = of_rows.scaled_h + row * H;
        weight_gradient.b_stride = H;
        weight_gradient.out = dw_VH.as<float>() + col * H;
        weight_gradient.out_stride = H;
        weight_gradient.in_dtype = dtype;
        weight_gradient.accumulate = accumulate || row > 0;
        weight_gradient.may_split = true;
        blas.run(ctx, weight_gradient);
      }
      const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(H, kBlock)));
      finish_rows_kernel<T><<<grid, kBlock, 0, stream>>>(dh_TH.as<T>(), dh_TH.row_stride, dh, scales, head, row);
      PRL_CUDA_CHECK(cudaGetLastError());
    }
  });
  if (dw_VH.data == nullptr) return;
  const float* factors = &scales->target;
  add_to_rows(ctx, dw_VH, g.h, ConstTensorView{row_targets, {count}, DType::kI32, g.h.device, count}, occurrences,
              {factors, sizeof(RowScale) / sizeof(float)});
}

}  // namespace prl::ops::cuda
