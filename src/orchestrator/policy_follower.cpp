#include "orchestrator/policy_follower.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "base/spans.hpp"
#include "base/waiting.hpp"
#include "net/deadline.hpp"
#include "net/report.hpp"

namespace prl::orchestrator {

using namespace std::chrono_literals;

namespace {

/// How long one wait for a newer version lasts before the follower looks whether the run goes on.
constexpr auto kVersionSlice = 1s;
constexpr auto kWakeSlice = 500ms;

}  // namespace

PolicyFollower::PolicyFollower(std::shared_ptr<PolicySource> source, Options options, RunControl& control)
    : source_(std::move(source)), options_(options), control_(control) {
  // One more than the trainer can be ahead of the engines, which is the lag and the step in training.
  if (options_.strict_lag) source_->keep_versions(static_cast<std::size_t>(*options_.strict_lag) + 2);
}

asio::awaitable<void> PolicyFollower::load_first(PolicyVersion first, PolicyVersion last) {
  log::info("waiting for policy v{} from {}", first.value, source_->describe());
  Waiting waiting({.who = "the orchestrator",
                   .what = fmt::format("the trainer to publish the first policy, v{}", first.value),
                   .limit = options_.policy_timeout,
                   .detail = [this] { return source_->describe(); }});
  for (;;) {
    control_.check();
    const auto newest = co_await source_->wait_newer(PolicyVersion{first.value - 1}, net::Clock::now() + kVersionSlice);
    if (newest && *newest > last)
      fail(ErrorCode::kOutOfSync, "the run starts after step {}, but {} already offers v{}: remove the newer weights, or resume from there",
           first.value, source_->describe(), newest->value);
    if (newest) {
      // Engines that are asked to stop, or die, at the same moment take no weights any more.
      auto applying = control_.until_ended<void>(apply(*newest));
      co_await std::move(applying);
      log::info("inference runs policy v{}", newest->value);
      co_return;
    }
    waiting.check();
    if (waiting.is_expired()) waiting.fail_expired("is the trainer running?");
  }
}

asio::awaitable<void> PolicyFollower::apply(PolicyVersion target) {
  newest_applied_ = std::max(newest_applied_, target);
  const spans::Scope span(spans::Detail::kCoarse, "weights", "engines take new weights", target.value);
  const net::TimePoint deadline = net::Clock::now() + options_.update_timeout;
  // The source's own error says more, and comes first.
  auto applying = net::with_deadline<void>(source_->apply(target, deadline), deadline + 2s,
                                           fmt::format("{} to take the weights of policy v{}", source_->describe_engines(), target.value));
  Waiting::Options waiting{.who = "the orchestrator",
                           .what = fmt::format("inference to take the weights of policy v{}", target.value),
                           .limit = options_.update_timeout,
                           .detail = [this] { return source_->describe_engines(); }};
  auto reporting = net::while_reporting<void>(std::move(applying), std::move(waiting));
  co_await std::move(reporting);
  version_ = target;
}

asio::awaitable<void> PolicyFollower::follow(std::function<void()> on_update) {
  for (;;) {
    const auto newest = co_await source_->wait_newer(version_, net::Clock::now() + kVersionSlice);
    if (!newest) continue;
    if (is_paused_ || (options_.strict_lag && *newest > allowed_)) {
      co_await resumed_.wait_until(net::Clock::now() + kVersionSlice);
      continue;
    }
    is_updating_ = true;
    const net::TimePoint begin = net::Clock::now();
    auto applying = apply(*newest);
    co_await std::move(applying);
    is_updating_ = false;
    seconds_ = std::chrono::duration<double>(net::Clock::now() - begin).count();
    log::debug("inference runs policy v{} after {:.2f} s", newest->value, seconds_);
    on_update();
  }
}

asio::awaitable<bool> PolicyFollower::wait_for(PolicyVersion version) {
  Waiting waiting({.who = "the orchestrator",
                   .what = fmt::format("the trainer to publish the last policy, v{}, which is to be evaluated", version.value),
                   .limit = options_.policy_timeout,
                   .detail = [this] { return source_->describe(); }});
  while (version_ < version && !control_.is_stopped()) {
    control_.check_failure();
    waiting.check();
    if (waiting.is_expired()) {
      log::warning("the last policy (v{}) did not come from {} in {} s; v{} is evaluated instead", version.value, source_->describe(),
                   options_.policy_timeout.count() / 1000, version_.value);
      co_return false;
    }
    co_await control_.wait_until(net::Clock::now() + kWakeSlice);
  }
  co_return version_ >= version;
}

asio::awaitable<void> PolicyFollower::pause() {
  is_paused_ = true;
  while (is_updating_ && !control_.has_failed() && !control_.is_stopped()) co_await net::sleep_for(5ms);
  control_.check_failure();
}

void PolicyFollower::allow(PolicyVersion newest) {
  allowed_ = std::max(allowed_, newest);
  resumed_.notify();
}

void PolicyFollower::resume() {
  is_paused_ = false;
  resumed_.notify();
}

void PolicyFollower::check_versions(const env::Episode& episode, PolicyVersion opened) const {
  for (const env::TrajectoryStep& step : episode.trajectory) {
    if (!step.has_versions) continue;
    std::int64_t oldest = std::min(step.version_start.value, step.version_end.value);
    std::int64_t newest = std::max(step.version_start.value, step.version_end.value);
    for (const std::int64_t version : step.tokens.versions) {
      oldest = std::min(oldest, version);
      newest = std::max(newest, version);
    }
    if (oldest >= opened.value && newest <= newest_applied_.value) continue;
    fail(
        ErrorCode::kOutOfSync,
        "a rollout of {} was sampled by v{} to v{}, but its group was opened under v{} and this run has sent nothing newer than v{} to {}: "
        "another run or client writes weights into that server, or it was started anew",
        episode.env_name, oldest, newest, opened.value, newest_applied_.value, source_->describe_engines());
  }
}

}  // namespace prl::orchestrator
