#include "orchestrator/batch_shipper.hpp"

#include <functional>
#include <utility>

#include "base/log.hpp"
#include "base/spans.hpp"
#include "base/units.hpp"
#include "base/waiting.hpp"

namespace prl::orchestrator {

namespace {

constexpr std::chrono::milliseconds kPushSlice{250};  // how soon a full queue notices a stop

}  // namespace

BatchShipper::BatchShipper(std::shared_ptr<rollouts::SampleSender> sender, Options options, RunControl& control)
    : sender_(std::move(sender)), options_(std::move(options)), control_(control) {
  if (options_.pack.num_ranks != sender_->num_ranks())
    fail(ErrorCode::kInvalidArgument, "batches are packed for {} ranks, but the sample queue has {}", options_.pack.num_ranks,
         sender_->num_ranks());
}

bool BatchShipper::is_trained_on(std::int64_t step) const {
  if (!options_.newest_policy) return false;
  const std::optional<PolicyVersion> newest = options_.newest_policy();
  return newest && newest->value >= step;
}

asio::awaitable<BatchShipper::Shipment> BatchShipper::ship(std::int64_t step, std::vector<wire::TrainingSample> samples) {
  Shipment shipment;
  net::TimePoint begin = net::Clock::now();
  auto shared = std::make_shared<std::vector<wire::TrainingSample>>(std::move(samples));
  auto losses = std::make_shared<wire::PackLosses>();
  std::function<BatchPtr()> work = [shared, pack = options_.pack, step, losses] {
    auto packed = std::make_shared<wire::TrainingBatch>();
    packed->step = step;
    packed->ranks = wire::pack(std::move(*shared), pack, losses.get());
    return BatchPtr(std::move(packed));
  };
  auto packing = thread_.run<BatchPtr>(std::move(work), begin + kFileDeadline, "packing");
  BatchPtr packed = co_await std::move(packing);
  shipment.seconds_pack = seconds_since(begin);
  shipment.losses = *losses;
  if (losses->num_cut_tokens > 0)
    log::warning("batch {}: {} samples were cut to rows of {} tokens and {} have no token left, {} tokens in all: raise seq_len", step,
                 losses->num_cut, options_.pack.seq_len, losses->num_lost, losses->num_cut_tokens);
  begin = net::Clock::now();
  auto pushing = push(std::move(packed));
  const spans::Scope span(spans::Detail::kCoarse, "sample queue", "waits for the trainer to take a batch", step);
  shipment.is_sent = co_await std::move(pushing);
  shipment.seconds_push = seconds_since(begin);
  co_return shipment;
}

asio::awaitable<bool> BatchShipper::push(BatchPtr batch) {
  Waiting waiting({.who = "the orchestrator",
                   .what = fmt::format("the trainer to take a batch, so that batch {} can be sent", batch->step),
                   .limit = options_.timeout,
                   .detail = [this] { return sender_->describe(); }});
  for (;;) {
    std::function<bool()> work = [sender = sender_, batch] { return sender->push(*batch, kPushSlice); };
    auto pushing = thread_.run<bool>(std::move(work), net::Clock::now() + kFileDeadline, "the sample queue");
    if (co_await std::move(pushing)) co_return true;
    if (control_.is_stopped()) co_return false;
    control_.check_failure();
    if (is_trained_on(batch->step)) co_return true;
    if (options_.orders.is_paused()) waiting.restart();
    waiting.check();
    if (waiting.is_expired()) waiting.fail_expired("is the trainer running?");
  }
}

asio::awaitable<void> BatchShipper::drain(std::int64_t last_step) {
  Waiting waiting({.who = "the orchestrator",
                   .what = fmt::format("the trainer to take every batch up to {}", last_step),
                   .limit = options_.timeout,
                   .detail = [this] { return sender_->describe(); }});
  for (;;) {
    const bool is_stopped = control_.is_stopped();
    std::function<bool()> work = [sender = sender_] { return sender->drain(kPushSlice); };
    auto draining = thread_.run<bool>(std::move(work), net::Clock::now() + kFileDeadline, "the sample queue");
    if (co_await std::move(draining) || is_stopped) co_return;
    waiting.check();
    if (!waiting.is_expired()) continue;
    log::warning("the trainer has not taken every batch up to {} in {} s ({}): is it running?", last_step, options_.timeout.count() / 1000,
                 sender_->describe());
    co_return;
  }
}

}  // namespace prl::orchestrator
