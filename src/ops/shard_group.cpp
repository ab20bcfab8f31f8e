#include "ops/shard_group.hpp"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "base/error.hpp"
#include "ops/cuda_table.hpp"
#include "ops/shape_check.hpp"

namespace prl::ops {
namespace {

/// For one rank's part of one product of a step.
constexpr std::chrono::minutes kDeadline{5};

class CpuShardGroup final : public ShardGroup {
 public:
  CpuShardGroup(std::span<const std::shared_ptr<DeviceRuntime>> devices, std::size_t max_bytes) : max_bytes_(max_bytes) {
    for (const auto& device : devices)
      for (auto* const turns = &buffers_.emplace_back(); Tensor & buffer : turns->buffers)
        buffer = Tensor::empty(device, {static_cast<std::int64_t>(max_bytes)}, DType::kU8);
  }
  int size() const noexcept override { return static_cast<int>(buffers_.size()); }

  TensorView gather(OpContext& ctx, int rank, ConstTensorView part) override {
    const std::int64_t rows = part.shape.num_rows(), width = part.shape.num_cols() * size();
    Rank& own = buffers_[static_cast<std::size_t>(rank)];
    const std::size_t part_bytes = static_cast<std::size_t>(part.shape.num_cols()) * size_of(part.dtype);
    const std::size_t row_bytes = part_bytes * buffers_.size(), turn = own.num_gathered++ % own.buffers.size();
    check_gathered(ctx, part, row_bytes, max_bytes_);
    for (Rank& to : buffers_)
      for (std::int64_t row = 0; row < rows; ++row)
        std::memcpy(
            to.buffers[turn].as<std::byte>() + static_cast<std::size_t>(row) * row_bytes + static_cast<std::size_t>(rank) * part_bytes,
            part.as<std::byte>() + static_cast<std::size_t>(row * part.row_stride) * size_of(part.dtype), part_bytes);
    await_all();
    return {own.buffers[turn].data(), {rows, width}, part.dtype, part.device, width};
  }

  void meet(int) override {}  // nothing is recorded, and a gather is over when it returns
  void abort() noexcept override {
    const std::lock_guard lock(mutex_);
    is_aborted_ = true;
    all_came_.notify_all();
  }
  void reset() override {
    const std::lock_guard lock(mutex_);
    is_aborted_ = false;
    num_here_ = 0;
    for (Rank& rank : buffers_) rank.num_gathered = 0;
  }

  static void check_gathered(const OpContext& ctx, ConstTensorView part, std::size_t row_bytes, std::size_t max_bytes) {
    ShapeCheck check("gather", ctx);
    check.check("part", part, "T N");
    const std::size_t bytes = static_cast<std::size_t>(part.shape.num_rows()) * row_bytes;
    if (bytes > max_bytes) fail(ErrorCode::kOutOfMemory, "[gather] {} bytes, devices that share layers have room for {}", bytes, max_bytes);
  }

 private:
  struct Rank {
    std::array<Tensor, 2> buffers;  ///< take turns: who reads one is done when its rank comes again, before others write it
    std::uint64_t num_gathered = 0;
  };
  /// Until all ranks are here.
  void await_all() {
    std::unique_lock lock(mutex_);
    const std::uint64_t now = num_met_;
    if (++num_here_ == size()) {
      num_here_ = 0;
      ++num_met_;
      all_came_.notify_all();
      return;
    }
    const bool came = all_came_.wait_for(lock, kDeadline, [&] { return num_met_ != now || is_aborted_; });
    if (num_met_ != now) return;
    fail(ErrorCode::kUnavailable, "[gather] another device that shares the layers {}",
         came ? "has failed" : "did not come within 5 minutes");
  }

  std::size_t max_bytes_;
  std::vector<Rank> buffers_;
  std::mutex mutex_;
  std::condition_variable all_came_;
  int num_here_ = 0;
  std::uint64_t num_met_ = 0;
  bool is_aborted_ = false;
};

}  // namespace

std::unique_ptr<ShardGroup> make_shard_group(std::span<const std::shared_ptr<DeviceRuntime>> devices, std::size_t max_bytes) {
  PRL_CHECK(!devices.empty(), "a group of no devices");
  const DeviceKind kind = devices[0]->device().kind;
  for (const auto& device : devices) PRL_CHECK(device->device().kind == kind, "a group of CPU and GPU");
  if (kind == DeviceKind::kCuda) return make_cuda_shard_group(devices, max_bytes);
  return std::make_unique<CpuShardGroup>(devices, max_bytes);
}

}  // namespace prl::ops
