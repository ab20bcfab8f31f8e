#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <vector>

#include "router/router.hpp"

/// Many engines and thousands of sessions under a virtual clock: what the router's decisions lead to.
namespace prl::router {
namespace {

constexpr double kPrefillTokensPerSecond = 20'000;
constexpr double kDecodeTokensPerSecond = 60;

struct Turn {
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_new_tokens = 0;
  double think_seconds = 0;  ///< of the environment, before the turn
};
using Session = std::vector<Turn>;

/// Conversations as environments with tools have them: the prompt grows by each reply and by what the tools say; a few replies are long.
std::vector<Session> make_sessions(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto uniform = [&random] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  const auto exponential = [&](double mean) { return -mean * std::log(1 - uniform()); };
  std::vector<Session> sessions(count);
  for (Session& session : sessions) {
    std::int64_t prompt = 300 + static_cast<std::int64_t>(uniform() * 1500);
    const int num_turns = 1 + static_cast<int>(exponential(4));
    for (int i = 0; i < std::min(num_turns, 20); ++i) {
      Turn turn;
      turn.num_prompt_tokens = prompt;
      turn.num_new_tokens = 1 + static_cast<std::int64_t>(std::min(exponential(uniform() < 0.05 ? 1500 : 150), 4096.0));
      turn.think_seconds = i == 0 ? 0 : exponential(1.5);
      prompt += turn.num_new_tokens + 20 + static_cast<std::int64_t>(uniform() * 300);
      session.push_back(turn);
    }
  }
  return sessions;
}

/// All conversations begin with the same 128 tokens.
PrefixHashes prompt_of(std::size_t session, const Turn& turn) {
  PrefixHashes parts(static_cast<std::size_t>(turn.num_prompt_tokens / 16));
  for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = i < 8 ? i : 100'000 * (session + 1) + i;
  return parts;
}

struct SimulationOptions {
  int num_engines = 1;
  std::int64_t num_seats = 16;              ///< of each engine
  std::int64_t num_cache_tokens = 0;        ///< of each engine; 0: as many as there are
  std::int64_t max_tokens = 0;              ///< told to the router
  std::size_t num_concurrent_sessions = 0;  ///< that play at one time
  Spread spread = Spread::kSessions;
  double failure_seconds = 0;  ///< an engine is lost so often, and comes back after as long; 0: never
};

struct Outcome {
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_hit_tokens = 0;
  std::int64_t num_turns = 0;
  std::int64_t num_replays = 0;
  std::int64_t num_idle_while_waiting = 0;  ///< engines less than half full at a moment at which a request waited
  double seconds = 0;
  double busy_seconds = 0;  ///< of all seats
  double hit_rate() const { return static_cast<double>(num_hit_tokens) / static_cast<double>(num_prompt_tokens); }
};

class Simulation {
 public:
  Simulation(SimulationOptions options, const std::vector<Session>& sessions)
      : options_(options),
        sessions_(sessions),
        next_turn_(sessions.size()),
        caches_(static_cast<std::size_t>(options.num_engines)),
        router_({.spread = options.spread}) {
    for (int i = 0; i < options.num_engines; ++i)
      router_.add_engine({.max_requests = options.num_seats, .max_tokens = options.max_tokens}, true);
  }

  Outcome run() {
    for (std::size_t i = 0; i < std::min(options_.num_concurrent_sessions, sessions_.size()); ++i) start_next_session();
    if (options_.failure_seconds > 0) at(options_.failure_seconds, [this] { lose_engine(0); });
    while (!events_.empty() && num_done_ < sessions_.size()) {
      now_ = events_.top().when;
      const std::function<void()> work = events_.top().work;
      events_.pop();
      work();
      carry_out();
    }
    outcome_.seconds = now_;
    return outcome_;
  }

 private:
  struct Event {
    double when;
    std::int64_t order;
    std::function<void()> work;
    bool operator<(const Event& other) const { return std::pair(when, order) > std::pair(other.when, other.order); }
  };
  struct Cached {
    std::int64_t num_tokens = 0;
    std::int64_t used = 0;  ///< order of its last use
  };
  struct Cache {
    std::map<std::size_t, Cached> sessions;
    std::int64_t num_tokens = 0;
  };
  struct Running {
    std::size_t session;
    std::int64_t engine;
    double begin;
  };

  void at(double seconds, std::function<void()> work) { events_.push({now_ + seconds, num_events_++, std::move(work)}); }

  void start_next_session() {
    if (num_begun_ == sessions_.size()) return;
    const std::size_t session = num_begun_++;
    at(0, [this, session] { submit(session, false); });
  }

  void submit(std::size_t session, bool is_replay) {
    const Turn& turn = sessions_[session][next_turn_[session]];
    const auto ticket = router_.submit({.session = options_.spread == Spread::kPrefixes ? "" : std::to_string(session),
                                        .num_prompt_tokens = turn.num_prompt_tokens,
                                        .max_new_tokens = 4096,
                                        .prefixes = options_.spread == Spread::kPrefixes ? prompt_of(session, turn) : PrefixHashes(),
                                        .is_replay = is_replay});
    ASSERT_TRUE(ticket.has_value());
    waiting_[ticket->value] = session;
  }

  void carry_out() {
    for (const Assignment& assignment : router_.plan()) begin(assignment);
    if (router_.num_waiting() == 0) return;
    for (int i = 0; i < options_.num_engines; ++i) {
      const EngineLoad load = router_.load(EngineId{i});
      const bool is_half_empty = options_.max_tokens == 0 ? 2 * load.num_requests < options_.num_seats
                                                          : load.num_requests == 0;  // with few tokens left the first in line may not fit
      if (load.is_ready && is_half_empty) ++outcome_.num_idle_while_waiting;
    }
  }

  void begin(const Assignment& assignment) {
    const std::size_t session = waiting_.at(assignment.ticket.value);
    waiting_.erase(assignment.ticket.value);
    const Turn& turn = sessions_[session][next_turn_[session]];
    const std::int64_t engine = assignment.engine.value;
    EXPECT_TRUE(options_.num_engines == 1 || router_.load(assignment.engine).num_requests <= options_.num_seats);
    Cache& cache = caches_[static_cast<std::size_t>(engine)];
    const auto found = cache.sessions.find(session);
    const std::int64_t num_hits = found == cache.sessions.end() ? 0 : std::min(found->second.num_tokens, turn.num_prompt_tokens);
    outcome_.num_prompt_tokens += turn.num_prompt_tokens;
    outcome_.num_hit_tokens += num_hits;
    running_[assignment.ticket.value] = {session, engine, now_};
    const double seconds = static_cast<double>(turn.num_prompt_tokens - num_hits) / kPrefillTokensPerSecond +
                           static_cast<double>(turn.num_new_tokens) / kDecodeTokensPerSecond;
    const std::int64_t ticket = assignment.ticket.value;
    at(seconds, [this, ticket] { end(ticket); });
  }

  void keep(Cache& cache, std::size_t session, std::int64_t num_tokens) {
    Cached& entry = cache.sessions[session];
    cache.num_tokens += num_tokens - entry.num_tokens;
    entry = {num_tokens, num_events_};
    while (options_.num_cache_tokens > 0 && cache.num_tokens > options_.num_cache_tokens && cache.sessions.size() > 1) {
      const auto oldest = std::min_element(cache.sessions.begin(), cache.sessions.end(),
                                           [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
      cache.num_tokens -= oldest->second.num_tokens;
      cache.sessions.erase(oldest);
    }
  }

  void end(std::int64_t ticket) {
    const auto it = running_.find(ticket);
    if (it == running_.end()) return;  // its engine was lost meanwhile
    const Running done = it->second;
    running_.erase(it);
    const Turn& turn = sessions_[done.session][next_turn_[done.session]];
    router_.finish(TicketId{ticket}, turn.num_new_tokens);
    outcome_.busy_seconds += now_ - done.begin;
    ++outcome_.num_turns;
    keep(caches_[static_cast<std::size_t>(done.engine)], done.session, turn.num_prompt_tokens + turn.num_new_tokens);
    const std::size_t session = done.session;
    if (++next_turn_[session] == sessions_[session].size()) {
      ++num_done_;
      caches_[static_cast<std::size_t>(done.engine)].num_tokens -=
          std::exchange(caches_[static_cast<std::size_t>(done.engine)].sessions[session].num_tokens, 0);
      start_next_session();
      return;
    }
    at(sessions_[session][next_turn_[session]].think_seconds, [this, session] { submit(session, false); });
  }

  void lose_engine(std::int64_t engine) {
    router_.set_ready(EngineId{engine}, false);
    caches_[static_cast<std::size_t>(engine)] = {};
    std::vector<std::int64_t> lost;
    for (const auto& [ticket, running] : running_)
      if (running.engine == engine) lost.push_back(ticket);
    for (const std::int64_t ticket : lost) {
      const std::size_t session = running_.at(ticket).session;
      running_.erase(ticket);
      router_.cancel(TicketId{ticket});
      submit(session, true);
      ++outcome_.num_replays;
    }
    at(options_.failure_seconds, [this, engine] {
      router_.set_ready(EngineId{engine}, true);
      at(options_.failure_seconds, [this, engine] { lose_engine((engine + 1) % options_.num_engines); });
    });
  }

  SimulationOptions options_;
  const std::vector<Session>& sessions_;
  std::vector<std::size_t> next_turn_;
  std::vector<Cache> caches_;
  Router router_;
  std::priority_queue<Event> events_;
  std::int64_t num_events_ = 0;
  double now_ = 0;
  std::size_t num_begun_ = 0, num_done_ = 0;
  std::map<std::int64_t, std::size_t> waiting_;  ///< ticket to session
  std::map<std::int64_t, Running> running_;
  Outcome outcome_;
};

std::int64_t num_turns(const std::vector<Session>& sessions) {
  std::int64_t count = 0;
  for (const Session& session : sessions) count += static_cast<std::int64_t>(session.size());
  return count;
}

void print(const char* what, const Outcome& outcome) {
  std::printf("  %s: %.1f%% of prompt tokens in the cache, %.0f s, seats busy %.0f s, %lld turns, %lld replays\n", what,
              100 * outcome.hit_rate(), outcome.seconds, outcome.busy_seconds, static_cast<long long>(outcome.num_turns),
              static_cast<long long>(outcome.num_replays));
}

class SpreadSimulation : public ::testing::TestWithParam<Spread> {};

/// Conversations whose router knows no sessions where prompts tell the same.
TEST_P(SpreadSimulation, CachesAreFoundByPromptsAndNoEngineIsIdleWhileARequestWaits) {
  const std::vector<Session> sessions = make_sessions(4'000, 11);
  SimulationOptions options{.num_engines = 16, .num_seats = 16, .num_cache_tokens = 16 * 16'000, .num_concurrent_sessions = 300};
  const Outcome by_session = Simulation(options, sessions).run();
  options.spread = GetParam();
  const Outcome outcome = Simulation(options, sessions).run();
  print(::testing::PrintToString(static_cast<int>(GetParam())).c_str(), outcome);
  print("by sessions", by_session);
  EXPECT_EQ(outcome.num_turns, num_turns(sessions));
  EXPECT_EQ(outcome.num_idle_while_waiting, 0);
  if (GetParam() == Spread::kPrefixes)
    EXPECT_GE(outcome.hit_rate(), 0.97 * by_session.hit_rate());
  else
    EXPECT_LE(outcome.hit_rate(), 0.5 * by_session.hit_rate()) << "it knows neither sessions nor prompts";
}

INSTANTIATE_TEST_SUITE_P(Policies, SpreadSimulation,
                         ::testing::Values(Spread::kTurns, Spread::kRandom, Spread::kTwoChoices, Spread::kPrefixes));

class RouterSimulation : public ::testing::TestWithParam<std::size_t> {};

/// From a fleet that is half used, over one that is just full, to one that always has requests waiting.
TEST_P(RouterSimulation, NoEngineIsIdleWhileAnotherQueuesAndPrefixesAreFound) {
  const std::vector<Session> sessions = make_sessions(10'000, 7);
  SimulationOptions options{.num_engines = 64, .num_seats = 16, .num_cache_tokens = 16 * 16'000, .num_concurrent_sessions = GetParam()};
  const Outcome many = Simulation(options, sessions).run();
  options.num_engines = 1;
  options.num_seats *= 64;
  options.num_cache_tokens *= 64;
  const Outcome one = Simulation(options, sessions).run();
  print("64 engines", many);
  print("one engine 64 times as large", one);
  EXPECT_EQ(many.num_turns, num_turns(sessions));
  EXPECT_EQ(many.num_idle_while_waiting, 0);
  EXPECT_GE(many.hit_rate(), 0.91 * one.hit_rate());
}

INSTANTIATE_TEST_SUITE_P(Load, RouterSimulation, ::testing::Values(512, 1100, 1300, 4096));

TEST(RouterSimulationWithFailures, LostEnginesCostNoTurn) {
  const std::vector<Session> sessions = make_sessions(10'000, 8);
  const SimulationOptions options{
      .num_engines = 64, .num_seats = 16, .num_cache_tokens = 16 * 16'000, .num_concurrent_sessions = 1200, .failure_seconds = 2};
  const Outcome outcome = Simulation(options, sessions).run();
  print("an engine lost every 4 s", outcome);
  EXPECT_EQ(outcome.num_turns, num_turns(sessions));
  EXPECT_GT(outcome.num_replays, 100);
  EXPECT_EQ(outcome.num_idle_while_waiting, 0);
}

TEST(RouterSimulationWithTokens, AFullCacheHoldsRequestsBackButNoEngineIsWithoutWork) {
  const std::vector<Session> sessions = make_sessions(4'000, 9);
  const SimulationOptions options{
      .num_engines = 64, .num_seats = 16, .num_cache_tokens = 30'000, .max_tokens = 30'000, .num_concurrent_sessions = 1024};
  const Outcome outcome = Simulation(options, sessions).run();
  print("caches of 30,000 tokens", outcome);
  EXPECT_EQ(outcome.num_turns, num_turns(sessions));
  EXPECT_EQ(outcome.num_idle_while_waiting, 0);
}

}  // namespace
}  // namespace prl::router
