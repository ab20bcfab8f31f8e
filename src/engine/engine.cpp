#include "engine/engine.hpp"

#include <future>
#include <iterator>
#include <type_traits>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "base/spans.hpp"
#include "engine/adapter_set.hpp"
#include "engine/core.hpp"
#include "engine/paged_runner.hpp"
#include "engine/resolve_request.hpp"
#include "engine/sharded_runner.hpp"
#include "nn/shards.hpp"

namespace prl::engine {
namespace {

using Clock = std::chrono::steady_clock;

/// After so many steps that all failed nothing suggests that the next one will not.
constexpr int kMaxFailuresInARow = 3;

std::int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

enum class CallState { kQueued, kTaken, kAbandoned };

const nn::ModelConfig& config_of(const nn::WeightsPtr& weights) {
  if (weights == nullptr) fail(ErrorCode::kInvalidArgument, "an engine needs weights to start with");
  return weights->config;
}

/// nullptr unless a model draws the drafts, on the first device. `cache`: the engine's own there.
std::unique_ptr<DraftModel> make_draft_model(const std::shared_ptr<DeviceRuntime>& runtime, const EngineOptions& options,
                                             const nn::Weights& weights, const nn::KvCache& cache) {
  const bool is_head = options.drafts.uses_head();
  if (options.drafts.num_tokens == 0 || (options.draft_model == nullptr && !is_head)) return nullptr;
  EngineOptions own = options;
  own.num_host_blocks = own.num_disk_blocks = own.num_state_snapshots = 0;
  own.logs_routes = false;
  own.drafts = {};
  own.times = nullptr;
  RunnerShare share{.has_adapters = false};
  if (is_head)
    share.hidden_of = &cache;
  else
    check_draft_model(options.draft_model->config, weights.config);
  auto of_drafts = std::make_unique<PagedRunner>(runtime, own, is_head ? weights.mtp : options.draft_model, share);
  return std::make_unique<DraftModel>(std::move(of_drafts), own.num_blocks, own.block_size,
                                      std::max(own.max_num_batched_tokens, own.max_num_seqs), is_head);
}

std::unique_ptr<EngineCore> make_core(std::shared_ptr<DeviceRuntime> runtime, const EngineOptions& options, nn::WeightsPtr weights) {
  check_options(options, config_of(weights));
  check_cache_size(options, nn::config_of_shard(weights->config, weights->shard.size), weights->compute);
  CoreOptions core;
  core.num_blocks = options.num_blocks;
  core.block_size = options.block_size;
  core.num_host_blocks = options.num_host_blocks;
  core.num_disk_blocks = options.num_disk_blocks;
  if (options.adapters != nullptr) core.adapters = options.adapters;
  core.scheduler.max_num_seqs = options.max_num_seqs;
  core.scheduler.max_adapters = core.adapters->max_ready();
  core.scheduler.max_num_batched_tokens = options.max_num_batched_tokens;
  core.scheduler.enable_prefix_caching = options.enable_prefix_caching;
  if (!config_of(weights).linear.layers.empty()) core.scheduler.num_state_snapshots = options.num_state_snapshots;
  core.scheduler.enable_chunked_prefill = options.enable_chunked_prefill;
  core.scheduler.drafts = {options.drafts};
  if (options.drafts.uses_head()) check_head(*weights);
  std::unique_ptr<ModelRunner> runner;
  const nn::KvCache* cache = nullptr;
  if (weights->others.empty()) {
    auto paged = std::make_unique<PagedRunner>(runtime, options, weights);
    cache = &paged->cache();
    runner = std::move(paged);
  } else {
    auto sharded = std::make_unique<ShardedRunner>(runtime, options, weights);
    cache = &sharded->first_cache();
    runner = std::move(sharded);
  }
  std::unique_ptr<DraftModel> drafts = make_draft_model(runtime, options, *weights, *cache);
  core.scheduler.drafts.has_model = drafts != nullptr;
  if (drafts != nullptr)
    core.scheduler.drafts.most_tokens = (options.drafts.uses_head() ? *weights : *options.draft_model).config.max_position;
  return std::make_unique<EngineCore>(core, std::move(runner), std::move(drafts));
}

/// Steps as spans: each one of a trace, and as stretches of work where one follows the other.
class StepSpans {
 public:
  explicit StepSpans(const EngineStats& stats) : num_tokens_(stats.num_step_tokens), tokens_at_begin_(num_tokens_) {}
  ~StepSpans() { flush(); }
  StepSpans(const StepSpans&) = delete;
  StepSpans& operator=(const StepSpans&) = delete;

  void add(Clock::time_point begin, const EngineStats& stats) {
    if (!spans::is_on(spans::Detail::kCoarse)) return;
    const Clock::time_point end = Clock::now();
    if (spans::is_on(spans::Detail::kFine))
      spans::add(spans::Detail::kFine, {.lane = "engine steps",
                                        .name = "step",
                                        .begin = begin,
                                        .end = end,
                                        .note = fmt::format(R"("tokens":{},"running":{},"waiting":{})", stats.num_step_tokens - num_tokens_,
                                                            stats.num_running, stats.num_waiting)});
    if (num_steps_ > 0 && (begin - end_ > kLongestGap || end - begin_ > kLongest)) flush();
    if (num_steps_++ == 0) {
      begin_ = begin;
      tokens_at_begin_ = num_tokens_;
    }
    num_tokens_ = stats.num_step_tokens;
    busy_ += end - begin;
    end_ = end;
    max_running_ = std::max(max_running_, stats.num_running);
  }

 private:
  static constexpr std::chrono::milliseconds kLongestGap{50}, kLongest{1000};
  void flush() {
    if (num_steps_ > 0)
      spans::add(spans::Detail::kCoarse,
                 {.lane = "engine",
                  .name = "steps",
                  .begin = begin_,
                  .end = end_,
                  .note = fmt::format(R"("steps":{},"busy":{:.3f},"tokens":{},"running":{})", num_steps_,
                                      std::chrono::duration<double>(busy_).count(), num_tokens_ - tokens_at_begin_, max_running_)});
    num_steps_ = max_running_ = 0;
    busy_ = {};
  }

  Clock::time_point begin_, end_;
  Clock::duration busy_{};
  std::int64_t num_steps_ = 0, num_tokens_, tokens_at_begin_, max_running_ = 0;
};

}  // namespace

struct Engine::RuleBell {
  std::mutex mutex;
  Engine* engine = nullptr;  ///< guarded; null when the engine is gone
};

Engine::Engine(std::shared_ptr<DeviceRuntime> runtime, EngineOptions options, nn::WeightsPtr weights)
    : Engine(options, config_of(weights), make_core(std::move(runtime), options, weights)) {}

Engine::Engine(EngineOptions options, nn::ModelConfig config, std::unique_ptr<EngineCore> core)
    : options_(std::move(options)),
      config_(std::move(config)),
      core_(std::move(core)),
      adapters_(options_.adapters != nullptr ? options_.adapters : std::make_shared<AdapterSet>(0)) {
  stats_ = core_->stats();
  weights_ = core_->runner().weights();
  rule_bell_ = std::make_shared<RuleBell>();
  rule_bell_->engine = this;
  core_->on_rule_news([bell = rule_bell_] {
    const std::lock_guard lock(bell->mutex);
    if (bell->engine == nullptr) return;
    const std::lock_guard engine_lock(bell->engine->mutex_);
    bell->engine->has_rule_news_ = true;
    bell->engine->wake_.notify_one();
  });
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  shutdown();
  const std::lock_guard lock(rule_bell_->mutex);
  rule_bell_->engine = nullptr;
}

RequestId Engine::submit(wire::GenerateRequest request, EventSink sink, const std::string& adapter) {
  PRL_CHECK(sink != nullptr, "a request needs a sink");
  const ServedAdapterPtr served = adapter.empty() ? nullptr : adapters_->find(adapter);
  auto resolved = std::make_shared<ResolvedRequest>(resolve_request(std::move(request), options_, config_));
  resolved->served = served;
  const std::int64_t max_open = options_.max_queued_requests + options_.max_num_seqs;

  std::lock_guard lock(mutex_);
  if (is_stopping_) fail(ErrorCode::kUnavailable, "the engine has shut down{}{}", failure_.empty() ? "" : ": ", failure_);
  if (std::ssize(open_) >= max_open) {
    fail(ErrorCode::kOverloaded, "{} requests are open, {} may run and {} may wait; try again later", open_.size(), options_.max_num_seqs,
         options_.max_queued_requests);
  }
  if (const auto tenant = tenants_.find(adapter); tenant != tenants_.end() && tenant->second.state == TenantState::kDraining)
    fail(ErrorCode::kUnavailable, "run '{}' is draining: it takes no new requests", adapter);
  const RequestId id{++num_requests_};
  if (!resolved->sampling.seed) resolved->seed = mix_seed(options_.seed, id.value);
  open_.emplace(id, OpenRequest{.adapter = adapter});
  ++num_unseen_;
  commands_.push_back([this, id, resolved, receiver = std::move(sink)]() mutable {
    core_->add(id, std::move(*resolved), std::move(receiver));
    std::lock_guard seen(mutex_);
    --num_unseen_;
    ++stats_.num_waiting;
  });
  wake_.notify_one();
  return id;
}

void Engine::cancel(RequestId id) {
  std::lock_guard lock(mutex_);
  const auto it = open_.find(id);
  if (it == open_.end() || it->second.has_cancel) return;
  it->second.has_cancel = true;
  commands_.push_back([this, id] { core_->cancel(id); });
  wake_.notify_one();
}

void Engine::stop(RequestId id, std::string stop_string) {
  std::lock_guard lock(mutex_);
  const auto it = open_.find(id);
  if (it == open_.end() || it->second.has_stop) return;
  it->second.has_stop = true;
  commands_.push_back([this, id, text = std::move(stop_string)]() mutable { core_->stop(id, std::move(text)); });
  wake_.notify_one();
}

template <typename T>
T Engine::call(const char* what, std::chrono::milliseconds timeout, std::function<T()> work) {
  struct Call {
    std::promise<T> promise;
    std::atomic<CallState> state{CallState::kQueued};
  };
  auto call = std::make_shared<Call>();
  auto future = call->promise.get_future();
  {
    std::lock_guard lock(mutex_);
    if (is_stopping_)
      fail(ErrorCode::kUnavailable, "cannot {}: the engine has shut down{}{}", what, failure_.empty() ? "" : ": ", failure_);
    commands_.push_back([call, work = std::move(work)] {
      CallState expected = CallState::kQueued;
      if (!call->state.compare_exchange_strong(expected, CallState::kTaken)) return;
      try {
        if constexpr (std::is_void_v<T>) {
          work();
          call->promise.set_value();
        } else {
          call->promise.set_value(work());
        }
      } catch (const std::exception&) {
        call->promise.set_exception(std::current_exception());
      }
    });
    wake_.notify_one();
  }
  if (future.wait_for(timeout) != std::future_status::ready) {
    CallState expected = CallState::kQueued;
    const bool was_queued = call->state.compare_exchange_strong(expected, CallState::kAbandoned);
    fail(ErrorCode::kDeadline, "waited {} ms for the engine's thread to {}: {}", timeout.count(), what,
         was_queued ? "it is busy with a step and the order was withdrawn" : "it has begun and will finish later");
  }
  return future.get();
}

WeightProof Engine::update_weights(nn::WeightsPtr weights, std::chrono::milliseconds timeout) {
  if (weights == nullptr) fail(ErrorCode::kInvalidArgument, "update_weights needs weights");
  return call<WeightProof>("update its weights", timeout, [this, weights = std::move(weights)] {
    WeightProof proof = core_->update_weights(weights);
    std::lock_guard lock(mutex_);
    weights_ = core_->runner().weights();  // with the vision tower that was there, if these have none
    stats_.version = weights->version;     // the next stats() has it
    return proof;
  });
}

WeightProof Engine::proof(std::chrono::milliseconds timeout) {
  return call<WeightProof>("prove its weights", timeout, [this] { return core_->runner().prove(); });
}

WeightProof Engine::proof_of(const std::string& adapter, std::chrono::milliseconds timeout) {
  const ServedAdapterPtr named = adapters_->find(adapter);
  return call<WeightProof>("prove an adapter", timeout, [this, named] {
    core_->deliver();
    adapters_->apply_news();
    ModelRunner& runner = core_->runner();
    const AdapterWeights& weights = named->weights;
    WeightProof proof = runner.prove_with(weights.ready != nullptr ? weights.ready : runner.make_adapter(*weights.stored));
    proof.version = named->version;
    return proof;
  });
}

nn::WeightsPtr Engine::weights() const {
  std::lock_guard lock(mutex_);
  return weights_;
}

void Engine::set_tenant(const std::string& name, TenantOptions options) {
  if (name.empty()) fail(ErrorCode::kInvalidArgument, "a tenant needs the name of its adapter");
  if (!(options.weight >= 1e-6 && options.weight <= 1e6))
    fail(ErrorCode::kInvalidArgument, "tenant '{}': weight: wanted 1e-6 to 1e6, found {}", name, options.weight);
  if (options.max_tokens_in_flight < 0)
    fail(ErrorCode::kInvalidArgument, "tenant '{}': max_tokens_in_flight: wanted at least 0, found {}", name, options.max_tokens_in_flight);
  const std::lock_guard lock(mutex_);
  if (!tenants_.contains(name) && tenants_.size() >= kMaxTenants)
    fail(ErrorCode::kOverloaded, "there are {} tenants already, which is the limit", kMaxTenants);
  tenants_[name] = options;
  commands_.push_back([this, name, options] {
    core_->deliver();
    core_->tenants().set(name, options);
  });
  wake_.notify_one();
}

void Engine::remove_tenant(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (tenants_.erase(name) == 0) fail(ErrorCode::kNotFound, "there is no tenant '{}'", name);
  commands_.push_back([this, name] {
    core_->deliver();
    core_->tenants().remove(name);
  });
  wake_.notify_one();
}

std::int64_t Engine::cancel_tenant(const std::string& name) {
  std::vector<RequestId> ids;
  {
    const std::lock_guard lock(mutex_);
    if (!tenants_.contains(name)) fail(ErrorCode::kNotFound, "there is no tenant '{}'", name);
    for (const auto& [id, request] : open_)
      if (request.adapter == name) ids.push_back(id);
  }
  for (const RequestId id : ids) cancel(id);
  return std::ssize(ids);
}

std::vector<TenantStats> Engine::tenants(std::chrono::milliseconds timeout) {
  return call<std::vector<TenantStats>>("list its tenants", timeout, [this] { return core_->tenants().stats(); });
}

void Engine::visit(const char* what, std::chrono::milliseconds timeout, std::function<void(EngineCore&)> work) {
  if (timeout.count() > 0) return call<void>(what, timeout, [this, work = std::move(work)] { work(*core_); });
  const std::lock_guard lock(mutex_);
  if (is_stopping_) fail(ErrorCode::kUnavailable, "cannot {}: the engine has shut down", what);
  commands_.push_back([this, what, work = std::move(work)] {
    try {
      work(*core_);
    } catch (const std::exception& error) {
      log::error("the engine could not {}: {}", what, error.what());
    }
  });
  wake_.notify_one();
}

void Engine::pause(std::chrono::milliseconds timeout) {
  {
    std::lock_guard lock(mutex_);
    is_paused_ = true;
    stats_.is_paused = true;
  }
  // Commands run between steps, so once this one has run the step in progress is over.
  call<void>("finish its step and pause", timeout, [this] {
    core_->deliver();
    publish();  // the next stats() has that step too
  });
}

void Engine::resume() {
  std::lock_guard lock(mutex_);
  is_paused_ = false;
  stats_.is_paused = false;
  wake_.notify_one();
}

void Engine::reset_prefix_cache() {
  std::lock_guard lock(mutex_);
  wants_cache_reset_ = true;
  wake_.notify_one();
}

EngineStats Engine::stats() const {
  std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.num_waiting += num_unseen_;
  stats.max_num_seqs = options_.max_num_seqs;
  stats.max_model_len = options_.max_model_len;
  stats.max_draft_tokens = options_.drafts.num_tokens;
  // Their threads go on while no step is made.
  if (const BlockFiles* files = core_->runner().block_files()) stats.disk = files->stats();
  return stats;
}

bool Engine::is_alive(std::chrono::milliseconds max_age) const {
  if (!is_running_.load()) return false;
  const std::int64_t busy_since = busy_since_ns_.load();
  return busy_since == 0 || now_ns() - busy_since <= std::chrono::duration_cast<std::chrono::nanoseconds>(max_age).count();
}

void Engine::shutdown() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    wake_.notify_one();
  }
  std::lock_guard lock(join_mutex_);
  if (!thread_.joinable()) return;
  PRL_CHECK(thread_.get_id() != std::this_thread::get_id(), "shutdown() called from a sink: the engine's thread cannot wait for itself");
  thread_.join();
}

bool Engine::wait_for_work() {
  busy_since_ns_.store(0);
  std::unique_lock lock(mutex_);
  // Woken by every command; the time limit only keeps the wait from being endless.
  const auto can_step = [&] { return !is_paused_ && !core_->is_idle() && (!core_->waits_for_rules() || has_rule_news_); };
  const auto has_work = [&] { return is_stopping_ || !commands_.empty() || wants_cache_reset_ || can_step(); };
  while (!wake_.wait_for(lock, std::chrono::seconds(5), has_work)) {
  }
  if (is_stopping_) return false;
  busy_since_ns_.store(now_ns());
  has_rule_news_ = false;
  std::swap(batch_, commands_);
  const bool is_reset = std::exchange(wants_cache_reset_, false);
  lock.unlock();
  if (is_reset) core_->scheduler().reset_prefix_cache();
  return true;
}

void Engine::run() {
  StepSpans step_spans(stats_);
  // Before a step: an order of another thread never waits for more than the step in progress.
  const auto run_commands = [this] {
    for (Command& command : batch_) command();
    batch_.clear();
  };
  try {
    while (wait_for_work()) {
      run_commands();
      bool is_paused = false;
      {
        std::lock_guard lock(mutex_);
        is_paused = is_paused_;
      }
      const Clock::time_point begin = Clock::now();
      const bool has_stepped = !is_paused && core_->step();
      if (is_paused) core_->deliver();
      const int num_failures = publish();
      // Other threads count what waits, nothing else: the rest is this thread's own.
      if (has_stepped && spans::is_on(spans::Detail::kCoarse)) step_spans.add(begin, stats());
      if (num_failures >= kMaxFailuresInARow) {
        fail_engine(fmt::format("{} steps in a row failed", num_failures));
        break;
      }
    }
    // Shutting down: requests that were queued but not begun get their last event too.
    {
      std::lock_guard lock(mutex_);
      std::swap(batch_, commands_);
    }
    run_commands();
    const std::string failure = failure_;
    core_->abort_all(failure.empty() ? wire::FinishReason::kAbort : wire::FinishReason::kError, failure);
  } catch (const std::exception& error) {
    fail_engine(error.what());
    core_->abort_all(wire::FinishReason::kError, error.what());
  }
  publish();
  if (const EngineStats now = core_->stats(); now.num_draft_tokens > 0)
    log::info("engine: {} of {} draft tokens came true, {} tokens were drawn in all", now.num_accepted_tokens, now.num_draft_tokens,
              now.num_generation_tokens);
  busy_since_ns_.store(0);
  is_running_.store(false);
}

void Engine::fail_engine(const std::string& reason) {
  log::error("the engine has stopped: {}", reason);
  std::lock_guard lock(mutex_);
  failure_ = reason;
  is_stopping_ = true;
}

int Engine::publish() {
  EngineStats stats = core_->stats();
  const std::vector<RequestId> ended = core_->take_ended();
  std::lock_guard lock(mutex_);
  stats.is_paused = is_paused_;
  stats_ = stats;
  for (const RequestId id : ended) open_.erase(id);
  return stats.num_failures_in_a_row;
}

}  // namespace prl::engine
