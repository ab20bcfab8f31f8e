#include "weights/device_link.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include "base/log.hpp"

namespace prl::weights {

DevicePath make_device_path(const DeviceRuntime& runtime) {
  const char* links = std::getenv("PRL_WEIGHT_LINKS");
  if (runtime.device().kind != DeviceKind::kCuda || (links != nullptr && std::string_view(links) == "0")) return {};
  if (const std::string missing = comm::missing_nccl(); !missing.empty()) {
    log::warning("weights go through host memory: {}", missing);
    return {};
  }
  for (const CudaDeviceInfo& info : list_cuda_devices().devices)
    if (info.index == runtime.device().index)
      return {.make_stream = [index = info.index] { return make_cuda_stream(index); }, .device = info.uuid};
  return {};
}

void DeviceLink::open(const DevicePath& path, int rank, std::shared_ptr<comm::Store> store, std::chrono::milliseconds timeout) {
  if (group_ != nullptr) return;
  auto group = path.make_group({.rank = rank,
                                .size = 2,
                                .store = std::move(store),
                                .group = fmt::format("weights/link/{}", token_),
                                .timeout = timeout,
                                .runtime = path.make_stream()});
  const std::lock_guard lock(mutex_);
  group_ = std::move(group);
  if (is_aborted_) group_->abort("the link was given up while it was made");
}

void DeviceLink::copy(const Tensor& values, std::chrono::milliseconds timeout) {
  const comm::Call call{.what = "weights", .timeout = timeout};
  group_->broadcast(values.view(), 0, call);
  group_->settle(call);
}

void DeviceLink::abort(const char* reason) noexcept {
  const std::lock_guard lock(mutex_);
  is_aborted_ = true;
  if (group_ != nullptr) group_->abort(reason);
}

}  // namespace prl::weights
