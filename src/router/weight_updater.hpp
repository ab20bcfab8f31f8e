#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "base/ids.hpp"
#include "net/http_client.hpp"
#include "router/fleet.hpp"

namespace prl::router {

/// One version of the policy, as every engine is told to load it.
struct WeightUpdate {
  PolicyVersion version;
  std::string folder;  ///< of a Hugging Face checkpoint or an adapter, absolute
  std::string store;   ///< or "tcp://host:port" of the trainer, which sends them
  /// Not the weights of the model but those of the adapter of this name, which engines hold beside others: letters, digits, '_', '-', '.'.
  std::string adapter = {};
  /// Compares the proof in an engine's reply with what was published: Error{kOutOfSync} or {kCorrupt}, naming `url`. Any thread, and
  /// several at one time.
  std::function<void(const std::string& reply, const std::string& url)> verify;
  /// Whether an engine that came back has these weights already, of which nothing else is told; it then is verified. Empty: verify says.
  std::function<bool(const std::string& reply)> holds = {};
};

struct WeightUpdaterOptions {
  std::string api_key = {};  ///< of the admin routes; empty: the client's own
  std::string claim = {};    ///< the run, for servers that it did not start (net::RunClaim); empty: servers are not claimed
  /// Of an adapter's run: the body of POST /runs, by which an engine learns what share of it the run gets. It goes along with every update;
  /// engines without that route have no shares. Called from any thread.
  std::function<std::string()> share = {};
  /// What an engine gets beyond the time that the first one took, and that time again, before the run goes on without it.
  std::chrono::milliseconds patience{10'000};
};

/// Installs versions of the policy in all engines of a fleet at one time, by POST /update_weights or /load_lora_adapter, and compares each
/// engine's proof. An engine that misses an update is left out of the fleet, is given the newest version as soon as it answers again, and
/// then rejoins. Any thread.
class WeightUpdater {
 public:
  /// Becomes the fleet's bring_up, so before its first add().
  WeightUpdater(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client, WeightUpdaterOptions options = {});
  ~WeightUpdater();
  WeightUpdater(const WeightUpdater&) = delete;
  WeightUpdater& operator=(const WeightUpdater&) = delete;

  /// Returns when at least one engine runs the version and every other one does, or is left out. One caller at a time.
  /// Error{kOutOfSync} when a proof differs, whichever engine gave it; the first engine's error when all refuse; {kDeadline} saying how the
  /// engines are when none took the version in time.
  asio::awaitable<void> apply(WeightUpdate update, net::TimePoint deadline);
  /// Gives the engines that were claimed to other runs. One that does not answer in time keeps its claim; nothing is thrown.
  asio::awaitable<void> release(net::TimePoint deadline);
  /// The engines that have not answered the update in progress, for messages; empty if there is none.
  std::string describe_pending() const;
  /// What else an engine is given after the weights and before it is used; throws if that failed. Replaces what was given before.
  void also_bring_up(std::function<asio::awaitable<void>(EngineView)> more);

  struct State;  ///< of weight_updater.cpp

 private:
  std::shared_ptr<Fleet> fleet_;
  std::shared_ptr<State> state_;
};

}  // namespace prl::router
