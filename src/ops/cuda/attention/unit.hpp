#pragma once

#include <cstdint>

// Units of attention work as plain data, for host and device code alike.

namespace prl::ops::cuda {

/// kAttentionChunk, for files that device code includes.
constexpr int kChunkKeys = 1024;

/// Keys that a query sees at most, its own included, where it sees all.
constexpr std::int32_t kNoWindow = 1 << 30;

/// Consecutive new tokens of one sequence with the tiles of keys they need; computed once per group of heads.
struct AttentionUnit {
  std::int32_t token;  ///< row of q and out of the first token
  std::int32_t num_tokens;
  std::int32_t position;    ///< of the first token in its sequence
  std::int32_t num_keys;    ///< of the whole sequence: v rows from here on hold anything
  std::int32_t keys;        ///< dense: row of k and v of position 0; paged: index of its block in the table
  std::int32_t tile_begin;  ///< tiles [tile_begin, tile_end), counted from position 0
  std::int32_t tile_end;
  std::int32_t state;  ///< where the state of this unit's one chunk goes, or -1: the unit has all its chunks and finishes
};
/// A unit whose chunks lie in states [state, state + num_states), to be merged and finished.
struct MergeUnit {
  std::int32_t token, num_tokens, state, num_states;
};

/// How rows are laid out: a block of 64 rows holds `tokens` tokens times `heads` query heads of one kv head.
struct RowPacking {
  static constexpr int kRows = 64;
  int group;               ///< query heads per kv head
  int heads;               ///< of them in a block of rows
  int tokens;              ///< in a block of rows
  int groups_per_kv_head;  ///< blocks of heads that a kv head needs
  int num_groups;          ///< of all kv heads together
  static RowPacking of(std::int64_t num_q_heads, std::int64_t num_kv_heads);
};

}  // namespace prl::ops::cuda
