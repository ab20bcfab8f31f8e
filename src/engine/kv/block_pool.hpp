#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/ids.hpp"

namespace prl::engine {

using BlockId = StrongId<struct BlockIdTag, std::int32_t>;
/// Identity of a full block: hash of its token ids chained to the hash of the block before it.
using BlockHash = StrongId<struct BlockHashTag, std::uint64_t>;

/// The adapter that a sequence computes with, and which of its weights.
struct AdapterKey {
  std::uint64_t id = 0;  ///< 0: none, the base model alone
  PolicyVersion version;
  bool operator==(const AdapterKey&) const = default;
};
/// What a block's keys and values depend on beside its tokens: sequences share blocks only if all of it agrees.
struct PrefixKey {
  std::uint64_t epoch = 0;  ///< counts weight updates, so that two sets of weights that claim one version never mix
  PolicyVersion version;
  AdapterKey adapter;
  std::string_view cache_salt;  ///< keeps prefixes of different users apart
};
/// First link of a chain.
BlockHash root_hash(const PrefixKey& key) noexcept;
BlockHash chain_hash(BlockHash parent, std::span<const std::int32_t> tokens) noexcept;

class BlockPool;

/// Where cached blocks go that are evicted.
class EvictionListener {
 public:
  /// A published block is about to be written to anew.
  virtual void save(BlockId block, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) = 0;

 protected:
  ~EvictionListener() = default;
};

/// One reference to one block; returns it on destruction. The pool must outlive its leases.
class BlockLease {
 public:
  BlockLease() = default;
  BlockLease(BlockLease&& other) noexcept;
  BlockLease& operator=(BlockLease&& other) noexcept;
  BlockLease(const BlockLease&) = delete;
  BlockLease& operator=(const BlockLease&) = delete;
  ~BlockLease();

  BlockId id() const noexcept { return id_; }
  /// A second reference to the same block.
  BlockLease share() const;
  void release() noexcept;

 private:
  friend class BlockPool;
  BlockLease(BlockPool* pool, BlockId id) noexcept : pool_(pool), id_(id) {}
  BlockPool* pool_ = nullptr;
  BlockId id_{-1};
};

/// Releases the last block first: the free list is evicted oldest first, so a sequence's prefix outlives its tail.
void release_tail_first(std::vector<BlockLease>& leases) noexcept;

/// Who uses which KV block, and which full blocks can be found again by content. Bookkeeping only: holds no keys or values.
/// Single-threaded; after construction nothing allocates.
///
/// Invariants (check_integrity):
///   1. a block is in the free list if and only if its ref count is 0;
///   2. a taken block carries no hash until publish(); a free block keeps its hash until it is taken again;
///   3. the hash table holds exactly the hashed blocks, each hash once;
///   4. a published block is full and is never written again.
class BlockPool {
 public:
  /// `below`, which may be null, hears of cached blocks before they are evicted.
  BlockPool(std::int64_t num_blocks, std::int64_t block_size, EvictionListener* below = nullptr);
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// Appends `n` blocks with ref count 1 and no hash, evicting unreferenced cached blocks, least recently used first.
  /// False and nothing changed if fewer than `n` are free or evictable; the scheduler then preempts. O(n).
  [[nodiscard]] bool try_take(std::int64_t n, std::vector<BlockLease>& leases);
  /// Makes a full block findable. No effect if another block has this hash already.
  void publish(const BlockLease& lease, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens);
  /// The block can no longer be found.
  void unpublish(const BlockLease& lease) noexcept;
  /// The published block of these tokens after `parent`; tokens and parent are compared, not only the hash.
  [[nodiscard]] std::optional<BlockLease> find(BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens);
  /// Forgets every hash; references stay. O(num_blocks).
  void reset_cache() noexcept;

  std::int64_t num_blocks() const noexcept { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t num_blocks_for(std::int64_t num_tokens) const noexcept { return (num_tokens + block_size_ - 1) / block_size_; }
  std::int64_t block_size() const noexcept { return block_size_; }
  /// Blocks try_take could hand out now.
  std::int64_t num_free() const noexcept { return num_free_; }
  std::int64_t num_cached() const noexcept { return num_cached_; }
  std::int32_t ref_count(BlockId id) const noexcept { return blocks_[static_cast<std::size_t>(id.value)].ref_count; }
  /// Aborts if an invariant is broken. O(num_blocks).
  void check_integrity() const;

 private:
  friend class BlockLease;
  struct Block {
    std::int32_t ref_count = 0;
    bool has_hash = false;
    BlockHash hash;
    BlockHash parent;
    std::int32_t previous_free = -1, next_free = -1;
  };
  void add_ref(BlockId id) noexcept;
  void drop_ref(BlockId id) noexcept;
  void push_free(std::int32_t block, bool at_front) noexcept;
  void remove_free(std::int32_t block) noexcept;
  void forget(std::int32_t block) noexcept;
  std::size_t home(BlockHash hash) const noexcept { return static_cast<std::size_t>(hash.value) & (table_.size() - 1); }
  /// Slot that holds `hash`, or the empty slot that ends its probe.
  std::size_t probe(BlockHash hash) const noexcept;
  std::span<const std::int32_t> tokens_of(std::int32_t block) const noexcept;

  std::int64_t block_size_;
  EvictionListener* below_;
  std::vector<Block> blocks_;
  std::vector<std::int32_t> tokens_;  ///< [num_blocks, block_size], set by publish
  std::vector<std::int32_t> table_;   ///< open addressing by hash, power of two, at most half full; -1 is empty
  std::int32_t first_free_ = -1, last_free_ = -1;
  std::int64_t num_free_ = 0, num_cached_ = 0;
};

}  // namespace prl::engine
