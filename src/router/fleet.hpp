#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "net/http_client.hpp"
#include "net/signal.hpp"
#include "router/router.hpp"

namespace prl::router {

namespace asio = boost::asio;

enum class EngineState {
  kStarting,  ///< has not answered yet
  kReady,
  kBehind,    ///< answers, but has not proven the weights that the others run
  kDown,      ///< does not answer
  kDraining,  ///< finishes what it runs, then leaves
};
/// "starting", "ready", "behind", "down", "draining".
std::string_view to_string(EngineState state) noexcept;

/// What an engine of a fleet is for.
enum class EngineRole {
  kAll,      ///< whole requests; where prompts have engines of their own, it decodes
  kPrefill,  ///< prompts, whose blocks an engine of the other role takes over
};

/// What is known of an engine at one moment.
struct EngineView {
  EngineId id;
  EngineRole role = EngineRole::kAll;
  std::string url;  ///< root, without /v1
  EngineState state = EngineState::kStarting;
  EngineLoad load;
  EngineLimits limits;
  std::optional<PolicyVersion> version;  ///< that it has proven since it came up last
  std::string problem;                   ///< why it is not ready; empty if it is
  std::int64_t num_lost = 0;             ///< times it was lost
};

struct FleetOptions {
  RouterOptions router;
  std::chrono::milliseconds probe_interval{1000};  ///< of engines that are ready
  std::chrono::milliseconds retry_interval{250};   ///< of those that are not; doubles up to probe_interval
  std::chrono::milliseconds probe_timeout{5000};
  int num_failed_probes = 3;       ///< in a row, after which an engine that takes connections but does not answer is down
  std::size_t max_engines = 1024;  ///< further ones are refused
  bool reads_limits = true;        ///< ask engines on /metrics for how much they have room
  /// Tokens of a prompt that a decode engine computes itself, rather than leave them to a prefill engine.
  std::int64_t max_uncached_tokens = 16;
};

/// What became of prompts that prefill engines could have computed.
enum class PrefillOutcome {
  kSkipped,  ///< the decode engine had all but a few of its tokens
  kDone,
  kFailed,  ///< no prefill engine did it: the decode engine computes it
};

struct FleetCounts {
  RouterCounts router;
  std::int64_t num_waiting = 0;   ///< requests without an engine
  std::int64_t num_replayed = 0;  ///< requests that began anew on another engine
  std::int64_t num_lost = 0;      ///< engines that were lost, each time counted
  std::int64_t num_prefills = 0, num_prefills_skipped = 0, num_prefills_failed = 0;
};

class Fleet;

/// A request's place on an engine, given back when this is destroyed. Move only; must not outlive the Fleet's executor.
class Lease {
 public:
  Lease(Lease&&) noexcept;
  Lease& operator=(Lease&&) noexcept;
  ~Lease();
  const std::string& url() const noexcept { return url_; }
  EngineId engine() const noexcept { return engine_; }
  /// The version that the engine had proven when the request was given to it.
  std::optional<PolicyVersion> version() const noexcept { return version_; }
  /// Notified when the engine is lost. One waiter.
  const net::Signal& lost() const noexcept { return lost_; }
  /// The request has ended well, after so many tokens.
  void finish(std::int64_t num_new_tokens);
  /// The request found the engine broken: no other request goes there until it answers and proves its weights.
  void report_lost(const std::string& why);

 private:
  friend class Fleet;
  struct Owner;
  explicit Lease(std::unique_ptr<Owner> owner) noexcept;
  void give_back() noexcept;
  std::unique_ptr<Owner> owner_;
  std::string url_;
  EngineId engine_;
  std::optional<PolicyVersion> version_;
  net::Signal lost_;
};

/// Engines behind one router: who is there, who is well, and which request goes where. Looks after each engine with GET /health. An engine
/// that is lost, silent or without the right weights gets no requests until it is well again; those it had are told by Lease::lost().
/// Any thread.
class Fleet {
 public:
  /// Brings an engine that answers to the state in which it may be used: throws if that failed, and is then called again. Answers the
  /// version that the engine has proven, if versions are known at all.
  using BringUp = std::function<asio::awaitable<std::optional<PolicyVersion>>(EngineView)>;

  Fleet(asio::any_io_executor executor, std::shared_ptr<net::HttpClient> client, FleetOptions options = {});
  /// Stops the health checks; requests in flight go on.
  ~Fleet();
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  /// Before the first add(). It must not own this.
  void set_bring_up(BringUp bring_up);
  /// An engine joins; `url` with or without /v1. Error{kAlreadyExists} naming one that is there.
  EngineId add(const std::string& url, EngineRole role = EngineRole::kAll);
  /// An engine leaves when what it runs has ended. Error{kNotFound} listing those that are there.
  void drain(const std::string& url);

  /// RequestShape::prefixes are asked for.
  bool wants_prefixes() const noexcept;
  /// Waits until an engine has room. Error{kOverloaded} when too many wait, {kDeadline} saying how the engines are. Prefill engines get
  /// whole requests only while no other is ready.
  asio::awaitable<Lease> acquire(RequestShape shape, net::TimePoint deadline);
  /// The same of a prefill engine. Error{kUnavailable} when none is ready, then or later.
  asio::awaitable<Lease> acquire_prefill(RequestShape shape, net::TimePoint deadline);
  /// A prefill engine is ready, and another engine that could go on behind it.
  bool has_prefill() const;
  std::int64_t max_uncached_tokens() const noexcept;
  void count(PrefillOutcome outcome);
  /// True when an engine is ready, false when `deadline` passed first.
  asio::awaitable<bool> wait_ready(net::TimePoint deadline);

  /// The engine has proven `version`.
  void set_version(EngineId engine, PolicyVersion version);
  /// The engine missed an update: it gets no requests until it was brought up again, also if it is just being brought up.
  void set_behind(EngineId engine, const std::string& why);

  std::vector<EngineView> engines() const;
  FleetCounts counts() const;
  /// "http://a (ready), http://b (down: connection refused)".
  std::string describe() const;
  asio::any_io_executor executor() const;

  struct State;  ///< of fleet.cpp

 private:
  friend class Lease;
  static asio::awaitable<Lease> acquire_from(std::shared_ptr<State> state, EngineRole role, bool needs_prefill, RequestShape shape,
                                             net::TimePoint deadline);
  std::shared_ptr<State> state_;
};

}  // namespace prl::router
