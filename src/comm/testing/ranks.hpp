// For tests alone: the ranks of a group, as threads of this process or as processes of their own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace prl::comm::testing {

/// Calls `body` in `size` threads, each with its rank's communicator of `backend` ("local", "threads", "gloo", "nccl"). The first error
/// of a rank is thrown again, with its rank in front, when all have ended.
void run_threads(const std::string& backend, int size, const std::function<void(Communicator&)>& body,
                 std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Why `size` ranks of `backend` cannot run here; empty if they can.
std::string reason_to_skip(const std::string& backend, int size);

/// Processes made by fork() that run `body(rank)` and end. Those that are still there are killed with this object.
class Processes {
 public:
  /// `body` returns the exit status; an error that it throws is printed and becomes status 99.
  Processes(int size, const std::function<int(int rank)>& body);
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  int pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  /// Exit status of a rank, 128 + signal if one ended it; nullopt if it has not ended within `patience`.
  std::optional<int> wait(int rank, std::chrono::milliseconds patience);
  /// True once the rank is stopped by a signal.
  bool is_stopped(int rank) const;
  void kill(int rank, int signal) const;

 private:
  std::vector<int> pids_;
  std::vector<bool> is_reaped_;
};

}  // namespace prl::comm::testing
