#include "engine/core.hpp"

#include <algorithm>
#include <cmath>
#include <exception>
#include <iterator>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::engine {

namespace {

/// DraftPlanOptions::least_gain on devices that work beside the host: what is lost there is a gap between two steps, and that a step
/// of several tokens per sequence is not replayed from a recording.
constexpr double kLeastDraftGain = 0.125;
/// DraftPlanOptions::base_rows. A GPU such as the H200 has time for about 200 products in bfloat16 while it reads a weight; of a CPU
/// it was measured (docs/notebook/2026-11-28-speculative-decoding.md).
constexpr double kBaseRowsOfGpu = 200, kBaseRowsOfCpu = 16;

/// What a step found of a prompt's log-probabilities goes to the sequence.
void append_prompt_logprobs(Sequence& sequence, const PlanRow& row, StepOutput::Row& output) {
  const wire::SamplingParams& sampling = sequence.request->sampling;
  const bool has_top = *sampling.prompt_logprobs > 0;
  if (sequence.prompt_logprobs.empty()) {  // nothing predicts the first token
    sequence.prompt_logprobs.push_back(0.0f);
    if (has_top) sequence.prompt_top_logprobs.emplace_back();
    if (sampling.prompt_ranks) sequence.prompt_ranks.push_back(0);
  }
  const auto count = static_cast<std::ptrdiff_t>(row.num_prompt_logprobs);
  const auto append = [&](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.begin() + count));
  };
  append(sequence.prompt_logprobs, output.prompt_logprobs);
  if (has_top) append(sequence.prompt_top_logprobs, output.prompt_top_logprobs);
  if (sampling.prompt_ranks) append(sequence.prompt_ranks, output.prompt_ranks);
}

/// The sequence gets a token, drawn with the weights of `version`. kNone if it goes on.
wire::FinishReason append_token(Sequence& sequence, std::int32_t token, PolicyVersion version, std::int64_t block_size) {
  const ResolvedRequest& resolved = *sequence.request;
  if (sequence.num_output_tokens() == 0) {
    sequence.tokens.reserve(static_cast<std::size_t>(sequence.num_prompt_tokens + resolved.max_new_tokens));
    sequence.blocks.reserve(static_cast<std::size_t>((sequence.num_prompt_tokens + resolved.max_new_tokens) / block_size + 1));
    sequence.version_first = version;
  }
  sequence.tokens.push_back(token);
  sequence.rule_answer.reset();
  sequence.version_last = version;
  const bool may_stop = sequence.num_output_tokens() >= resolved.sampling.min_tokens;
  if (may_stop && std::binary_search(resolved.stop_ids.begin(), resolved.stop_ids.end(), token)) return wire::FinishReason::kStop;
  if (sequence.num_output_tokens() >= resolved.max_new_tokens) return wire::FinishReason::kLength;
  return wire::FinishReason::kNone;
}

struct AppendedTokens {
  std::int64_t num = 0;  ///< one at least
  wire::FinishReason reason = wire::FinishReason::kNone;
};
/// The sequence gets the tokens of a row that stand: those that were drawn behind drafts that are what was drawn, up to one that ends the
/// request or was not drawn well. output.num_good is not 0.
AppendedTokens append_tokens(const PlanRow& row, const StepOutput::Row& output, PolicyVersion version, std::int64_t block_size) {
  AppendedTokens out;
  bool stands = true;
  while (stands && out.reason == wire::FinishReason::kNone && out.num < output.num_good) {
    const auto at = static_cast<std::size_t>(out.num++);
    const std::int32_t token = output.samples[at].token;
    out.reason = append_token(*row.sequence, token, version, block_size);
    stands = out.num <= row.num_drafts && row.drafts[at] == token;
  }
  if (stands && out.reason == wire::FinishReason::kNone && !output.error.empty()) out.reason = wire::FinishReason::kError;
  return out;
}

/// The version of what computes the sequence: of its adapter, or of the weights.
PolicyVersion version_of(const Sequence& sequence, PolicyVersion of_weights) {
  const ServedAdapter* const adapter = sequence.request->served.get();
  return adapter != nullptr ? adapter->version : of_weights;
}

void count_step(EngineStats& stats, const StepPlan& plan) {
  const auto& bounds = EngineStats::kStepTokenBounds;
  const auto bucket = std::lower_bound(bounds.begin(), bounds.end(), plan.num_tokens) - bounds.begin();
  ++stats.num_steps_by_tokens[static_cast<std::size_t>(bucket)];
  stats.num_step_tokens += plan.num_tokens;
}

/// Of a request that ends, before its blocks go: which experts its first `num_tokens` had, if it wants to know.
void take_routes(ModelRunner& runner, CoreRequest& request, std::int64_t num_tokens, std::int64_t block_size) {
  const auto& start = request.resolved.sampling.routed_experts_start;
  if (!start || !request.routes.empty()) return;
  const auto num_held = static_cast<std::int64_t>(request.sequence.blocks.size()) * block_size;
  try {
    request.routes = runner.routes_of(request.sequence.blocks, *start, std::min(num_tokens, num_held));
  } catch (const std::exception& error) {  // the tokens are good all the same
    log::error("request {} is told no experts: {}", request.id.value, error.what());
  }
}

void add_sample(wire::GenerateOutput& delta, const CoreRequest& request, const ops::SampleResult& sample, PolicyVersion version) {
  delta.token_ids.push_back(sample.token);
  delta.logprobs.push_back(sample.logprob);
  delta.versions.push_back(version.value);
  const auto& named = request.resolved.sampling.logprob_token_ids;
  if (named.empty() && request.resolved.sampling.logprobs.value_or(0) == 0) return;
  auto& top = delta.top_logprobs.emplace_back();
  for (std::size_t k = 0; k < std::min(named.size(), sample.named_logprobs.size()); ++k)
    top.push_back({named[k], sample.named_logprobs[k]});
  for (const auto& [id, logprob] : sample.top_logprobs) top.push_back({id, logprob});
}

std::unique_ptr<DiskBlocks> make_disk_blocks(const CoreOptions& options, ModelRunner& runner) {
  if (options.num_disk_blocks == 0) return nullptr;
  BlockFiles* const files = runner.block_files();
  PRL_CHECK(files != nullptr && options.num_host_blocks > 0, "blocks in files, and a runner without files or host memory");
  return std::make_unique<DiskBlocks>(options.num_disk_blocks, options.block_size, *files);
}

CoreRequest& request_of(const Sequence& sequence) { return *static_cast<CoreRequest*>(sequence.owner); }

}  // namespace

EngineCore::EngineCore(const CoreOptions& options, std::unique_ptr<ModelRunner> runner, std::unique_ptr<DraftModel> drafts)
    : adapters_(options.adapters),
      disk_(make_disk_blocks(options, *runner)),
      host_(options.num_host_blocks > 0 ? std::make_unique<HostBlocks>(options.num_host_blocks, options.block_size, disk_.get()) : nullptr),
      pool_(options.num_blocks, options.block_size, host_.get()),
      scheduler_(
          [&] {
            SchedulerOptions scheduler = options.scheduler;
            scheduler.drafts.least_gain = runner->works_beside_host() ? kLeastDraftGain : 0;
            scheduler.drafts.base_rows = runner->works_beside_host() ? kBaseRowsOfGpu : kBaseRowsOfCpu;
            scheduler.may_draw = [this](Sequence& sequence) { return may_draw(sequence); };
            return scheduler;
          }(),
          pool_, host_.get(), disk_.get()),
      tenants_(scheduler_),
      runner_(std::move(runner)),
      drafts_(std::move(drafts)) {
  PRL_CHECK(options.scheduler.drafts.has_model == (drafts_ != nullptr), "drafts of a model, and no model, or the other way round");
  if (host_ != nullptr && runner_->block_memory() != nullptr)
    kv_ = std::make_unique<KvKeys>(std::make_unique<BlockExchange>(pool_, *host_, disk_.get(), *runner_->block_memory()), scheduler_,
                                   *runner_, *adapters_, [this] { deliver(); });
  if (const auto weights = runner_->weights()) version_ = weights->version;
  scheduler_.change_weights(version_);
}

EngineCore::~EngineCore() {
  for (auto& [id, request] : requests_) scheduler_.remove(request->sequence);
}

void EngineCore::add(RequestId id, ResolvedRequest resolved, EventSink sink) {
  auto owned = std::make_unique<CoreRequest>();
  CoreRequest& request = *owned;
  request.id = id;
  request.resolved = std::move(resolved);
  request.sink = std::move(sink);
  request.event.id = id;
  request.event.delta.request_id = fmt::format("{}", id.value);
  if (kv_ != nullptr && request.resolved.kv_key != 0) request.brought = kv_->exchange().adopt(request.resolved.kv_key);
  if (wire::as_slow(request.resolved.sampling.token_rule) != nullptr) ++num_ruled_;
  Sequence& sequence = request.sequence;
  sequence.request_id = id;
  sequence.arrival = num_arrivals_++;
  sequence.request = &request.resolved;
  sequence.owner = &request;
  sequence.seed = request.resolved.seed;
  // Waiting requests may be many: room for the output is reserved with the first token (see append_token).
  sequence.tokens = request.resolved.prompt_ids;
  sequence.num_prompt_tokens = static_cast<std::int64_t>(request.resolved.prompt_ids.size());
  sequence.tenant = tenants_.of(request.resolved.served);
  requests_.emplace(id, std::move(owned));
  scheduler_.add(sequence);
}

void EngineCore::cancel(RequestId id) {
  deliver();
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  end(*it->second, wire::FinishReason::kAbort, "");
  drop_ended();
}

void EngineCore::stop(RequestId id, std::string stop_string) {
  deliver();
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  CoreRequest& request = *it->second;
  request.begin_event(version_of(request.sequence, version_));
  request.event.delta.stop_string = std::move(stop_string);
  send(request, wire::FinishReason::kStop);
  drop_ended();
}

bool EngineCore::step() {
  waits_for_rules_ = has_failed_rule_ = false;
  if (adapters_->has_news()) {
    deliver();  // news are of the old versions
    adapters_->apply_news();
  }
  if (steps_.size() == 0) {
    if (num_ruled_ > 0) end_failed_rules();
    StepPlan& plan = steps_.next_plan();
    scheduler_.plan(plan);
    if (plan.rows.empty()) {
      last_settled_.reset();
      waits_for_rules_ = plan.has_held && !has_failed_rule_;
      if (plan.has_held) {
        send_news();
        drop_ended();
        return false;
      }
      PRL_CHECK(!scheduler_.has_work(), "{} sequences run and {} wait, but no step was planned", scheduler_.num_running(),
                scheduler_.num_waiting());
      return false;
    }
    try {
      if (drafts_ != nullptr) drafts_->draw(plan);
      adapters_->bring(plan, *runner_);
      steps_.begin(*runner_);
      if (host_ != nullptr) host_->carried_out();
    } catch (const std::exception& error) {
      send_news();
      scheduler_.give_up_copies();
      fail_step(plan, error.what());
      drop_ended();
      return true;
    }
  }
  if (runner_->works_beside_host()) {
    scheduler_.plan_ahead(steps_.oldest().plan, steps_.next_plan());
    try {
      if (!steps_.next_plan().rows.empty()) {
        steps_.begin(*runner_);
        if (host_ != nullptr) host_->carried_out();
      }
    } catch (const std::exception& error) {
      scheduler_.give_up_copies();
      log::warning("a step could not be enqueued behind the one in flight and is planned again: {}", error.what());
    }
  }
  send_news();
  settle();
  return true;
}

bool EngineCore::may_draw(Sequence& sequence) {
  const wire::SlowTokenRule* const rule = wire::as_slow(sequence.request->sampling.token_rule);
  if (rule == nullptr) return true;
  if (!sequence.rule_answer) sequence.rule_answer = rule->ask(sequence.output(), sequence.rule_cursor, rule_news_);
  if (!sequence.rule_answer->is_ready.load(std::memory_order_acquire)) return false;
  if (rule->failure().empty()) return true;
  has_failed_rule_ = true;  // its requests end before the next step is planned
  return false;
}

void EngineCore::end_failed_rules() {
  std::vector<std::pair<CoreRequest*, std::string>> failed;
  for (const auto& [id, request] : requests_) {
    if (const wire::SlowTokenRule* const rule = wire::as_slow(request->resolved.sampling.token_rule); rule != nullptr)
      if (std::string failure = rule->failure(); !failure.empty()) failed.emplace_back(request.get(), std::move(failure));
  }
  if (failed.empty()) return;
  send_news();
  for (const auto& [request, failure] : failed)
    if (request->sequence.state != SequenceState::kFinished) end(*request, wire::FinishReason::kError, failure);
  drop_ended();
}

void EngineCore::settle() {
  StepsUnderWay::Step& step = steps_.oldest();
  try {
    runner_->finish(step.plan, step.output);
  } catch (const std::exception& error) {
    steps_.retire_oldest();
    // What was enqueued behind it goes on from what it left, for sequences that end now.
    for (; steps_.size() > 0; steps_.retire_oldest()) {
      try {
        runner_->finish(steps_.oldest().plan, steps_.oldest().output);
      } catch (const std::exception& later) {
        log::debug("so did the step behind it: {}", later.what());
      }
    }
    fail_step(step.plan, error.what());
    drop_ended();
    return;
  }
  steps_.retire_oldest();
  num_failures_in_a_row_ = 0;
  count_step(counters_, step.plan);
  const auto now = std::chrono::steady_clock::now(), last = std::exchange(last_settled_, now).value_or(now);
  scheduler_.commit(step.plan, last == now ? std::nullopt : std::optional(std::chrono::duration<double>(now - last).count()));
  bool is_wanted_now = !runner_->works_beside_host();
  for (std::size_t i = 0; i < step.plan.rows.size(); ++i) is_wanted_now |= accept(step.plan.rows[i], step.output.rows[i]);
  if (is_wanted_now || !scheduler_.has_work()) send_news();
  drop_ended();
}

void EngineCore::deliver() {
  send_news();
  while (steps_.size() > 0) {
    settle();
    send_news();
  }
  drop_ended();
}

bool EngineCore::accept(const PlanRow& row, StepOutput::Row& output) {
  Sequence& sequence = *row.sequence;
  if (sequence.state == SequenceState::kFinished) return false;  // by the step before, or by a sink that threw
  CoreRequest& request = request_of(sequence);
  release_tail_first(request.brought);  // its blocks are its own now
  News news{.request = &request, .output = &output};
  if (!output.error.empty() && output.num_good == 0) {
    // Whatever made this row useless may sit in blocks that others would find.
    scheduler_.reset_prefix_cache();
    news.reason = wire::FinishReason::kError;
  } else {
    if (row.num_prompt_logprobs > 0 || sequence.wants_prompt_logprobs()) append_prompt_logprobs(sequence, row, output);
    counters_.num_prompt_tokens += std::max<std::int64_t>(0, std::min(row.known_end(), sequence.num_prompt_tokens) - row.first_token);
    if (!row.is_sampled) return false;
    const AppendedTokens appended = append_tokens(row, output, version_of(sequence, version_), pool_.block_size());
    scheduler_.accept(row, appended.num);
    counters_.num_generation_tokens += appended.num;
    counters_.num_drafts += row.num_drafts > 0 ? 1 : 0;
    counters_.num_draft_tokens += row.num_drafts;
    counters_.num_accepted_tokens += appended.num - 1;
    news.num_tokens = appended.num;
    news.reason = appended.reason;
    if (news.reason == wire::FinishReason::kError) scheduler_.reset_prefix_cache();
  }
  if (news.reason != wire::FinishReason::kNone) {
    if (news.reason != wire::FinishReason::kError) take_routes(*runner_, request, sequence.num_tokens() - 1, pool_.block_size());
    scheduler_.remove(sequence);
  }
  news_.push_back(news);
  return !request.resolved.sampling.stop.empty();
}

void EngineCore::send_news() {
  for (const News& news : news_) {
    CoreRequest& request = *news.request;
    if (request.is_sink_broken) continue;
    const PolicyVersion version = version_of(request.sequence, version_);
    request.begin_event(version);
    wire::GenerateOutput& delta = request.event.delta;
    for (std::int64_t i = 0; i < news.num_tokens; ++i)
      add_sample(delta, request, news.output->samples[static_cast<std::size_t>(i)], version);
    if (news.reason == wire::FinishReason::kError) {
      delta.error = std::move(news.output->error);
      news.output->error.clear();
    }
    if (news.reason == wire::FinishReason::kStop) delta.stop_token_id = delta.token_ids.back();
    send(request, news.reason);
  }
  news_.clear();
}

void EngineCore::end(CoreRequest& request, wire::FinishReason reason, const std::string& error) {
  request.begin_event(version_of(request.sequence, version_));
  request.event.delta.error = error;
  send(request, reason);
}

void EngineCore::send(CoreRequest& request, wire::FinishReason reason) {
  if (reason == wire::FinishReason::kStop || reason == wire::FinishReason::kLength)
    take_routes(*runner_, request, request.sequence.num_tokens_computed, pool_.block_size());
  if (reason != wire::FinishReason::kNone) request.end_event(reason);
  if (request.send_event() && reason == wire::FinishReason::kNone) return;
  scheduler_.remove(request.sequence);
  ended_.push_back(request.id);
  if (reason == wire::FinishReason::kStop) ++counters_.num_finished_stop;
  if (reason == wire::FinishReason::kLength) ++counters_.num_finished_length;
  if (reason == wire::FinishReason::kAbort) ++counters_.num_finished_abort;
}

std::vector<RequestId> EngineCore::take_ended() {
  drop_ended();
  num_dropped_ = 0;
  return std::exchange(ended_, {});
}

void EngineCore::drop_ended() {
  for (; num_dropped_ < ended_.size(); ++num_dropped_) {
    auto node = requests_.extract(ended_[num_dropped_]);
    if (node.empty()) continue;
    if (wire::as_slow(node.mapped()->resolved.sampling.token_rule) != nullptr) --num_ruled_;
    leaving_.push_back(std::move(node.mapped()));
  }
  std::erase_if(leaving_, [](const auto& request) { return request->sequence.num_steps_under_way == 0; });
}

void EngineCore::fail_step(const StepPlan& plan, const std::string& error) {
  ++num_failures_in_a_row_;
  log::error("a step over {} sequences failed and ends them: {}", plan.rows.size(), error);
  scheduler_.reset_prefix_cache();
  for (const PlanRow& row : plan.rows)
    if (row.sequence->state != SequenceState::kFinished) end(request_of(*row.sequence), wire::FinishReason::kError, error);
}

void EngineCore::abort_all(wire::FinishReason reason, const std::string& error) {
  deliver();
  std::vector<RequestId> ids;
  ids.reserve(requests_.size());
  for (const auto& [id, request] : requests_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  for (const RequestId id : ids) end(*requests_.at(id), reason, error);
  drop_ended();
}

WeightProof EngineCore::update_weights(nn::WeightsPtr weights) {
  deliver();  // news are of the old version
  const PolicyVersion version = weights->version;
  const nn::WeightsPtr former = runner_->weights();
  runner_->set_weights(std::move(weights));
  WeightProof proof;
  try {
    if (drafts_ != nullptr) drafts_->change_weights(*runner_->weights());
    proof = runner_->prove();
    if (!std::ranges::all_of(proof.probe_logprobs, [](float value) { return std::isfinite(value); }))
      fail(ErrorCode::kCorrupt,
           "the weights of version {} give log-probabilities that are not finite on the probe prompt; the former ones stay", version.value);
  } catch (const Error&) {
    runner_->set_weights(former);
    if (drafts_ != nullptr) drafts_->change_weights(*former);
    throw;
  }
  version_ = version;
  if (kv_ != nullptr) kv_->set_checksum(proof.checksum);
  scheduler_.change_weights(version);
  return proof;
}

EngineStats EngineCore::stats() const {
  EngineStats stats = counters_;
  stats.num_running = scheduler_.num_running();
  stats.num_waiting = scheduler_.num_waiting();
  stats.num_preemptions = scheduler_.stats().num_preemptions;
  stats.num_prefix_queries_tokens = scheduler_.stats().num_prefix_query_tokens;
  stats.num_prefix_hit_tokens = scheduler_.stats().num_prefix_hit_tokens;
  stats.num_blocks_total = pool_.num_blocks();
  stats.block_size = pool_.block_size();
  stats.num_blocks_used = pool_.num_blocks() - pool_.num_free();
  stats.num_host_hit_tokens = scheduler_.stats().num_host_hit_tokens;
  if (host_ != nullptr) {
    stats.num_host_blocks_total = host_->num_blocks();
    stats.num_host_blocks_used = host_->num_cached();
    stats.num_blocks_saved = host_->num_saved();
    stats.num_blocks_restored = host_->num_restored();
  }
  stats.num_disk_hit_tokens = scheduler_.stats().num_disk_hit_tokens;
  if (disk_ != nullptr) {
    stats.num_disk_blocks_total = disk_->num_blocks();
    stats.num_disk_blocks_used = disk_->num_cached();
    stats.disk = disk_->stats();
  }
  stats.num_failures_in_a_row = num_failures_in_a_row_;
  stats.version = version_;
  return stats;
}

}  // namespace prl::engine
