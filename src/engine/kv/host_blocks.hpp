#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/kv/block_pool.hpp"

namespace prl::engine {

/// A block that is copied from the device's cache to host memory, or back.
struct BlockCopy {
  BlockId device, host;
  bool operator==(const BlockCopy&) const = default;
};
/// What a step copies before it computes: first all saves, then all restores. A restore may read what a save of the same step writes, and
/// write to a block that it saves.
struct BlockCopies {
  std::vector<BlockCopy> saves;     ///< to host memory
  std::vector<BlockCopy> restores;  ///< to the device

  bool empty() const noexcept { return saves.empty() && restores.empty(); }
  void clear() noexcept {
    saves.clear();
    restores.clear();
  }
};

/// Which full blocks that the device's cache had no room for are in host memory. Bookkeeping only, under the same keys as BlockPool's, and
/// as single-threaded. Copies are collected until a step carries them out: either carried_out() or give_up() follows the plan that has
/// them.
///
/// Invariants (check_integrity):
///   1. those of a BlockPool, whose blocks are those of host memory;
///   2. besides leases of find() and take(), only copies that are collected hold references, one each: until a step has carried them out,
///   what they
///      read or write is not taken for another block.
class HostBlocks final : public EvictionListener {
 public:
  /// `below`, which may be null: where blocks go that host memory has no room for.
  HostBlocks(std::int64_t num_blocks, std::int64_t block_size, EvictionListener* below = nullptr);

  /// A published block of the device is about to be written to anew. No copy is made if host memory has it already, or if copies that are
  /// collected hold all of host memory.
  void save(BlockId device, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) override;
  /// A block to be filled from elsewhere; nullopt if all are in use.
  [[nodiscard]] std::optional<BlockLease> take();
  /// As BlockPool::publish, of a block of take() that was filled.
  void publish(const BlockLease& lease, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
    pool_.publish(lease, hash, parent, tokens);
  }
  /// As BlockPool::find.
  [[nodiscard]] std::optional<BlockLease> find(BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
    return pool_.find(hash, parent, tokens);
  }
  /// The device's block gets what find() found.
  void restore(BlockLease host, BlockId device);
  /// Sets `copies` to what is collected.
  void list(BlockCopies& copies) const;
  bool is_restoring(BlockId device) const noexcept;
  /// True while a copy that is collected has still to fill it.
  bool is_awaited(BlockId host) const noexcept;
  bool has_restores() const noexcept { return !restores_.empty(); }
  /// The copies are in the device's queue, ahead of everything that comes later.
  void carried_out() noexcept;
  /// They may have been carried out or not, or in part: what would have been saved is forgotten.
  void give_up() noexcept;
  /// Forgets what every block holds; copies that are collected stay.
  void reset_cache() noexcept { pool_.reset_cache(); }

  std::int64_t num_blocks() const noexcept { return pool_.num_blocks(); }
  /// Blocks that can be found.
  std::int64_t num_cached() const noexcept { return pool_.num_cached(); }
  /// Carried out so far.
  std::int64_t num_saved() const noexcept { return num_saved_; }
  std::int64_t num_restored() const noexcept { return num_restored_; }
  /// Aborts if an invariant is broken. O(num_blocks).
  void check_integrity() const;

 private:
  struct Pending {
    BlockId device;
    BlockLease host;
  };
  BlockPool pool_;
  std::vector<Pending> saves_, restores_;
  std::vector<BlockLease> taken_;  ///< empty between calls
  std::int64_t num_saved_ = 0, num_restored_ = 0;
};

}  // namespace prl::engine
