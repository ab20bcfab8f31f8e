#include <algorithm>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/kept_softmax.cuh"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/log_softmax.cuh"
#include "ops/cuda/logit_stats.cuh"

namespace prl::ops::cuda {
namespace {

/// Columns of the vocabulary and rows that are in memory as logits at a time. The slice is a block of 8 warps of chunks.
constexpr std::int64_t kSlice = 8 * kVocabChunk;
constexpr std::int64_t kForwardRows = 2048;
constexpr std::int64_t kBackwardRows = 8192;
constexpr int kBlock = 256;
constexpr int kKeptVecs = 4;  ///< times 8 columns that a thread reads back

/// One warp per chunk, one block per row of a slice. stats[chunk * rows + row]; `target_logits` where the target lies in the chunk.
template <typename W>
__global__ void __launch_bounds__(kBlock)
    slice_stats_kernel(ChunkStats* stats, float* target_logits, KeptSoftmax<W> kept, const float* logits, LiveRows live,
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
  if (first_row + row < kept.rows)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t first = first_col + begin + WarpChunk::piece(half) * kPiece;
      const ChunkStats piece = piece_weights<true>(x.x[half]);
      keep_piece(kept.piece(first_row + row, first), x.x[half]);
      if (threadIdx.x % kPieceLanes == 0) *kept.top(first_row + row, first) = piece.max;
    }
  const std::int64_t target = targets[t] - first_col;
  if (threadIdx.x % kWarp != 0) return;
  if (target >= begin && target < begin + count) target_logits[first_row + row] = scaled(logits[row * cols + target], temperatures[t]);
  stats[(first_col / kVocabChunk + chunk) * live.count + first_row + row] = s;
}

__global__ void __launch_bounds__(kBlock)
    merge_kernel(float* logp, float* entropy, float* lse, const ChunkStats* stats, const float* target_logits, LiveRows live, int chunks) {
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
  logp[t] = target_logits[row] - value;
  entropy[t] = logf(sum[0]) - weighted[0] / sum[0];
}

/// d logits = dlogp / temperature * (one_hot - softmax) of a slice, [rows, cols].
template <typename T>
struct LogitsGradient {
  T* out;
  LiveRows live;
  const float *dlogp, *lse;
  const std::int32_t* targets;
  const float* temperatures;
  std::int64_t first_row, first_col;
  int cols;
  bool wide;
};
/// One row of it, for a thread that takes 8 columns at a time. A piece belongs to neighbouring lanes.
template <typename T>
struct RowGradient {
  const LogitsGradient<T>& g;
  std::int64_t row = blockIdx.y;
  float temperature, coefficient, shift;
  int target;

  __device__ __forceinline__ explicit RowGradient(const LogitsGradient<T>& all) : g(all) {
    const std::int64_t t = g.live.of(g.first_row + row);
    temperature = g.temperatures[t];
    coefficient = g.dlogp[t] / temperature;
    shift = g.lse[t];
    target = g.targets[t] - static_cast<int>(g.first_col);
  }
  /// `e`: weights as kept, of a piece with this maximum.
  __device__ __forceinline__ void finish(float (&e)[kVec], float top, int column) const {
    const float factor = -coefficient * expf(top - shift);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      e[i] *= factor;
      if (column + i == target) e[i] += coefficient;
    }
    T* to = g.out + row * g.cols + column;
    if (column >= g.cols) return;
    if (g.wide)
      store<true>(to, e, kVec);
    else
      store<false>(to, e, g.cols - column);
  }
};

template <typename T>
__global__ void __launch_bounds__(kBlock)
    kept_gradient_kernel(const __grid_constant__ LogitsGradient<T> g, const __grid_constant__ KeptSoftmax<KeptWeight<T>> kept) {
  constexpr int kStep = kBlock * kVec;
  const RowGradient<T> mine(g);
  // Where the thread's columns begin, and 8 of the same 32 that it reads. All that it reads is under way before it waits for any.
  const int first = static_cast<int>(blockIdx.x) * kKeptVecs * kStep + static_cast<int>(threadIdx.x) * kVec;
  KeptWords<KeptWeight<T>> words[kKeptVecs];
  float top[kKeptVecs] = {};
#pragma unroll
  for (int v = 0; v < kKeptVecs; ++v) {
    const std::int64_t at = g.first_col + first + v * kStep;
    if (at >= kept.width) continue;
    words[v].read(kept.piece(g.first_row + mine.row, at));
    top[v] = *kept.top(g.first_row + mine.row, at);
  }
#pragma unroll
  for (int v = 0; v < kKeptVecs; ++v) {
    words[v].put_side_by_side();
    float e[kVec];
    words[v].unpack(e);
    mine.finish(e, top[v], first + v * kStep);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlock) logits_gradient_kernel(const __grid_constant__ LogitsGradient<T> g, const float* logits) {
  const RowGradient<T> mine(g);
  const int column = static_cast<int>(blockIdx.x * kBlock + threadIdx.x) * kVec;
  float x[kVec] = {};
  const float* from = logits + mine.row * g.cols + column;
  const int count = min(kVec, g.cols - column);
  if (g.wide && count > 0)
    load<true>(x, from, kVec);
  else
    load<false>(x, from, count);
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    x[i] = i < count ? scaled(x[i], mine.temperature) : -INFINITY;
    top = fmaxf(top, x[i]);
  }
  top = warp_max<kPiece / kVec>(top);
  const float base = piece_base(top);
#pragma unroll
  for (int i = 0; i < kVec; ++i) x[i] = kept_value<KeptWeight<T>>(expf(x[i] - base));
  mine.finish(x, top, column);
}

/// dh rows, rounded, at their places.
template <typename T>
__global__ void __launch_bounds__(kBlock)
    scatter_kernel(T* dh, const float* sums, LiveRows live, std::int64_t first_row, std::int64_t stride, int cols) {
  const int c = static_cast<int>(blockIdx.y * kBlock + threadIdx.x);
  if (c >= cols) return;
  const std::int64_t row = blockIdx.x;
  dh[live.of(first_row + row) * stride + c] = from_float<T>(sums[row * cols + c]);
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

template <typename W>
KeptSoftmax<W> kept_softmax(const ConstTensorView& kept, std::int64_t count, std::int64_t V) {
  if (kept.data == nullptr) return {};
  const std::int64_t width = whole_chunks(V), room = kept.shape.num_rows();
  auto* weights = static_cast<W*>(const_cast<void*>(kept.data));
  return {weights, reinterpret_cast<float*>(weights + room * width), width, std::min(room, count)};
}

void zero_rows(OpContext& ctx, const TensorView& v) {
  const std::size_t size = size_of(v.dtype);
  PRL_CUDA_CHECK(cudaMemset2DAsync(v.data, static_cast<std::size_t>(v.row_stride) * size, 0,
                                   static_cast<std::size_t>(v.shape.num_cols()) * size, static_cast<std::size_t>(v.shape.num_rows()),
                                   stream_of(ctx)));
}

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

  // At once where kernels of ours take it, else slice after slice by way of memory.
  Product whole = forward_product(w, h_TH.data, h_TH.row_stride, count, 0, V);
  const bool is_whole = can_form_logit_stats(ctx, whole);
  const std::int64_t block = is_whole ? 0 : std::min(count, kForwardRows);
  ChunkStats* stats = nullptr;
  float *target_logits = nullptr, *logits = nullptr;
  char* dense_h = nullptr;
  const auto carve = [&](void* memory) {
    Carver c(memory);
    stats = c.take<ChunkStats>(chunks * count);
    target_logits = c.take<float>(count);
    logits = c.take<float>(block * std::min(V, kSlice));
    dense_h = index == nullptr ? nullptr : c.take<char>(count * H * static_cast<std::int64_t>(size_of(w.dtype())));
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const Gathered g = gather(ctx, dense_h, h_TH, index, count);

  if (is_whole) {
    whole.a = g.h.data;
    whole.a_stride = g.h.row_stride;
    logit_stats(ctx, stats, target_logits, whole, kept_softmax<__half>(kept_RB, count, V), g.live, targets, temperatures);
  } else {
    for (std::int64_t col = 0; col < V; col += kSlice) {
      const std::int64_t cols = std::min(kSlice, V - col);
      for (std::int64_t row = 0; row < count; row += block) {
        const std::int64_t rows = std::min(block, count - row);
        Product p = forward_product(w, g.h.rows(row, rows).data, g.h.row_stride, rows, col, cols);
        p.out = logits;
        blas_of(ctx).run(ctx, p);
        with_type(w.dtype(), [&](auto t) {
          const auto kept = kept_softmax<KeptWeight<decltype(t)>>(kept_RB, count, V);
          slice_stats_kernel<<<static_cast<unsigned>(rows), kBlock, 0, stream_of(ctx)>>>(stats, target_logits, kept, logits, g.live, row,
                                                                                         targets, temperatures, col, cols);
        });
        PRL_CUDA_CHECK(cudaGetLastError());
      }
    }
  }
  merge_kernel<<<static_cast<unsigned>(ceil_div(count, kBlock)), kBlock, 0, stream_of(ctx)>>>(
      logp_T.as<float>(), entropy_T.as<float>(), lse_T.as<float>(), stats, target_logits, g.live, static_cast<int>(chunks));
  PRL_CUDA_CHECK(cudaGetLastError());
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
    if (!accumulate) zero_rows(ctx, dw_VH);
    return;
  }
  const auto* targets = staged(ctx, targets_T);
  const auto* temperatures = staged(ctx, temperatures_T);

  const std::int64_t num_kept = kept_RB.data == nullptr ? 0 : std::min(count, kept_RB.shape.num_rows());
  const std::int64_t block = std::min(count, kBackwardRows), slice = std::min(V, kSlice);
  float *logits = nullptr, *dh = nullptr;
  char *dlogits = nullptr, *dense_h = nullptr;
  const auto carve = [&](void* memory) {
    Carver c(memory);
    logits = c.take<float>(std::min(block, count - num_kept) * slice);
    dlogits = c.take<char>(block * slice * size);
    dh = c.take<float>(block * H);
    dense_h = index == nullptr ? nullptr : c.take<char>(count * H * size);
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const Gathered g = gather(ctx, dense_h, h_TH, index, count);
  Blas& blas = blas_of(ctx);

  for (std::int64_t row = 0; row < count; row += block) {
    const std::int64_t rows = std::min(block, count - row);
    const ConstTensorView h = g.h.rows(row, rows);
    for (std::int64_t col = 0; col < V; col += kSlice) {
      const std::int64_t cols = std::min(kSlice, V - col);
      // Of rows [first, first + n), from what was kept of them or, if given, from logits.
      const auto gradient_of = [&](std::int64_t first, std::int64_t n, const float* from) {
        const std::int64_t columns = kBlock * kVec * (from != nullptr ? 1 : kKeptVecs);
        const dim3 grid(static_cast<unsigned>(ceil_div(cols, columns)), static_cast<unsigned>(n));
        with_type(dtype, [&](auto t) {
          using T = decltype(t);
          const LogitsGradient<T> gradient{reinterpret_cast<T*>(dlogits) + (first - row) * cols,
                                           g.live,
                                           dlogp_T.as<float>(),
                                           lse_T.as<float>(),
                                           targets,
                                           temperatures,
                                           first,
                                           col,
                                           static_cast<int>(cols),
                                           cols % kVec == 0};
          if (from != nullptr)
            logits_gradient_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(gradient, from);
          else
            kept_gradient_kernel<<<grid, kBlock, 0, stream_of(ctx)>>>(gradient, kept_softmax<KeptWeight<T>>(kept_RB, count, V));
        });
        PRL_CUDA_CHECK(cudaGetLastError());
      };
      const std::int64_t from_kept = std::clamp<std::int64_t>(num_kept - row, 0, rows);
      if (from_kept > 0) gradient_of(row, from_kept, nullptr);
      if (const std::int64_t first = row + from_kept, n = rows - from_kept; n > 0) {
        Product forward = forward_product(w, g.h.rows(first, n).data, h.row_stride, n, col, cols);
        forward.out = logits;
        blas.run(ctx, forward);
        gradient_of(first, n, logits);
      }

      Product input;  // dh[rows, H] += dlogits[rows, cols] W[col.., H]
      input.M = rows;
      input.N = H;
      input.K = cols;
      input.a = dlogits;
      input.a_stride = cols;
      input.b = w.w_NK.as<char>() + col * H * size;
      input.b_stride = H;
      input.out = dh;
      input.out_stride = H;
      input.in_dtype = dtype;
      input.accumulate = col > 0;
      input.may_split = true;
      blas.run(ctx, input);

      Product weight_gradient;  // dw[col.., H] += dlogits^T[cols, rows] h[rows, H]
      weight_gradient.M = cols;
      weight_gradient.N = H;
      weight_gradient.K = rows;
      weight_gradient.a = dlogits;
      weight_gradient.a_stride = cols;
      weight_gradient.transpose_a = true;
      weight_gradient.b = h.data;
      weight_gradient.b_stride = h.row_stride;
      weight_gradient.out = dw_VH.as<float>() + col * H;
      weight_gradient.out_stride = H;
      weight_gradient.in_dtype = dtype;
      weight_gradient.accumulate = accumulate || row > 0;
      weight_gradient.may_split = true;
      blas.run(ctx, weight_gradient);
    }
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(H, kBlock)));
    with_type(dtype, [&](auto t) {
      using T = decltype(t);
      scatter_kernel<T><<<grid, kBlock, 0, stream_of(ctx)>>>(dh_TH.as<T>(), dh, g.live, row, dh_TH.row_stride, static_cast<int>(H));
    });
    PRL_CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace prl::ops::cuda
