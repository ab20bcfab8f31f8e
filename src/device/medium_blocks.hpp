#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

namespace prl {

/// Host allocator for blocks between 64 KiB and a huge page, such as matrices of small models. They share slabs of huge pages: reading a
/// matrix over 4 KiB pages costs a page walk for each, which is expensive in virtual machines. Freed blocks are reused for their size
/// class; slabs are freed with the allocator. Any thread.
class MediumBlocks {
 public:
  static constexpr std::size_t kMinBytes = std::size_t{64} << 10, kHugePage = std::size_t{2} << 20;
  /// Whether a block of this size comes from here. Always false under AddressSanitizer, where every block is allocated by itself.
  static bool takes(std::size_t bytes) noexcept;

  MediumBlocks() = default;
  ~MediumBlocks();  ///< frees all blocks
  MediumBlocks(const MediumBlocks&) = delete;
  MediumBlocks& operator=(const MediumBlocks&) = delete;

  /// 64-byte aligned, contents undefined; nullptr if the host has no memory left.
  void* allocate(std::size_t bytes);
  /// `bytes` as it was asked for.
  void deallocate(void* pointer, std::size_t bytes) noexcept;
  /// Bytes of freed blocks that can be reused.
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
