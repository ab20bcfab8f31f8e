#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace prl::cuda {

/// Memory of one GPU, shared by the runtimes of this process that use it. Allocations are ordered by stream and served from what
/// was freed before; the driver is asked only when the pool has to grow. Any thread; the caller has made the device current.
class DeviceHeap {
 public:
  /// The heap of a device, made on first use.
  static std::shared_ptr<DeviceHeap> of(int index);
  explicit DeviceHeap(int index);
  ~DeviceHeap();
  DeviceHeap(const DeviceHeap&) = delete;
  DeviceHeap& operator=(const DeviceHeap&) = delete;

  void add_stream(cudaStream_t stream);
  void remove_stream(cudaStream_t stream) noexcept;
  /// nullptr when the device has no room, after everything that was freed has been given back to it.
  void* allocate(std::size_t bytes, cudaStream_t stream);
  /// The memory is reused once every stream of the heap has passed the work queued on it now.
  void deallocate(void* pointer, cudaStream_t stream) noexcept;
  /// While it is held no thread frees memory: that would wait for streams, and a stream that records must not be waited for.
  std::unique_lock<std::recursive_mutex> hold() const { return std::unique_lock(mutex_); }
  /// Free device memory and what the pool holds unused.
  std::size_t bytes_available() const;

 private:
  struct User {
    cudaStream_t stream = nullptr;
    cudaEvent_t passed = nullptr;
  };
  mutable std::recursive_mutex mutex_;
  int index_;
  cudaMemPool_t pool_ = nullptr;  ///< null where the driver has no stream-ordered pools: plain cudaMalloc then
  cudaStream_t free_stream_ = nullptr;
  std::vector<User> users_;
};

}  // namespace prl::cuda
