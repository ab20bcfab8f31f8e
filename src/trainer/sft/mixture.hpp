#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "config/sft_config.hpp"

namespace prl::trainer {

/// A row of one of several parts.
struct MixedRow {
  std::uint32_t part = 0;
  std::uint32_t index = 0;
};

/// The rows of one epoch over several parts: by turns, or drawn by `probabilities`, each part in its own order and from its start
/// again when it is used up. The epoch ends when the first part is used up (kFirstExhausted) or when all were once
/// (kAllExhausted). A pure function of its arguments.
/// Error{kInvalidArgument} naming data.probabilities: not one per part, negative, not summing to 1, or 0 for a part that has to be
/// used up; or a part without rows, by its number.
/// Source    interleave_datasets of github.com/huggingface/datasets.
std::vector<MixedRow> mix_rows(std::span<const std::size_t> sizes, const std::optional<std::vector<double>>& probabilities,
                               config::StoppingStrategy strategy, std::uint64_t seed);

}  // namespace prl::trainer
