#pragma once

#include <boost/json/object.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "net/http_message.hpp"
#include "net/request_guard.hpp"
#include "router/fleet_orders.hpp"

namespace prl::router {

/// Error{kInvalidArgument} if the body is not a JSON object.
boost::json::object body_of(const net::HttpRequest& request);

/// The routes of adapters and of runs that a server has, for all engines behind a router: the same paths, bodies and replies. Keys of runs
/// stay here, where requests come in; numbers of GET /runs and /runs/cancel are sums over the engines. Any thread.
class OrderRoutes : public std::enable_shared_from_this<OrderRoutes> {
 public:
  struct Options {
    std::chrono::milliseconds timeout{720'000};
    std::string api_key = {}, admin_api_key = {};  ///< of the router's own routes
  };
  using Handler = std::function<asio::awaitable<net::HttpResponse>(net::HttpRequest)>;
  using Add = std::function<void(const char* method, const char* path, net::Access access, Handler handler)>;

  OrderRoutes(std::shared_ptr<FleetOrders> orders, Options options);

  /// Call once, of an object that a shared_ptr owns.
  void add_to(const Add& add);
  /// The run whose key the request carries; nullopt: none.
  std::optional<std::string> run_of(const net::HttpRequest& request) const;
  /// A request with a run's key asks that run's adapter: names it where the request names no model, and throws HttpError 403 where it names
  /// another one.
  void restrict_to_run(net::HttpRequest& request) const;

 private:
  using Reply = asio::awaitable<net::HttpResponse>;
  Reply load(net::HttpRequest request, std::string path);
  Reply unload(net::HttpRequest request);
  Reply weight_proof(net::HttpRequest request);
  Reply list_runs(net::HttpRequest request);
  Reply put_run(net::HttpRequest request);
  Reply change_run(net::HttpRequest request, std::string path, OrderEffect effect);
  Reply cancel_run(net::HttpRequest request);

  /// An empty key takes the run's away.
  void set_key(const std::string& run, const std::string& key);
  /// Error{kAlreadyExists} if another run has the key.
  void require_free_key(const std::string& run, const std::string& key) const;

  std::shared_ptr<FleetOrders> orders_;
  Options options_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> keys_;  ///< of runs that have one; guarded
};

}  // namespace prl::router
