#include "router/fleet.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "net/async_result.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/service.hpp"
#include "net/task_group.hpp"
#include "router/engine_metrics.hpp"

namespace prl::router {

using namespace std::chrono_literals;

namespace {

/// How long an engine may take from its first answer to being ready: loading weights is part of it.
constexpr auto kBringUpTime = 20min;

}  // namespace

std::string_view to_string(EngineState state) noexcept {
  switch (state) {
    case EngineState::kStarting: return "starting";
    case EngineState::kReady: return "ready";
    case EngineState::kBehind: return "behind";
    case EngineState::kDown: return "down";
    case EngineState::kDraining: return "draining";
  }
  return "unknown";
}

struct Fleet::State : std::enable_shared_from_this<Fleet::State> {
  /// Of the second router's engines and tickets: no fleet has so many of the first.
  static constexpr std::int64_t kFirstPrefill = std::int64_t{1} << 48;
  struct Engine {
    std::string url;
    EngineState state = EngineState::kStarting;
    EngineLimits limits;
    std::optional<PolicyVersion> version;
    std::string problem;
    std::int64_t num_lost = 0;
    bool is_stale = false;  ///< missed something since it was last asked to be brought up
    std::int64_t life = 0;  ///< counts the times it became ready: reports from an earlier life say nothing
    net::TimePoint lost_at{};
    net::Signal wake;
  };
  struct Waiter {
    net::AsyncResult<Assignment> result;
    net::Signal lost;
    std::optional<std::int64_t> engine;
    bool needs_prefill = false;  ///< waits for a prefill engine, and for nothing if there is none
  };

  State(asio::any_io_executor e, std::shared_ptr<net::HttpClient> c, FleetOptions o)
      : executor(std::move(e)), client(std::move(c)), options(o), decoding(o.router), prefilling(prefill_options(o.router)) {}

  static RouterOptions prefill_options(RouterOptions options) {
    options.first_id = kFirstPrefill;
    return options;
  }
  static EngineRole role_of(std::int64_t id) noexcept { return id >= kFirstPrefill ? EngineRole::kPrefill : EngineRole::kAll; }
  /// The one that has the engine, or the ticket.
  Router& router_of(std::int64_t id) noexcept { return role_of(id) == EngineRole::kPrefill ? prefilling : decoding; }
  const Router& router_of(std::int64_t id) const noexcept { return role_of(id) == EngineRole::kPrefill ? prefilling : decoding; }

  // Those below with "locked" are called with the mutex held.
  EngineView view_locked(std::int64_t id) const {
    const Engine& engine = engines.at(id);
    return {.id = EngineId{id},
            .role = role_of(id),
            .url = engine.url,
            .state = engine.state,
            .load = router_of(id).load(EngineId{id}),
            .limits = engine.limits,
            .version = engine.version,
            .problem = engine.problem,
            .num_lost = engine.num_lost};
  }

  void dispatch_locked() {
    for (Router* router : {&decoding, &prefilling})
      for (const Assignment& assignment : router->plan()) {
        Waiter& waiter = waiters.at(assignment.ticket.value);
        waiter.engine = assignment.engine.value;
        waiter.result.set_value(assignment);
      }
  }

  /// Takes the engine out of use and tells its requests.
  void put_aside_locked(std::int64_t id, EngineState to, const std::string& why) {
    Engine& engine = engines.at(id);
    engine.problem = why;
    if (engine.state == EngineState::kDraining) to = EngineState::kDraining;
    engine.state = to;
    engine.lost_at = net::Clock::now();
    router_of(id).set_ready(EngineId{id}, false);
    engine.wake.notify();
    release_prefills_locked();
  }

  /// Whoever waits for a prefill engine when none is ready has better things to do.
  void release_prefills_locked() {
    if (prefilling.has_ready_engine()) return;
    for (auto& [ticket, waiter] : waiters)
      if (waiter.needs_prefill && !waiter.engine)
        waiter.result.set_exception(std::make_exception_ptr(Error(ErrorCode::kUnavailable, "no prefill engine is ready")));
  }

  void lose_locked(std::int64_t id, const std::string& why) {
    Engine& engine = engines.at(id);
    if (engine.state == EngineState::kStarting || engine.state == EngineState::kDown) {
      engine.problem = why;
      return;
    }
    const std::int64_t num_requests = router_of(id).load(EngineId{id}).num_requests;
    ++engine.num_lost;
    ++num_lost;
    engine.version.reset();
    log::warning("engine {} is lost: {}; {} of its requests start again on other engines", engine.url, why, num_requests);
    put_aside_locked(id, EngineState::kDown, why);
    for (auto& [ticket, waiter] : waiters)
      if (waiter.engine == id) waiter.lost.notify();
    dispatch_locked();
  }

  /// Why it may not be used yet, or empty.
  std::string set_ready_locked(std::int64_t id, std::optional<PolicyVersion> version, EngineLimits limits) {
    Engine& engine = engines.at(id);
    if (engine.state == EngineState::kDraining) return {};
    if (engine.is_stale) return "it missed an update while it was brought up";
    const bool is_back = engine.state != EngineState::kStarting;
    engine.state = EngineState::kReady;
    engine.version = version;
    engine.problem.clear();
    engine.limits = limits;
    ++engine.life;
    router_of(id).set_limits(EngineId{id}, limits);
    router_of(id).set_ready(EngineId{id}, true);
    if (is_back) {
      const double seconds = std::chrono::duration<double>(net::Clock::now() - engine.lost_at).count();
      log::success("engine {} is back after {:.1f} s{}", engine.url, seconds,
                   version ? fmt::format(", with policy v{}", version->value) : std::string());
    } else {
      log::info("engine {} is ready", engine.url);
    }
    dispatch_locked();
    return {};
  }

  std::string describe_locked() const {
    std::string text;
    for (const auto& [id, engine] : engines)
      text += fmt::format("{}{} ({}{}{})", text.empty() ? "" : ", ", engine.url, to_string(engine.state),
                          engine.problem.empty() ? "" : ": ", engine.problem);
    return text.empty() ? "there is no engine" : text;
  }

  /// True once a draining engine has left.
  bool leave_if_drained(std::int64_t id) {
    std::lock_guard lock(mutex);
    const auto it = engines.find(id);
    if (it == engines.end()) return true;
    if (it->second.state != EngineState::kDraining || router_of(id).load(EngineId{id}).num_requests > 0) return false;
    log::info("engine {} has left", it->second.url);
    router_of(id).remove_engine(EngineId{id});
    engines.erase(it);
    dispatch_locked();
    return true;
  }

  asio::any_io_executor executor;
  std::shared_ptr<net::HttpClient> client;
  FleetOptions options;
  BringUp bring_up;
  mutable std::mutex mutex;
  Router decoding, prefilling;
  std::map<std::int64_t, Engine> engines;
  std::map<std::int64_t, Waiter> waiters;  ///< by ticket, until its lease ends
  std::int64_t num_replayed = 0;
  std::int64_t num_lost = 0;
  FleetCounts prefills;  ///< num_prefills and those beside it
  std::unique_ptr<net::TaskGroup> tasks;
};

struct Lease::Owner {
  std::shared_ptr<Fleet::State> state;
  TicketId ticket;
  std::int64_t life = 0;
};

Lease::Lease(std::unique_ptr<Owner> owner) noexcept : owner_(std::move(owner)) {}
Lease::Lease(Lease&&) noexcept = default;

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  owner_ = std::move(other.owner_);
  url_ = std::move(other.url_);
  engine_ = other.engine_;
  version_ = other.version_;
  lost_ = other.lost_;
  return *this;
}

Lease::~Lease() { give_back(); }

void Lease::give_back() noexcept {
  const std::unique_ptr<Owner> owner = std::move(owner_);
  if (!owner) return;
  std::lock_guard lock(owner->state->mutex);
  owner->state->waiters.erase(owner->ticket.value);
  owner->state->router_of(owner->ticket.value).cancel(owner->ticket);
  owner->state->dispatch_locked();
}

void Lease::finish(std::int64_t num_new_tokens) {
  const std::unique_ptr<Owner> owner = std::move(owner_);
  std::lock_guard lock(owner->state->mutex);
  owner->state->waiters.erase(owner->ticket.value);
  owner->state->router_of(owner->ticket.value).finish(owner->ticket, num_new_tokens);
  owner->state->dispatch_locked();
}

void Lease::report_lost(const std::string& why) {
  std::lock_guard lock(owner_->state->mutex);
  const auto it = owner_->state->engines.find(engine_.value);
  if (it != owner_->state->engines.end() && it->second.life == owner_->life) owner_->state->lose_locked(engine_.value, why);
}

namespace {

/// Runs `bring_up` and answers what is wrong, or nothing.
asio::awaitable<std::string> try_bring_up(const Fleet::BringUp* bring_up, EngineView view, std::optional<PolicyVersion>* version) {
  std::exception_ptr failure;
  try {
    auto bringing = (*bring_up)(std::move(view));
    auto bounded = net::with_deadline(std::move(bringing), net::Clock::now() + kBringUpTime, "an engine to be brought up");
    *version = co_await std::move(bounded);
    co_return std::string();
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const Error error = net::to_error(failure);
  if (error.code() == ErrorCode::kCancelled) throw error;
  co_return std::string(error.what());
}

/// Looks after one engine until it has left.
asio::awaitable<void> look_after(std::shared_ptr<Fleet::State> fleet, std::int64_t id) {
  int num_failed = 0;
  bool is_first_failure = true;
  std::chrono::milliseconds wait = fleet->options.retry_interval;
  while (!fleet->leave_if_drained(id)) {
    EngineView view;
    net::Signal wake;
    {
      std::lock_guard lock(fleet->mutex);
      view = fleet->view_locked(id);
      wake = fleet->engines.at(id).wake;
    }
    auto probing = net::probe_health(fleet->client, view.url, fleet->options.probe_timeout);
    std::string problem = co_await std::move(probing);
    num_failed = problem.empty() ? 0 : num_failed + 1;
    const bool is_in_use = view.state == EngineState::kReady || view.state == EngineState::kDraining;
    if (problem.empty() && !is_in_use) {
      std::optional<PolicyVersion> version;
      EngineLimits limits;
      {
        std::lock_guard lock(fleet->mutex);
        fleet->engines.at(id).is_stale = false;
      }
      if (fleet->bring_up) {
        auto bringing = try_bring_up(&fleet->bring_up, view, &version);
        problem = co_await std::move(bringing);
      }
      if (problem.empty() && fleet->options.reads_limits) {
        auto reading = read_limits(fleet->client, view.url, fleet->options.probe_timeout);
        limits = co_await std::move(reading);
      }
      std::lock_guard lock(fleet->mutex);
      if (problem.empty()) problem = fleet->set_ready_locked(id, version, limits);
      if (!problem.empty()) fleet->engines.at(id).problem = problem;
    } else if (num_failed >= fleet->options.num_failed_probes || (!problem.empty() && !is_in_use)) {
      std::lock_guard lock(fleet->mutex);
      fleet->lose_locked(id, problem);
    }
    const auto longest = fleet->options.probe_interval;
    if (problem.empty()) {
      wait = longest;
    } else {
      wait = is_first_failure ? fleet->options.retry_interval : std::min(2 * wait, longest);
    }
    is_first_failure = problem.empty();
    co_await wake.wait_until(net::Clock::now() + wait);
  }
}

}  // namespace

Fleet::Fleet(asio::any_io_executor executor, std::shared_ptr<net::HttpClient> client, FleetOptions options)
    : state_(std::make_shared<State>(executor, std::move(client), options)) {
  state_->tasks = std::make_unique<net::TaskGroup>(executor, "engines");
}

Fleet::~Fleet() { state_->tasks->cancel(); }

void Fleet::set_bring_up(BringUp bring_up) { state_->bring_up = std::move(bring_up); }

EngineId Fleet::add(const std::string& url, EngineRole role) {
  const std::string root = net::server_root(url);
  net::Url::parse(root);
  EngineId id;
  {
    std::lock_guard lock(state_->mutex);
    for (const auto& [known, engine] : state_->engines)
      if (engine.url == root) fail(ErrorCode::kAlreadyExists, "engine {} is there already ({})", root, to_string(engine.state));
    if (state_->engines.size() >= state_->options.max_engines)
      fail(ErrorCode::kOverloaded, "{} engines are the limit; drain one before {} joins", state_->engines.size(), root);
    id = (role == EngineRole::kPrefill ? state_->prefilling : state_->decoding).add_engine({}, false);
    state_->engines[id.value].url = root;
  }
  state_->tasks->spawn(fmt::format("engine {}", root), look_after(state_, id.value));
  return id;
}

void Fleet::drain(const std::string& url) {
  const std::string root = net::server_root(url);
  std::lock_guard lock(state_->mutex);
  for (auto& [id, engine] : state_->engines) {
    if (engine.url != root) continue;
    log::info("engine {} leaves when its {} requests have ended", root, state_->router_of(id).load(EngineId{id}).num_requests);
    engine.state = EngineState::kDraining;
    state_->router_of(id).set_ready(EngineId{id}, false);
    engine.wake.notify();
    state_->release_prefills_locked();
    state_->dispatch_locked();
    return;
  }
  fail(ErrorCode::kNotFound, "no engine {}; there are: {}", root, state_->describe_locked());
}

bool Fleet::wants_prefixes() const noexcept { return state_->options.router.spread == Spread::kPrefixes; }

bool Fleet::has_prefill() const {
  const std::lock_guard lock(state_->mutex);
  return state_->prefilling.has_ready_engine() && state_->decoding.has_ready_engine();
}

std::int64_t Fleet::max_uncached_tokens() const noexcept { return state_->options.max_uncached_tokens; }

void Fleet::count(PrefillOutcome outcome) {
  const std::lock_guard lock(state_->mutex);
  FleetCounts& counts = state_->prefills;
  if (outcome == PrefillOutcome::kSkipped) ++counts.num_prefills_skipped;
  if (outcome == PrefillOutcome::kDone) ++counts.num_prefills;
  if (outcome == PrefillOutcome::kFailed) ++counts.num_prefills_failed;
}

asio::awaitable<Lease> Fleet::acquire(RequestShape shape, net::TimePoint deadline) {
  EngineRole role = EngineRole::kAll;
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->decoding.has_ready_engine() && state_->prefilling.has_ready_engine()) role = EngineRole::kPrefill;
  }
  return acquire_from(state_, role, /*needs_prefill=*/false, std::move(shape), deadline);
}

asio::awaitable<Lease> Fleet::acquire_prefill(RequestShape shape, net::TimePoint deadline) {
  return acquire_from(state_, EngineRole::kPrefill, /*needs_prefill=*/true, std::move(shape), deadline);
}

asio::awaitable<Lease> Fleet::acquire_from(std::shared_ptr<State> state, EngineRole role, bool needs_prefill, RequestShape shape,
                                           net::TimePoint deadline) {
  auto owner = std::make_unique<Lease::Owner>();
  net::AsyncResult<Assignment> result;
  net::Signal lost;
  {
    std::lock_guard lock(state->mutex);
    if (shape.is_replay) ++state->num_replayed;
    if (needs_prefill && !state->prefilling.has_ready_engine()) fail(ErrorCode::kUnavailable, "no prefill engine is ready");
    Router& router = role == EngineRole::kPrefill ? state->prefilling : state->decoding;
    const auto ticket = router.submit(std::move(shape));
    if (!ticket) fail(ErrorCode::kOverloaded, "{} requests wait for an engine already", router.num_waiting());
    owner->state = state;
    owner->ticket = *ticket;
    State::Waiter& waiter = state->waiters[ticket->value];
    waiter.result = result;
    waiter.lost = lost;
    waiter.needs_prefill = needs_prefill;
    state->dispatch_locked();
  }
  Lease lease(std::move(owner));
  std::optional<Assignment> assignment;
  std::exception_ptr failure;
  try {
    auto waiting = result.wait(deadline, "an engine with room");
    assignment = co_await std::move(waiting);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  std::lock_guard lock(state->mutex);
  if (failure) {
    const Error error = net::to_error(failure);
    throw error.code() == ErrorCode::kDeadline ? error.with_context(state->describe_locked()) : error;
  }
  const State::Engine& engine = state->engines.at(assignment->engine.value);
  lease.engine_ = assignment->engine;
  lease.url_ = engine.url;
  lease.version_ = engine.version;
  lease.lost_ = lost;
  lease.owner_->life = engine.life;
  co_return lease;
}

asio::awaitable<bool> Fleet::wait_ready(net::TimePoint deadline) {
  const std::shared_ptr<State> state = state_;
  for (;;) {
    {
      std::lock_guard lock(state->mutex);
      if (state->decoding.has_ready_engine()) co_return true;
    }
    if (net::Clock::now() >= deadline) co_return false;
    co_await net::sleep_until(std::min(deadline, net::Clock::now() + 50ms));
  }
}

void Fleet::set_version(EngineId engine, PolicyVersion version) {
  std::lock_guard lock(state_->mutex);
  const auto it = state_->engines.find(engine.value);
  if (it == state_->engines.end()) return;
  if (std::exchange(it->second.version, version) != version)
    state_->router_of(engine.value).forget_prefixes(engine);  // computed with other weights
}

void Fleet::set_behind(EngineId id, const std::string& why) {
  std::lock_guard lock(state_->mutex);
  const auto it = state_->engines.find(id.value);
  if (it == state_->engines.end()) return;
  it->second.is_stale = true;
  if (it->second.state != EngineState::kReady) return;
  log::warning("engine {} is left out until it has caught up: {}", it->second.url, why);
  state_->put_aside_locked(id.value, EngineState::kBehind, why);
  state_->dispatch_locked();
}

std::vector<EngineView> Fleet::engines() const {
  std::lock_guard lock(state_->mutex);
  std::vector<EngineView> views;
  for (const auto& [id, engine] : state_->engines) views.push_back(state_->view_locked(id));
  return views;
}

FleetCounts Fleet::counts() const {
  std::lock_guard lock(state_->mutex);
  FleetCounts counts = state_->prefills;
  counts.router = state_->decoding.counts();
  counts.num_waiting = static_cast<std::int64_t>(state_->decoding.num_waiting() + state_->prefilling.num_waiting());
  counts.num_replayed = state_->num_replayed;
  counts.num_lost = state_->num_lost;
  return counts;
}

std::string Fleet::describe() const {
  std::lock_guard lock(state_->mutex);
  return state_->describe_locked();
}

asio::any_io_executor Fleet::executor() const { return state_->executor; }

}  // namespace prl::router
