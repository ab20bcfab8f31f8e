#include "launch/inference_group.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "config/cli.hpp"
#include "config/secrets.hpp"
#include "launch/inference_role.hpp"
#include "launch/model_setup.hpp"
#include "launch/run_identity.hpp"
#include "launch/supervisor.hpp"
#include "net/io_runtime.hpp"
#include "net/port_owner.hpp"
#include "router/router_server.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr int kMaxRestarts = 3;
constexpr const char* kEngineHost = "127.0.0.1";

std::chrono::milliseconds to_ms(double seconds) { return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

/// The device of engine `number` among those that this process sees.
std::string visible_device(int number) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return std::to_string(number);
  std::vector<std::string> ids;
  std::istringstream list(visible);
  for (std::string id; std::getline(list, id, ',');) ids.push_back(id);
  return static_cast<std::size_t>(number) < ids.size() ? ids[static_cast<std::size_t>(number)] : std::string();
}

ChildSpec engine_of_group(const config::InferenceConfig& config, int number) {
  ChildSpec child;
  child.name = fmt::format("engine_{}", number);
  child.argv = {fs::read_symlink("/proc/self/exe").string(), "inference", "@", (config.output_dir / "configs" / "inference.json").string()};
  const auto set = [&child](const char* flag, std::string value) { child.argv.insert(child.argv.end(), {flag, std::move(value)}); };
  set("--server.host", kEngineHost);
  set("--server.port", std::to_string(config.backend_port + number));
  set("--parallel.dp", "1");
  set("--api-server-count", "1");
  set("--output-dir", (config.output_dir / child.name).string());
  if (config.compute.device == config::DeviceKind::kCpu && config.compute.num_threads == 0)
    set("--compute.num-threads", std::to_string(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / config.parallel.dp)));
  if (config.compute.device != config::DeviceKind::kCpu) child.env["CUDA_VISIBLE_DEVICES"] = visible_device(number);
  if (const std::string secrets = config::secrets_of(config); !secrets.empty()) child.env[config::kSecretsVariable] = secrets;
  child.log_file = config.output_dir / "logs" / (child.name + ".log");
  child.must_finish = false;
  child.max_restarts = kMaxRestarts;
  child.ready_mark = kServingMark;
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

}  // namespace

int run_inference_group(const config::InferenceConfig& config, std::stop_token stop) {
  const int num_engines = config.parallel.dp;
  net::raise_fd_limit(2 * static_cast<std::uint64_t>(config.server.max_connections) + 512);
  net::require_free_port(config.server.host, config.server.port);
  for (int i = 0; i < num_engines; ++i) net::require_free_port(kEngineHost, config.backend_port + i);
  model_folder(config.model.name);  // a download happens once, here
  net::IoRuntime io(2, "router");
  net::HttpClient::Options client_options;
  client_options.bearer = config.server.api_key.value_or("");
  client_options.timeout = to_ms(config.server.request_timeout);
  auto client = std::make_shared<net::HttpClient>(io.executor(), client_options);
  router::FleetOptions fleet_options;
  fleet_options.router.max_waiting = static_cast<std::size_t>(config.server.max_queued_requests) * static_cast<std::size_t>(num_engines);
  auto fleet = std::make_shared<router::Fleet>(io.executor(), client, fleet_options);
  auto updater = std::make_shared<router::WeightUpdater>(
      fleet, client, router::WeightUpdaterOptions{.api_key = config.server.admin_api_key.value_or(config.server.api_key.value_or(""))});
  router::RouterServer server(server_options(config), fleet, updater, client);
  Supervisor supervisor;
  for (int i = 0; i < num_engines; ++i) {
    supervisor.start(engine_of_group(config, i));
    fleet->add(fmt::format("http://{}:{}", kEngineHost, config.backend_port + i));
  }
  server.start();
  log::success("{} {} with {} engines on http://{}:{}/v1", kServingMark, config.model.served_name.value_or(config.model.name), num_engines,
               config.server.host, server.port());
  const auto failure = supervisor.run(stop, /*until_stopped=*/true);
  if (failure) log::error("inference: {}", *failure);
  server.stop(std::chrono::seconds(10));
  supervisor.terminate_all(std::chrono::seconds(20));
  return failure ? 1 : 0;
}

}  // namespace prl::launch
