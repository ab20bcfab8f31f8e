#pragma once

#include <mutex>
#include <unordered_set>

namespace prl::server {

class Generation;

/// The generations that a server has in flight, so that it can end them when it stops. Any thread.
class LiveGenerations {
 public:
  void add(Generation& generation);
  void remove(Generation& generation);
  /// Each of them, and each that is added from now on, ends with Error{kUnavailable} at its next event.
  void end_all();
  bool is_ending() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_set<Generation*> generations_;
  bool is_ending_ = false;
};

}  // namespace prl::server
