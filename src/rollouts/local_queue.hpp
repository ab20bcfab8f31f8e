#pragma once

#include <memory>

#include "rollouts/sample_queue.hpp"

namespace prl::rollouts {

/// Sender and receivers in one process: a bounded queue of pointers per rank. Copies share one state.
class LocalSampleQueue {
 public:
  /// `capacity` in steps, at least 1.
  LocalSampleQueue(std::int64_t num_ranks, std::int64_t capacity);
  std::unique_ptr<SampleSender> make_sender() const;
  /// One receiver per rank in [0, num_ranks).
  std::unique_ptr<SampleReceiver> make_receiver(std::int64_t rank) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace prl::rollouts
