#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "base/spans.hpp"
#include "env/chat_client.hpp"

namespace prl::orchestrator {

/// What the rollouts of one environment do over time: how many wait for the model, and how many run the environment's own code. Recorded as
/// spans on the lane "environment/<name>", each named after what most rollouts did. Any thread.
class EnvActivity {
 public:
  /// `name`: of the environment.
  explicit EnvActivity(std::string name) : lane_("environment/" + std::move(name)) {}
  ~EnvActivity() { change(0, 0, true); }

  void begin_rollout() { change(+1, 0); }
  void end_rollout() { change(-1, 0); }
  /// Of a rollout that is under way.
  void begin_model() { change(-1, +1); }
  void end_model() { change(+1, -1); }

 private:
  void change(int own, int model, bool is_end = false);

  const std::string lane_;
  std::mutex mutex_;
  int num_own_ = 0, num_model_ = 0;
  spans::Clock::time_point begin_, last_;
  double own_seconds_ = 0, model_seconds_ = 0;  ///< of rollouts, since begin_
};

/// A scope in which a rollout is under way.
class PlayedRollout {
 public:
  explicit PlayedRollout(EnvActivity& activity) : activity_(activity) { activity_.begin_rollout(); }
  PlayedRollout(const PlayedRollout&) = delete;
  PlayedRollout& operator=(const PlayedRollout&) = delete;
  ~PlayedRollout() { activity_.end_rollout(); }

 private:
  EnvActivity& activity_;
};

/// Conversations of `service` that tell `activity` when they wait for the model.
std::shared_ptr<env::ChatClientFactory> watch_calls(std::shared_ptr<env::ChatClientFactory> service, std::shared_ptr<EnvActivity> activity);

}  // namespace prl::orchestrator
