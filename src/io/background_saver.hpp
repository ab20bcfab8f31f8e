#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace prl::io {

/// Runs one save at a time on a thread of its own, so that training goes on while files are written.
///
/// Threads   submit() and wait() from one thread. The job must own (or share, immutably) all it reads.
class BackgroundSaver {
 public:
  BackgroundSaver();
  /// Waits for the running job; its error, if nobody asked for it, is logged.
  ~BackgroundSaver();
  BackgroundSaver(const BackgroundSaver&) = delete;
  BackgroundSaver& operator=(const BackgroundSaver&) = delete;

  /// Waits for the job before, rethrows its error, then starts this one. `name` is for messages ("checkpoint of step 20").
  /// Error{kDeadline} names the job that is still running after `timeout`.
  void submit(std::string name, std::function<void()> job, std::chrono::milliseconds timeout = std::chrono::minutes(30));
  /// Waits for the running job, if any, and rethrows its error once.
  void wait(std::chrono::milliseconds timeout = std::chrono::minutes(30));
  bool is_busy() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::io
