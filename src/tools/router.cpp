#include "tools/router.hpp"

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "base/log.hpp"
#include "launch/routing.hpp"
#include "net/io_runtime.hpp"
#include "router/router_server.hpp"

namespace prl::tools {

int run_router(const config::RouterToolConfig& config, std::stop_token stop) {
  const auto to_ms = [](double seconds) { return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)); };
  net::raise_fd_limit(2 * static_cast<std::uint64_t>(config.max_connections) + 512);
  net::IoRuntime io(2, "router");
  net::HttpClient::Options client_options;
  const char* key = std::getenv(config.engine_api_key_var.c_str());
  client_options.bearer = key != nullptr && *key != '\0' ? key : "EMPTY";
  client_options.timeout = to_ms(config.request_timeout);
  client_options.max_connections_per_host = static_cast<std::size_t>(config.max_connections);
  auto client = std::make_shared<net::HttpClient>(io.executor(), client_options);
  router::FleetOptions fleet_options;
  fleet_options.router = launch::router_options(config);
  fleet_options.router.max_waiting = static_cast<std::size_t>(config.max_waiting);
  auto fleet = std::make_shared<router::Fleet>(io.executor(), client, fleet_options);
  auto updater = std::make_shared<router::WeightUpdater>(fleet, client);
  router::RouterServerOptions options;
  options.http.host = config.host;
  options.http.port = config.port;
  options.http.max_connections = static_cast<std::size_t>(config.max_connections);
  options.http.max_body_bytes = static_cast<std::size_t>(config.max_body_bytes);
  options.http.name = "router";
  options.guard.api_key = config.api_key.value_or("");
  options.guard.admin_api_key = config.admin_api_key.value_or("");
  options.guard.cors_origins = config.cors_origins;
  options.guard.allowed_hosts = config.allowed_hosts;
  options.guard.host = config.host;
  options.guard.origin_advice = "; list the origin in cors_origins";
  options.guard.host_advice = "; list the name in allowed_hosts, or set api_key";
  options.request_timeout = to_ms(config.request_timeout);
  options.update_timeout = to_ms(config.update_timeout);
  router::RouterServer server(std::move(options), fleet, updater, client);
  server.start();
  for (const std::string& url : config.engines) fleet->add(url);
  log::success("routing http://{}:{}/v1 to {} engine{}", config.host, server.port(), config.engines.size(),
               config.engines.size() == 1 ? "" : "s");
  std::mutex mutex;
  std::condition_variable_any ended;
  std::unique_lock lock(mutex);
  ended.wait(lock, stop, [] { return false; });
  log::info("stopping: no new requests, running ones get 10 s");
  server.stop(std::chrono::seconds(10));
  return 0;
}

}  // namespace prl::tools
