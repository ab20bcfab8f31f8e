#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "device/host_link.hpp"
#include "tensor/tensor.hpp"
#include "weights/share.hpp"

namespace prl::weights {

/// The values themselves, or a copy made on `stream`, which is of their device.
Tensor in_host_memory(const Tensor& values, DeviceRuntime& stream);

/// The newest versions of a trainer's weights, which engines may ask for. The newest stays where it is; a former one that lies on the
/// trainer's device is copied to host memory (page-locked where there is such), for engines that lag, so that at most two versions that
/// only engines need lie there.
class HeldVersions {
 public:
  struct Held {
    Tensor values;  ///< of `ranges`, one after the other
    bool is_on_device = false;
    std::int64_t num_all = 0;  ///< values of the whole model
    ValueRanges ranges;
    std::vector<Share> others;  ///< who sends what, while this one sends the rest
    bool is_adapter = false;    ///< `values` are the bytes of one
  };
  /// `device`: of values that are copied to host memory in time, on its stream; nullptr if none are.
  HeldVersions(std::int64_t num_kept, std::shared_ptr<DeviceRuntime> device, std::chrono::milliseconds timeout = std::chrono::seconds(30));
  ~HeldVersions();
  HeldVersions(const HeldVersions&) = delete;
  HeldVersions& operator=(const HeldVersions&) = delete;

  /// Waits until no version but the newest is on the device, in use by a transfer or to be copied: after the timeout, which is logged, it
  /// is held all the same. Values on another device are copied to host memory at once. What was enqueued on the values' runtime has been
  /// waited for. One thread.
  void hold(std::int64_t version, Tensor values, std::vector<Share> others = {});
  /// The same where a part of a model's values is held.
  void hold(std::int64_t version, Tensor values, ValueRanges ranges, std::int64_t num_all, std::vector<Share> others = {});
  /// The same of a policy that is an adapter: its bytes, in host memory.
  void hold_adapter(std::int64_t version, Tensor image);
  /// nullptr if it is not held. Any thread.
  std::shared_ptr<const Held> find(std::int64_t version) const;
  /// -1 if none is held. Any thread.
  std::int64_t newest() const;

 private:
  void hold(std::int64_t version, Held given);
  using Entry = std::map<std::int64_t, std::shared_ptr<const Held>>::iterator;
  /// With mutex_ held. A former version on the device; end() if there is none.
  Entry former_on_device();
  bool is_device_free();
  void copy_to_host(std::stop_token stop);
  /// With mutex_ held. Memory for a copy: that of a version which is not held any more, whose pages are there already.
  Tensor take_spare(const Tensor& like);
  /// Of link_, or without it for lack of such memory.
  Tensor new_memory(const Tensor& like);

  std::int64_t num_kept_;
  std::shared_ptr<DeviceRuntime> device_;
  std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::condition_variable_any has_more_;
  std::map<std::int64_t, std::shared_ptr<const Held>> held_;
  std::vector<std::weak_ptr<const Held>> on_device_;  ///< all but the newest that anybody uses
  std::vector<std::shared_ptr<const Held>> spares_;   ///< in host memory, not held any more; at most one
  std::shared_ptr<HostLink> link_;                    ///< of the thread; nullptr: there was no memory for it
  std::jthread thread_;
};

}  // namespace prl::weights
