#include "router/router.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/error.hpp"

namespace prl::router {
namespace {

/// Weight of the newest completion in the mean length: about the last hundred count.
constexpr double kMeanWeight = 0.02;
/// Replays stand before all places of arrival.
constexpr std::int64_t kReplayLead = std::int64_t{1} << 62;

/// In a line: replays first, then in order of arrival.
std::int64_t place_of(std::int64_t ticket, bool is_replay) { return is_replay ? ticket - kReplayLead : ticket; }

}  // namespace

std::optional<std::int64_t> SessionHomes::find(const std::string& session) const {
  if (session.empty()) return std::nullopt;
  const auto it = homes_.find(session);
  if (it == homes_.end()) return std::nullopt;
  return it->second.engine;
}

void SessionHomes::set(const std::string& session, std::int64_t engine) {
  if (session.empty()) return;
  if (const auto it = homes_.find(session); it != homes_.end()) {
    it->second.engine = engine;
    ages_.splice(ages_.begin(), ages_, it->second.age);
    return;
  }
  if (homes_.size() >= max_sessions_) {
    homes_.erase(ages_.back());
    ages_.pop_back();
  }
  ages_.push_front(session);
  homes_.emplace(session, Home{engine, ages_.begin()});
}

void SessionHomes::forget_engine(std::int64_t engine) {
  std::erase_if(homes_, [&](const auto& home) {
    if (home.second.engine != engine) return false;
    ages_.erase(home.second.age);
    return true;
  });
}

Router::Router(RouterOptions options) : options_(options), homes_(options.max_sessions) {}

Router::Engine& Router::engine(EngineId id) {
  const auto it = engines_.find(id.value);
  PRL_CHECK(it != engines_.end(), "the router has no engine {}", id.value);
  return it->second;
}

const Router::Engine& Router::engine(EngineId id) const {
  const auto it = engines_.find(id.value);
  PRL_CHECK(it != engines_.end(), "the router has no engine {}", id.value);
  return it->second;
}

EngineId Router::add_engine(EngineLimits limits, bool is_ready) {
  const EngineId id{next_engine_++};
  Engine& added = engines_[id.value];
  added.limits = limits;
  added.load.is_ready = is_ready;
  return id;
}

void Router::set_limits(EngineId id, EngineLimits limits) { engine(id).limits = limits; }

void Router::set_ready(EngineId id, bool is_ready) {
  Engine& changed = engine(id);
  if (std::exchange(changed.load.is_ready, is_ready) == is_ready || is_ready) return;
  // Those that waited for its prefix go wherever there is room.
  for (const auto& [place, ticket] : std::exchange(changed.waiting, {})) {
    requests_.at(ticket).waits_for.reset();
    fresh_.emplace(place, ticket);
  }
  homes_.forget_engine(id.value);
}

void Router::remove_engine(EngineId id) {
  set_ready(id, false);
  PRL_CHECK(engine(id).load.num_requests == 0, "engine {} still runs {} requests", id.value, engine(id).load.num_requests);
  engines_.erase(id.value);
}

std::int64_t Router::expected_tokens(const RequestShape& shape) const {
  std::int64_t num_new = shape.max_new_tokens;
  if (mean_new_tokens_ > 0) num_new = std::min(num_new, static_cast<std::int64_t>(mean_new_tokens_) + 1);
  return shape.num_prompt_tokens + num_new;
}

bool Router::has_room(const Engine& engine, std::int64_t num_tokens) const {
  if (!engine.load.is_ready) return false;
  if (engines_.size() == 1 || engine.load.num_requests == 0) return true;
  const EngineLimits& limits = engine.limits;
  return (limits.max_requests == 0 || engine.load.num_requests < limits.max_requests) &&
         (limits.max_tokens == 0 || engine.load.num_tokens + num_tokens <= limits.max_tokens);
}

bool Router::Engine::is_half_empty() const noexcept {
  return (limits.max_requests == 0 || 2 * load.num_requests < limits.max_requests) &&
         (limits.max_tokens == 0 || 2 * load.num_tokens < limits.max_tokens);
}

bool Router::has_ready_engine() const noexcept {
  return std::any_of(engines_.begin(), engines_.end(), [](const auto& entry) { return entry.second.load.is_ready; });
}

void Router::enqueue(std::int64_t ticket) {
  Request& request = requests_.at(ticket);
  request.waits_for = homes_.find(request.shape.session);
  if (request.shape.failed_on && request.waits_for == request.shape.failed_on->value) request.waits_for.reset();
  Queue& queue = request.waits_for ? engines_.at(*request.waits_for).waiting : fresh_;
  queue.emplace(place_of(ticket, request.shape.is_replay), ticket);
  ++num_waiting_;
}

void Router::dequeue(std::int64_t ticket) {
  Request& request = requests_.at(ticket);
  Queue& queue = request.waits_for ? engines_.at(*request.waits_for).waiting : fresh_;
  queue.erase(place_of(ticket, request.shape.is_replay));
  --num_waiting_;
}

std::optional<TicketId> Router::submit(RequestShape shape) {
  if (num_waiting_ >= options_.max_waiting) return std::nullopt;
  const TicketId ticket{next_ticket_++};
  requests_[ticket.value].shape = std::move(shape);
  enqueue(ticket.value);
  return ticket;
}

void Router::finish(TicketId ticket, std::int64_t num_new_tokens) {
  const auto it = requests_.find(ticket.value);
  PRL_CHECK(it != requests_.end() && it->second.engine, "request {} ended without having begun", ticket.value);
  ++engine(EngineId{*it->second.engine}).load.num_finished;
  const auto length = static_cast<double>(num_new_tokens);
  mean_new_tokens_ = mean_new_tokens_ > 0 ? mean_new_tokens_ + kMeanWeight * (length - mean_new_tokens_) : std::max(length, 1.0);
  cancel(ticket);
}

void Router::cancel(TicketId ticket) {
  const auto it = requests_.find(ticket.value);
  PRL_CHECK(it != requests_.end(), "request {} ended twice", ticket.value);
  if (it->second.engine) {
    EngineLoad& load = engines_.at(*it->second.engine).load;
    --load.num_requests;
    load.num_tokens -= it->second.num_tokens;
  } else {
    dequeue(ticket.value);
  }
  requests_.erase(it);
}

void Router::assign(std::int64_t ticket, std::int64_t engine, std::vector<Assignment>& plan) {
  dequeue(ticket);
  Request& request = requests_.at(ticket);
  const bool has_home = request.waits_for.has_value();
  const bool is_home = has_home && *request.waits_for == engine;
  request.num_tokens = expected_tokens(request.shape);
  request.engine = engine;
  EngineLoad& load = engines_.at(engine).load;
  ++load.num_requests;
  load.num_tokens += request.num_tokens;
  last_turn_ = engine;
  if (options_.spread == Spread::kSessions) homes_.set(request.shape.session, engine);
  ++counts_.num_assigned;
  if (is_home) ++counts_.num_at_home;
  if (has_home && !is_home) ++counts_.num_moved;
  plan.push_back({TicketId{ticket}, EngineId{engine}, has_home && !is_home});
}

std::optional<std::int64_t> Router::choose(const RequestShape& shape, bool must_be_half_empty) const {
  const std::int64_t num_tokens = expected_tokens(shape);
  const std::pair<const std::int64_t, Engine>* best = nullptr;
  const bool takes_turns = options_.spread == Spread::kTurns;
  const auto rank = [&](const auto& entry) {
    const EngineLoad& load = entry.second.load;
    const bool has_failed = shape.failed_on && shape.failed_on->value == entry.first;
    return takes_turns ? std::tuple(has_failed, std::int64_t{entry.first <= last_turn_}, entry.first)
                       : std::tuple(has_failed, load.num_tokens, load.num_requests);
  };
  for (const auto& entry : engines_)
    if (has_room(entry.second, num_tokens) && (!must_be_half_empty || entry.second.is_half_empty()) && (!best || rank(entry) < rank(*best)))
      best = &entry;
  if (!best) return std::nullopt;
  return best->first;
}

void Router::plan_at_home(std::vector<Assignment>& plan) {
  for (auto& [id, engine] : engines_)
    while (!engine.waiting.empty()) {
      const std::int64_t ticket = engine.waiting.begin()->second;
      if (!has_room(engine, expected_tokens(requests_.at(ticket).shape))) break;
      assign(ticket, id, plan);
    }
}

void Router::plan_fresh(std::vector<Assignment>& plan) {
  while (!fresh_.empty()) {
    const std::int64_t ticket = fresh_.begin()->second;
    const auto engine = choose(requests_.at(ticket).shape, /*must_be_half_empty=*/false);
    if (!engine) return;
    assign(ticket, *engine, plan);
  }
}

std::optional<std::int64_t> Router::cheapest_to_move(bool from_long_lines) const {
  std::optional<std::int64_t> cheapest;
  const auto num_prompt_tokens = [this](std::int64_t ticket) { return requests_.at(ticket).shape.num_prompt_tokens; };
  for (const auto& [id, engine] : engines_) {
    if (engine.waiting.empty() || (from_long_lines && !engine.has_long_line())) continue;
    const std::int64_t first = engine.waiting.begin()->second;
    if (!cheapest || num_prompt_tokens(first) < num_prompt_tokens(*cheapest)) cheapest = first;
  }
  return cheapest;
}

void Router::plan_moves(std::vector<Assignment>& plan) {
  for (const bool from_long_lines : {false, true})
    while (const auto ticket = cheapest_to_move(from_long_lines)) {
      const auto engine = choose(requests_.at(*ticket).shape, !from_long_lines);
      if (!engine) break;
      assign(*ticket, *engine, plan);
    }
}

std::vector<Assignment> Router::plan() {
  std::vector<Assignment> plan;
  if (num_waiting_ == 0) return plan;
  plan_at_home(plan);
  plan_fresh(plan);
  plan_moves(plan);
  return plan;
}

EngineLoad Router::load(EngineId id) const { return engine(id).load; }

}  // namespace prl::router
