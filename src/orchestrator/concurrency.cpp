#include "orchestrator/concurrency.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace prl::orchestrator {
namespace {

// The numbers of spec 3.12.
constexpr double kSoftUsage = 0.6, kTrimUsage = 0.8, kTrimTo = 0.7, kCancelUsage = 0.9;
constexpr double kGrowth = 1.25, kNearCap = 0.9;
constexpr double kCutPreempted = 0.8, kCutQueued = 0.9, kCutAgain = 0.5;
constexpr int kPatiencePolls = 6;
constexpr std::chrono::seconds kFreshPoll{15};

}  // namespace

ConcurrencyController::ConcurrencyController(Options options) : options_(options) {
  set_cap(static_cast<double>(options_.initial.value_or(options_.min)));
}

void ConcurrencyController::set_cap(double cap) {
  cap_ = std::clamp(cap, static_cast<double>(options_.min), static_cast<double>(std::max(options_.min, options_.max)));
}

std::int64_t ConcurrencyController::cap() const noexcept { return static_cast<std::int64_t>(std::floor(cap_ + 1e-9)); }

void ConcurrencyController::cut(double cap) {
  set_cap(cap);
  is_draining_ = true;
  num_queue_polls_ = 0;
}

void ConcurrencyController::on_poll(const EnginePressure& pressure, std::int64_t num_inflight, net::TimePoint now) {
  const bool is_first = !has_polled_;
  has_polled_ = true;
  last_poll_ = now;
  ++since_trim_;
  ++since_drain_;
  num_to_cancel_ = 0;
  capacity_ = pressure.max_model_len > 0 ? pressure.num_cache_tokens / pressure.max_model_len : 0;
  if (is_first && !options_.initial && capacity_ > 0) set_cap(capacity_);
  // A counter that went back belongs to an engine that was started anew.
  const double num_new_preemptions = is_first ? 0 : std::max(0.0, pressure.num_preemptions - num_preemptions_);
  num_preemptions_ = pressure.num_preemptions;
  has_empty_queue_ = pressure.num_waiting == 0;
  num_waiting_polls_ = has_empty_queue_ ? 0 : num_waiting_polls_ + 1;
  num_queue_polls_ = has_long_queue(pressure) ? num_queue_polls_ + 1 : 0;
  if (num_new_preemptions > 0 || has_long_queue(pressure))
    signal_ = PressureSignal::kHard;
  else if (num_waiting_polls_ >= 2 || pressure.kv_usage > kSoftUsage)
    signal_ = PressureSignal::kSoft;
  else
    signal_ = PressureSignal::kClear;
  const auto inflight = static_cast<double>(num_inflight);
  if (is_draining_) {
    if (num_inflight > cap() || signal_ == PressureSignal::kHard) return;
    is_draining_ = false;
    since_drain_ = 0;
  }
  if (num_new_preemptions > 0) return cut(inflight * (since_drain_ <= kPatiencePolls ? kCutAgain : kCutPreempted));
  if (num_queue_polls_ >= kPatiencePolls) return cut(inflight * (since_drain_ <= kPatiencePolls ? kCutAgain : kCutQueued));
  if (pressure.kv_usage > kTrimUsage && since_trim_ >= kPatiencePolls) {
    set_cap(inflight * kTrimTo / pressure.kv_usage);
    since_trim_ = 0;
    if (pressure.kv_usage > kCancelUsage) num_to_cancel_ = std::max<std::int64_t>(0, num_inflight - cap());
  }
}

double ConcurrencyController::take_turnover(net::TimePoint now) noexcept {
  const double seconds = turnover_since_ ? std::chrono::duration<double>(now - *turnover_since_).count() : 0;
  turnover_since_ = now;
  const auto num_ended = static_cast<double>(std::exchange(num_completed_, 0));
  return seconds > 0 ? num_ended / seconds : 0;
}

void ConcurrencyController::on_completion(std::int64_t num_inflight, net::TimePoint now) {
  ++num_completed_;
  const bool has_news = has_polled_ && now - last_poll_ <= kFreshPoll;
  if (!has_news || signal_ != PressureSignal::kClear || !has_empty_queue_ || is_draining_) return;
  if (static_cast<double>(num_inflight + 1) < kNearCap * cap_) return;
  set_cap(cap_ * std::pow(kGrowth, 1.0 / static_cast<double>(std::max<std::int64_t>(1, num_inflight))));
}

}  // namespace prl::orchestrator
