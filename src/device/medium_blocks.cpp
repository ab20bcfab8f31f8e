#include "device/medium_blocks.hpp"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <new>

namespace prl {
namespace {

constexpr std::size_t kSlabBytes = 8 * MediumBlocks::kHugePage;

/// Eighths of a power of two: at most an eighth is lost, and blocks of nearly the same size can stand in for each other.
std::size_t medium_class(std::size_t bytes) {
  const std::size_t unit = std::bit_floor(bytes) / 8;
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

bool MediumBlocks::takes([[maybe_unused]] std::size_t bytes) noexcept {
#ifdef __SANITIZE_ADDRESS__
  return false;
#else
  return bytes >= kMinBytes && bytes < kHugePage;
#endif
}

MediumBlocks::~MediumBlocks() {
  for (void* slab : slabs_) std::free(slab);
}

bool MediumBlocks::add_slab() {
  void* slab = std::aligned_alloc(kHugePage, kSlabBytes);
  if (slab == nullptr) return false;
  (void)madvise(slab, kSlabBytes, MADV_HUGEPAGE);  // a refusal is harmless
  try {
    slabs_.push_back(slab);
  } catch (const std::bad_alloc&) {
    std::free(slab);
    return false;
  }
  next_ = static_cast<std::byte*>(slab);
  left_ = kSlabBytes;
  return true;
}

void* MediumBlocks::allocate(std::size_t bytes) {
  const std::size_t size = medium_class(bytes);
  std::lock_guard lock(mutex_);
  if (const auto found = waiting_.find(size); found != waiting_.end() && !found->second.empty()) {
    void* pointer = found->second.back();
    found->second.pop_back();
    bytes_waiting_ -= size;
    return pointer;
  }
  if (left_ < size && !add_slab()) return nullptr;
  std::byte* pointer = next_;
  next_ += size;
  left_ -= size;
  return pointer;
}

void MediumBlocks::deallocate(void* pointer, std::size_t bytes) noexcept {
  const std::size_t size = medium_class(bytes);
  std::lock_guard lock(mutex_);
  try {
    waiting_[size].push_back(pointer);
  } catch (const std::bad_alloc&) {
    return;  // the block ends with its slab
  }
  bytes_waiting_ += size;
}

std::size_t MediumBlocks::bytes_waiting() const noexcept {
  std::lock_guard lock(mutex_);
  return bytes_waiting_;
}

}  // namespace prl
