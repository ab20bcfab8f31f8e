#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/ids.hpp"
#include "tensor/tensor.hpp"
#include "weights/device_link.hpp"
#include "weights/transfer.hpp"

namespace prl::weights {

struct WeightReceiverOptions {
  std::string engine;                     ///< tells this engine from others of the same trainer, and stays the same when it is started anew
  DevicePath path;                        ///< over which values may come
  std::shared_ptr<DeviceRuntime> memory;  ///< where values that come over the path lie; of the path's device
  /// For the trainer to come: it may have been lost, and another rank serves at its address.
  std::chrono::milliseconds patience = std::chrono::seconds(60);
  std::chrono::milliseconds join_timeout = kJoinTimeout;  ///< of a link
};

/// An engine's end of a CollectiveChannel.
class WeightReceiver {
 public:
  explicit WeightReceiver(WeightReceiverOptions options = {}) : options_(std::move(options)) {}

  /// All values of `version` from the trainer whose store is at `address`. [num_values] `dtype`, in options.memory if they came from device
  /// to device, else in host memory. A version that is newer than all that the trainer has is waited for, two minutes at most: a trainer
  /// that heals computes it again. Error{kNotFound} if the trainer does not hold that version, {kShape} if its model or dtype is another,
  /// {kUnavailable} naming the address if there is no trainer, PeerLost if it was lost while it sent. One that does not come within
  /// options.patience is asked again until `timeout`. Any thread; one transfer at a time.
  Tensor receive(const std::string& address, PolicyVersion version, DType dtype, std::int64_t num_values,
                 std::chrono::milliseconds timeout);

 private:
  struct Wanted;
  struct Answer;
  Answer ask(const Wanted& wanted);
  void open_link(const std::string& token, const std::shared_ptr<comm::Store>& store);
  /// Of a link that could not be opened: the trainer may have been lost, so one more is tried; then values come through host memory.
  std::string give_up_link(const std::string& reason);

  WeightReceiverOptions options_;
  std::mutex mutex_;
  std::unique_ptr<DeviceLink> link_;
  int num_failed_links_ = 0;  ///< in a row
};

}  // namespace prl::weights
