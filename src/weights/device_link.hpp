#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.hpp"
#include "device/device.hpp"
#include "tensor/tensor.hpp"

namespace prl::weights {

/// The way of values from the device of one process to that of another, beside the group in host memory in which both meet.
struct DevicePath {
  std::function<std::shared_ptr<DeviceRuntime>()> make_stream;  ///< for one link (make_cuda_stream); none: values go through host memory
  std::string device;                                           ///< the same text in every process that uses this device, and no other's
  std::function<std::unique_ptr<comm::Communicator>(comm::CommOptions)> make_group = comm::make_nccl_communicator;
};
/// NCCL from the GPU that `runtime` is of. None for a CPU, with PRL_WEIGHT_LINKS=0 in the environment, and where NCCL cannot be used, which
/// is logged with the reason.
DevicePath make_device_path(const DeviceRuntime& runtime);

/// A group of trainer (rank 0) and engine (rank 1) over their devices, which stays from one version to the next: making it takes longer
/// than a transfer. One thread at a time, but for abort().
class DeviceLink {
 public:
  /// `token` is drawn by the trainer and names the group in its store.
  explicit DeviceLink(std::string token) : token_(std::move(token)) {}
  ~DeviceLink() { abort("the link is not needed any more"); }
  DeviceLink(const DeviceLink&) = delete;
  DeviceLink& operator=(const DeviceLink&) = delete;
  const std::string& token() const noexcept { return token_; }
  /// Both ends call it alike; once open it stays so. Errors of the path's group: PeerLost if the other end does not come in time.
  void open(const DevicePath& path, int rank, std::shared_ptr<comm::Store> store, std::chrono::milliseconds timeout);
  /// The values of rank 0, on the path's device, replace those of rank 1; returns when they have. Before it what is enqueued to make or to
  /// allocate the pieces is waited for by the caller. PeerLost if the other end was lost.
  void copy(const std::vector<Tensor>& pieces, std::chrono::milliseconds timeout);
  /// Ends the link, also while it is used. Any thread.
  void abort(const char* reason) noexcept;

 private:
  std::string token_;
  std::mutex mutex_;  ///< guards what follows, not its use
  std::unique_ptr<comm::Communicator> group_;
  bool is_aborted_ = false;
};

}  // namespace prl::weights
