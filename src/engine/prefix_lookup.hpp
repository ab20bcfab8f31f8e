#pragma once

#include <cstdint>
#include <vector>

#include "engine/kv/block_pool.hpp"
#include "engine/kv/disk_blocks.hpp"
#include "engine/kv/host_blocks.hpp"
#include "engine/sequence.hpp"

namespace prl::engine {

/// Finds the blocks of a sequence's beginning that are cached: on the device, in host memory, or in files, from which it reads them into
/// host memory. For one sequence at a time: take(), then
/// restore() or drop().
class PrefixLookup {
 public:
  /// `host` may be null, and `disk`; there is no `disk` without a `host`.
  PrefixLookup(BlockPool& pool, HostBlocks* host, DiskBlocks* disk) : pool_(pool), host_(host), disk_(disk) {}

  /// Gives the sequence, which has no blocks and whose last_hash is the root, leases of its longest known prefix, never of the whole
  /// sequence: at least one token is left to compute. Leases are empty where a block is in host memory alone.
  void take(Sequence& sequence);
  /// The empty leases among those of take().
  std::int64_t num_in_host() const noexcept { return static_cast<std::int64_t>(found_.size()); }
  /// Of them those that take() has read from files.
  std::int64_t num_from_disk() const noexcept { return num_from_disk_; }
  /// Fills the empty leases: takes blocks of the device, of which there must be as many, collects the copies that they need, and publishes
  /// them, for no row is computed before the copies of its step.
  void restore(Sequence& sequence);
  /// Instead of restore(): the sequence's leases are returned.
  void drop(Sequence& sequence) noexcept;

 private:
  /// A block in host memory.
  struct Found {
    std::size_t index = 0;  ///< of the sequence's blocks
    bool is_read = true;    ///< false: it is in a file alone, and `host` is for what is there
    BlockLease host;
    BlockHash hash, parent;
    BlockHash before = {};  ///< that of the block before it
  };
  /// Adds the block to found_ if it is in host memory or in a file.
  bool find_below(std::size_t index, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens);
  /// Reads what find_below() found in files; what comes after a block that could not be read is let go.
  void read_files(Sequence& sequence);
  std::span<const std::int32_t> tokens_of(const Sequence& sequence, std::size_t index) const noexcept;

  BlockPool& pool_;
  HostBlocks* host_;
  DiskBlocks* disk_;
  std::vector<Found> found_;       ///< in the order of the sequence
  std::vector<BlockLease> slots_;  ///< of those in files; empty between calls
  std::int64_t num_from_disk_ = 0;
  std::vector<BlockLease> taken_;  ///< empty between calls
};

/// The sequence has no blocks and has computed nothing.
void drop_blocks(Sequence& sequence) noexcept;

}  // namespace prl::engine
