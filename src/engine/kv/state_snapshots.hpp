#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "engine/kv/block_pool.hpp"

namespace prl::engine {

/// The state of a sequence is copied from one slot of nn::KvCache's states to another.
struct StateCopy {
  std::int32_t from = 0, to = 0;
};

/// Which slots hold copies of states, of models with linear attention: each of the state behind a full block, under the block's hash. What
/// of a prefix the cache of blocks does not hold. Bookkeeping only, single-threaded. A hit counts only behind blocks that the BlockPool has
/// found too, whose tokens it compares.
class StateSnapshots {
 public:
  /// Of slots [first_slot, first_slot + num_slots).
  StateSnapshots(std::int64_t first_slot, std::int64_t num_slots);

  bool is_enabled() const noexcept { return !entries_.empty(); }
  bool has(BlockHash block) const { return index_.contains(block.value); }
  /// The slot, which becomes the most recently used one.
  std::optional<std::int32_t> find(BlockHash block);
  /// A slot for the state behind a block, in place of the least recently used one; nullopt if there is one already.
  std::optional<std::int32_t> add(BlockHash block);
  void forget(BlockHash block);
  void clear();
  /// Aborts if the index and the slots disagree.
  void check_integrity() const;

 private:
  struct Entry {
    std::optional<BlockHash> block;
    std::uint64_t last_use = 0;
  };
  std::int64_t first_slot_;
  std::vector<Entry> entries_;
  std::unordered_map<std::uint64_t, std::size_t> index_;  ///< of entries_, by hash
  std::uint64_t num_uses_ = 0;
};

}  // namespace prl::engine
