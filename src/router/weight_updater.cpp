#include "router/weight_updater.hpp"

#include <fmt/format.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/percent.hpp"
#include "net/run_claim.hpp"
#include "net/task_group.hpp"

namespace prl::router {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

namespace {

/// An update that fails leaves a lone engine's run without a policy, so a server that is busy for some seconds is asked more often than a
/// client does by itself. Among several, the one that fails is left out instead.
constexpr int kLoneRetries = 5;
constexpr auto kCatchUpTime = 12min;
constexpr auto kProofTime = 60s;
constexpr int kNotFound = 404;

/// Whether the engine could not be reached, so that it may do better once it is up again.
bool is_away(ErrorCode code) { return code == ErrorCode::kUnavailable || code == ErrorCode::kDeadline || code == ErrorCode::kIo; }

}  // namespace

struct WeightUpdater::State {
  std::shared_ptr<net::HttpClient> client;
  WeightUpdaterOptions options;
  mutable std::mutex mutex;
  std::optional<WeightUpdate> current;
  std::set<std::int64_t> updated;  ///< engines that took a version of this run since they came up
  std::set<std::string> pending;
  std::function<asio::awaitable<void>(EngineView)> more;
};

namespace {

using Shared = std::shared_ptr<WeightUpdater::State>;

net::HttpCall weights_call(const WeightUpdate& update, bool is_first) {
  net::HttpCall call;
  call.method = "POST";
  call.url = "/update_weights";
  // A server that outlived an earlier run may hold a later version: the run that begins takes it over.
  boost::json::object body{{"version", update.version.value}, {"force", is_first}};
  body[update.store.empty() ? "weight_dir" : "store"] = update.store.empty() ? update.folder : update.store;
  call.body = boost::json::serialize(body);
  return call;
}

net::HttpCall adapter_call(const WeightUpdate& update) {
  net::HttpCall call;
  call.method = "POST";
  call.url = "/load_lora_adapter";
  boost::json::object body{{"lora_name", update.adapter}};
  if (update.store.empty()) {
    body["lora_path"] = update.folder;  // whose name says the version
  } else {
    body["store"] = update.store;
    body["version"] = update.version.value;
  }
  call.body = boost::json::serialize(body);
  return call;
}

net::HttpCall proof_call(const WeightUpdater::State& state, const std::string& url, const WeightUpdate& update) {
  net::HttpCall call;
  call.url = url + "/weight_proof" + (update.adapter.empty() ? std::string() : "?adapter=" + net::percent_encode(update.adapter));
  call.timeout = kProofTime;
  call.max_retries = 0;
  if (!state.options.api_key.empty()) call.bearer = state.options.api_key;
  return call;
}

net::HttpCall share_call(const WeightUpdater::State& state, const std::string& url) {
  net::HttpCall call;
  call.method = "POST";
  call.url = url + "/runs";
  call.body = state.options.share();
  call.timeout = kProofTime;
  if (!state.options.api_key.empty()) call.bearer = state.options.api_key;
  return call;
}

asio::awaitable<std::string> send_update(Shared state, EngineView engine, WeightUpdate update, net::TimePoint deadline, int max_retries) {
  bool is_first = false;
  {
    std::lock_guard lock(state->mutex);
    is_first = !state->updated.contains(engine.id.value);
    state->pending.insert(engine.url);
  }
  net::HttpCall call = update.adapter.empty() ? weights_call(update, is_first) : adapter_call(update);
  call.url = engine.url + call.url;
  call.timeout = std::max(std::chrono::duration_cast<milliseconds>(deadline - net::Clock::now()), milliseconds(1));
  call.max_retries = max_retries;
  if (!state->options.claim.empty()) call.headers.add(net::kClaimHeader, state->options.claim);
  if (!state->options.api_key.empty()) call.bearer = state->options.api_key;
  auto calling = state->client->call(std::move(call));
  const net::HttpReply reply = co_await std::move(calling);
  reply.raise_for_status(fmt::format("weight update of {}", engine.url));
  std::string proof = reply.body;
  if (!update.adapter.empty()) {
    auto asking = state->client->call(proof_call(*state, engine.url, update));
    const net::HttpReply answer = co_await std::move(asking);
    answer.raise_for_status(fmt::format("proof of adapter '{}' of {}", update.adapter, engine.url));
    proof = answer.body;
    if (state->options.share) {
      auto sharing = state->client->call(share_call(*state, engine.url));
      const net::HttpReply shared = co_await std::move(sharing);
      if (shared.status != kNotFound) shared.raise_for_status(fmt::format("share of run '{}' of {}", update.adapter, engine.url));
    }
  }
  update.verify(proof, engine.url);
  std::lock_guard lock(state->mutex);
  state->updated.insert(engine.id.value);
  co_return proof;
}

/// True if the engine proves that it runs the version already.
asio::awaitable<bool> proves(Shared state, std::string url, WeightUpdate update) {
  std::exception_ptr failure;
  try {
    auto calling = state->client->call(proof_call(*state, url, update));
    const net::HttpReply reply = co_await std::move(calling);
    if (!reply.is_ok() || (update.holds && !update.holds(reply.body))) co_return false;
    update.verify(reply.body, url);
    co_return true;
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const Error error = net::to_error(failure);
  if (error.code() == ErrorCode::kCancelled) throw error;
  co_return false;
}

asio::awaitable<std::optional<PolicyVersion>> bring_up(Shared state, EngineView engine) {
  for (;;) {
    std::optional<WeightUpdate> update;
    bool was_updated = false;
    {
      std::lock_guard lock(state->mutex);
      update = state->current;
      // A process that was lost may be another one now, which knows nothing of this run.
      if (engine.state != EngineState::kBehind) state->updated.erase(engine.id.value);
      was_updated = state->updated.contains(engine.id.value);
    }
    if (!update) co_return std::nullopt;
    bool is_proven = false;
    if (!was_updated && engine.num_lost > 0) {
      auto proving = proves(state, engine.url, *update);
      is_proven = co_await std::move(proving);
    }
    if (!is_proven) {
      auto sending = send_update(state, engine, *update, net::Clock::now() + kCatchUpTime, /*max_retries=*/0);
      std::exception_ptr failure;
      try {
        co_await std::move(sending);
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
      std::lock_guard lock(state->mutex);
      state->pending.erase(engine.url);
      if (failure) std::rethrow_exception(failure);
    }
    std::lock_guard lock(state->mutex);
    if (state->current && state->current->version == update->version) co_return update->version;
    engine.state = EngineState::kBehind;  // another one came meanwhile; an older one if this one was refused by the others
    if (!state->current || state->current->version < update->version) state->updated.erase(engine.id.value);
  }
}

asio::awaitable<std::optional<PolicyVersion>> bring_up_with_more(Shared state, EngineView engine) {
  auto bringing = bring_up(state, engine);
  const std::optional<PolicyVersion> version = co_await std::move(bringing);
  std::function<asio::awaitable<void>(EngineView)> more;
  {
    std::lock_guard lock(state->mutex);
    more = state->more;
  }
  if (more) {
    auto giving = more(engine);
    co_await std::move(giving);
  }
  co_return version;
}

/// One engine's part of an update.
struct Part {
  EngineView engine;
  std::optional<Error> error;
  bool is_done = false;
};

asio::awaitable<void> run_part(Shared state, std::shared_ptr<Part> part, WeightUpdate update, net::TimePoint deadline, int max_retries,
                               net::Signal done) {
  std::exception_ptr failure;
  try {
    auto sending = send_update(state, part->engine, std::move(update), deadline, max_retries);
    co_await std::move(sending);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  {
    std::lock_guard lock(state->mutex);
    state->pending.erase(part->engine.url);
    if (failure) part->error = net::to_error(failure);
    part->is_done = true;
  }
  done.notify();
}

struct Tally {
  std::size_t num_done = 0, num_good = 0;
};

Tally tally(const WeightUpdater::State& state, const std::vector<std::shared_ptr<Part>>& parts) {
  std::lock_guard lock(state.mutex);
  Tally tally;
  for (const auto& part : parts) {
    tally.num_done += part->is_done ? 1 : 0;
    tally.num_good += part->is_done && !part->error ? 1 : 0;
    if (part->is_done && part->error && part->error->code() == ErrorCode::kOutOfSync) throw *part->error;
  }
  return tally;
}

/// Until all parts are done, or the first good one has waited long enough for the others.
asio::awaitable<Tally> wait_for_parts(Shared state, std::vector<std::shared_ptr<Part>> parts, net::Signal done, net::TimePoint deadline) {
  const net::TimePoint begin = net::Clock::now();
  net::TimePoint limit = deadline;
  bool has_good = false;
  for (;;) {
    const Tally now = tally(*state, parts);
    if (now.num_done == parts.size() || net::Clock::now() >= limit) co_return now;
    if (now.num_good > 0 && !std::exchange(has_good, true)) {
      const auto taken = net::Clock::now() - begin;
      limit = std::min(deadline, net::Clock::now() + taken + state->options.patience);
    }
    co_await done.wait_until(limit);
  }
}

}  // namespace

WeightUpdater::WeightUpdater(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client, WeightUpdaterOptions options)
    : fleet_(std::move(fleet)), state_(std::make_shared<State>()) {
  state_->client = std::move(client);
  state_->options = std::move(options);
  fleet_->set_bring_up([state = state_](EngineView engine) { return bring_up_with_more(state, std::move(engine)); });
}

WeightUpdater::~WeightUpdater() = default;

asio::awaitable<void> WeightUpdater::apply(WeightUpdate update, net::TimePoint deadline) {
  std::optional<WeightUpdate> before;
  {
    std::lock_guard lock(state_->mutex);
    before = std::exchange(state_->current, update);
  }
  const std::vector<EngineView> engines = fleet_->engines();
  const int max_retries = engines.size() == 1 ? kLoneRetries : 1;
  net::TaskGroup tasks(fleet_->executor(), "weight updates");
  net::Signal done;
  std::vector<std::shared_ptr<Part>> parts;
  for (const EngineView& engine : engines) {
    if (engine.state != EngineState::kReady) {
      fleet_->set_behind(engine.id, "it was not ready for the newest policy");  // it is brought up with this version
      continue;
    }
    parts.push_back(std::make_shared<Part>(Part{.engine = engine, .error = {}}));
    tasks.spawn(fmt::format("weight update of {}", engine.url), run_part(state_, parts.back(), update, deadline, max_retries, done));
  }
  auto waiting = wait_for_parts(state_, parts, done, deadline);
  const Tally result = co_await std::move(waiting);
  std::optional<Error> refusal;
  for (const auto& part : parts) {
    std::optional<Error> error;
    bool is_done = false;
    {
      std::lock_guard lock(state_->mutex);
      error = part->error;
      is_done = part->is_done;
    }
    if (is_done && !error) {
      fleet_->set_version(part->engine.id, update.version);
      continue;
    }
    if (error && !refusal && !is_away(error->code())) refusal = error;
    if (result.num_good == 0 && refusal) continue;
    fleet_->set_behind(part->engine.id,
                       fmt::format("it missed policy v{} ({})", update.version.value, error ? error->what() : "no answer in time"));
  }
  if (result.num_good > 0) co_return;
  if (refusal) {
    // Nobody has it: engines that come up are to get what the others run.
    std::lock_guard lock(state_->mutex);
    if (state_->current && state_->current->version == update.version) state_->current = std::move(before);
    throw *refusal;
  }
  // Nobody could be reached: whoever comes back is brought up with this version.
  auto ready = fleet_->wait_ready(deadline);
  if (!co_await std::move(ready))
    fail(ErrorCode::kDeadline, "no engine took policy v{} in time: {}", update.version.value, fleet_->describe());
}

asio::awaitable<void> WeightUpdater::release(net::TimePoint deadline) {
  if (state_->options.claim.empty()) co_return;
  for (const EngineView& engine : fleet_->engines()) {
    net::HttpCall call;
    call.method = "POST";
    call.url = engine.url + "/release";
    call.headers.add(net::kClaimHeader, state_->options.claim);
    call.deadline = deadline;
    call.max_retries = 0;
    if (!state_->options.api_key.empty()) call.bearer = state_->options.api_key;
    try {
      auto calling = state_->client->call(std::move(call));
      co_await std::move(calling);
    } catch (const Error& error) {
      log::debug("{} was not released: {}", engine.url, error.what());
    }
  }
}

void WeightUpdater::also_bring_up(std::function<asio::awaitable<void>(EngineView)> more) {
  std::lock_guard lock(state_->mutex);
  state_->more = std::move(more);
}

std::string WeightUpdater::describe_pending() const {
  std::lock_guard lock(state_->mutex);
  return fmt::format("{}", fmt::join(state_->pending, ", "));
}

}  // namespace prl::router
