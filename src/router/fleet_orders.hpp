#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/http_client.hpp"
#include "router/fleet.hpp"
#include "router/turns.hpp"
#include "router/weight_updater.hpp"

namespace prl::router {

/// What an order is about.
enum class OrderKind { kAdapter, kRun };

/// What engines that join later hear of an order that was carried out.
enum class OrderEffect {
  kLoaded,   ///< the adapter with this body
  kShared,   ///< the run with the fields of this body, beside those of earlier ones
  kState,    ///< that the run is in the state that this path puts it in
  kRemoved,  ///< that there is no such adapter or run
  kNone,
};

/// A POST that every engine gets.
struct Order {
  OrderKind kind = OrderKind::kAdapter;
  std::string name;  ///< of the adapter or run
  std::string path;
  boost::json::object body;
  OrderEffect effect = OrderEffect::kNone;
};

struct FleetOrdersOptions {
  std::string api_key = {};                     ///< of the engines' admin routes; empty: the client's own
  std::size_t max_names = 4096;                 ///< adapters, and runs, that are remembered
  std::size_t max_waiting = 256;                ///< orders that wait for their turn
  std::chrono::milliseconds patience{10'000};   ///< what an engine gets beyond the time that the first one took, and that time again
  std::chrono::milliseconds undo_time{60'000};  ///< for all engines that took an order, which another refused, to be put back
};

/// What every engine of a fleet holds beside the weights of the model: adapters by name, and runs that share the engines. An order goes to
/// all engines at one time and changes all or none; adapters are compared by their proofs. The last order for each name is remembered, and
/// an engine that joins or comes back hears it before it counts as ready. Any thread.
class FleetOrders {
 public:
  /// Engines hear what is remembered whenever `updater` brings them up.
  FleetOrders(std::shared_ptr<Fleet> fleet, std::shared_ptr<WeightUpdater> updater, std::shared_ptr<net::HttpClient> client,
              FleetOrdersOptions options = {});
  FleetOrders(const FleetOrders&) = delete;
  FleetOrders& operator=(const FleetOrders&) = delete;

  /// The replies of the engines that took the order, of one at least. One that could not be reached is left out of the fleet until it has
  /// heard what it missed. If any refuses, those that took the order are put back to what they had (one that cannot be is left out
  /// likewise), and the error has the first refusal's status and the names of all engines that refused; {kOutOfSync} when proofs of an
  /// adapter differ; {kUnavailable} when no engine could be reached, {kOverloaded} when too many orders wait or too many names are
  /// remembered, {kDeadline}.
  asio::awaitable<std::vector<net::HttpReply>> carry_out(Order order, net::TimePoint deadline);
  /// Keeps orders, whose proofs a weight update would disturb, waiting until it is destroyed. Errors of Turns::take.
  asio::awaitable<Turns::Turn> take_turn(net::TimePoint deadline);
  /// The replies of all engines that are ready to a GET. The first refusal is the error; {kUnavailable} when none is ready.
  asio::awaitable<std::vector<net::HttpReply>> ask(std::string target, net::TimePoint deadline);
  /// The proof that all engines that are ready give; of the model with `adapter` unless that is empty. Error{kOutOfSync} when they differ.
  asio::awaitable<std::string> proof(std::string adapter, net::TimePoint deadline);

  struct State;  ///< of fleet_orders.cpp

 private:
  std::shared_ptr<State> state_;
};

}  // namespace prl::router
