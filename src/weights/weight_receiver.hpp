#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

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

/// What an engine can use.
struct Acceptable {
  DType dtype = DType::kF32;           ///< of a model's values
  std::int64_t num_values = 0;         ///< of its model
  std::string adapter = {};            ///< under which name it holds the policy, which then must be an adapter; empty: as the model
  std::int64_t max_adapter_bytes = 0;  ///< 0: no adapter
};

struct Received {
  Tensor values;
  bool is_adapter = false;  ///< `values` are the bytes of one (nn::peft_image), in host memory
};

/// An engine's end of a CollectiveChannel.
class WeightReceiver {
 public:
  explicit WeightReceiver(WeightReceiverOptions options = {}) : options_(std::move(options)) {}

  /// All values of `version` from the trainer whose store is at `address`. [num_values] `dtype`, in options.memory if they came from device
  /// to device, else in host memory. Where other ranks of the trainer send parts, all of them are asked at the same time; what one of them
  /// does not send is asked of the first. A version that is newer than all that the trainer has is waited for, two minutes at most: a
  /// trainer that heals computes it again. Error{kNotFound} if the trainer does not hold that version, {kShape} if its model or dtype is
  /// another, {kUnavailable} naming the address if there is no trainer, or it has no version at all, PeerLost if it was lost while it sent.
  /// One that does not come within options.patience is asked again until `timeout`. Any thread; one transfer at a time.
  Tensor receive(const std::string& address, PolicyVersion version, DType dtype, std::int64_t num_values,
                 std::chrono::milliseconds timeout);
  /// The same, or an adapter, whichever the trainer trains: what fits `acceptable`, else Error{kShape} saying what came.
  Received receive(const std::string& address, PolicyVersion version, const Acceptable& acceptable, std::chrono::milliseconds timeout);

 private:
  /// A rank of the trainer, as this engine sees it.
  struct Sender {
    std::unique_ptr<DeviceLink> link;
    int num_failed_links = 0;  ///< in a row
    bool may_link = true;
  };
  struct Wanted;
  struct Met;
  Met meet(const Wanted& wanted, Sender& sender) const;
  static void check_offer(const Offer& offer, const Wanted& wanted);
  void open_link(const std::string& token, const std::shared_ptr<comm::Store>& store, Sender& sender) const;
  /// The pieces of `values` that were offered. False, and why, if there is no link: it is asked for again without one after a while.
  bool take(Met& met, Sender& sender, const Tensor& values, const Wanted& wanted, std::string& reason) const;
  Tensor make_room(const Met& met) const;
  /// What `share` has of `wanted` goes to `values`.
  void fetch(const Share& share, Wanted wanted, Sender& sender, const Tensor& values) const;
  void forget_former_senders(const std::string& address, const std::vector<Share>& others);

  WeightReceiverOptions options_;
  std::mutex mutex_;
  std::map<std::string, Sender> senders_;  ///< by address
};

}  // namespace prl::weights
