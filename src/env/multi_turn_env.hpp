#pragma once

#include <cstdint>
#include <string>

#include "env/environment.hpp"
#include "env/rubric.hpp"

namespace prl::env {

/// Base of environments that talk with the model: model turn, environment's answer, model turn, ... until done.
/// Subclasses say what the environment answers and when it is over; everything else is here.
class MultiTurnEnv : public Environment {
 public:
  struct Limits {
    std::int64_t max_turns = 10;                    ///< model turns; <= 0: no limit
    std::int64_t max_total_completion_tokens = -1;  ///< over all turns; < 0: no limit
  };

  MultiTurnEnv(std::string name, Limits limits, Rubric rubric);
  const std::string& name() const noexcept final { return name_; }
  asio::awaitable<Episode> run(Task task, RolloutContext context) const final;

 protected:
  /// One rollout in progress. Lives in run(); the hooks below get it by reference.
  struct Rollout {
    const Task& task;
    Episode& episode;
    boost::json::array messages;  ///< prompt and everything after it
    boost::json::object scratch;  ///< the environment's own notes
    bool is_asking = false;       ///< the model is being asked
  };

  virtual void start(Rollout& rollout) const { static_cast<void>(rollout); }
  /// Called after each model turn: non-empty ends the rollout with that stop condition. The limits are checked besides.
  virtual std::string stop_condition(const Rollout& rollout) const {
    static_cast<void>(rollout);
    return {};
  }
  /// Messages that answer the model's last one. The pointer is valid until the coroutine ends.
  virtual asio::awaitable<boost::json::array> respond(Rollout* rollout) const = 0;
  /// Called before scoring, also after a failure.
  virtual void finish(Rollout& rollout) const { static_cast<void>(rollout); }
  /// What scoring has to ask others for; the rubric comes after it. Not called after a failure. What it throws fails the rollout.
  virtual asio::awaitable<void> judge(Rollout* rollout, net::TimePoint deadline) const;

 private:
  asio::awaitable<void> play(Rollout* rollout, RolloutContext context) const;
  std::string limit_reached(const Episode& episode, std::int64_t max_total_completion_tokens) const;

  std::string name_;
  Limits limits_;
  Rubric rubric_;
};

/// One prompt, one answer.
class SingleTurnEnv : public MultiTurnEnv {
 public:
  SingleTurnEnv(std::string name, Rubric rubric) : MultiTurnEnv(std::move(name), Limits{1, -1}, std::move(rubric)) {}

 protected:
  asio::awaitable<boost::json::array> respond(Rollout* rollout) const final;
};

}  // namespace prl::env
