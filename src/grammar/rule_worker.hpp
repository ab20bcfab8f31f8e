#pragma once

#include <functional>
#include <memory>

namespace prl::grammar {

/// Threads that work out masks, so that the engine's never does. They give way to other threads where cores are few.
class RuleWorker {
 public:
  explicit RuleWorker(int num_threads);
  /// Ends after the jobs in progress; the others are dropped.
  ~RuleWorker();
  RuleWorker(const RuleWorker&) = delete;
  RuleWorker& operator=(const RuleWorker&) = delete;
  /// Jobs wait in a queue that its users bound: one for each sequence that an engine holds. Any thread, never blocks.
  void post(std::function<void()> job);

 private:
  struct Shared;
  void stop();
  std::shared_ptr<Shared> shared_;  ///< each thread has it too
};

}  // namespace prl::grammar
