#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "nn/element_ranges.hpp"
#include "nn/tensor_table.hpp"

namespace prl::nn {
struct ExpertSection;
}

namespace prl::trainer {

using nn::ElementRange;
using nn::ElementRanges;
using nn::intersection;

/// Which rank steps which elements. The array is cut into chunks that depend on the table alone: the vectors, and each matrix block, in
/// pieces of kChunkElements; what is summed per chunk does not depend on the number of ranks. Each rank owns a run of the chunks of each
/// section (nn::grad_sections), about as many as the others, so that all of them send and receive when a section is exchanged.
class ShardPlan {
 public:
  static constexpr std::int64_t kChunkElements = std::int64_t{1} << 16;

  /// A run of the array that is divided among all ranks.
  struct Section {
    ElementRange range;
    std::vector<ElementRange> parts;  ///< of each rank, one after the other; may be empty
    std::vector<std::int64_t> counts() const;
  };

  /// `keeps_blocks`: no block is divided (Muon orthogonalises whole matrices), the vectors are one. Layers have too few blocks to be
  /// divided evenly: then the whole array is one section.
  /// `divides_experts`: the experts of each layer are a section, in which each rank owns those of nn::ExpertShare; not
  /// with `keeps_blocks`.
  ShardPlan(const nn::TensorTable& table, int num_ranks, bool keeps_blocks, bool divides_experts = false);

  int num_ranks() const noexcept { return static_cast<int>(elements_.size()); }
  /// All that a rank owns; may be empty.
  const ElementRanges& elements(int rank) const { return elements_[static_cast<std::size_t>(rank)]; }
  /// The most that any rank owns.
  std::int64_t longest() const noexcept;
  /// What a rank owns of elements that lie in one section.
  ElementRange part(int rank, ElementRange of) const { return elements(rank).part_of(of); }
  /// In the order of the array, all of which they are.
  std::span<const Section> sections() const noexcept { return sections_; }
  /// Of the whole array, in order.
  std::span<const ElementRange> chunks() const noexcept { return chunks_; }
  /// Indices of those of a rank, in order.
  std::span<const std::size_t> chunks_of(int rank) const { return chunks_of_[static_cast<std::size_t>(rank)]; }

 private:
  void divide(ElementRange section, int num_ranks, std::span<const std::size_t> cuts);
  void divide(const nn::ExpertSection& experts, int num_ranks);
  /// `firsts`: chunks with which each rank's part begins, and one past the last.
  void add_section(ElementRange section, std::span<const std::size_t> firsts);
  std::int64_t element_of(std::size_t chunk) const {
    return chunk < chunks_.size() ? chunks_[chunk].begin : chunks_.empty() ? 0 : chunks_.back().end;
  }

  std::vector<ElementRange> chunks_;
  std::vector<Section> sections_;
  std::vector<ElementRanges> elements_;
  std::vector<std::vector<std::size_t>> chunks_of_;
};

}  // namespace prl::trainer
