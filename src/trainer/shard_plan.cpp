#include "trainer/shard_plan.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::trainer {

ShardPlan::ShardPlan(const nn::TensorTable& table, int num_ranks, bool keeps_blocks) {
  PRL_CHECK(num_ranks >= 1, "{} ranks", num_ranks);
  // Blocks lie in memory in the order of their offsets; gaps between them belong to the one before.
  std::vector<std::int64_t> begins;
  if (table.num_vector_elements() > 0) begins.push_back(0);
  for (const nn::BlockSpec& block : table.blocks())
    if (block.trainable && block.is_matrix()) begins.push_back(block.offset);
  std::ranges::sort(begins);
  begins.push_back(table.num_master_elements());
  std::vector<std::size_t> cuts{0};  // chunks before which the array may be divided
  for (std::size_t i = 0; i + 1 < begins.size(); ++i) {
    for (std::int64_t at = begins[i]; at < begins[i + 1]; at += kChunkElements) {
      chunks_.push_back({at, std::min(at + kChunkElements, begins[i + 1])});
      if (!keeps_blocks) cuts.push_back(chunks_.size());
    }
    if (keeps_blocks) cuts.push_back(chunks_.size());
  }
  const std::int64_t total = table.num_master_elements();
  const auto element_of = [&](std::size_t cut) { return cut < chunks_.size() ? chunks_[cut].begin : total; };
  for (int rank = 0; rank < num_ranks; ++rank) {
    // The cut nearest to an even share, and none before the last rank's.
    const std::int64_t wanted = total * rank / num_ranks;
    const auto nearest = std::ranges::min_element(cuts, {}, [&](std::size_t cut) {
      const std::int64_t d = element_of(cut) - wanted;
      return d < 0 ? -d : d;
    });
    first_chunk_.push_back(rank == 0 ? 0 : std::max(first_chunk_.back(), *nearest));
  }
  first_chunk_.push_back(chunks_.size());
  for (int rank = 0; rank < num_ranks; ++rank)
    ranges_.push_back(
        {element_of(first_chunk_[static_cast<std::size_t>(rank)]), element_of(first_chunk_[static_cast<std::size_t>(rank) + 1])});
}

std::vector<std::int64_t> ShardPlan::counts() const {
  std::vector<std::int64_t> counts;
  for (const ElementRange& range : ranges_) counts.push_back(range.count());
  return counts;
}

std::span<const ElementRange> ShardPlan::chunks_of(int rank) const {
  const std::size_t first = first_chunk_[static_cast<std::size_t>(rank)], end = first_chunk_[static_cast<std::size_t>(rank) + 1];
  return std::span(chunks_).subspan(first, end - first);
}

}  // namespace prl::trainer
