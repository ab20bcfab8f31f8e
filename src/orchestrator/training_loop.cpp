#include "orchestrator/training_loop.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/log_progress.hpp"

namespace prl::orchestrator {

using namespace std::chrono_literals;

namespace {

constexpr auto kTick = 500ms;  // longest sleep of the loop

double seconds_between(net::TimePoint begin, net::TimePoint end) { return std::chrono::duration<double>(end - begin).count(); }

}  // namespace

void TrainingLoop::on_progress() {
  idle_.restart();
  parts_.control.wake();
}

asio::awaitable<void> TrainingLoop::run() {
  last_ship_ = net::Clock::now();
  idle_.restart();
  // What a killed process was about to send comes before anything new.
  while (options_.is_recovered && parts_.assembler.is_ready() && !parts_.control.is_stopped()) {
    auto shipping = ship();
    co_await std::move(shipping);
  }
  while (!parts_.recorder.is_done() && !parts_.control.is_stopped()) {
    parts_.control.check_failure();
    if (options_.orders.is_paused()) {
      auto waiting = wait_while_paused();
      co_await std::move(waiting);
      continue;
    }
    if (parts_.evals.is_due()) {
      phases_.go_to("evaluates");
      auto evaluating = parts_.evals.run_due();
      co_await std::move(evaluating);
      idle_.restart();
    }
    const net::TimePoint now = net::Clock::now();
    const BatchAssembler::Opened opened = parts_.assembler.open_groups(now);
    if (opened.has_started) idle_.restart();
    if (parts_.assembler.is_ready()) {
      auto shipping = ship();
      co_await std::move(shipping);
      continue;
    }
    if (parts_.assembler.collect_one()) continue;
    const bool is_held = parts_.assembler.waits_for_open_groups();
    phases_.go_to(is_held                 ? "waits for its oldest rollouts"
                  : opened.is_gate_closed ? "waits for new weights"
                                          : "collects rollouts",
                  parts_.assembler.dispatcher().step());
    check_held(is_held);
    log_status(opened.is_gate_closed);
    check_stall(opened.is_gate_closed);
    co_await parts_.control.wait_until(now + kTick);
    if (is_held)
      seconds_held_ += seconds_between(now, net::Clock::now());
    else if (opened.is_gate_closed)
      seconds_gate_closed_ += seconds_between(now, net::Clock::now());
  }
  phases_.end();
}

asio::awaitable<void> TrainingLoop::wait_while_paused() {
  phases_.go_to("is paused");
  log::warning("paused with {} of {} rollouts collected", parts_.assembler.num_queued(), options_.batch_size);
  while (options_.orders.is_paused() && !parts_.control.is_stopped()) {
    parts_.control.check_failure();
    co_await parts_.control.wait_until(net::Clock::now() + kTick);
  }
  log::warning("goes on collecting");
  idle_.restart();
}

/// Cuts, packs and sends the batch in collection. Changes nothing if it turned out empty, or when stopped before it was sent.
asio::awaitable<void> TrainingLoop::ship() {
  held_.reset();
  StepFacts facts;
  facts.step = parts_.assembler.dispatcher().step();
  facts.policy_version = parts_.policy.version().value;
  facts.seconds_generate = seconds_between(last_ship_, net::Clock::now());
  auto keeping = parts_.recorder.keep_recovery();
  co_await std::move(keeping);
  phases_.go_to("packs", facts.step);
  const std::shared_ptr<CollectedBatch> batch = parts_.assembler.take();
  if (!batch) co_return;
  // Said before the batch is sent: the trainer, which has not seen it yet, looks when it has trained on it.
  if (options_.orders.wants_checkpoint() && parts_.recorder.has_checkpoints()) {
    options_.orders.set_checkpoint_step(facts.step);
    parts_.recorder.save_after(facts.step);
  }
  BatchShipper::Shipment shipment{.is_sent = facts.policy_version >= facts.step};  // sent by a process before this one, and trained on
  if (!shipment.is_sent) {
    auto shipping = parts_.shipper.ship(facts.step, std::move(batch->samples));
    shipment = co_await std::move(shipping);
  }
  if (!shipment.is_sent) {
    parts_.assembler.put_back(std::move(batch->rollouts));
    co_return;
  }
  phases_.go_to("records", facts.step);
  const net::TimePoint now = net::Clock::now();
  facts.seconds_pack = shipment.seconds_pack;
  facts.seconds_push = shipment.seconds_push;
  facts.losses = shipment.losses;
  facts.seconds_step = seconds_between(std::exchange(last_ship_, now), now);
  facts.seconds_wait_for_policy = std::exchange(seconds_gate_closed_, 0.0);
  facts.seconds_wait_for_oldest = std::exchange(seconds_held_, 0.0);
  facts.seconds_update_weights = parts_.policy.seconds_of_last_update();
  idle_.restart();
  parts_.recorder.count(*batch, facts.step);
  monitor::Metrics pools;
  parts_.assembler.take_metrics(facts, pools);
  if (options_.add_metrics) options_.add_metrics(pools);
  load_.take(pools);
  parts_.assembler.advance_step();
  // The next batch's own version; after the last batch, the newest.
  if (options_.strict_lag)
    parts_.policy.allow(PolicyVersion{parts_.recorder.is_done() ? std::numeric_limits<std::int64_t>::max()
                                                                : parts_.assembler.dispatcher().step() - 1 - *options_.strict_lag});
  auto recording = parts_.recorder.record(batch, facts, std::move(pools));
  co_await std::move(recording);
}

void TrainingLoop::check_held(bool is_held) {
  if (!is_held) return held_.reset();
  if (!held_)
    held_.emplace(Waiting::Options{
        .who = "the orchestrator",
        .what = fmt::format("the oldest rollouts in flight to finish, before full batch {} ships", parts_.assembler.dispatcher().step()),
        .limit = parts_.assembler.max_rollout_time() + 60s,
        .detail =
            [this] {
              return fmt::format("{} groups are open, and after this batch some would be too old to train on",
                                 parts_.assembler.dispatcher().num_open_groups());
            },
        .first = std::min(options_.status_interval, std::chrono::milliseconds(10s))});
  held_->check();
}

void TrainingLoop::log_status(bool is_gate_closed) {
  if (net::Clock::now() - last_status_ < options_.status_interval) return;
  last_status_ = net::Clock::now();
  const Dispatcher& dispatcher = parts_.assembler.dispatcher();
  const char* wait = parts_.policy.is_updating()                ? ", inference takes the next policy"
                     : is_gate_closed                           ? ", waiting for the next policy"
                     : parts_.assembler.waits_for_open_groups() ? ", waiting for its oldest rollouts in flight"
                                                                : "";
  log::progress("collecting batch {}: {}/{} rollouts, {} in flight, policy v{}{}", dispatcher.step(), parts_.assembler.num_queued(),
                options_.batch_size, dispatcher.num_inflight(), dispatcher.version().value, wait);
}

/// Says whom the loop waits for, and ends the run when that took too long.
void TrainingLoop::check_stall(bool is_gate_closed) {
  if (parts_.policy.is_updating()) return idle_.restart();  // the update says so, and has its own deadline
  const Dispatcher& dispatcher = parts_.assembler.dispatcher();
  const std::int64_t num_inflight = dispatcher.num_inflight();
  std::chrono::milliseconds limit = options_.policy_timeout;
  if (num_inflight > 0) limit = std::max(limit, parts_.assembler.max_rollout_time() + 60s);
  const bool is_trainer_due = is_gate_closed && num_inflight == 0;
  if (is_trainer_due)
    idle_.expect(fmt::format("the trainer to publish a policy newer than v{}, for batch {}", dispatcher.version().value, dispatcher.step()),
                 limit);
  else
    idle_.expect(fmt::format("inference to finish one of {} rollouts in flight, for batch {}", num_inflight, dispatcher.step()), limit);
  idle_.check();
  if (idle_.is_expired()) idle_.fail_expired(is_trainer_due ? "is the trainer running?" : "");
}

std::string TrainingLoop::describe_idle() const {
  return fmt::format("{} of {} rollouts collected, policies from {}, rollouts from {}", parts_.assembler.num_queued(), options_.batch_size,
                     parts_.policy.source().describe(), options_.rollouts_from);
}

}  // namespace prl::orchestrator
