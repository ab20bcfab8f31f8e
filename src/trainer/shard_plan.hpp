#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nn/tensor_table.hpp"

namespace prl::trainer {

using nn::ElementRange;
using nn::intersection;

/// Which rank steps which elements. The array is cut into chunks that depend on the table alone: the vectors, and each matrix block, in
/// pieces of kChunkElements. A rank owns one run of chunks, so that what is summed per chunk does not depend on the number of ranks.
class ShardPlan {
 public:
  static constexpr std::int64_t kChunkElements = std::int64_t{1} << 16;

  /// `keeps_blocks`: no block is divided (Muon orthogonalises whole matrices), the vectors are one.
  ShardPlan(const nn::TensorTable& table, int num_ranks, bool keeps_blocks);

  int num_ranks() const noexcept { return static_cast<int>(ranges_.size()); }
  /// May be empty.
  const ElementRange& range(int rank) const { return ranges_[static_cast<std::size_t>(rank)]; }
  /// In the order of ranks.
  std::vector<std::int64_t> counts() const;
  /// Of the whole array, in order.
  std::span<const ElementRange> chunks() const noexcept { return chunks_; }
  std::span<const ElementRange> chunks_of(int rank) const;

 private:
  std::vector<ElementRange> chunks_, ranges_;
  std::vector<std::size_t> first_chunk_;  ///< per rank, and one past the last
};

}  // namespace prl::trainer
