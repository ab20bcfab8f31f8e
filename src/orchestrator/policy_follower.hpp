#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "env/episode.hpp"
#include "net/signal.hpp"
#include "orchestrator/policy_source.hpp"
#include "orchestrator/run_control.hpp"

namespace prl::orchestrator {

/// Brings every version that the trainer publishes to the engines, one at a time, and knows which versions a rollout can be of.
/// The loop's thread only.
class PolicyFollower {
 public:
  struct Options {
    std::chrono::milliseconds policy_timeout{3'600'000};  ///< for the trainer to publish a version that the run cannot go on without
    std::chrono::milliseconds update_timeout{720'000};    ///< for the engines to take one version
    std::optional<std::int64_t> strict_lag = {};          ///< loads each version in its turn, and not before it is to be run: see allow()
  };
  PolicyFollower(std::shared_ptr<PolicySource> source, Options options, RunControl& control);

  /// Waits for a policy that the run can start with, `first` to `last`, and loads the newest. Error{kOutOfSync} if a newer one is published
  /// already, {kDeadline} saying who waits for whom, {kCancelled} after a stop.
  asio::awaitable<void> load_first(PolicyVersion first, PolicyVersion last);
  asio::awaitable<void> load_first(PolicyVersion first) { return load_first(first, first); }
  /// Loads newer versions, and calls `on_update` after each, until it is cancelled.
  asio::awaitable<void> follow(std::function<void()> on_update);
  /// With a strict lag: versions up to this one may be loaded now.
  void allow(PolicyVersion newest);
  /// Until `version` or a newer one is loaded. False after a stop, and (with a warning) when the policy timeout passed. Main coroutine
  /// only.
  asio::awaitable<bool> wait_for(PolicyVersion version);
  /// Keeps the engines' weights as they are until resume(); returns once no update is under way, or the run is stopped.
  asio::awaitable<void> pause();
  void resume();

  /// The version that the engines have proven to run.
  PolicyVersion version() const noexcept { return version_; }
  bool is_updating() const noexcept { return is_updating_; }
  double seconds_of_last_update() const noexcept { return seconds_; }
  /// Error{kOutOfSync} for tokens that no engine of this run can have sampled since `opened`, when the rollout's group was opened:
  /// another run's server, or one that was started anew.
  void check_versions(const env::Episode& episode, PolicyVersion opened) const;
  const PolicySource& source() const noexcept { return *source_; }

 private:
  asio::awaitable<void> apply(PolicyVersion target);

  std::shared_ptr<PolicySource> source_;
  Options options_;
  RunControl& control_;
  PolicyVersion version_;
  PolicyVersion newest_applied_{-1};  ///< that the engines may run: sent to them, or being sent
  bool is_updating_ = false;
  bool is_paused_ = false;
  PolicyVersion allowed_{0};  ///< with a strict lag
  double seconds_ = 0;
  net::Signal resumed_;  ///< something that keeps a version waiting has changed
};

}  // namespace prl::orchestrator
