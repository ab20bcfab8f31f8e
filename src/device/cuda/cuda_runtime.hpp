#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "device/cuda/fault.hpp"
#include "device/device.hpp"

namespace prl::cuda {

class DeviceHeap;

/// The one DeviceRuntime of GPUs; for op bodies, which find it behind OpContext::runtime. See make_cuda_runtime().
class CudaRuntime : public DeviceRuntime {
 public:
  /// Without memory: make_cuda_stream().
  explicit CudaRuntime(int index, bool has_memory = true);
  ~CudaRuntime() override;
  Device device() const noexcept override { return {DeviceKind::kCuda, index_}; }
  void* allocate(std::size_t bytes) override;
  void deallocate(void* pointer, std::size_t bytes) noexcept override;
  void copy_from_host(void* destination, const void* host, std::size_t bytes) override;
  void copy_to_host(void* host, const void* source, std::size_t bytes) override;
  void copy_within(void* destination, const void* source, std::size_t bytes) override;
  void copy_from_device(void* destination, const DeviceRuntime& other, const void* source, std::size_t bytes) override;
  void zero(void* destination, std::size_t bytes) override;
  std::unique_ptr<Stopwatch> make_stopwatch() override;
  void synchronize() override;
  std::size_t bytes_in_use() const noexcept override { return in_use_.load(std::memory_order_relaxed); }
  std::size_t peak_bytes() const noexcept override { return peak_.load(std::memory_order_relaxed); }
  std::size_t bytes_available() const override;
  void* stream() const noexcept override { return stream_; }
  std::unique_ptr<RecordedWork> record(const std::function<void()>& work) override;

  const cudaDeviceProp& properties() const noexcept { return properties_; }
  /// Makes this runtime's device the calling thread's. Every method above does so itself.
  void activate() const;

  /// A copy of small host arrays (lengths, slots, tables) in device memory, made without waiting. Valid for the work queued until
  /// the next few megabytes have been staged, so: stage what one op needs, launch it, forget the pointers. Arrays equal to recently
  /// staged ones cost a comparison and no copy, which is what every layer after the first sees.
  const void* stage(const void* host, std::size_t bytes);
  /// As copy_from_host. Small arrays beside what is queued: the copy begins when `after`, an event of the stream, has passed, and work
  /// queued from now on waits for it by `done`.
  void upload(void* destination, const void* host, std::size_t bytes, cudaEvent_t after, cudaEvent_t done);
  /// Where kernels leave a fault.
  FaultWord* fault_word() const noexcept { return fault_; }
  /// Error{} of the fault that a kernel has left. Whoever waits for the device calls it afterwards.
  void throw_fault();

 private:
  class EventStopwatch;
  /// Pinned memory that one copy at a time passes through.
  struct Slot {
    char* memory = nullptr;
    std::array<cudaEvent_t, 2> done{};  ///< the last copy through each half has run
    bool is_taken = false;
  };
  struct Staged {
    std::size_t offset = 0, bytes = 0;
  };
  class Lease;
  void make_ring(std::size_t quarter_bytes);
  void free_ring() noexcept;
  std::size_t reserve_in_ring(std::size_t bytes);

  int index_;
  cudaDeviceProp properties_{};
  cudaStream_t stream_ = nullptr, upload_stream_ = nullptr;
  std::shared_ptr<DeviceHeap> heap_;
  std::atomic<std::size_t> in_use_{0}, peak_{0};

  FaultWord* fault_ = nullptr;  ///< pinned, the same address on both sides

  std::mutex slot_mutex_;
  std::condition_variable slot_free_;
  std::array<Slot, 4> slots_;

  std::mutex ring_mutex_;
  char* ring_host_ = nullptr;    ///< pinned
  char* ring_device_ = nullptr;  ///< the same bytes on the device
  std::size_t quarter_bytes_ = 0, quarter_ = 0, quarter_at_ = 0;
  std::array<cudaEvent_t, 4> ring_done_{};  ///< the copies out of each quarter have run
  std::vector<Staged> staged_;              ///< what lies in the last two quarters, newest last
};

/// The runtime behind a context, which must be one of CUDA.
CudaRuntime& runtime_of(DeviceRuntime& runtime);

}  // namespace prl::cuda
