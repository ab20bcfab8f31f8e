#include "router/fleet_orders.hpp"

#include <fmt/format.h>

#include <boost/json/serialize.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/failure.hpp"
#include "base/log.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/percent.hpp"
#include "net/task_group.hpp"
#include "router/same_proof.hpp"

namespace prl::router {

using namespace std::chrono_literals;
namespace json = boost::json;

namespace {

constexpr auto kReplayTime = 12min;
constexpr auto kOneProofTime = 60s;
constexpr int kMissingStatus = 404;

/// One request to one engine.
struct Post {
  std::string path;
  json::object body;
  bool may_be_missing = false;  ///< 404 is as good
};

/// What is remembered of a name.
struct Record {
  bool is_live = false;
  json::object body;         ///< of the load, or the fields of the run
  std::string state_path;    ///< "/runs/pause" and the like; empty: none was asked for
  std::int64_t changed = 0;  ///< counts changes of all records
};

using Key = std::pair<OrderKind, std::string>;

Record remember(const Record& before, const Order& order) {
  Record after = before;
  switch (order.effect) {
    case OrderEffect::kLoaded:
      after = {.is_live = true, .body = order.body, .state_path = {}, .changed = 0};
      after.body["load_inplace"] = true;
      break;
    case OrderEffect::kShared:
      if (!before.is_live) after = {};
      after.is_live = true;
      for (const auto& [key, value] : order.body) after.body[key] = value;
      break;
    case OrderEffect::kState:
      after.is_live = true;
      after.body["name"] = order.name;
      after.state_path = order.path;
      break;
    case OrderEffect::kRemoved: after = {}; break;
    case OrderEffect::kNone: break;
  }
  return after;
}

/// What brings an engine, whatever it holds, to what the record says.
std::vector<Post> posts_of(const Key& key, const Record& record) {
  const auto& [kind, name] = key;
  if (kind == OrderKind::kAdapter) {
    if (record.is_live) return {{.path = "/v1/load_lora_adapter", .body = record.body}};
    return {{.path = "/v1/unload_lora_adapter", .body = {{"lora_name", name}}, .may_be_missing = true}};
  }
  if (!record.is_live) return {{.path = "/runs/remove", .body = {{"name", name}}, .may_be_missing = true}};
  std::vector<Post> posts{{.path = "/runs", .body = record.body}};
  if (!record.state_path.empty()) posts.push_back({.path = record.state_path, .body = {{"name", name}}});
  return posts;
}

/// One engine's part of an order.
struct OrderPart {
  EngineView engine;
  std::optional<net::HttpReply> reply;
  std::optional<Error> error;  ///< of the call, or of the proof
  bool is_done = false;

  bool is_good() const { return is_done && !error && reply && reply->is_ok(); }
  /// Also if its proof is not as it should be.
  bool took() const { return reply && reply->is_ok(); }
  bool is_missing() const { return is_done && !error && reply && reply->status == kMissingStatus; }
  /// It could not be reached, so that it may do better once it is up again.
  bool is_away() const {
    if (!is_done) return true;
    const ErrorCode code = error ? error->code() : error_code_of_status(reply->status);
    return !is_good() && (code == ErrorCode::kUnavailable || code == ErrorCode::kDeadline || code == ErrorCode::kIo);
  }
  std::string problem() const {
    if (!is_done) return "no answer in time";
    return error ? std::string(error->what()) : fmt::format("{}: {}", reply->status, reply->error_message());
  }
};

using OrderParts = std::vector<std::shared_ptr<OrderPart>>;

}  // namespace

struct FleetOrders::State {
  State(std::shared_ptr<Fleet> f, std::shared_ptr<net::HttpClient> c, FleetOrdersOptions o)
      : fleet(std::move(f)), client(std::move(c)), options(std::move(o)), turns(options.max_waiting) {}

  /// The engines that are ready and that no part names yet; if there is none, `commit` is called before any other engine may be brought up.
  /// Engines that heard all and are not ready now are brought up again.
  template <typename Commit>
  std::vector<EngineView> untold(const OrderParts& told, Commit commit) {
    std::lock_guard lock(mutex);
    std::vector<EngineView> fresh;
    std::set<std::int64_t> there;
    for (const EngineView& engine : fleet->engines()) {
      there.insert(engine.id.value);
      if (engine.state == EngineState::kDraining || !present.contains(engine.id.value)) continue;
      if (engine.state != EngineState::kReady) {
        present.erase(engine.id.value);
        fleet->set_behind(engine.id, "it was away while the engines got an order");
      } else if (std::ranges::none_of(told, [&](const auto& part) { return part->engine.id == engine.id; })) {
        fresh.push_back(engine);
      }
    }
    std::erase_if(present, [&](std::int64_t id) { return !there.contains(id); });
    if (fresh.empty()) commit();
    return fresh;
  }

  void put_aside(const EngineView& engine, const std::string& why) {
    std::lock_guard lock(mutex);
    present.erase(engine.id.value);
    fleet->set_behind(engine.id, why);
  }

  void store(const Key& key, Record record) {
    std::lock_guard lock(mutex);
    store_locked(key, std::move(record));
  }

  // With the mutex held.
  void store_locked(const Key& key, Record record) {
    record.changed = ++num_changes;
    records[key] = std::move(record);
    // Names that are gone are remembered too, for engines that were away; the oldest of them are forgotten first.
    const auto count = [&](bool is_live) {
      return static_cast<std::size_t>(std::ranges::count_if(records, [&](const auto& one) { return one.second.is_live == is_live; }));
    };
    while (count(false) > options.max_names) {
      auto oldest = records.end();
      for (auto it = records.begin(); it != records.end(); ++it)
        if (!it->second.is_live && (oldest == records.end() || it->second.changed < oldest->second.changed)) oldest = it;
      records.erase(oldest);
    }
  }

  std::shared_ptr<Fleet> fleet;
  std::shared_ptr<net::HttpClient> client;
  FleetOrdersOptions options;
  Turns turns;
  mutable std::mutex mutex;  ///< of what follows
  std::map<Key, Record> records;
  std::int64_t num_changes = 0;
  std::set<std::int64_t> present;  ///< engines that have heard all that is remembered
};

namespace {

using SharedOrders = std::shared_ptr<FleetOrders::State>;

asio::awaitable<net::HttpReply> call_engine(SharedOrders state, std::string method, std::string url, std::string body,
                                            net::TimePoint deadline) {
  net::HttpCall call;
  call.method = std::move(method);
  call.url = std::move(url);
  call.body = std::move(body);
  call.timeout = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - net::Clock::now()), 1ms);
  call.max_retries = 0;  // a load that has happened is refused when it comes again
  if (!state->options.api_key.empty()) call.bearer = state->options.api_key;
  auto calling = state->client->call(std::move(call));
  co_return co_await std::move(calling);
}

/// Empty `adapter`: of the model itself.
asio::awaitable<std::string> proof_of(SharedOrders state, std::string url, std::string adapter, net::TimePoint deadline) {
  const std::string query = adapter.empty() ? std::string() : "?adapter=" + net::percent_encode(adapter);
  auto asking = call_engine(state, "GET", url + "/weight_proof" + query, {}, std::min(deadline, net::Clock::now() + kOneProofTime));
  net::HttpReply reply = co_await std::move(asking);
  reply.raise_for_status(adapter.empty() ? fmt::format("proof of {}", url) : fmt::format("proof of adapter '{}' of {}", adapter, url));
  co_return std::move(reply.body);
}

struct EngineTask {
  std::string method, target, body;
  std::string adapter = {};  ///< whose proof is asked for and compared, unless empty
  std::shared_ptr<SameProof> proof = {};
};

asio::awaitable<void> run_order_part(SharedOrders state, std::shared_ptr<OrderPart> part, EngineTask task, net::TimePoint deadline,
                                     net::Signal done) {
  std::optional<net::HttpReply> reply;
  std::exception_ptr failure;
  try {
    auto calling = call_engine(state, task.method, part->engine.url + task.target, task.body, deadline);
    reply = co_await std::move(calling);
    if (reply->is_ok() && task.proof) {
      auto proving = proof_of(state, part->engine.url, task.adapter, deadline);
      const std::string proof = co_await std::move(proving);
      task.proof->check(proof, part->engine.url);
    }
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  {
    std::lock_guard lock(state->mutex);
    part->reply = std::move(reply);
    if (failure) part->error = net::to_error(failure);
    part->is_done = true;
  }
  done.notify();
}

/// Until all have answered, or the first good one has waited long enough for the others. OrderParts are copies: nobody changes them any
/// more.
asio::awaitable<OrderParts> ask_all(SharedOrders state, std::vector<EngineView> engines, EngineTask task, net::TimePoint deadline) {
  net::TaskGroup tasks(state->fleet->executor(), "orders to engines");
  net::Signal done;
  OrderParts parts;
  for (const EngineView& engine : engines) {
    parts.push_back(std::make_shared<OrderPart>(OrderPart{.engine = engine, .reply = {}, .error = {}}));
    tasks.spawn(fmt::format("{} of {}", task.target, engine.url), run_order_part(state, parts.back(), task, deadline, done));
  }
  const net::TimePoint begin = net::Clock::now();
  net::TimePoint limit = deadline;
  for (bool has_good = false;;) {
    std::size_t num_done = 0, num_good = 0;
    {
      std::lock_guard lock(state->mutex);
      for (const auto& part : parts) {
        num_done += part->is_done ? 1 : 0;
        num_good += part->is_good() ? 1 : 0;
      }
    }
    if (num_done == parts.size() || net::Clock::now() >= limit) break;
    if (num_good > 0 && !std::exchange(has_good, true)) {
      const auto taken = net::Clock::now() - begin;
      limit = std::min(deadline, net::Clock::now() + taken + state->options.patience);
    }
    co_await done.wait_until(limit);
  }
  OrderParts settled;
  std::lock_guard lock(state->mutex);
  for (const auto& part : parts) settled.push_back(std::make_shared<OrderPart>(*part));
  co_return settled;
}

/// Puts one engine back to what is remembered, by `posts`. The fleet does without one that cannot be put back in time.
asio::awaitable<void> undo_part(SharedOrders state, EngineView engine, std::vector<Post> posts, std::string order_path,
                                net::TimePoint deadline) {
  std::string problem;
  for (const Post& post : posts) {
    try {
      auto calling = call_engine(state, "POST", engine.url + post.path, json::serialize(post.body), deadline);
      const net::HttpReply reply = co_await std::move(calling);
      if (!reply.is_ok() && !(post.may_be_missing && reply.status == kMissingStatus)) problem = reply.error_message();
    } catch (const Error& error) {
      problem = error.what();
    }
    if (!problem.empty()) break;
  }
  if (!problem.empty())
    state->put_aside(engine, fmt::format("{} that another engine refused could not be undone ({})", order_path, problem));
}

/// Puts engines that took an order, which others refused, back to what is remembered, all at one time.
asio::awaitable<void> undo(SharedOrders state, OrderParts took, Order order, Record before) {
  if (order.effect == OrderEffect::kNone) co_return;
  net::TaskGroup tasks(state->fleet->executor(), "orders that are undone");
  const net::TimePoint deadline = net::Clock::now() + state->options.undo_time;
  for (const auto& part : took)
    tasks.spawn(fmt::format("undoing {} of {}", order.path, part->engine.url),
                undo_part(state, part->engine, posts_of({order.kind, order.name}, before), order.path, deadline));
  // The calls end at their deadline themselves.
  auto joining = tasks.join(deadline + 5s);
  if (!co_await std::move(joining))
    log::warning("{}: some engines were not put back within {} ms", order.path, state->options.undo_time.count());
}

struct Sorted {
  OrderParts good, refused, missing, away;
};

Sorted sort_out(const OrderParts& parts, bool may_be_missing) {
  Sorted sorted;
  for (const auto& part : parts) {
    if (part->is_good())
      sorted.good.push_back(part);
    else if (may_be_missing && part->is_missing())
      sorted.missing.push_back(part);
    else
      (part->is_away() ? sorted.away : sorted.refused).push_back(part);
  }
  if (sorted.good.empty()) sorted.refused.insert(sorted.refused.end(), sorted.missing.begin(), sorted.missing.end());
  return sorted;
}

[[noreturn]] void fail_refused(const Order& order, const OrderParts& refused, std::size_t num_told) {
  std::string who;
  for (const auto& part : refused) who += fmt::format("{}{}: {}", who.empty() ? "" : "; ", part->engine.url, part->problem());
  const std::string message =
      fmt::format("{} of {} engines refused {} of '{}', so none was changed: {}", refused.size(), num_told, order.path, order.name, who);
  const OrderPart& first = *refused.front();
  if (first.error) throw Error(first.error->code(), message);
  throw net::HttpError(first.reply->status, error_code_of_status(first.reply->status), message);
}

/// The engine's proof of an adapter must be that of one that is in use already, if there is one.
asio::awaitable<void> compare_with_others(SharedOrders state, EngineView engine, std::string adapter, net::TimePoint deadline) {
  SameProof proof;
  for (const EngineView& other : state->fleet->engines()) {
    if (other.state != EngineState::kReady || other.id == engine.id) continue;
    bool is_present = false;
    {
      std::lock_guard lock(state->mutex);
      is_present = state->present.contains(other.id.value);
    }
    if (!is_present) continue;
    std::optional<std::string> wanted;
    try {
      auto asking = proof_of(state, other.url, adapter, deadline);
      wanted = co_await std::move(asking);
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kCancelled) throw;
    }
    if (!wanted) continue;  // another one may answer
    proof.check(*wanted, other.url);
    break;
  }
  auto proving = proof_of(state, engine.url, adapter, deadline);
  const std::string own = co_await std::move(proving);
  proof.check(own, engine.url);
}

asio::awaitable<void> tell_what_is_remembered(SharedOrders state, EngineView engine) {
  const net::TimePoint deadline = net::Clock::now() + kReplayTime;
  {
    std::lock_guard lock(state->mutex);
    state->present.erase(engine.id.value);
  }
  for (std::int64_t heard = 0;;) {
    std::vector<std::pair<Key, Record>> news;
    {
      std::lock_guard lock(state->mutex);
      for (const auto& [key, record] : state->records)
        if (record.changed > heard) news.emplace_back(key, record);
      heard = state->num_changes;
      if (news.empty()) state->present.insert(engine.id.value);
    }
    if (news.empty()) co_return;
    std::ranges::sort(news, {}, [](const auto& one) { return one.second.changed; });
    for (const auto& [key, record] : news) {
      const std::vector<Post> posts = posts_of(key, record);
      for (const Post& post : posts) {
        auto calling = call_engine(state, "POST", engine.url + post.path, json::serialize(post.body), deadline);
        const net::HttpReply reply = co_await std::move(calling);
        if (post.may_be_missing && reply.status == kMissingStatus) continue;
        reply.raise_for_status(fmt::format("{} of '{}', which the other engines have; unload it or load it anew", post.path, key.second));
      }
      if (key.first == OrderKind::kAdapter && record.is_live) {
        auto comparing = compare_with_others(state, engine, key.second, deadline);
        co_await std::move(comparing);
      }
    }
  }
}

}  // namespace

FleetOrders::FleetOrders(std::shared_ptr<Fleet> fleet, std::shared_ptr<WeightUpdater> updater, std::shared_ptr<net::HttpClient> client,
                         FleetOrdersOptions options)
    : state_(std::make_shared<State>(std::move(fleet), std::move(client), std::move(options))) {
  // The fleet keeps this function: held by it, the fleet would never end.
  updater->also_bring_up([weak = std::weak_ptr(state_)](EngineView engine) -> asio::awaitable<void> {
    const SharedOrders state = weak.lock();
    return state ? tell_what_is_remembered(state, std::move(engine)) : net::sleep_until(net::Clock::now());
  });
}

asio::awaitable<std::vector<net::HttpReply>> FleetOrders::carry_out(Order order, net::TimePoint deadline) {
  const SharedOrders state = state_;
  auto taking = state->turns.take(deadline);
  const Turns::Turn turn = co_await std::move(taking);
  const Key key{order.kind, order.name};
  Record before;
  {
    std::lock_guard lock(state->mutex);
    if (const auto it = state->records.find(key); it != state->records.end()) before = it->second;
    const Record after = remember(before, order);
    const auto num_live =
        std::ranges::count_if(state->records, [&](const auto& one) { return one.first.first == order.kind && one.second.is_live; });
    if (after.is_live && !before.is_live && static_cast<std::size_t>(num_live) >= state->options.max_names)
      fail(ErrorCode::kOverloaded, "{} {} are remembered for engines that join, which is the limit; remove one", num_live,
           order.kind == OrderKind::kAdapter ? "adapters" : "runs");
  }
  EngineTask task{.method = "POST", .target = order.path, .body = json::serialize(order.body), .adapter = order.name, .proof = {}};
  if (order.effect == OrderEffect::kLoaded) task.proof = std::make_shared<SameProof>();
  const bool may_be_missing = order.effect == OrderEffect::kRemoved;
  OrderParts told;
  for (;;) {
    const auto commit = [&] {
      if (told.empty() || order.effect == OrderEffect::kNone) return;
      state->store_locked(key, remember(before, order));
    };
    std::vector<EngineView> fresh = state->untold(told, commit);
    if (fresh.empty()) break;
    auto asking = ask_all(state, std::move(fresh), task, deadline);
    const OrderParts parts = co_await std::move(asking);
    told.insert(told.end(), parts.begin(), parts.end());
    const Sorted sorted = sort_out(told, may_be_missing);
    OrderParts took = told;
    std::erase_if(took, [](const auto& part) { return part->is_away() || !part->took(); });
    // Who gave no answer may hold what the others do not get, and who took it may be out of reach when it is taken back: both hear what was
    // before when they are brought up.
    const bool has_failed = !sorted.refused.empty() || sorted.good.empty();
    if (has_failed && order.effect != OrderEffect::kNone && !(took.empty() && sorted.away.empty())) state->store(key, before);
    for (const auto& part : sorted.away) state->put_aside(part->engine, fmt::format("it missed {} ({})", order.path, part->problem()));
    if (!sorted.refused.empty()) {
      auto undoing = undo(state, std::move(took), order, before);
      co_await std::move(undoing);
      fail_refused(order, sorted.refused, told.size());
    }
    if (sorted.good.empty()) fail(ErrorCode::kUnavailable, "no engine could be reached with {}: {}", order.path, state->fleet->describe());
  }
  if (told.empty()) fail(ErrorCode::kUnavailable, "no engine is ready: {}", state->fleet->describe());
  std::vector<net::HttpReply> replies;
  for (const auto& part : sort_out(told, may_be_missing).good) replies.push_back(*part->reply);
  co_return replies;
}

asio::awaitable<Turns::Turn> FleetOrders::take_turn(net::TimePoint deadline) { return state_->turns.take(deadline); }

asio::awaitable<std::vector<net::HttpReply>> FleetOrders::ask(std::string target, net::TimePoint deadline) {
  const SharedOrders state = state_;
  std::vector<EngineView> ready = state->fleet->engines();
  std::erase_if(ready, [](const EngineView& engine) { return engine.state != EngineState::kReady; });
  if (ready.empty()) fail(ErrorCode::kUnavailable, "no engine is ready: {}", state->fleet->describe());
  EngineTask task{.method = "GET", .target = std::move(target), .body = {}};
  auto asking = ask_all(state, std::move(ready), std::move(task), deadline);
  const OrderParts parts = co_await std::move(asking);
  std::vector<net::HttpReply> replies;
  for (const auto& part : parts) {
    if (part->error) throw *part->error;
    if (!part->is_done) fail(ErrorCode::kDeadline, "waited for {}: no answer in time", part->engine.url);
    part->reply->raise_for_status(part->engine.url);
    replies.push_back(*part->reply);
  }
  co_return replies;
}

asio::awaitable<std::string> FleetOrders::proof(std::string adapter, net::TimePoint deadline) {
  const std::string query = adapter.empty() ? std::string() : "?adapter=" + net::percent_encode(adapter);
  auto asking = ask("/weight_proof" + query, deadline);
  const std::vector<net::HttpReply> replies = co_await std::move(asking);
  SameProof proof;
  for (std::size_t i = 0; i < replies.size(); ++i) proof.check(replies[i].body, fmt::format("engine {} of {}", i + 1, replies.size()));
  co_return proof.body();
}

}  // namespace prl::router
