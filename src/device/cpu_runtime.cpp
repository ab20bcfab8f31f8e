#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "base/error.hpp"
#include "device/cgroup_memory.hpp"
#include "device/device.hpp"
#include "device/medium_blocks.hpp"

namespace prl {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = MediumBlocks::kHugePage;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// "MemAvailable" of /proc/meminfo in bytes; the largest number if the file is missing.
std::size_t available_ram() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::size_t kib = 0;
  while (file >> key >> kib) {
    std::getline(file, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<std::size_t>::max();
}

/// Size a large block is rounded to: whole huge pages, and above 32 of them sixteenths of a power of two, so that blocks of nearly
/// the same size can stand in for each other at a cost of at most 1/16.
std::size_t size_class(std::size_t bytes) {
  if (bytes <= 32 * kHugePage) return round_up(bytes, kHugePage);
  return round_up(bytes, std::bit_floor(bytes) / 16);
}

/// Small blocks come from malloc, medium ones from slabs. Large ones are kept when freed and handed out again: returning them to the kernel
/// would cost a page fault and a cleared page at each of the next step's first touches.
class CpuRuntime final : public DeviceRuntime {
 public:
  ~CpuRuntime() override { release_kept(); }
  Device device() const noexcept override { return {}; }

  void* allocate(std::size_t bytes) override {
    if (bytes > std::numeric_limits<std::size_t>::max() / 4) out_of_memory(bytes);
    void* pointer = bytes >= kHugePage           ? allocate_large(size_class(bytes))
                    : MediumBlocks::takes(bytes) ? medium_.allocate(bytes)
                                                 : std::aligned_alloc(kAlignment, round_up(std::max<std::size_t>(bytes, 1), kAlignment));
    if (pointer == nullptr) out_of_memory(bytes);
    const std::size_t now = in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    std::size_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
    return pointer;
  }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    in_use_.fetch_sub(bytes, std::memory_order_relaxed);
    if (MediumBlocks::takes(bytes))
      medium_.deallocate(pointer, bytes);
    else if (bytes < kHugePage || !keep(pointer, size_class(bytes)))
      std::free(pointer);
  }
  void copy_from_host(void* destination, const void* host, std::size_t bytes) override { copy(destination, host, bytes); }
  void copy_to_host(void* host, const void* source, std::size_t bytes) override { copy(host, source, bytes); }
  void copy_within(void* destination, const void* source, std::size_t bytes) override { copy(destination, source, bytes); }
  void zero(void* destination, std::size_t bytes) override {
    if (bytes != 0) std::memset(destination, 0, bytes);
  }
  void synchronize() override {}
  std::size_t bytes_in_use() const noexcept override { return in_use_.load(std::memory_order_relaxed); }
  std::size_t peak_bytes() const noexcept override { return peak_.load(std::memory_order_relaxed); }
  std::size_t bytes_available() const override {
    const std::size_t fresh = std::min(available_ram(), available_in_cgroup("/sys/fs/cgroup"));
    std::lock_guard lock(mutex_);
    const std::size_t kept = kept_bytes_ + medium_.bytes_waiting();
    return fresh > std::numeric_limits<std::size_t>::max() - kept ? fresh : fresh + kept;
  }

 private:
  static void copy(void* destination, const void* source, std::size_t bytes) {
    if (bytes != 0) std::memmove(destination, source, bytes);
  }
  [[noreturn]] void out_of_memory(std::size_t bytes) const {
    rlimit limit{};
    const bool is_limited = ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    fail(ErrorCode::kOutOfMemory,
         "[cpu memory] wanted {} bytes, {} bytes are in use by this process and {} bytes are free{}; use a smaller model, batch or cache",
         bytes, bytes_in_use(), bytes_available(),
         is_limited ? fmt::format(", but its address space is limited to {} bytes (ulimit -v)", limit.rlim_cur) : "");
  }

  void* allocate_large(std::size_t size) {
    {
      std::lock_guard lock(mutex_);
      if (const auto found = kept_.find(size); found != kept_.end()) {
        void* pointer = found->second.back().pointer;
        found->second.pop_back();
        if (found->second.empty()) kept_.erase(found);
        kept_bytes_ -= size;
        return pointer;
      }
      while (kept_bytes_ > 0 && in_use_.load(std::memory_order_relaxed) + kept_bytes_ + size > budget()) release_oldest();
    }
    void* pointer = std::aligned_alloc(kHugePage, round_up(size, kHugePage));
    if (pointer == nullptr) {
      release_kept();
      pointer = std::aligned_alloc(kHugePage, round_up(size, kHugePage));
    }
    // Weights and caches are streamed end to end; huge pages take the page walks out of that. A refusal is harmless.
    if (pointer != nullptr) (void)madvise(pointer, size, MADV_HUGEPAGE);
    return pointer;
  }
  /// Used and kept memory together. Parts of a training step that follow each other need blocks of other sizes, so that what all of them
  /// need is more than is in use at any time: an arena lies idle while new weights are made.
  std::size_t budget() const noexcept {
    const std::size_t peak = peak_.load(std::memory_order_relaxed);
    return peak + peak / 2 + kHugePage;
  }
  bool keep(void* pointer, std::size_t size) noexcept {
    std::lock_guard lock(mutex_);
    if (in_use_.load(std::memory_order_relaxed) + kept_bytes_ + size > budget()) return false;
    try {
      kept_[size].push_back({pointer, ++num_kept_ever_});
    } catch (const std::bad_alloc&) {
      return false;
    }
    kept_bytes_ += size;
    return true;
  }
  /// With mutex_ held, when something is kept.
  void release_oldest() noexcept {
    const auto oldest = std::ranges::min_element(kept_, {}, [](const auto& entry) { return entry.second.front().number; });
    std::free(oldest->second.front().pointer);
    oldest->second.pop_front();
    kept_bytes_ -= oldest->first;
    if (oldest->second.empty()) kept_.erase(oldest);
  }
  void release_kept() noexcept {
    std::lock_guard lock(mutex_);
    while (kept_bytes_ > 0) release_oldest();
  }

  struct Kept {
    void* pointer;
    std::uint64_t number;  ///< in the order in which blocks were freed
  };
  MediumBlocks medium_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::deque<Kept>> kept_;  ///< by size class, the oldest first; none is empty
  std::size_t kept_bytes_ = 0;
  std::uint64_t num_kept_ever_ = 0;
  std::atomic<std::size_t> in_use_{0};
  std::atomic<std::size_t> peak_{0};
};

}  // namespace

std::shared_ptr<DeviceRuntime> make_cpu_runtime() { return std::make_shared<CpuRuntime>(); }

}  // namespace prl
