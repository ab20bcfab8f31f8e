#include <climits>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/embedding.hpp"

namespace prl::ops::cuda {
namespace {

using ::prl::cuda::Fault;
using ::prl::cuda::FaultWord;

constexpr int kEmbeddingBlock = 256;

/// One block per token; a row is bytes, whatever its type. An id outside the table leaves zeros and a fault. An id of -1 - i stands for
/// drawn[i]. It begins recorded work, but for the plan of attention, which has nothing to do with it: so it does not wait for that.
template <typename Piece>
__global__ void __launch_bounds__(kEmbeddingBlock)
    embedding_kernel(char* out, const char* table, const std::int32_t* ids, const std::int32_t* drawn, std::int32_t num_drawn,
                     std::int64_t num_rows, std::int64_t out_stride, std::int64_t table_stride, int pieces, FaultWord* fault) {
  const std::int64_t t = blockIdx.x;
  std::int32_t id = ids[t];
  if (id < 0 && -1 - id < num_drawn) id = drawn[-1 - id];
  const bool is_good = id >= 0 && id < num_rows;
  if (!is_good && threadIdx.x == 0) ::prl::cuda::report(fault, Fault::kEmbeddingId, static_cast<std::uint32_t>(t));
  auto* to = reinterpret_cast<Piece*>(out + t * out_stride);
  const auto* from = reinterpret_cast<const Piece*>(table + (is_good ? id : 0) * table_stride);
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) to[i] = is_good ? from[i] : Piece{};
  // In this order: what comes later and reads without waiting what came before, as attention reads its plan, may do so from here on.
  wait_for_previous();
  let_next_begin();
}

/// One block per row, as embedding_kernel the other way round. A slot outside of the table is left out.
template <typename Piece>
__global__ void __launch_bounds__(kEmbeddingBlock)
    store_rows_kernel(char* to, const char* rows, const std::int32_t* slots, std::int64_t num_slots, std::int64_t to_stride,
                      std::int64_t row_stride, int pieces) {
  wait_for_previous();
  const std::int64_t t = blockIdx.x;
  if (const std::int32_t slot = slots[t]; slot >= 0 && slot < num_slots) {
    auto* out = reinterpret_cast<Piece*>(to + slot * to_stride);
    const auto* from = reinterpret_cast<const Piece*>(rows + t * row_stride);
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) out[i] = from[i];
  }
  let_next_begin();
}

// Where each id occurs: integers, so the order of the atomics leaves no trace.
__global__ void clear_kernel(Occurrences o, std::int64_t num_rows) {
  const std::int64_t v = static_cast<std::int64_t>(blockIdx.x) * kEmbeddingBlock + threadIdx.x;
  if (v >= num_rows) return;
  o.first[v] = INT_MAX;
  o.last[v] = -1;
}
__global__ void find_kernel(Occurrences o, const std::int32_t* ids, std::int64_t num_tokens, std::int64_t num_rows, FaultWord* fault) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kEmbeddingBlock + threadIdx.x;
  if (t >= num_tokens) return;
  const std::int32_t id = ids[t];
  if (id < 0 || id >= num_rows) {
    ::prl::cuda::report(fault, Fault::kEmbeddingBackwardId, static_cast<std::uint32_t>(t));
    return;
  }
  atomicMin(&o.first[id], static_cast<std::int32_t>(t));
  atomicMax(&o.last[id], static_cast<std::int32_t>(t));
}

/// The block of an id's first token adds the rows of all its tokens, in token order. Tokens that share an id are found 256 at a
/// time and kept as a list, so that their rows can be asked for ahead of the additions. blockIdx.y: columns.
template <typename T, bool kFactors>
__global__ void __launch_bounds__(kEmbeddingBlock)
    add_to_rows_kernel(float* dtable, const T* dout, const std::int32_t* ids, Occurrences o, std::int64_t num_rows, std::int64_t cols,
                       std::int64_t dtable_stride, std::int64_t dout_stride, RowFactors factors) {
  __shared__ int warp_counts[kEmbeddingBlock / kWarp];
  __shared__ std::int32_t found[kEmbeddingBlock];
  const auto t = static_cast<std::int32_t>(blockIdx.x);
  const std::int32_t id = ids[t];
  if (id < 0 || id >= num_rows || o.first[id] != t) return;
  const std::int32_t last = o.last[id];
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.y) * kEmbeddingBlock + threadIdx.x;
  const bool is_column = c < cols;
  float sum = is_column ? dtable[id * dtable_stride + c] : 0.0f;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto row = [&](std::int32_t i) {
    const float v = to_float(dout[i * dout_stride + c]);
    return kFactors ? v * factors.factors[i * factors.stride] : v;
  };
  for (std::int32_t base = t; base <= last; base += kEmbeddingBlock) {
    const std::int32_t mine = base + static_cast<std::int32_t>(threadIdx.x);
    const bool is_hit = mine <= last && ids[mine] == id;
    const unsigned hits = __ballot_sync(kFullWarp, is_hit);
    if (lane == 0) warp_counts[warp] = __popc(hits);
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < kEmbeddingBlock / kWarp; ++w) {
      if (w < warp) before += warp_counts[w];
      total += warp_counts[w];
    }
    if (is_hit) found[before + __popc(hits & ((1u << lane) - 1u))] = mine;
    __syncthreads();
    if (is_column) {
      int i = 0;
      for (; i + 4 <= total; i += 4) {
        float v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = row(found[i + j]);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum += v[j];
      }
      for (; i < total; ++i) sum += row(found[i]);
    }
    __syncthreads();
  }
  if (is_column) dtable[id * dtable_stride + c] = sum;
}

}  // namespace

void embedding(OpContext& ctx, TensorView out_TH, ConstTensorView table_VH, const TokenIds& ids) {
  const std::int32_t* drawn = ids.drawn_B.as<std::int32_t>();
  const auto num_drawn = drawn == nullptr ? 0 : static_cast<std::int32_t>(ids.drawn_B.shape.num_elements());
  const std::int64_t T = out_TH.shape.num_rows(), V = table_VH.shape.num_rows();
  const auto size = static_cast<std::int64_t>(size_of(out_TH.dtype));
  const std::int64_t row_bytes = table_VH.shape.num_cols() * size, out_stride = out_TH.row_stride * size,
                     table_stride = table_VH.row_stride * size;
  const auto launch = [&](auto piece) {
    using Piece = decltype(piece);
    const auto pieces = static_cast<int>(row_bytes / static_cast<std::int64_t>(sizeof(Piece)));
    const auto threads = static_cast<unsigned>(std::min<std::int64_t>(kEmbeddingBlock, round_up(pieces, kWarp)));
    launch_chained(stream_of(ctx), embedding_kernel<Piece>, dim3(static_cast<unsigned>(T)), dim3(threads), 0, out_TH.as<char>(),
                   table_VH.as<char>(), ids.ids_T.as<std::int32_t>(), drawn, num_drawn, V, out_stride, table_stride, pieces,
                   fault_word_of(ctx));
  };
  const bool wide =
      is_aligned(out_TH.data, 16) && is_aligned(table_VH.data, 16) && row_bytes % 16 == 0 && out_stride % 16 == 0 && table_stride % 16 == 0;
  if (wide)
    launch(uint4{});
  else if (size == 2)
    launch(std::uint16_t{});
  else
    launch(std::uint32_t{});
  PRL_CUDA_CHECK(cudaGetLastError());
}

void add_to_rows(OpContext& ctx, TensorView table_VH, ConstTensorView rows_TH, ConstTensorView ids_T, const Occurrences& o,
                 const RowFactors& factors) {
  const std::int64_t T = rows_TH.shape.num_rows(), V = table_VH.shape.num_rows(), H = table_VH.shape.num_cols();
  const cudaStream_t stream = stream_of(ctx);
  const std::int32_t* ids = ids_T.as<std::int32_t>();
  clear_kernel<<<static_cast<unsigned>(ceil_div(V, kEmbeddingBlock)), kEmbeddingBlock, 0, stream>>>(o, V);
  PRL_CUDA_CHECK(cudaGetLastError());
  find_kernel<<<static_cast<unsigned>(ceil_div(T, kEmbeddingBlock)), kEmbeddingBlock, 0, stream>>>(o, ids, T, V, fault_word_of(ctx));
  PRL_CUDA_CHECK(cudaGetLastError());
  with_type(rows_TH.dtype, [&](auto t) {
    using E = decltype(t);
    const dim3 grid(static_cast<unsigned>(T), static_cast<unsigned>(ceil_div(H, kEmbeddingBlock)));
    with_bool(factors.factors != nullptr, [&](auto has_factors) {
      add_to_rows_kernel<E, has_factors.value><<<grid, kEmbeddingBlock, 0, stream>>>(table_VH.as<float>(), rows_TH.as<E>(), ids, o, V, H,
                                                                                     table_VH.row_stride, rows_TH.row_stride, factors);
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void store_rows(OpContext& ctx, TensorView to_SC, ConstTensorView rows_TC, ConstTensorView slot_T) {
  const std::int64_t T = rows_TC.shape.num_rows(), S = to_SC.shape.num_rows();
  const auto size = static_cast<std::int64_t>(size_of(to_SC.dtype));
  const std::int64_t row_bytes = rows_TC.shape.num_cols() * size, to_stride = to_SC.row_stride * size,
                     row_stride = rows_TC.row_stride * size;
  const auto launch = [&](auto piece) {
    using Piece = decltype(piece);
    const auto pieces = static_cast<int>(row_bytes / static_cast<std::int64_t>(sizeof(Piece)));
    const auto threads = static_cast<unsigned>(std::min<std::int64_t>(kEmbeddingBlock, round_up(pieces, kWarp)));
    launch_chained(stream_of(ctx), store_rows_kernel<Piece>, dim3(static_cast<unsigned>(T)), dim3(threads), 0, to_SC.as<char>(),
                   rows_TC.as<char>(), slot_T.as<std::int32_t>(), S, to_stride, row_stride, pieces);
  };
  const bool wide =
      is_aligned(to_SC.data, 16) && is_aligned(rows_TC.data, 16) && row_bytes % 16 == 0 && to_stride % 16 == 0 && row_stride % 16 == 0;
  if (wide)
    launch(uint4{});
  else if (size == 2)
    launch(std::uint16_t{});
  else
    launch(std::uint32_t{});
  PRL_CUDA_CHECK(cudaGetLastError());
}

void embedding_backward(OpContext& ctx, TensorView dtable_VH, ConstTensorView dout_TH, ConstTensorView ids_T) {
  const std::int64_t V = dtable_VH.shape.num_rows();
  Occurrences o{};
  const auto carve = [&](void* memory) {
    Carver c(memory);
    o = {c.take<std::int32_t>(V), c.take<std::int32_t>(V)};
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  add_to_rows(ctx, dtable_VH, dout_TH, ids_T, o);
}

}  // namespace prl::ops::cuda
