#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "device/cuda/cuda_runtime.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/shard_gather.hpp"
#include "ops/cuda_table.hpp"

namespace prl::ops::cuda {
namespace {

/// Of threads for each other: loading a kernel or growing a buffer takes a thread milliseconds, autotuning up to seconds.
constexpr std::chrono::seconds kDeadline{60};
constexpr int kBusyPolls = 1 << 12;

/// Memory of one device that others reach.
class SharedMemory {
 public:
  SharedMemory(::prl::cuda::CudaRuntime& runtime, std::span<const int> peers, std::size_t bytes) : runtime_(runtime) {
    runtime.activate();
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, runtime.device().index};
    PRL_CUDA_CHECK(cudaMemPoolCreate(&pool_, &properties));
    for (const int peer : peers) {
      if (peer == runtime.device().index) continue;
      cudaMemAccessDesc access{};
      access.location = {cudaMemLocationTypeDevice, peer};
      access.flags = cudaMemAccessFlagsProtReadWrite;
      PRL_CUDA_CHECK(cudaMemPoolSetAccess(pool_, &access, 1));
    }
    const auto stream = static_cast<cudaStream_t>(runtime.stream());
    const cudaError_t status = cudaMallocFromPoolAsync(&data_, bytes, pool_, stream);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      fail(ErrorCode::kOutOfMemory, "[{} memory] wanted {} bytes for what devices that share layers exchange", to_string(runtime.device()),
           bytes);
    }
    PRL_CUDA_CHECK(status);
    PRL_CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  ~SharedMemory() {
    if (cudaSetDevice(runtime_.device().index) != cudaSuccess) return;  // the process ends and the driver is gone
    runtime_.activate();
    (void)cudaDeviceSynchronize();
    if (data_ != nullptr) (void)cudaFreeAsync(data_, static_cast<cudaStream_t>(runtime_.stream()));
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(runtime_.stream()));
    if (pool_ != nullptr) (void)cudaMemPoolDestroy(pool_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  ::prl::cuda::CudaRuntime& runtime_;
  cudaMemPool_t pool_ = nullptr;
  void* data_ = nullptr;
};

class CudaShardGroup final : public ShardGroup {
 public:
  CudaShardGroup(std::span<const std::shared_ptr<DeviceRuntime>> devices, std::size_t max_bytes)
      : devices_(devices.begin(), devices.end()),
        turn_bytes_(static_cast<std::size_t>(round_up(static_cast<std::int64_t>(max_bytes), 256))) {
    if (devices.size() > kMaxShardRanks)
      fail(ErrorCode::kInvalidArgument, "{} GPUs are to share layers, at most {} can", devices.size(), kMaxShardRanks);
    std::vector<int> indices;
    for (const auto& device : devices) indices.push_back(device->device().index);
    for (const int from : indices)
      for (const int to : indices) check_reach(from, to);
    for (const auto& device : devices)
      memory_.push_back(
          std::make_unique<SharedMemory>(::prl::cuda::runtime_of(*device), indices, kStateBytes + 2 * (marked_bytes() + turn_bytes_)));
    num_gathered_.resize(devices.size());
    std::ranges::sort(indices);
    has_own_devices_ = std::ranges::adjacent_find(indices) == indices.end();
    CudaShardGroup::reset();
  }

  int size() const noexcept override { return static_cast<int>(devices_.size()); }

  TensorView gather(OpContext& ctx, int rank, ConstTensorView part) override {
    const std::size_t item = size_of(part.dtype), part_bytes = static_cast<std::size_t>(part.shape.num_cols()) * item;
    const std::size_t bytes = static_cast<std::size_t>(part.shape.num_rows()) * part_bytes * devices_.size();
    if (bytes > turn_bytes_)
      fail(ErrorCode::kOutOfMemory, "[gather] {} bytes, devices that share layers have room for {}", bytes, turn_bytes_);
    const std::size_t stride_bytes = static_cast<std::size_t>(part.row_stride) * item;
    if (part_bytes % sizeof(GatherVector) != 0 || stride_bytes % sizeof(GatherVector) != 0 || !is_aligned(part.data, sizeof(GatherVector)))
      fail(ErrorCode::kShape, "[gather] rows of {} bytes, {} apart; multiples of {} are wanted", part_bytes, stride_bytes,
           sizeof(GatherVector));
    const std::size_t turn = num_gathered_[static_cast<std::size_t>(rank)]++ % 2;
    GatherPeers peers{};
    for (std::size_t r = 0; r < memory_.size(); ++r) {
      std::byte* const of_turn = memory_[r]->data() + kStateBytes + turn * (marked_bytes() + turn_bytes_);
      peers.marked[r] = reinterpret_cast<uint4*>(of_turn);
      peers.out[r] = reinterpret_cast<GatherVector*>(of_turn + marked_bytes());
      peers.told[r] = &state_of(r)->told[0][0];
    }
    const GatherPart from{part.as<GatherVector>(), part.shape.num_rows(), static_cast<std::int64_t>(stride_bytes / sizeof(GatherVector)),
                          static_cast<std::int64_t>(part_bytes / sizeof(GatherVector))};
    // Recorded work is enqueued as a whole.
    const bool is_enqueued_now = !is_capturing(stream_of(ctx));
    if (is_enqueued_now) meet(rank);
    launch_gather(ctx, peers, from, rank, size(), state_of(static_cast<std::size_t>(rank)), has_own_devices_);
    if (is_enqueued_now) meet(rank);
    const std::int64_t width = part.shape.num_cols() * size();
    return {peers.out[static_cast<std::size_t>(rank)], {part.shape.num_rows(), width}, part.dtype, part.device, width};
  }

  /// Most of the time the threads come within microseconds of each other.
  void meet(int) override {
    const std::uint64_t now = num_met_.load(std::memory_order_acquire);
    if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      num_here_.store(0, std::memory_order_relaxed);
      num_met_.store(now + 1, std::memory_order_release);
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    for (int polls = 0; num_met_.load(std::memory_order_acquire) == now; ++polls) {
      if (is_aborted_.load(std::memory_order_acquire))
        fail(ErrorCode::kUnavailable, "[gather] another device that shares the layers has failed");
      if (polls < kBusyPolls) continue;
      std::this_thread::yield();
      if (polls % 1024 == 0 && std::chrono::steady_clock::now() - start > kDeadline)
        fail(ErrorCode::kUnavailable, "[gather] another device that shares the layers did not come within a minute");
    }
  }

  void abort() noexcept override { is_aborted_.store(true, std::memory_order_release); }  // kernels that wait give up after the deadline

  void reset() override {
    for (const auto& device : devices_) {
      ::prl::cuda::CudaRuntime& runtime = ::prl::cuda::runtime_of(*device);
      runtime.activate();
      PRL_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(runtime.stream())));
    }
    for (std::size_t r = 0; r < devices_.size(); ++r) {
      devices_[r]->zero(memory_[r]->data(), kStateBytes + 2 * (marked_bytes() + turn_bytes_));
      ::prl::cuda::runtime_of(*devices_[r]).activate();
      PRL_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(devices_[r]->stream())));
      num_gathered_[r] = 0;
    }
    num_here_ = 0;
    is_aborted_ = false;
  }

 private:
  /// What comes before the two buffers.
  static constexpr std::size_t kStateBytes = (sizeof(GatherState) + 255) / 256 * 256;
  GatherState* state_of(std::size_t rank) const { return reinterpret_cast<GatherState*>(memory_[rank]->data()); }

  /// For the parts of all ranks.
  std::size_t marked_bytes() const { return devices_.size() * kMaxMarkedWords * sizeof(uint4); }
  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
  }

  static void check_reach(int from, int to) {
    int can = from == to;
    if (can == 0) PRL_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, from, to));
    if (can == 0) fail(ErrorCode::kUnavailable, "cuda:{} and cuda:{} cannot share layers: one does not reach the other's memory", from, to);
  }

  std::vector<std::shared_ptr<DeviceRuntime>> devices_;
  std::size_t turn_bytes_;
  std::vector<std::unique_ptr<SharedMemory>> memory_;
  std::vector<std::uint64_t> num_gathered_;
  bool has_own_devices_ = true;  ///< each rank
  std::atomic<int> num_here_{0};
  std::atomic<std::uint64_t> num_met_{0};
  std::atomic<bool> is_aborted_{false};
};

}  // namespace
}  // namespace prl::ops::cuda

namespace prl::ops {

std::unique_ptr<ShardGroup> make_cuda_shard_group(std::span<const std::shared_ptr<DeviceRuntime>> devices, std::size_t max_bytes) {
  return std::make_unique<cuda::CudaShardGroup>(devices, max_bytes);
}

}  // namespace prl::ops
