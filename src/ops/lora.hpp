#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/hash.hpp"
#include "ops/linear.hpp"

#ifdef __CUDACC__
#define PRL_DROPOUT __host__ __device__ inline
#else
#define PRL_DROPOUT inline
#endif

namespace prl::ops {

/// Largest rank of an adapter of one matrix.
inline constexpr std::int64_t kMaxLoraRank = 512;

/// What an adapter adds to some of a weight's outputs: scale * B of its ranks.
struct LoraPart {
  std::int64_t first_output = 0, num_outputs = 0;  ///< of the weight (a part of q|k|v, or all of it)
  std::int64_t first_rank = 0, rank = 0;           ///< rows of A
  float scale = 0;                                 ///< alpha / rank, or alpha / sqrt(rank)
  LinearWeightPtr b;                               ///< [num_outputs, rank], without a bias
};

/// The low-rank adapter of one weight [N, K]: the A of its parts one below the other, so that one product serves all of them, and the B
/// of each. Immutable once made.
struct LoraWeight {
  LinearWeightPtr a;  ///< [R, K], R the ranks of all parts
  std::vector<LoraPart> parts;

  std::int64_t num_ranks() const noexcept { return a->num_outputs(); }
  DType dtype() const noexcept { return a->dtype(); }  ///< of A and every B: that of the weight, or kF32
};

/// Rows of a batch that one adapter serves.
struct LoraRows {
  const LoraWeight* weight = nullptr;
  std::span<const std::int32_t> rows;  ///< rising, in no other group; host memory. data() == nullptr: all rows of the batch
  std::int64_t count(std::int64_t num_rows) const noexcept {
    return rows.data() == nullptr ? num_rows : static_cast<std::int64_t>(rows.size());
  }
  /// True if they are consecutive.
  bool lie_together() const noexcept { return rows.empty() || rows.back() - rows.front() + 1 == static_cast<std::int32_t>(rows.size()); }
  std::int64_t first() const noexcept { return rows.empty() ? 0 : rows.front(); }
};

/// y[t] += scale * B (A x[t]) for the rows of each group: the second term of y = x W^T + scale * B A x, whose first `linear` has written.
/// Rows of no group stay as they are.
///
/// Shapes    x [T, K], y [T, N] of one dtype; row-strided views allowed. Groups may have different ranks, up to kMaxLoraRank a part.
/// Numerics  A x is summed in fp32 and rounded to weight->dtype(), B (A x) is summed in fp32, scaled, added to y and rounded once. Each sum
///           has one order that depends on the adapter's shapes and the kind of device alone: a row of y depends on its row of x, on y and
///           on its own adapter, never on the other rows, adapters or threads (batch-invariant).
void add_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> groups);

/// Bytes of an adapter's entry, whatever the device.
inline constexpr std::size_t kLoraEntryBytes = 256;
/// A tile: the slot of an adapter, -1 for none, then up to kLoraTileRows rows of the batch, -1 where there are fewer.
inline constexpr std::int64_t kLoraTileRows = 16, kLoraTileWords = 1 + kLoraTileRows;
/// Appends the tiles of `rows`, which name the adapter of `slot`.
void append_lora_tiles(std::vector<std::int32_t>& tiles, std::int32_t slot, std::span<const std::int32_t> rows);

/// The adapters of one weight by slot and the rows that name them, all in device memory: the work stays the same when other rows name other
/// adapters, so that it can be recorded.
struct LoraIndex {
  ConstTensorView entries;    ///< kU8 [num_slots, kLoraEntryBytes], rows at any multiple of that: what write_lora_entry wrote
  ConstTensorView tiles;      ///< kI32 [num_tiles, kLoraTileWords]; no row twice
  std::int64_t max_rank = 0;  ///< of a part of any entry
  /// kI32 [1], 0 before and after linear_lora, which alone needs it. In recorded work no other product has it.
  TensorView signal = {};
  /// For linear_fused: all rows that name an adapter name this one, of which recorded work keeps the parts, but for scales and values.
  /// Null: linear_fused does not take it.
  const LoraWeight* single = nullptr;
  ConstTensorView single_entry = {};  ///< kU8 [kLoraEntryBytes]: its entry, wherever it lies
};
class ShapeCheck;
void check_lora_index(ShapeCheck& check, const LoraIndex& index);
/// True if the device adds adapters by index.
bool has_lora_index(const OpContext& ctx) noexcept;
/// Writes the entry (host memory, kLoraEntryBytes) of an adapter beside activations of `dtype`; nullptr: one that adds nothing. It is good
/// as long as `weight` is there. False if the device computes this adapter in groups alone.
[[nodiscard]] bool write_lora_entry(OpContext& ctx, std::span<std::byte> entry, const LoraWeight* weight, DType dtype);
/// add_lora for the rows of the index: the same bits.
void add_lora_indexed(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LoraIndex& index);
/// `linear`, then `add_lora_indexed`: the same bits, with A x formed beside the product. False, and nothing is done, if the device has no
/// such kernels for these sizes.
[[nodiscard]] bool linear_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LoraIndex& index);

/// Gradients of `add_lora` for rows that all have the adapter `w`, which was packed with its backward form.
///
///   dh = scale * dy B      da_RK (+)= dh^T x      db (+)= scale * dy^T (A x), one [num_outputs, rank] per part      dx (+)= dh A
///
/// dA and dB are fp32; A x and dh are rounded to w.dtype(). dx_TK.data == nullptr leaves dx out. Sums over T run in a fixed order; rows of
/// dx are batch-invariant.
void lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                   ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate);

// Of groups of neighbouring rows, each with an adapter of its own: group g has rows [begin[g], begin[g + 1]). Both return false, and do
// nothing, where the device has no kernels for all groups at once, or unless the adapters have the same parts and scales.

/// add_lora of each group: the same bits.
bool add_grouped_lora(OpContext& ctx, TensorView y_RN, ConstTensorView x_RK, std::span<const LoraWeight* const> adapters,
                      std::span<const std::int32_t> begin);
/// lora_backward of each group: the same bits. `da` has one view for each group, `db` one for each part of each group, group by group;
/// those of groups without rows become 0 unless `accumulate`.
bool grouped_lora_backward(OpContext& ctx, TensorView dx_RK, std::span<const TensorView> da, std::span<const TensorView> db,
                           ConstTensorView dy_RN, ConstTensorView x_RK, std::span<const LoraWeight* const> adapters,
                           std::span<const std::int32_t> begin, bool accumulate_dx, bool accumulate);

/// Which elements of a matrix are dropped: element (t, k) of one that is `K` wide by a hash of (seed, (first_row + t) * K + k) alone.
struct DropoutMask {
  std::uint64_t seed = 0;
  float probability = 0;       ///< in [0, 1)
  std::int64_t first_row = 0;  ///< where the matrix begins in a larger one, whose mask this is a part of
};
/// y_TK (+)= x / (1 - probability), or 0 where dropped. Its own gradient: dx (+)= dropout(dy). x and y of one dtype, y may be x.
void dropout(OpContext& ctx, TensorView y_TK, ConstTensorView x_TK, const DropoutMask& mask, bool accumulate);

inline std::uint64_t dropout_threshold(float probability) {
  return static_cast<std::uint64_t>(static_cast<double>(probability) * 4294967296.0);
}
/// Shared by all bodies: the upper half of the hash decides.
PRL_DROPOUT bool is_dropped(std::uint64_t seed, std::uint64_t index, std::uint64_t threshold) {
  return (hash_word(seed, index) >> 32) < threshold;
}

}  // namespace prl::ops

#undef PRL_DROPOUT
