#include "device/cuda/page_locked.hpp"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "base/thread_pool.hpp"

namespace prl::cuda {
namespace {

/// Less is left to the driver: at 2 GB/s it takes some 30 ms.
constexpr std::size_t kLargeBytes = std::size_t{64} << 20;
constexpr std::size_t kHugePage = std::size_t{2} << 20, kPage = 4096;
constexpr int kMaxThreads = 8;

std::shared_ptr<void> from_driver(std::size_t bytes, const char*& why) {
  void* memory = nullptr;
  if (const cudaError_t status = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable); status != cudaSuccess) {
    (void)cudaGetLastError();
    why = cudaGetErrorString(status);
    return nullptr;
  }
  return {memory, [](void* p) { (void)cudaFreeHost(p); }};
}

}  // namespace

std::shared_ptr<void> allocate_page_locked(std::size_t bytes, const char*& why) {
  if (bytes < kLargeBytes) return from_driver(bytes, why);
  const std::size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage, mapped = size + kHugePage;
  void* const mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    why = "the system has no memory to map";
    return nullptr;
  }
  auto* const begin = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(mapping) + kHugePage - 1) / kHugePage * kHugePage);
  (void)madvise(begin, size, MADV_HUGEPAGE);  // a hint: systems without huge pages take small ones
  ThreadPool pool(std::min(num_available_cores(), kMaxThreads));
  constexpr std::size_t kPart = 16 * kHugePage;
  pool.parallel_for(static_cast<std::int64_t>((size + kPart - 1) / kPart), [&](std::int64_t i) {
    const std::size_t first = static_cast<std::size_t>(i) * kPart;
    for (std::size_t at = first; at < std::min(first + kPart, size); at += kPage) *static_cast<volatile char*>(begin + at) = 0;
  });
  if (const cudaError_t status = cudaHostRegister(begin, size, cudaHostRegisterPortable); status != cudaSuccess) {
    (void)cudaGetLastError();
    (void)munmap(mapping, mapped);
    why = cudaGetErrorString(status);
    return nullptr;
  }
  return {begin, [mapping, mapped](void* p) {
            (void)cudaHostUnregister(p);  // fails where the process ends and the driver is gone
            (void)munmap(mapping, mapped);
          }};
}

}  // namespace prl::cuda
