#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/kv/host_blocks.hpp"

namespace prl::engine {

/// The bytes of blocks of host memory, for whoever brings them to another engine or from there, whatever the number of devices. One thread,
/// that of the scheduler, except that the bytes of a block that is leased and in no copy may be read and written by any one thread.
class BlockMemory {
 public:
  virtual ~BlockMemory() = default;
  /// Of a block, all devices together.
  virtual std::size_t block_bytes() const = 0;
  /// Copies blocks of the device's cache, as the work enqueued before leaves them, to host memory, and waits for that.
  virtual void fetch(std::span<const BlockCopy> copies) = 0;
  /// Appends the parts of a block, those of the first device first, once no copy to or from it is under way.
  virtual void add_parts(BlockId host, std::vector<std::span<std::byte>>& parts) = 0;
};

}  // namespace prl::engine
