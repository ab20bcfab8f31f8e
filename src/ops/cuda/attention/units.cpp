#include "ops/cuda/attention/units.hpp"

#include <algorithm>

namespace prl::ops::cuda {
namespace {

template <typename Visit>
void for_each_unit(std::span<const AttentionSequence> sequences, int tokens, int tile, std::int32_t window, const Visit& visit) {
  for (const AttentionSequence& s : sequences)
    for (std::int32_t first = 0; first < s.num_tokens; first += tokens) {
      AttentionUnit u{};
      u.token = s.token + first;
      u.num_tokens = std::min(tokens, s.num_tokens - first);
      u.position = s.num_keys - s.num_tokens + first;
      u.num_keys = s.num_keys;
      u.keys = s.keys;
      u.tile_begin = std::max(0, u.position - window + 1) / tile;
      u.tile_end = (u.position + u.num_tokens + tile - 1) / tile;
      u.state = -1;
      visit(u);
    }
}

void sort_longest_first(std::vector<AttentionUnit>& units) {
  std::ranges::stable_sort(units, std::greater<>(), [](const AttentionUnit& u) { return u.tile_end - u.tile_begin; });
}

}  // namespace

RowPacking RowPacking::of(std::int64_t num_q_heads, std::int64_t num_kv_heads) {
  RowPacking p{};
  p.group = static_cast<int>(num_q_heads / num_kv_heads);
  p.heads = std::min(p.group, kRows);
  p.tokens = kRows / p.heads;
  p.groups_per_kv_head = (p.group + p.heads - 1) / p.heads;
  p.num_groups = p.groups_per_kv_head * static_cast<int>(num_kv_heads);
  return p;
}

std::vector<AttentionSequence> sequences_of(const VarlenAttention& args) {
  std::vector<AttentionSequence> out;
  out.reserve(args.cu_seqlens.size());
  for (std::size_t s = 0; s + 1 < args.cu_seqlens.size(); ++s) {
    const std::int32_t begin = args.cu_seqlens[s], count = args.cu_seqlens[s + 1] - begin;
    if (count > 0) out.push_back({begin, count, count, begin});
  }
  return out;
}

std::vector<AttentionSequence> sequences_of(const PagedAttention& args) {
  std::vector<AttentionSequence> out;
  out.reserve(args.context_len.size());
  for (std::size_t s = 0; s < args.context_len.size(); ++s) {
    const std::int32_t begin = args.query_start[s], count = args.query_start[s + 1] - begin;
    if (count > 0) out.push_back({begin, count, args.context_len[s], static_cast<std::int32_t>(s) * args.max_blocks});
  }
  return out;
}

std::vector<AttentionUnit> whole_units(std::span<const AttentionSequence> sequences, int tokens, int tile, std::int32_t window) {
  std::vector<AttentionUnit> units;
  for_each_unit(sequences, tokens, tile, window, [&](const AttentionUnit& u) { units.push_back(u); });
  sort_longest_first(units);
  return units;
}

SplitUnits split_units(std::span<const AttentionSequence> sequences, int tokens, int tile, std::int32_t window) {
  SplitUnits out;
  const std::int32_t chunk = kAttentionChunk / tile;
  for_each_unit(sequences, tokens, tile, window, [&](AttentionUnit u) {
    const std::int32_t begin = u.tile_begin, end = u.tile_end, first = begin / chunk, chunks = (end + chunk - 1) / chunk - first;
    if (chunks > 1) out.merges.push_back({u.token, u.num_tokens, out.num_states, chunks});
    for (std::int32_t c = 0; c < chunks; ++c) {
      u.tile_begin = std::max(begin, (first + c) * chunk);
      u.tile_end = std::min(end, (first + c + 1) * chunk);
      u.state = chunks > 1 ? out.num_states++ : -1;
      out.units.push_back(u);
    }
  });
  sort_longest_first(out.units);
  return out;
}

}  // namespace prl::ops::cuda
