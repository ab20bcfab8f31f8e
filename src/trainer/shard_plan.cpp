#include "trainer/shard_plan.hpp"

#include <algorithm>
#include <iterator>

#include "base/error.hpp"
#include "nn/parameters.hpp"

namespace prl::trainer {

std::vector<std::int64_t> ShardPlan::Section::counts() const {
  std::vector<std::int64_t> counts;
  for (const ElementRange& part : parts) counts.push_back(part.count());
  return counts;
}

ShardPlan::ShardPlan(const nn::TensorTable& table, int num_ranks, bool keeps_blocks, bool divides_experts)
    : chunks_of_(static_cast<std::size_t>(num_ranks)) {
  PRL_CHECK(!keeps_blocks || !divides_experts, "experts are divided with the sections of layers");
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
  std::vector<nn::GradSection> sections{{nn::GradSection::kRest, {0, table.num_master_elements()}}};
  if (!keeps_blocks) sections = nn::grad_sections(table, false, divides_experts);
  for (const nn::GradSection& section : sections) divide(section.range, num_ranks, cuts);
  if (divides_experts)
    for (const nn::ExpertSection& experts : nn::expert_sections(table)) divide(experts, num_ranks);
  std::ranges::sort(sections_, {}, [](const Section& section) { return section.range.begin; });
  for (std::vector<std::size_t>& of_rank : chunks_of_) std::ranges::sort(of_rank);
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::vector<ElementRange> parts;
    for (const Section& section : sections_) parts.push_back(section.parts[static_cast<std::size_t>(rank)]);
    elements_.emplace_back(parts);
  }
}

void ShardPlan::divide(ElementRange section, int num_ranks, std::span<const std::size_t> cuts) {
  const auto begin_of = [this](std::size_t cut) { return element_of(cut); };
  // Its own begin and end are among them. Cuts rise, and so do their elements.
  const auto first_inside = std::ranges::lower_bound(cuts, section.begin, {}, begin_of);
  const std::span<const std::size_t> inside(first_inside, std::ranges::upper_bound(cuts, section.end, {}, begin_of));
  PRL_CHECK(!inside.empty() && element_of(inside.front()) == section.begin && element_of(inside.back()) == section.end,
            "no chunks begin and end where elements [{}, {}) do", section.begin, section.end);
  std::vector<std::size_t> firsts;  // per rank, and one past the last
  for (int rank = 0; rank < num_ranks; ++rank) {
    // The cut nearest to an even share, and none before the last rank's.
    const std::int64_t wanted = section.begin + section.count() * rank / num_ranks;
    auto nearest = std::ranges::lower_bound(inside, wanted, {}, begin_of);
    if (nearest == inside.end() || (nearest != inside.begin() && wanted - element_of(*std::prev(nearest)) <= element_of(*nearest) - wanted))
      --nearest;
    firsts.push_back(rank == 0 ? inside.front() : std::max(firsts.back(), *nearest));
  }
  firsts.push_back(inside.back());
  add_section(section, firsts);
}

void ShardPlan::divide(const nn::ExpertSection& experts, int num_ranks) {
  std::vector<std::size_t> firsts;
  const auto num_experts = static_cast<std::int64_t>(experts.begin_of.size()) - 1;
  for (int rank = 0; rank <= num_ranks; ++rank) {
    const nn::ExpertShare share{rank, num_ranks};
    const std::int64_t begin = experts.begin_of[static_cast<std::size_t>(rank < num_ranks ? share.first(num_experts) : num_experts)];
    const auto chunk = std::ranges::lower_bound(chunks_, begin, {}, &ElementRange::begin);
    firsts.push_back(static_cast<std::size_t>(chunk - chunks_.begin()));
  }
  add_section(experts.range(), firsts);
}

void ShardPlan::add_section(ElementRange section, std::span<const std::size_t> firsts) {
  Section& made = sections_.emplace_back(Section{section, {}});
  for (std::size_t rank = 0; rank + 1 < firsts.size(); ++rank) {
    made.parts.push_back({element_of(firsts[rank]), element_of(firsts[rank + 1])});
    for (std::size_t chunk = firsts[rank]; chunk < firsts[rank + 1]; ++chunk) chunks_of_[rank].push_back(chunk);
  }
}

std::int64_t ShardPlan::longest() const noexcept {
  std::int64_t longest = 0;
  for (const ElementRanges& elements : elements_) longest = std::max(longest, elements.count());
  return longest;
}

}  // namespace prl::trainer
