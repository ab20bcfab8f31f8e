#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/run_orders.hpp"
#include "net/off_thread.hpp"
#include "orchestrator/run_control.hpp"
#include "rollouts/sample_queue.hpp"
#include "wire/packing.hpp"

namespace prl::orchestrator {

/// Packs batches and puts them into the sample queue, on a thread of its own. The main coroutine only.
class BatchShipper {
 public:
  struct Options {
    wire::PackOptions pack;
    std::chrono::milliseconds timeout{3'600'000};  ///< for the trainer to make room, and to take the last batches
    RunOrders orders = {};                         ///< a paused trainer is not waited for in vain
    /// The newest policy that the trainer has published: it has trained on the batches up to that step.
    std::function<std::optional<PolicyVersion>()> newest_policy = {};
  };
  struct Shipment {
    bool is_sent = false;  ///< or need not be; false: the run was stopped before the queue had room
    double seconds_pack = 0, seconds_push = 0;
    wire::PackLosses losses = {};
  };
  /// Error{kInvalidArgument} if the queue has another number of ranks than the packing.
  BatchShipper(std::shared_ptr<rollouts::SampleSender> sender, Options options, RunControl& control);

  /// Packs `samples` as the batch of `step` and waits for room in the queue, but not for a trainer that has trained on it: an orchestrator
  /// that was killed may have sent it without noting so, and after the last step nobody is there to take it. Error{kDeadline} naming
  /// the trainer.
  asio::awaitable<Shipment> ship(std::int64_t step, std::vector<wire::TrainingSample> samples);
  /// No more batches come.
  void close() { sender_->close(); }
  /// Waits until the trainer has taken every batch up to `last_step`: with a warning in place of an error at the deadline, and for a
  /// moment only after a stop.
  asio::awaitable<void> drain(std::int64_t last_step);

 private:
  using BatchPtr = std::shared_ptr<const wire::TrainingBatch>;
  asio::awaitable<bool> push(BatchPtr batch);
  bool is_trained_on(std::int64_t step) const;

  std::shared_ptr<rollouts::SampleSender> sender_;
  Options options_;
  RunControl& control_;
  net::OffThread thread_;
};

}  // namespace prl::orchestrator
