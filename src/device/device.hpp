#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace prl {

enum class DeviceKind : std::uint8_t { kCpu, kCuda };

/// Where a tensor's memory is.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
std::string to_string(Device device);

/// A recorded sequence of kernels (a CUDA graph), enqueued as a whole.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
  /// Copies `bytes` from host memory, which may be reused on return, to device memory that no other work reads. The copy waits only for the
  /// previous run of this work and for what had been enqueued when it was recorded.
  virtual void upload(void* destination, const void* host, std::size_t bytes) = 0;
  /// Enqueues the work behind what was uploaded for it.
  virtual void run() = 0;
};

/// Timestamps in a device's stream, and the time between them.
class Stopwatch {
 public:
  static constexpr std::uint64_t kNumKept = 32;
  virtual ~Stopwatch() = default;
  /// Enqueues a timestamp and returns its number; the last kNumKept are kept.
  virtual std::uint64_t mark() = 0;
  /// Waits until the work before `to` has run. 0 <= from <= to, both kept.
  virtual double seconds(std::uint64_t from, std::uint64_t to) = 0;
};

/// Memory and copies of one device; the only interface to a device outside of ops/. Any thread.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual Device device() const noexcept = 0;
  /// 64-byte aligned, contents undefined. Error{kOutOfMemory} with the size wanted and what is in use.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void deallocate(void* pointer, std::size_t bytes) noexcept = 0;
  virtual void copy_from_host(void* destination, const void* host, std::size_t bytes) = 0;
  virtual void copy_to_host(void* host, const void* source, std::size_t bytes) = 0;
  virtual void copy_within(void* destination, const void* source, std::size_t bytes) = 0;
  /// From the memory of `other`, a device of the same kind: in the order of this one's stream alone.
  virtual void copy_from_device(void* destination, const DeviceRuntime& other, const void* source, std::size_t bytes) {
    (void)other;
    copy_within(destination, source, bytes);
  }
  virtual void zero(void* destination, std::size_t bytes) = 0;
  /// The runtime must outlive it.
  virtual std::unique_ptr<Stopwatch> make_stopwatch();
  /// Waits until all enqueued work is done.
  virtual void synchronize() = 0;
  virtual std::size_t bytes_in_use() const noexcept = 0;
  virtual std::size_t peak_bytes() const noexcept = 0;
  /// Memory that can still be allocated: free RAM within the cgroup limit, or free device memory.
  virtual std::size_t bytes_available() const = 0;
  /// The stream (cudaStream_t) on which copies and kernels run; nullptr where calls are synchronous.
  virtual void* stream() const noexcept { return nullptr; }
  /// Records the kernels that `work` enqueues, with their addresses, instead of running them. `work` may not allocate or free memory, nor
  /// copy to or from the host. nullptr where the device cannot record; `work` is not called then.
  virtual std::unique_ptr<RecordedWork> record(const std::function<void()>& work);
};

/// The host's memory, with counts of what is allocated.
std::shared_ptr<DeviceRuntime> make_cpu_runtime();

/// One GPU: its memory and one stream, so one runtime per role. Copies to the device return when the host memory may be reused; copies from
/// the device wait for all enqueued work. Freed memory is reused in stream order, and memory that another runtime's stream may still read
/// is not reused before that stream has passed the point of the free.
/// Error{kUnavailable} names what is missing: CUDA in this build, the driver, a GPU, this index.
std::shared_ptr<DeviceRuntime> make_cuda_runtime(int index = 0);

/// A stream of a GPU beside a runtime's, for transfers: as make_cuda_runtime(), but without memory. allocate() fails, and memory that is
/// freed is reused without waiting for this stream: whoever uses it keeps the tensors until its work has run.
std::shared_ptr<DeviceRuntime> make_cuda_stream(int index);

struct CudaDeviceInfo {
  int index = 0;
  std::string name;
  std::string uuid;  ///< "GPU-8c2f..."; the same in every process, whatever it calls the card
  int compute_major = 0, compute_minor = 0;
  int num_multiprocessors = 0;
  std::size_t total_bytes = 0, l2_bytes = 0;
};
/// The GPUs this build can use. Never fails: with no devices, `missing` says why.
struct CudaDevices {
  std::vector<CudaDeviceInfo> devices;
  std::string missing;
  std::string versions;  ///< "driver 13.0, runtime 13.0, built for sm_90a"
};
CudaDevices list_cuda_devices();

/// What the CPU can do, read once at start. `best_bf16` says which bf16 path exists.
struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;  ///< F, BW, VL, DQ
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  ///< tile registers, and the kernel granted them to this process
  std::string name;
};
const CpuFeatures& cpu_features();

}  // namespace prl
