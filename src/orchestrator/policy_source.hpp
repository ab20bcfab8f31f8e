#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/ids.hpp"
#include "net/asio.hpp"

namespace prl::orchestrator {

namespace asio = boost::asio;

/// Where new weights come from, and how the engines get them. One caller at a time.
class PolicySource {
 public:
  virtual ~PolicySource() = default;
  /// Waits for a complete published version above `than` and answers the newest; nullopt when `deadline` passed.
  virtual asio::awaitable<std::optional<PolicyVersion>> wait_newer(PolicyVersion than, net::TimePoint deadline) = 0;
  /// The newest complete version so far, if any; does not wait, and may be asked while somebody else waits.
  virtual std::optional<PolicyVersion> newest() const = 0;
  /// From now on wait_newer answers the oldest of up to `count` versions above `than`, not the newest: engines are to run each in its turn.
  virtual void keep_versions(std::size_t count) { static_cast<void>(count); }
  /// Loads `version` into every engine and returns when all of them have proven (checksum and probe) that they run it.
  /// Requests in flight are kept. Error{kOutOfSync} when a proof differs from the trainer's, {kDeadline} naming the engine.
  virtual asio::awaitable<void> apply(PolicyVersion version, net::TimePoint deadline) = 0;
  /// For messages: "weights/ of outputs", "in-process trainer".
  virtual std::string describe() const = 0;
  /// The engines that apply() writes to, for messages: "http://localhost:8000".
  virtual std::string describe_engines() const { return "the inference engine"; }
};

}  // namespace prl::orchestrator
