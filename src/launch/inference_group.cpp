#include "launch/inference_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/store.hpp"
#include "config/cli.hpp"
#include "config/secrets.hpp"
#include "launch/inference_role.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/node_meeting.hpp"
#include "launch/routing.hpp"
#include "launch/run_identity.hpp"
#include "launch/supervisor.hpp"
#include "launch/visible_gpus.hpp"
#include "net/io_runtime.hpp"
#include "net/port_owner.hpp"
#include "router/router_server.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr int kMaxRestarts = 3;
/// For nodes to come, as batch systems start them one after another.
constexpr std::chrono::milliseconds kEnginesTime{600'000};
constexpr std::chrono::milliseconds kFrontStoreTimeout{10'000}, kStorePoll{200};

std::chrono::milliseconds to_ms(double seconds) { return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

/// The engines of one node among those of all.
struct GroupPlace {
  int first = 0, num_here = 1, num_all = 1;
  std::string host = "127.0.0.1";  ///< where the engines listen
  bool is_head = true;             ///< has the router
  std::string store;               ///< where nodes tell their engines; empty: there is one node
  std::optional<EnginePools> pools = {};

  int port_of(const config::InferenceConfig& config, int local) const {
    return pools ? pools->port_of(first + local, local) : config.backend_port + local;
  }
  router::EngineRole role_of(int number) const {
    return pools && pools->is_prefill(number) ? router::EngineRole::kPrefill : router::EngineRole::kAll;
  }
};

std::string rpc_endpoint(const config::ParallelConfig& parallel) {
  const bool is_v6 = parallel.dp_address->find(':') != std::string::npos;
  return fmt::format("{}:{}", is_v6 ? fmt::format("[{}]", *parallel.dp_address) : *parallel.dp_address, parallel.dp_rpc_port);
}

GroupPlace group_place(const config::InferenceConfig& config, const std::string& engine_host) {
  const config::ParallelConfig& parallel = config.parallel;
  GroupPlace place{
      .first = parallel.dp_start_rank, .num_here = parallel.dp_local.value_or(parallel.dp), .num_all = parallel.dp, .store = {}};
  if (!parallel.dp_address) return place;
  place.is_head = !parallel.headless;
  place.store = fmt::format("tcp://{}", rpc_endpoint(parallel));
  const std::string& host = config.server.host;
  const bool is_own = host != "0.0.0.0" && host != "::" && host != "127.0.0.1" && host != "localhost";
  place.host = !engine_host.empty() ? engine_host : is_own ? host : own_address_towards(rpc_endpoint(parallel));
  return place;
}

std::string url_of(const std::string& host, int port) {
  return fmt::format("http://{}:{}", host.find(':') == std::string::npos ? host : fmt::format("[{}]", host), port);
}

std::string engine_key(int number) { return fmt::format("inference/engine/{}", number); }

ChildSpec engine_of_group(const config::InferenceConfig& config, const GroupPlace& place, int local) {
  const int number = place.first + local;
  ChildSpec child;
  child.name = fmt::format("engine_{}", number);
  child.argv = {fs::read_symlink("/proc/self/exe").string(), "inference", "@", (config.output_dir / "configs" / "inference.json").string()};
  const auto set = [&child](const char* flag, std::string value) { child.argv.insert(child.argv.end(), {flag, std::move(value)}); };
  set("--server.host", place.host);
  set("--server.port", std::to_string(place.port_of(config, local)));
  set("--parallel.dp", "1");
  set("--parallel.dp-local", "None");
  set("--parallel.dp-address", "None");
  set("--parallel.dp-start-rank", "0");
  set("--parallel.headless", "false");
  set("--api-server-count", "1");
  set("--output-dir", (config.output_dir / child.name).string());
  if (config.compute.device == config::DeviceKind::kCpu && config.compute.num_threads == 0)
    set("--compute.num-threads", std::to_string(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / place.num_here)));
  if (device_kind(config.compute) == DeviceKind::kCuda)
    child.env["CUDA_VISIBLE_DEVICES"] = visible_devices_of(gpus_of_engine(config, local));
  if (const std::string secrets = config::secrets_of(config); !secrets.empty()) child.env[config::kSecretsVariable] = secrets;
  child.log_file = log_file(config.output_dir, child.name + ".log");
  child.must_finish = false;
  child.max_restarts = kMaxRestarts;
  child.ready_mark = kServingMark;
  if (place.pools) place.pools->set_up(child, number, local);
  return child;
}

router::RouterServerOptions server_options(const config::InferenceConfig& config) {
  const config::ServerConfig& server = config.server;
  router::RouterServerOptions options;
  options.http.host = server.host;
  options.http.port = server.port;
  options.http.max_connections = static_cast<std::size_t>(server.max_connections);
  options.http.max_body_bytes = static_cast<std::size_t>(server.max_body_bytes);
  options.http.max_held_body_bytes = static_cast<std::size_t>(server.max_held_body_bytes);
  options.http.name = "router";
  options.guard = {.api_key = server.api_key.value_or(""),
                   .admin_api_key = server.admin_api_key.value_or(""),
                   .cors_origins = server.cors_origins,
                   .allowed_hosts = server.allowed_hosts,
                   .host = server.host,
                   .run_id = run_identity()};
  if (!options.guard.run_id.empty()) options.http.headers.add(net::kRunIdHeader, options.guard.run_id);
  options.request_timeout = to_ms(server.request_timeout);
  return options;
}

/// Adds the engines of other nodes to the fleet as these tell them. A thread of its own.
void add_told_engines(const GroupPlace& place, router::Fleet& fleet, const std::stop_token& stop) {
  const auto store = comm::make_store(place.store, kFrontStoreTimeout);
  std::set<int> missing;
  for (int number = 0; number < place.num_all; ++number)
    if (number < place.first || number >= place.first + place.num_here) missing.insert(number);
  Waiting waiting({.who = "the router", .what = "the engines of other nodes", .limit = kEnginesTime, .detail = [&missing] {
                     return fmt::format("engines {} have not been told", fmt::join(missing, ", "));
                   }});
  while (!missing.empty() && !stop.stop_requested()) {
    for (auto it = missing.begin(); it != missing.end();) {
      const std::optional<std::string> url = store->get(engine_key(*it));
      if (url) {
        log::info("engine {} is at {}", *it, *url);
        fleet.add(*url, place.role_of(*it));
      }
      it = url ? missing.erase(it) : std::next(it);
    }
    waiting.check();
    if (waiting.is_expired()) return log::warning("engines {} did not come; the others serve without them", fmt::join(missing, ", "));
    std::this_thread::sleep_for(kStorePoll);
  }
}

/// Tells the head's router the engines of this node, and asks for their end when the head is gone. A thread of its own.
void tell_engines(const config::InferenceConfig& config, const GroupPlace& place, std::stop_source& end, const std::stop_token& stop) {
  try {
    const auto store = comm::make_store(place.store, kEnginesTime);
    for (int local = 0; local < place.num_here; ++local)
      store->set(engine_key(place.first + local), url_of(place.host, place.port_of(config, local)));
    while (!stop.stop_requested()) {
      (void)store->get(engine_key(place.first));
      std::this_thread::sleep_for(kStorePoll);
    }
  } catch (const Error& error) {
    if (!stop.stop_requested()) log::error("the router's node at {} is gone: {}", place.store, error.what());
    end.request_stop();
  }
}

/// A node whose engines serve another node's router.
int run_headless(const config::InferenceConfig& config, const GroupPlace& place, std::stop_token stop) {
  Supervisor supervisor;
  for (int local = 0; local < place.num_here; ++local) supervisor.start(engine_of_group(config, place, local));
  std::stop_source end;
  const std::stop_callback on_stop(stop, [&end] { end.request_stop(); });
  const std::jthread telling([&](std::stop_token own) { tell_engines(config, place, end, own); });
  log::success("engines {} to {} for the router at {}", place.first, place.first + place.num_here - 1, place.store);
  const auto failure = supervisor.run(end.get_token(), /*until_stopped=*/true);
  if (failure) log::error("inference: {}", *failure);
  supervisor.terminate_all(std::chrono::seconds(20));
  return failure ? 1 : 0;
}

}  // namespace

void place_engines(config::InferenceConfig& config, const NodePlace& place) {
  config::ParallelConfig& parallel = config.parallel;
  const int num_here = config::num_engines_on(config, place.per_node);
  parallel.dp = config.api_server_count = place.num_nodes * num_here;
  parallel.dp_local = num_here;
  parallel.dp_start_rank = place.rank * num_here;
  parallel.headless = place.rank > 0;
  parallel.dp_address.reset();
  // Of its own: the nodes may share the folder, and a job that is started again reads the configuration that is there.
  config.output_dir /= fmt::format("node_{}", place.rank);
  if (!std::holds_alternative<config::InferenceDisaggregated>(config.deployment)) config.deployment = config::InferenceSingleNode{};
  if (place.num_nodes == 1) return;
  const std::string& endpoint = *place.endpoint;
  const std::size_t colon = endpoint.rfind(':');
  std::string host = endpoint.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  parallel.dp_address = std::move(host);
  parallel.dp_rpc_port = std::atoi(endpoint.c_str() + colon + 1);
}

int run_inference_group(const config::InferenceConfig& config, std::stop_token stop, const std::string& engine_host,
                        std::optional<EnginePools> pools) {
  const int num_engines = config.parallel.dp;
  GroupPlace place = group_place(config, engine_host);
  if (pools) {
    const config::ServerConfig& server = config.server;
    const bool has_key = config.kv_transfer.api_key || server.admin_api_key || server.api_key;
    if (!has_key && !place.store.empty())
      fail(ErrorCode::kInvalidArgument,
           "kv_transfer.api_key: wanted a key that the engines of all nodes know, or server.api_key; found none");
    if (!has_key) pools->kv_key = make_kv_key();
    place.pools = std::move(pools);
  }
  net::raise_fd_limit(2 * static_cast<std::uint64_t>(config.server.max_connections) + 512);
  for (int i = 0; i < place.num_here; ++i) net::require_free_port(place.host, place.port_of(config, i));
  if (!place.is_head) return run_headless(config, place, stop);
  net::require_free_port(config.server.host, config.server.port);
  std::optional<comm::StoreServer> told;
  if (!place.store.empty()) told.emplace(*config.parallel.dp_address, config.parallel.dp_rpc_port);
  model_folder(config.model.name);  // a download happens once, here
  net::IoRuntime io(2, "router");
  net::HttpClient::Options client_options;
  client_options.bearer = config.server.api_key.value_or("");
  client_options.timeout = to_ms(config.server.request_timeout);
  auto client = std::make_shared<net::HttpClient>(io.executor(), client_options);
  router::FleetOptions fleet_options;
  if (const auto* wanted = config.router ? std::get_if<config::VllmRouterConfig>(&*config.router) : nullptr)
    fleet_options.router = router_options(*wanted);
  if (place.pools) fleet_options.max_uncached_tokens = place.pools->deployment.non_cached_tokens;
  fleet_options.router.max_waiting = static_cast<std::size_t>(config.server.max_queued_requests) * static_cast<std::size_t>(num_engines);
  auto fleet = std::make_shared<router::Fleet>(io.executor(), client, fleet_options);
  const std::string admin_key = config.server.admin_api_key.value_or(config.server.api_key.value_or(""));
  auto updater = std::make_shared<router::WeightUpdater>(fleet, client, router::WeightUpdaterOptions{.api_key = admin_key});
  router::RouterServerOptions options = server_options(config);
  options.engine_admin_key = admin_key;
  router::RouterServer server(std::move(options), fleet, updater, client);
  Supervisor supervisor;
  for (int local = 0; local < place.num_here; ++local) {
    supervisor.start(engine_of_group(config, place, local));
    fleet->add(url_of(place.host, place.port_of(config, local)), place.role_of(place.first + local));
  }
  std::jthread adding;
  if (told) adding = std::jthread([&](std::stop_token own) { add_told_engines(place, *fleet, own); });
  server.start();
  log::success("{} {} with {} engines{} on http://{}:{}/v1", kServingMark, config.model.served_name.value_or(config.model.name),
               num_engines, place.pools ? fmt::format(", {} of them for prompts", place.pools->num_prefill) : "", config.server.host,
               server.port());
  const auto failure = supervisor.run(stop, /*until_stopped=*/true);
  if (failure) log::error("inference: {}", *failure);
  server.stop(std::chrono::seconds(10));
  supervisor.terminate_all(std::chrono::seconds(20));
  return failure ? 1 : 0;
}

}  // namespace prl::launch
