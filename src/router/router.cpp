#include "router/router.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::router {
namespace {

/// Weight of the newest completion in the mean length: about the last hundred count.
constexpr double kMeanWeight = 0.02;
/// Replays stand before all places of arrival.
constexpr std::int64_t kReplayLead = std::int64_t{1} << 62;

/// `is_only`: there is no other engine; it has a queue of its own.
bool has_room(const EngineLimits& limits, const EngineLoad& load, std::int64_t num_tokens, bool is_only) {
  if (!load.is_ready) return false;
  if (is_only || load.num_requests == 0) return true;
  return (limits.max_requests == 0 || load.num_requests < limits.max_requests) &&
         (limits.max_tokens == 0 || load.num_tokens + num_tokens <= limits.max_tokens);
}

bool is_half_empty(const EngineLimits& limits, const EngineLoad& load) {
  return (limits.max_requests == 0 || 2 * load.num_requests < limits.max_requests) &&
         (limits.max_tokens == 0 || 2 * load.num_tokens < limits.max_tokens);
}

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

Router::Router(RouterOptions options)
    : options_(options),
      homes_(options.max_sessions),
      choice_(options.spread, options.prefixes, options.seed),
      next_engine_(options.first_id),
      next_ticket_(options.first_id) {}

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
  Engine added{.limits = limits, .load = {}, .sent = SentPrefixes(options_.prefixes.max_bytes)};
  added.load.is_ready = is_ready;
  engines_.emplace(id.value, std::move(added));
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
  changed.sent.clear();
}

void Router::forget_prefixes(EngineId id) { engine(id).sent.clear(); }

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

bool Router::has_ready_engine() const noexcept {
  return std::any_of(engines_.begin(), engines_.end(), [](const auto& entry) { return entry.second.load.is_ready; });
}

void Router::enqueue(std::int64_t ticket) {
  Request& request = requests_.at(ticket);
  request.waits_for = homes_.find(request.shape.session);
  if (options_.spread == Spread::kPrefixes) {
    const std::vector<EngineChoice::Candidate> ready = ready_engines();
    request.waits_for = choice_.is_imbalanced(ready) ? std::nullopt : choice_.with_prefix(ready, request.shape.prefixes, request.waits_for);
  }
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
  Engine& chosen = engines_.at(engine);
  ++chosen.load.num_requests;
  chosen.load.num_tokens += request.num_tokens;
  choice_.note(engine);
  if (options_.spread == Spread::kSessions || options_.spread == Spread::kPrefixes) homes_.set(request.shape.session, engine);
  if (options_.spread == Spread::kPrefixes) chosen.sent.add(std::exchange(request.shape.prefixes, {}));
  ++counts_.num_assigned;
  if (is_home) ++counts_.num_at_home;
  if (has_home && !is_home) ++counts_.num_moved;
  plan.push_back({TicketId{ticket}, EngineId{engine}, has_home && !is_home});
}

std::vector<EngineChoice::Candidate> Router::ready_engines() const {
  std::vector<EngineChoice::Candidate> ready;
  for (const auto& [id, engine] : engines_)
    if (engine.load.is_ready) ready.push_back({id, &engine.load, &engine.sent});
  return ready;
}

std::optional<std::int64_t> Router::choose(const RequestShape& shape, bool must_be_half_empty) {
  const std::int64_t num_tokens = expected_tokens(shape);
  const std::vector<EngineChoice::Candidate> ready = ready_engines();
  std::vector<EngineChoice::Candidate> candidates;
  for (const EngineChoice::Candidate& candidate : ready) {
    const Engine& engine = engines_.at(candidate.id);
    if (has_room(engine.limits, engine.load, num_tokens, engines_.size() == 1) &&
        (!must_be_half_empty || is_half_empty(engine.limits, engine.load)))
      candidates.push_back(candidate);
  }
  if (candidates.size() > 1 && shape.failed_on)
    std::erase_if(candidates, [&](const auto& candidate) { return candidate.id == shape.failed_on->value; });
  if (candidates.empty()) return std::nullopt;
  return choice_.choose(candidates, ready, shape.prefixes, homes_.find(shape.session));
}

void Router::plan_at_home(std::vector<Assignment>& plan) {
  for (auto& [id, engine] : engines_)
    while (!engine.waiting.empty()) {
      const std::int64_t ticket = engine.waiting.begin()->second;
      if (!has_room(engine.limits, engine.load, expected_tokens(requests_.at(ticket).shape), engines_.size() == 1)) break;
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
    if (engine.waiting.empty() || (from_long_lines && 2 * std::ssize(engine.waiting) <= engine.load.num_requests)) continue;
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

EngineLoad Router::load(EngineId id) const {
  EngineLoad load = engine(id).load;
  load.num_sent_bytes = engine(id).sent.num_bytes();
  return load;
}

}  // namespace prl::router
