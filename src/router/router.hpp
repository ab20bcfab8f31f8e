#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/ids.hpp"
#include "router/engine_choice.hpp"
#include "router/sent_prefixes.hpp"

namespace prl::router {

using EngineId = StrongId<struct EngineIdTag>;
/// One request on its way through the router.
using TicketId = StrongId<struct TicketIdTag>;

/// What an engine has room for; 0 is not known, which counts as any amount.
struct EngineLimits {
  std::int64_t max_requests = 0;  ///< that run at one time
  std::int64_t max_tokens = 0;    ///< of prompts and completions, in its key-value cache
  bool operator==(const EngineLimits&) const = default;
};

struct RouterOptions {
  Spread spread = Spread::kSessions;
  PrefixSpread prefixes = {};
  std::uint64_t seed = 0;             ///< of the engines that are drawn: equal requests at equal moments give equal engines
  std::size_t max_waiting = 65536;    ///< requests that may wait for room
  std::size_t max_sessions = 262144;  ///< whose engine is remembered; the one used longest ago is forgotten first
  std::int64_t first_id = 0;          ///< of engines and tickets, so that those of two routers differ
};

/// What is known of a request before it runs.
struct RequestShape {
  std::string session;  ///< requests of one session share a prefix; empty: none
  std::int64_t num_prompt_tokens = 0;
  std::int64_t max_new_tokens = 0;
  PrefixHashes prefixes = {};  ///< of the prompt; only Spread::kPrefixes asks for them
  bool is_replay = false;      ///< was in flight on an engine that was lost: goes before the others
  /// The engine that failed the request: it is given it again only while no other has room. An engine that fails at once has always the
  /// fewest tokens in flight, and would else get every repetition.
  std::optional<EngineId> failed_on = {};
};

struct Assignment {
  TicketId ticket;
  EngineId engine;
  bool has_moved = false;  ///< its prefix is on another engine
};

struct RouterCounts {
  std::int64_t num_assigned = 0;
  std::int64_t num_at_home = 0;  ///< to the engine that has the session's prefix, or the prompt's
  std::int64_t num_moved = 0;    ///< away from it, since it had no room
};

/// Which engine has the prefix of a session. No session is the empty one, which has no home.
class SessionHomes {
 public:
  /// The one used longest ago is forgotten when there are more than `max_sessions`.
  explicit SessionHomes(std::size_t max_sessions) : max_sessions_(max_sessions) {}
  std::optional<std::int64_t> find(const std::string& session) const;
  void set(const std::string& session, std::int64_t engine);
  void forget_engine(std::int64_t engine);

 private:
  struct Home {
    std::int64_t engine = 0;
    std::list<std::string>::iterator age;
  };
  std::size_t max_sessions_;
  std::unordered_map<std::string, Home> homes_;
  std::list<std::string> ages_;  ///< sessions, used last first
};

/// Decides which engine runs which request. No clock, no thread, no socket: callers tell what happened and carry out plan().
///
///   1. A request goes to its session's engine while that has room, for its prefix is there.
///   2. A session without an engine gets the one with the fewest tokens in flight, a request that failed on an engine another than that.
///   3. A request waits here, not at an engine, and only while its session's engine, or without one every engine, is full. A session
///      moves to another engine when that is less than half full, or when more wait for its own than half of what that runs; of those first
///      in line the one with the shortest prompt, which is the cheapest to compute again. So no engine is idle while another queues.
/// A single engine is given all requests at once: it has a queue of its own.
/// With Spread::kTurns, kRandom and kTwoChoices no session has an engine, and rule 2 takes another of the engines with room.
/// With Spread::kPrefixes the engine of rule 1 is that which was sent the longest part of the request's prompt before, of several the one
/// with its session; if no engine was sent enough of it, its session's; and rule 2 takes the engine that was sent the least text. While
/// engines differ too much in requests in flight, a request goes to the one with the fewest.
///
/// Every ticket is assigned at most once and ends by finish() or cancel(). Engines may come and go between any two calls.
class Router {
 public:
  explicit Router(RouterOptions options = {});

  EngineId add_engine(EngineLimits limits, bool is_ready);
  void set_limits(EngineId engine, EngineLimits limits);
  /// An engine that is not ready gets no requests, and its sessions go to others; what it runs stays its own until it ends.
  void set_ready(EngineId engine, bool is_ready);
  /// What the engine has computed is of no more use, as after a change of its weights.
  void forget_prefixes(EngineId engine);
  /// Forgets an engine. Error{kInternal} while it has requests.
  void remove_engine(EngineId engine);

  /// Nullopt when max_waiting requests wait.
  [[nodiscard]] std::optional<TicketId> submit(RequestShape shape);
  /// An assigned request has ended; its length improves the estimate of those to come.
  void finish(TicketId ticket, std::int64_t num_new_tokens);
  /// Ends a request that waits, or one in flight that has given no token.
  void cancel(TicketId ticket);
  /// Requests that can start now. Call after any change.
  std::vector<Assignment> plan();

  EngineLoad load(EngineId engine) const;
  const RouterCounts& counts() const noexcept { return counts_; }
  std::size_t num_waiting() const noexcept { return num_waiting_; }
  /// An engine is ready, whether it has room or not.
  bool has_ready_engine() const noexcept;

 private:
  struct Request {
    RequestShape shape;
    std::int64_t num_tokens = 0;            ///< expected, while it is in flight
    std::optional<std::int64_t> engine;     ///< that runs it
    std::optional<std::int64_t> waits_for;  ///< engine in whose queue it is; nullopt: in fresh_
  };
  using Queue = std::map<std::int64_t, std::int64_t>;  ///< place in line to ticket
  struct Engine {
    EngineLimits limits;
    EngineLoad load;
    SentPrefixes sent;
    Queue waiting = {};  ///< requests whose prefix is here
  };

  Engine& engine(EngineId id);
  const Engine& engine(EngineId id) const;
  std::int64_t expected_tokens(const RequestShape& shape) const;
  void enqueue(std::int64_t ticket);
  void dequeue(std::int64_t ticket);
  void assign(std::int64_t ticket, std::int64_t engine, std::vector<Assignment>& plan);
  void plan_at_home(std::vector<Assignment>& plan);
  void plan_fresh(std::vector<Assignment>& plan);
  void plan_moves(std::vector<Assignment>& plan);
  std::vector<EngineChoice::Candidate> ready_engines() const;
  /// Of the engines with room the one that Spread says.
  std::optional<std::int64_t> choose(const RequestShape& shape, bool must_be_half_empty);
  /// The first in a line with the shortest prompt, among all lines or the long ones alone.
  std::optional<std::int64_t> cheapest_to_move(bool from_long_lines) const;

  RouterOptions options_;
  std::map<std::int64_t, Engine> engines_;
  std::unordered_map<std::int64_t, Request> requests_;
  Queue fresh_;
  std::size_t num_waiting_ = 0;
  SessionHomes homes_;
  EngineChoice choice_;
  double mean_new_tokens_ = 0;  ///< of requests that finished; 0 before the first
  std::int64_t next_engine_ = 0;
  std::int64_t next_ticket_ = 0;
  RouterCounts counts_;
};

}  // namespace prl::router
