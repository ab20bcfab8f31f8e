#include "device/cuda/device_heap.hpp"

#include <algorithm>
#include <limits>
#include <map>

#include "device/cuda/check.hpp"

namespace prl::cuda {

std::shared_ptr<DeviceHeap> DeviceHeap::of(int index) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<DeviceHeap>> heaps;
  std::lock_guard lock(mutex);
  std::shared_ptr<DeviceHeap> heap = heaps[index].lock();
  if (heap == nullptr) heaps[index] = heap = std::make_shared<DeviceHeap>(index);
  return heap;
}

DeviceHeap::DeviceHeap(int index) : index_(index) {
  int has_pools = 0;
  PRL_CUDA_CHECK(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, index));
  if (has_pools != 0) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, index};
    PRL_CUDA_CHECK(cudaMemPoolCreate(&pool_, &properties));
    std::uint64_t keep_all = std::numeric_limits<std::uint64_t>::max();
    PRL_CUDA_CHECK(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all));
  }
  PRL_CUDA_CHECK(cudaStreamCreateWithFlags(&free_stream_, cudaStreamNonBlocking));
}

DeviceHeap::~DeviceHeap() {
  // At the end of the process the driver may be gone already; there is nothing left to free then.
  if (cudaSetDevice(index_) != cudaSuccess) return;
  (void)cudaStreamSynchronize(free_stream_);
  (void)cudaStreamDestroy(free_stream_);
  if (pool_ != nullptr) (void)cudaMemPoolDestroy(pool_);
}

void DeviceHeap::add_stream(cudaStream_t stream) {
  User user{stream, nullptr};
  PRL_CUDA_CHECK(cudaEventCreateWithFlags(&user.passed, cudaEventDisableTiming));
  std::lock_guard lock(mutex_);
  users_.push_back(user);
}

void DeviceHeap::remove_stream(cudaStream_t stream) noexcept {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(users_.begin(), users_.end(), [&](const User& user) { return user.stream == stream; });
  if (found == users_.end()) return;
  (void)cudaEventDestroy(found->passed);
  users_.erase(found);
}

void* DeviceHeap::allocate(std::size_t bytes, cudaStream_t stream) {
  const auto try_once = [&]() -> void* {
    void* pointer = nullptr;
    const cudaError_t status = pool_ != nullptr ? cudaMallocFromPoolAsync(&pointer, bytes, pool_, stream) : cudaMalloc(&pointer, bytes);
    if (status == cudaSuccess) return pointer;
    if (status != cudaErrorMemoryAllocation) PRL_CUDA_CHECK(status);
    (void)cudaGetLastError();  // or the next launch would report it
    return nullptr;
  };
  if (void* pointer = try_once()) return pointer;
  PRL_CUDA_CHECK(cudaDeviceSynchronize());
  if (pool_ != nullptr) PRL_CUDA_CHECK(cudaMemPoolTrimTo(pool_, 0));
  return try_once();
}

void DeviceHeap::deallocate(void* pointer, cudaStream_t stream) noexcept {
  if (pool_ == nullptr) {
    (void)cudaFree(pointer);  // waits for the device
    return;
  }
  std::lock_guard lock(mutex_);
  if (users_.size() <= 1) {
    (void)cudaFreeAsync(pointer, users_.empty() ? free_stream_ : stream);
    return;
  }
  for (const User& user : users_) {
    (void)cudaEventRecord(user.passed, user.stream);
    (void)cudaStreamWaitEvent(free_stream_, user.passed, 0);
  }
  (void)cudaFreeAsync(pointer, free_stream_);
}

std::size_t DeviceHeap::bytes_available() const {
  std::size_t free = 0, total = 0;
  PRL_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (pool_ == nullptr) return free;
  std::uint64_t reserved = 0, used = 0;
  PRL_CUDA_CHECK(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved));
  PRL_CUDA_CHECK(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used));
  return free + static_cast<std::size_t>(reserved - used);
}

}  // namespace prl::cuda
