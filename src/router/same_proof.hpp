#pragma once

#include <mutex>
#include <optional>
#include <string>

namespace prl::router {

/// Compares the proofs of engines with the first one that came: a router has no manifest of its own. Any thread.
class SameProof {
 public:
  /// Error{kCorrupt} if `reply` has no checksum and log-probabilities, {kOutOfSync} naming `url` if they are not those of the first.
  void check(const std::string& reply, const std::string& url);
  /// The first reply, empty if none came.
  std::string body() const;

 private:
  mutable std::mutex mutex_;
  std::optional<std::string> first_;  ///< what is compared
  std::string body_;
};

}  // namespace prl::router
