#pragma once

#include <span>
#include <vector>

#include "ops/attention.hpp"
#include "ops/cuda/attention/unit.hpp"

// How a call of attention is cut into units of work, on the host, as plain data. The kernels take the list as it is: it decides
// who computes what and when, never a bit of a result.

namespace prl::ops::cuda {

/// Where a sequence's new tokens are and what they see.
struct AttentionSequence {
  std::int32_t token, num_tokens, num_keys, keys;
};
std::vector<AttentionSequence> sequences_of(const VarlenAttention& args);
std::vector<AttentionSequence> sequences_of(const PagedAttention& args);

/// Units of up to `tokens` tokens, those with most tiles first. A query sees at most `window` keys.
std::vector<AttentionUnit> whole_units(std::span<const AttentionSequence> sequences, int tokens, int tile, std::int32_t window);
/// The same, cut at chunks: units with a single chunk finish at once, the others leave states to merge.
struct SplitUnits {
  std::vector<AttentionUnit> units;
  std::vector<MergeUnit> merges;
  std::int32_t num_states = 0;
};
SplitUnits split_units(std::span<const AttentionSequence> sequences, int tokens, int tile, std::int32_t window);

}  // namespace prl::ops::cuda
