#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "net/http_server.hpp"
#include "net/request_guard.hpp"
#include "router/fleet.hpp"
#include "router/weight_updater.hpp"

namespace prl::router {

struct RouterServerOptions {
  net::HttpServer::Options http;
  net::RequestGuard::Options guard;
  std::chrono::milliseconds request_timeout{3'600'000};
  std::chrono::milliseconds update_timeout{720'000};  ///< of weights, adapters and runs
  std::string engine_admin_key = {};                  ///< of the engines' admin routes; empty: the client's own
};

/// Engines behind one address: /v1/*, /inference/v1/generate and the tokenizer's routes are answered by an engine, streamed replies too.
///
/// A request whose engine is lost begins anew on another one, with the same seed (the router adds one where there is none); a stream goes
/// on where it broke off, with the tokens that the lost engine would have sent. Only /v1/responses, whose events do not add up, ends with
/// an error once its stream has begun. POST /update_weights goes to every engine, and so do loads of adapters and orders to runs
/// (FleetOrders); GET, POST and DELETE /engines list, add and drain them while requests run.
class RouterServer {
 public:
  /// `fleet` and `client` run on one I/O runtime, which outlives this.
  RouterServer(RouterServerOptions options, std::shared_ptr<Fleet> fleet, std::shared_ptr<WeightUpdater> updater,
               std::shared_ptr<net::HttpClient> client);
  ~RouterServer();
  /// Error{kIo} naming host:port.
  void start();
  int port() const noexcept;
  void stop(std::chrono::milliseconds drain);

  struct Context;  ///< of router_server.cpp

 private:
  std::shared_ptr<Context> context_;
  net::HttpServer http_;
};

}  // namespace prl::router
