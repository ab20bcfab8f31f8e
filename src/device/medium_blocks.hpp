#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace prl {

/// Host memory for blocks that are smaller than a huge page and larger than what page walks are worth thinking about: a matrix of a small
/// model, say. They share slabs of huge pages, because reading such a matrix end to end over small pages costs a walk for every 4 KiB,
/// which a virtual machine makes dear. Freed blocks wait for another of their size class; slabs stay until the end. Any thread.
class MediumBlocks {
 public:
  static constexpr std::size_t kMinBytes = std::size_t{64} << 10, kHugePage = std::size_t{2} << 20;
  /// Whether a block of this size comes from here. False in builds that check addresses, where every block stands alone.
  static bool takes(std::size_t bytes) noexcept;

  MediumBlocks() = default;
  ~MediumBlocks();  ///< all blocks end
  MediumBlocks(const MediumBlocks&) = delete;
  MediumBlocks& operator=(const MediumBlocks&) = delete;

  /// 64-byte aligned, contents undefined; nullptr if the host has no memory left.
  void* allocate(std::size_t bytes);
  /// `bytes` as it was asked for.
  void deallocate(void* pointer, std::size_t bytes) noexcept;
  /// In freed blocks that wait.
  std::size_t bytes_waiting() const noexcept;

 private:
  bool add_slab();

  mutable std::mutex mutex_;
  std::vector<void*> slabs_;
  std::byte* next_ = nullptr;  ///< what is left of the last slab
  std::size_t left_ = 0;
  std::map<std::size_t, std::vector<void*>> waiting_;  ///< by size class
  std::size_t bytes_waiting_ = 0;
};

}  // namespace prl
