#include <cstring>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/device.cuh"

namespace prl::ops::cuda {
namespace {

constexpr int kEditBlock = 256;
/// Of edits for one launch: more at once would enlarge the ring through which they go, whose memory no plan knows of.
constexpr std::size_t kLaunchBytes = std::size_t{1} << 20;

/// A row and where its entries lie, from where the rows begin.
struct RowEdits {
  LogitEdits::Row row;
  std::uint32_t allowed = 0, biases = 0, seen = 0, masked = 0;
};
static_assert(sizeof(RowEdits) % sizeof(std::uint64_t) == 0, "words follow the rows");

/// A block for each row. What is done to one logit by entries of different kinds is done in their order.
__global__ void __launch_bounds__(kEditBlock)
    edit_kernel(float* logits_BV, std::int64_t row_stride, int V, const RowEdits* rows, const std::int32_t* drawn_B) {
  __shared__ bool is_drawn_seen;
  const RowEdits& edits = rows[blockIdx.x];
  const LogitEdits::Row& row = edits.row;
  const char* const base = reinterpret_cast<const char*>(rows);
  float* const logits_V = logits_BV + row.row * row_stride;
  const auto* const biases = reinterpret_cast<const LogitEdits::Bias*>(base + edits.biases);
  const auto* const seen = reinterpret_cast<const LogitEdits::Seen*>(base + edits.seen);
  const auto* const masked = reinterpret_cast<const std::int32_t*>(base + edits.masked);
  const auto* const allowed = reinterpret_cast<const std::uint64_t*>(base + edits.allowed);
  const std::int32_t drawn = row.drawn_row >= 0 ? drawn_B[row.drawn_row] : -1;
  if (threadIdx.x == 0) is_drawn_seen = false;
  for (int i = threadIdx.x; i < row.num_biases; i += kEditBlock) logits_V[biases[i].id] += biases[i].value;
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_seen; i += kEditBlock) {
    const LogitEdits::Seen token = seen[i];
    const bool is_drawn = token.id == drawn;
    if (is_drawn) is_drawn_seen = true;
    logits_V[token.id] = penalised(logits_V[token.id], token.count + (is_drawn ? 1 : 0), row);
  }
  __syncthreads();
  if (threadIdx.x == 0 && drawn >= 0 && !is_drawn_seen) logits_V[drawn] = penalised(logits_V[drawn], 1, row);
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_masked; i += kEditBlock) logits_V[masked[i]] = kMaskedLogit;
  if (!row.has_allowed) return;
  __syncthreads();
  for (int id = threadIdx.x; id < V; id += kEditBlock)
    if ((allowed[id / 64] >> (id % 64) & 1) == 0) logits_V[id] = row.not_allowed;
}

/// What is left of the entries of one kind.
template <typename T>
struct Entries {
  const T* next;
  const T* take(std::int64_t count) { return std::exchange(next, next + count); }
};

}  // namespace

void edit_logits(OpContext& ctx, TensorView logits_BV, ConstTensorView drawn_B, const LogitEdits& edits) {
  const std::int64_t V = logits_BV.shape.num_cols();
  thread_local std::vector<char> packed;  // kept, so that a warm call allocates nothing
  Entries<LogitEdits::Bias> biases{edits.biases.data()};
  Entries<LogitEdits::Seen> seen{edits.seen.data()};
  Entries<std::int32_t> masked{edits.masked.data()};
  Entries<std::uint64_t> allowed{edits.allowed.data()};
  const auto words_of = [&](const LogitEdits::Row& row) { return row.has_allowed ? LogitEdits::words_per_row(V) : 0; };
  const auto bytes_of = [&](const LogitEdits::Row& row) {
    return sizeof(RowEdits) + static_cast<std::size_t>(words_of(row)) * sizeof(std::uint64_t) +
           round_up(
               row.num_biases * sizeof(LogitEdits::Bias) + row.num_seen * sizeof(LogitEdits::Seen) + row.num_masked * sizeof(std::int32_t),
               sizeof(std::uint64_t));
  };
  for (std::size_t begin = 0, end = 0; begin < edits.rows.size(); begin = end) {
    std::size_t bytes = 0;
    for (; end < edits.rows.size() && (end == begin || bytes + bytes_of(edits.rows[end]) <= kLaunchBytes); ++end)
      bytes += bytes_of(edits.rows[end]);
    packed.resize(bytes);
    std::size_t used = (end - begin) * sizeof(RowEdits);
    const auto put = [&](const auto* entries, std::int64_t count) {
      const std::size_t at = used, size = static_cast<std::size_t>(count) * sizeof *entries;
      if (size > 0) std::memcpy(packed.data() + at, entries, size);
      used += size;
      return static_cast<std::uint32_t>(at);
    };
    for (std::size_t i = begin; i < end; ++i) {
      RowEdits row{edits.rows[i]};
      row.allowed = put(allowed.take(words_of(row.row)), words_of(row.row));
      row.biases = put(biases.take(row.row.num_biases), row.row.num_biases);
      row.seen = put(seen.take(row.row.num_seen), row.row.num_seen);
      row.masked = put(masked.take(row.row.num_masked), row.row.num_masked);
      used = round_up(used, sizeof(std::uint64_t));
      std::memcpy(packed.data() + (i - begin) * sizeof(RowEdits), &row, sizeof row);
    }
    const auto* const rows = static_cast<const RowEdits*>(staged_bytes(ctx, packed.data(), packed.size()));
    edit_kernel<<<static_cast<unsigned>(end - begin), kEditBlock, 0, stream_of(ctx)>>>(
        logits_BV.as<float>(), logits_BV.row_stride, static_cast<int>(V), rows, drawn_B.as<std::int32_t>());
    PRL_CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace prl::ops::cuda
