#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>

#include "base/error.hpp"
#include "device/device.hpp"

namespace prl {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

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

bool read_number(const char* path, std::size_t& out) {
  std::ifstream file(path);
  return static_cast<bool>(file >> out);
}

/// What the cgroup (v2, then v1) still allows; the largest number where there is no limit.
std::size_t available_in_cgroup() {
  std::size_t limit = 0, used = 0;
  const bool v2 = read_number("/sys/fs/cgroup/memory.max", limit) && read_number("/sys/fs/cgroup/memory.current", used);
  const bool v1 = !v2 && read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes", limit) && read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes", used);
  if (!v2 && !v1) return std::numeric_limits<std::size_t>::max();
  return limit > used ? limit - used : 0;
}

class CpuRuntime final : public DeviceRuntime {
 public:
  Device device() const noexcept override { return {}; }

  void* allocate(std::size_t bytes) override {
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) out_of_memory(bytes);
    const bool large = bytes >= kHugePage;
    const std::size_t alignment = large ? kHugePage : kAlignment;
    void* pointer = std::aligned_alloc(alignment, round_up(std::max<std::size_t>(bytes, 1), alignment));
    if (pointer == nullptr) out_of_memory(bytes);
    // Weights and caches are streamed end to end; huge pages take the page walks out of that. A refusal is harmless.
    if (large) (void)madvise(pointer, bytes, MADV_HUGEPAGE);
    const std::size_t now = in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    std::size_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
    return pointer;
  }
  void deallocate(void* pointer, std::size_t bytes) noexcept override {
    if (pointer == nullptr) return;
    std::free(pointer);
    in_use_.fetch_sub(bytes, std::memory_order_relaxed);
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
  std::size_t bytes_available() const override { return std::min(available_ram(), available_in_cgroup()); }

 private:
  static void copy(void* destination, const void* source, std::size_t bytes) {
    if (bytes != 0) std::memmove(destination, source, bytes);
  }
  [[noreturn]] void out_of_memory(std::size_t bytes) const {
    fail(ErrorCode::kOutOfMemory, "[cpu memory] wanted {} bytes, {} bytes are in use by this process and {} bytes are free; use a smaller model, batch or cache", bytes, bytes_in_use(),
         bytes_available());
  }

  std::atomic<std::size_t> in_use_{0};
  std::atomic<std::size_t> peak_{0};
};

}  // namespace

std::shared_ptr<DeviceRuntime> make_cpu_runtime() { return std::make_shared<CpuRuntime>(); }

}  // namespace prl
