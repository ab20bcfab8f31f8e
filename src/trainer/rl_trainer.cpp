#include "trainer/rl_trainer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/spans.hpp"
#include "base/units.hpp"
#include "base/waiting.hpp"
#include "monitor/format.hpp"
#include "nn/peft.hpp"
#include "trainer/agreement.hpp"
#include "trainer/shared_batch.hpp"
#include "wire/checks.hpp"

namespace prl::trainer {

namespace {

using Clock = std::chrono::steady_clock;

/// How often a wait looks at the stop token.
constexpr std::chrono::milliseconds kStopPoll{200};
/// Parts of the weights that ranks send begin at multiples of it.
constexpr std::int64_t kPartUnit = std::int64_t{1} << 10;

/// The masters that `policy` holds, in the compute dtype, one after the other; they stay as they are.
Tensor own_values(Policy& policy) {
  const nn::ElementRanges& own = policy.parameters().held();
  Tensor values = Tensor::empty(policy.context().runtime, {own.count()}, policy.options().compute);
  for (const nn::ElementRange range : own.ranges())
    if (range.count() > 0) policy.round(range, values.slice(own.place_of(range.begin), range.count()));
  return values;
}

/// RL as a TrainRun drives it.
class RlTraining final : public Training {
 public:
  RlTraining(const RlRunOptions& options, Policy& policy, const ReceiverFactory& make_receiver, weights::WeightChannel* channel,
             std::stop_token stop)
      : options_(options),
        trainer_(policy, options.step, options.seq_len, options.peak_flops),
        make_receiver_(make_receiver),
        channel_(channel),
        stop_(std::move(stop)) {}

  GradientStep& gradient_step() override { return trainer_.gradient_step(); }

  void begin(const TrainProgress& progress) override {
    trainer_.restore_progress(progress);
    if (is_first() && !options_.broadcasts.empty()) weights::remove_broadcasts_after(options_.broadcasts, progress.step);
    meet_senders();
    publish();
    receiver_.reset();
    if (is_first()) receiver_ = make_receiver_(progress.step + 1);
  }

  void recover(const TrainProgress& progress) override {
    trainer_.restore_progress(progress);
    const bool sent_own = sends_own_;
    meet_senders();
    has_next_ = batch_ && batch_->step == progress.step + 1;
    // What the lost rank 0 did: the queue still has what no rank has.
    const bool takes_over = is_first() && receiver_ == nullptr;
    if (takes_over) receiver_ = make_receiver_(progress.step + (has_next_ ? 2 : 1));
    // Where each rank sends what it holds, that is another part now.
    if (sent_own || sends_own_ || (brings_layers() ? gradient_step().is_any_rank(takes_over) : takes_over)) publish();
  }

  /// Whether next() would not wait. At rank 0.
  bool is_ready() {
    if (options_.orders.is_paused()) {
      forgive_waiting();
      return false;
    }
    if (!has_next_) batch_ = receiver_->pop(std::chrono::milliseconds(0));
    has_next_ = batch_.has_value();
    if (has_next_ || receiver_->is_closed()) return true;
    if (Clock::now() - waiting_since_ > options_.batch_timeout)
      fail(ErrorCode::kDeadline,
           "[trainer] no samples came from {} in {} s: is the orchestrator alive, and does it reach the inference server?", source(),
           std::chrono::duration_cast<std::chrono::seconds>(options_.batch_timeout).count());
    return false;
  }
  void forgive_waiting() { waiting_since_ = Clock::now(); }
  /// Whether next() finds the end of the samples. At rank 0.
  bool is_at_end() const { return !has_next_ && receiver_->is_closed(); }

  bool next(std::int64_t step, monitor::Metrics& metrics) override {
    check_stop();
    if (is_stopped_ && (options_.abort.stop_requested() || num_after_stop_++ >= options_.max_steps_after_stop)) return false;
    const auto start = Clock::now();
    const spans::Scope span(spans::Detail::kCoarse, "trainer", "waits for a batch", step);
    wait_for_batch(step);
    metrics["time/wait_for_batch"] = seconds_since(start);
    // A stop reaches the orchestrator too, whose samples may end before this role has looked.
    if (!batch_) check_stop();
    if (!batch_ && !is_stopped_ && options_.step.max_steps && options_.replay == nullptr)
      fail(ErrorCode::kUnavailable,
           "[trainer] the samples from {} ended before step {} of {}: the orchestrator has stopped; its log says why", source(), step,
           *options_.step.max_steps);
    return batch_.has_value();
  }

  void step(TrainProgress& progress, monitor::Metrics& metrics) override {
    metrics.merge(trainer_.step(*batch_));
    progress = trainer_.progress();
  }

  bool publish() override {
    const bool publishes = channel_ != nullptr && is_first();
    hold_part();
    const bool any_publishes = brings_layers() ? gradient_step().is_any_rank(publishes) : publishes;
    const bool any_proves = brings_layers() ? any_publishes || keeps_record() : publishes || (keeps_record() && is_first());
    Policy& policy = trainer_.policy();
    weights::Publication publication;
    publication.others = senders_;
    if (any_publishes && brings_values() && !sends_own_) policy.gather_values(publishes);
    if (any_proves) publication.manifest = policy.manifest();
    if (keeps_record()) record(publication.manifest.checksum);
    if (!publishes) return false;
    if (!brings_layers()) publication.handle = policy.weights();
    CheckpointOptions saved = options_.checkpoint.value_or(CheckpointOptions{});
    if (!options_.checkpoint) saved.companions.folder = policy.options().model;
    publication.save = [&policy, saved](const std::filesystem::path& folder) {
      policy.save_for_engines(folder, saved.companions, saved.max_shard_bytes);
    };
    if (sends_own_) publication.ranges = part_;
    publication.is_adapter = policy.options().lora.has_value();
    publication.flat = [this, &policy] {
      if (policy.options().lora) return nn::peft_image(*policy.weights(), *policy.parameters().table());
      return sends_own_ ? own_values(policy) : policy.flat_values();
    };
    channel_->publish(std::move(publication));
    return true;
  }

  bool waits_while_paused() const override { return true; }

  std::string line(std::int64_t step, const monitor::Metrics& metrics) const override { return rl_step_line(step, metrics); }

 private:
  /// All ranks have a part in the weights that one of them publishes.
  bool brings_layers() { return trainer_.policy().layered() != nullptr; }
  /// Of the values that are published, not of a base alone.
  bool brings_values() { return brings_layers() && !trainer_.policy().options().lora; }
  comm::Communicator& ranks() { return gradient_step().ranks(); }
  /// Takes the samples and publishes for all ranks.
  bool is_first() { return ranks().rank() == 0; }
  std::string source() const { return receiver_ != nullptr ? receiver_->describe() : "rank 0"; }

  bool keeps_record() const { return options_.recorder != nullptr || options_.replay != nullptr; }
  /// What the newest weights are and came from. All ranks call it, and all fail if the first one does.
  void record(std::uint64_t checksum) {
    agree(ranks(), [&] {
      if (!is_first()) return;
      const std::int64_t step = trainer_.progress().step;
      const bool has_batch = batch_ && batch_->step == step;
      if (options_.recorder != nullptr) options_.recorder->record(step, has_batch ? &*batch_ : nullptr, checksum);
      if (options_.replay != nullptr) options_.replay->check(step, checksum);
    });
  }

  std::int64_t num_values() { return trainer_.policy().parameters().table()->num_master_elements(); }
  /// Tells the first rank who else sends engines a part of new weights, and which. Where layers are brought each rank sends what it holds,
  /// which takes all of them.
  void meet_senders() {
    senders_.clear();
    part_.clear();
    sends_own_ = false;
    const int num_senders = std::min(options_.num_senders, ranks().size());
    if (num_senders <= 1 || (brings_values() && (num_senders < ranks().size() || options_.step.num_replicas > 1))) return;
    sends_own_ = brings_values();
    Policy& policy = trainer_.policy();
    const int rank = ranks().rank();
    if (sends_own_)
      for (const nn::ElementRange& range : policy.parameters().held().ranges()) part_.push_back({range.begin, range.end});
    else if (rank < num_senders)
      part_ = {weights::part_of(num_values(), num_senders, rank, kPartUnit)};
    std::erase_if(part_, [](const weights::ValueRange& range) { return range.count() == 0; });
    const std::string address = rank > 0 && !part_.empty() ? options_.sender->address() : "";
    for (const std::string& share : ranks().gather_bytes(weights::Share{address, part_}.to_text(), {.what = "what ranks send to engines"}))
      senders_.push_back(weights::Share::parse(share));
    std::erase_if(senders_, [](const weights::Share& share) { return share.address.empty(); });
    if (is_first()) log::info("{} ranks send engines a part of the weights each", senders_.size() + 1);
  }
  /// At a rank beside the first: keeps its part of the present weights for engines. A copy, so that the rest may go.
  void hold_part() {
    if (part_.empty() || is_first()) return;
    Policy& policy = trainer_.policy();
    Tensor own;
    if (sends_own_) {
      own = own_values(policy);
    } else {
      const Tensor whole = policy.flat_values(), from = whole.slice(part_.front().begin, part_.front().count());
      own = Tensor::empty(whole.runtime(), from.shape(), whole.dtype());
      whole.runtime()->copy_within(own.data(), from.data(), from.num_bytes());
    }
    options_.sender->versions().hold(policy.weights()->version.value, own, part_, num_values());
  }

  /// Once one rank is told to stop, all of them are.
  void check_stop() { is_stopped_ = is_stopped_ || gradient_step().is_any_rank(stop_.stop_requested()); }

  /// Sets batch_ to that of `step`, the same at every rank; to nothing at the end of the samples, or when a stopped run has nothing more to
  /// wait for. Ranks speak to each other all the while, so that one which is lost is noticed here too.
  void wait_for_batch(std::int64_t step) {
    Waiting waiting({.who = "the trainer",
                     .what = fmt::format("the orchestrator's samples of step {}", step),
                     .limit = options_.batch_timeout,
                     .detail = [this] { return source(); },
                     .first = options_.first_notice});
    std::optional<Clock::time_point> stopped_at;
    bool was_paused = false;
    for (;;) {
      const bool is_paused = is_first() && !is_stopped_ && options_.orders.is_paused();
      if (is_paused != was_paused) log::warning("{} step {}", is_paused ? "paused before" : "goes on with", step);
      was_paused = is_paused;
      if (is_paused) {
        waiting.restart();
        std::this_thread::sleep_for(kStopPoll);
        share_batch(ranks(), Supply::kWaiting, batch_);
        check_stop();
        continue;
      }
      if (!std::exchange(has_next_, false)) batch_ = is_first() ? receiver_->pop(kStopPoll) : std::nullopt;
      Supply supply = Supply::kWaiting;
      if (is_first() && batch_)
        supply = Supply::kBatch;
      else if (is_first() && is_over(stopped_at, waiting))
        supply = Supply::kEnd;
      supply = share_batch(ranks(), supply, batch_);
      if (supply != Supply::kWaiting) return;
      check_stop();
    }
  }

  /// At rank 0, which got no batch: whether none will come. Throws when the wait has been too long.
  bool is_over(std::optional<Clock::time_point>& stopped_at, Waiting& waiting) {
    if (receiver_->is_closed()) return true;
    if (is_stopped_) {
      const auto now = Clock::now();
      if (!stopped_at) stopped_at = now;
      const bool may_wait = options_.max_steps_after_stop > 0 && !options_.abort.stop_requested();
      return !may_wait || receiver_->was_closed_before() || now - *stopped_at >= options_.stop_grace;
    }
    if (waiting.is_expired()) waiting.fail_expired("is the orchestrator alive, and does it reach the inference server?");
    waiting.check();
    return false;
  }

  const RlRunOptions& options_;
  RlTrainer trainer_;
  const ReceiverFactory& make_receiver_;
  weights::WeightChannel* channel_;
  std::stop_token stop_;
  std::unique_ptr<rollouts::SampleReceiver> receiver_;
  std::optional<rollouts::RankBatch> batch_;
  weights::ValueRanges part_;            ///< that this rank sends engines of new weights, if several do
  std::vector<weights::Share> senders_;  ///< the others that do
  bool sends_own_ = false;               ///< each rank sends what it holds
  bool has_next_ = false;                ///< batch_ is of the step to come: a lost rank interrupted it
  Clock::time_point waiting_since_ = Clock::now();
  std::int64_t num_after_stop_ = 0;
  bool is_stopped_ = false;
};

/// What router replay needs of a row.
void check_experts(const wire::MicroBatch& row, const nn::ModelConfig& model) {
  const wire::RoutedExperts& experts = row.routed_experts;
  std::size_t first = 0;
  for (std::size_t s = 0; s < row.sequence_lengths.size(); ++s) {
    const auto count = static_cast<std::size_t>(row.sequence_lengths[s]);
    const bool is_sampled =
        std::ranges::any_of(std::span(row.loss_mask).subspan(first, count), [](std::uint8_t mask) { return mask != 0; });
    if (is_sampled && (experts.empty() || !experts.knows(static_cast<std::int64_t>(first))))
      fail(ErrorCode::kInvalidArgument,
           "enable_router_replay: a sample of environment '{}' does not say which experts its tokens had: servers tell it with "
           "inference.enable_return_routed_experts",
           row.env_names[s]);
    first += count;
  }
  if (experts.empty()) return;
  if (experts.num_layers != model.num_layers || experts.top_k != model.num_active_experts)
    fail(ErrorCode::kCorrupt, "a micro-batch has {} experts per token in {} layers, the model {} in {}", experts.top_k, experts.num_layers,
         model.num_active_experts, model.num_layers);
  for (const std::uint16_t id : experts.ids)
    if (id >= model.num_experts && id != wire::RoutedExperts::kUnknown)
      fail(ErrorCode::kCorrupt, "a micro-batch names expert {}, the model has {}", id, model.num_experts);
}

double share_of_known_experts(std::span<const wire::MicroBatch> rows) {
  std::int64_t num_known = 0, num_tokens = 0;
  for (const wire::MicroBatch& row : rows)
    for (std::int64_t i = 0; i < row.routed_experts.num_tokens(); ++i, ++num_tokens) num_known += row.routed_experts.knows(i);
  return num_tokens > 0 ? static_cast<double>(num_known) / static_cast<double>(num_tokens) : 0.0;
}

}  // namespace

RlTrainer::RlTrainer(Policy& policy, GradientStepOptions options, std::int64_t seq_len, double peak_flops)
    : policy_(policy), gradient_step_(policy, std::move(options)), seq_len_(seq_len), peak_(peak_flops) {}

void RlTrainer::check(const rollouts::RankBatch& batch, std::int64_t step) const {
  if (batch.step != step)
    fail(ErrorCode::kInvalidArgument,
         "the samples are of step {}, but the trainer is at step {}: orchestrator and trainer must resume from the same step", batch.step,
         step);
  for (const wire::MicroBatch& row : batch.micro_batches) {
    wire::check(row);
    if (static_cast<std::int64_t>(row.input_ids.size()) > seq_len_)
      fail(ErrorCode::kCorrupt, "a micro-batch has {} tokens, trainer.model.seq_len is {}: orchestrator.seq_len must not be larger",
           row.input_ids.size(), seq_len_);
    if (policy_.options().replays_routes) check_experts(row, policy_.config());
  }
}

monitor::Metrics RlTrainer::step(const rollouts::RankBatch& batch) {
  const std::int64_t step = progress_.step + 1;
  try {
    fail_alike([&] { check(batch, step); });
    std::int64_t num_samples = 0;
    for (const wire::MicroBatch& row : batch.micro_batches) num_samples += static_cast<std::int64_t>(row.sequence_lengths.size());
    const GradientStepResult result = gradient_step_.run(batch.micro_batches, PolicyVersion{step});
    progress_.step = step;
    progress_.total_tokens += result.num_tokens;
    progress_.total_samples += num_samples;

    monitor::Metrics metrics;
    put_step_metrics(metrics, result, *policy_.context().runtime);
    if (policy_.options().replays_routes) metrics["replayed_tokens"] = share_of_known_experts(batch.micro_batches);
    metrics["optim/lr"] = result.lr_next;
    for (const char* family : {"entropy/all", "mismatch_kl/all"})
      if (result.pool.values(family).empty()) metrics[std::string(family) + "/mean"] = 0.0;
    MetricPool pool = result.pool;
    pool.erase("loss");  // reported as the step's loss
    pool.put_all(metrics);
    const double entropy = result.pool.mean("entropy/all");
    if (entropy > 0) metrics["kl_ent_ratio/mean"] = result.pool.mean("mismatch_kl/all") / entropy;
    const double tokens_per_s = result.forward_backward_s > 0 ? static_cast<double>(result.num_tokens) / result.forward_backward_s : 0;
    put_throughput(metrics, tokens_per_s, result.forward_backward_s > 0 ? result.flops / result.forward_backward_s : 0, peak_,
                   gradient_step_.ranks().size());
    metrics["progress/total_tokens"] = static_cast<double>(progress_.total_tokens);
    metrics["progress/total_samples"] = static_cast<double>(progress_.total_samples);
    return metrics;
  } catch (const comm::PeerLost&) {
    throw;  // whoever goes on without the lost rank needs to know which it is
  } catch (const SharedError& error) {
    throw SharedError(error.with_context(fmt::format("[trainer] step {}", step)));
  } catch (const Error& error) {
    throw error.with_context(fmt::format("[trainer] step {}", step));
  }
}

struct RlRun::Impl {
  Impl(RlRunOptions given, Policy& policy, ReceiverFactory receiver, weights::WeightChannel* channel, monitor::Monitor& monitor)
      : options(std::move(given)),
        make_receiver(std::move(receiver)),
        training(options, policy, make_receiver, channel, {}),
        run(options, policy, training, monitor, {}) {}
  const RlRunOptions options;
  const ReceiverFactory make_receiver;
  RlTraining training;
  TrainRun run;
};

RlRun::RlRun(RlRunOptions options, Policy& policy, ReceiverFactory make_receiver, weights::WeightChannel* channel,
             monitor::Monitor& monitor)
    : impl_(std::make_unique<Impl>(std::move(options), policy, std::move(make_receiver), channel, monitor)) {
  PRL_CHECK(!impl_->options.max_losses && !impl_->options.is_bench, "a run beside others heals no ranks and is no benchmark");
}
RlRun::~RlRun() = default;
void RlRun::begin() { impl_->run.begin(); }
bool RlRun::is_ready() { return impl_->run.is_done() || impl_->training.is_ready(); }
void RlRun::forgive_waiting() { impl_->training.forgive_waiting(); }
bool RlRun::is_done() const { return impl_->run.is_done(); }
bool RlRun::is_at_end() const { return impl_->run.is_done() || impl_->training.is_at_end(); }
bool RlRun::step() {
  const bool stepped = impl_->run.step();
  impl_->training.forgive_waiting();
  return stepped;
}
TrainRunResult RlRun::finish() {
  impl_->run.finish();
  return impl_->run.result();
}
void RlRun::give_up_on(const comm::PeerLost& lost) { impl_->run.give_up_on(lost); }
const TrainProgress& RlRun::progress() const { return impl_->run.progress(); }

TrainRunResult run_rl_trainer(const RlRunOptions& given, Policy& policy, const ReceiverFactory& make_receiver,
                              weights::WeightChannel* channel, monitor::Monitor& monitor, std::stop_token stop) {
  RlRunOptions options = given;
  options.apply_bench();
  RlTraining training(options, policy, make_receiver, channel, stop);
  return TrainRun(options, policy, training, monitor, stop).run();
}

}  // namespace prl::trainer
