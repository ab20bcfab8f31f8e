#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "wire/training.hpp"

namespace prl::rollouts {

/// What one data-parallel rank trains on in one step.
struct RankBatch {
  std::int64_t step = 0;  ///< 1-based optimizer step that consumes it
  std::vector<wire::MicroBatch> micro_batches;
};

/// The orchestrator's end of the sample queue. Steps are sent in ascending order without gaps.
///
/// Bound    at most `capacity` steps are held for a rank that does not take them; push() then waits.
/// Threads  one thread at a time. push() blocks: never call it on an I/O thread.
class SampleSender {
 public:
  virtual ~SampleSender() = default;
  /// Hands one step to every rank; batch.ranks.size() must equal num_ranks(). False when the queue stayed full for
  /// `timeout`: the batch is then not sent and may be pushed again. Error{kUnavailable} after close().
  [[nodiscard]] virtual bool push(const wire::TrainingBatch& batch, std::chrono::milliseconds timeout) = 0;
  virtual std::int64_t num_ranks() const noexcept = 0;
  /// No more steps follow: receivers drain what is left and then see the end. Idempotent.
  virtual void close() = 0;
  /// After close(): true once the steps no longer need this object, because every rank has taken them or because they lie where
  /// ranks find them later; false when `timeout` passed first. Without it the destructor drops what was not taken.
  [[nodiscard]] virtual bool drain(std::chrono::milliseconds timeout) = 0;
  /// One line for messages about waits: which transport, where, and which rank has taken what.
  virtual std::string describe() const = 0;
};

/// A trainer rank's end.
///
/// Each step arrives once and in order, also over a transport that lost or repeated a message.
/// Threads  one thread.
class SampleReceiver {
 public:
  virtual ~SampleReceiver() = default;
  /// The next step of this rank; nullopt when `timeout` passed, or when the sender closed and all was taken (is_closed()).
  /// Error{kCorrupt} naming file or message when a payload is damaged or is not the step that was due.
  [[nodiscard]] virtual std::optional<RankBatch> pop(std::chrono::milliseconds timeout) = 0;
  virtual bool is_closed() const = 0;
  /// Word of an end that was there before this receiver: of a sender that was faster, or of an earlier run. One that is stopped need not
  /// wait either way: a sender that is to come would have removed it before it sent anything.
  virtual bool was_closed_before() const { return false; }
  virtual std::string describe() const = 0;
};

}  // namespace prl::rollouts
