#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/kv/block_pool.hpp"

namespace prl::engine {

/// A block of host memory and its slot in files.
struct DiskCopy {
  BlockId host, slot;
  bool operator==(const DiskCopy&) const = default;
};
/// Of several parts of a block the last of these counts.
enum class DiskRead : std::uint8_t {
  kRead,
  kLate,  ///< not within the time that a read may take; it may be asked for again
  kGone,  ///< not there any more, or not what was written
};
struct DiskStats {
  std::int64_t num_writes_queued = 0;  ///< now
  std::int64_t num_written = 0, num_read = 0;
  std::int64_t num_not_queued = 0;  ///< not written, since too much waited
  std::int64_t num_late = 0;        ///< not read within the time that a read may take
  std::int64_t num_damaged = 0;     ///< not what was written
  bool is_off = false;              ///< the disk refused a write
};

/// Carries blocks between host memory and files, whatever the number of devices. One thread, that of the scheduler.
class BlockFiles {
 public:
  virtual ~BlockFiles() = default;
  /// Host memory may be written to anew when this returns. False: the slot is empty.
  [[nodiscard]] virtual bool write(const DiskCopy& copy) = 0;
  /// Waits for a bounded time.
  virtual std::vector<DiskRead> read(std::span<const DiskCopy> copies) = 0;
  /// Empties all slots.
  virtual void forget() = 0;
  /// Any thread.
  virtual DiskStats stats() const = 0;
};

/// Which full blocks that host memory had no room for are in files. Bookkeeping under the same keys as BlockPool's, whose blocks are slots
/// of files here, and as single-threaded.
class DiskBlocks final : public EvictionListener {
 public:
  DiskBlocks(std::int64_t num_blocks, std::int64_t block_size, BlockFiles& files) : pool_(num_blocks, block_size), files_(files) {}

  /// A block of host memory is about to be written to anew. Nothing is written if files have it already, or have no time for it.
  void save(BlockId host, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) override;
  /// As BlockPool::find.
  [[nodiscard]] std::optional<BlockLease> find(BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
    return pool_.find(hash, parent, tokens);
  }
  /// The blocks of `slots` into those of `host`. What is gone can no longer be found.
  std::vector<DiskRead> read(std::span<const BlockId> host, std::span<const BlockLease> slots);
  void reset_cache();

  std::int64_t num_blocks() const noexcept { return pool_.num_blocks(); }
  /// Blocks that can be found.
  std::int64_t num_cached() const noexcept { return pool_.num_cached(); }
  DiskStats stats() const { return files_.stats(); }
  /// Aborts if an invariant is broken. O(num_blocks).
  void check_integrity() const { pool_.check_integrity(); }

 private:
  BlockPool pool_;
  BlockFiles& files_;
  std::vector<BlockLease> taken_;  ///< empty between calls
  std::vector<DiskCopy> copies_;
};

}  // namespace prl::engine
