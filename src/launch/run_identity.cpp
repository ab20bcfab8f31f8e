#include "launch/run_identity.hpp"

#include <fmt/format.h>

#include <cstdlib>
#include <random>
#include <sstream>

#include "base/files.hpp"
#include "net/http_client.hpp"

namespace prl::launch {
namespace {

/// Servers on `count` ports from `port` on.
void add_own(const config::ClientConfig& client, int port, int count, std::vector<std::string>& origins) {
  const auto add = [&](const std::vector<std::string>& urls) {
    for (const std::string& url : urls)
      if (const int its = net::Url::parse(url).port; its >= port && its < port + count) origins.push_back(net::origin_of(url));
  };
  add(client.base_url);
  if (client.admin_base_url) add(*client.admin_base_url);
}

std::string environment_value(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

}  // namespace

std::string new_run_identity() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}", device(), device());
}

std::vector<std::string> own_servers(const config::RlConfig& config) {
  std::vector<std::string> origins;
  if (config.inference) {
    const int port = config.inference->server.port, count = config.inference->parallel.dp;
    add_own(config.orchestrator.student.client, port, count, origins);
    config::ClientConfig prefill;
    prefill.base_url = config.orchestrator.prefill.base_url;
    add_own(prefill, port, count, origins);
  }
  if (config.teacher_inference && config.orchestrator.teacher)
    add_own(config.orchestrator.teacher->client, config.teacher_inference->server.port, 1, origins);
  return origins;
}

std::map<std::string, std::string> identity_env(const std::string& run_id, const std::vector<std::string>& servers) {
  return {{kRunIdVariable, run_id}, {kRunServersVariable, fmt::format("{}", fmt::join(servers, " "))}};
}

std::string run_identity() { return environment_value(kRunIdVariable); }

std::string run_claim(const std::filesystem::path& output_dir) {
  std::error_code ignored;
  std::filesystem::path folder = std::filesystem::weakly_canonical(std::filesystem::absolute(output_dir), ignored);
  if (!folder.has_filename()) folder = folder.parent_path();  // "a/b/" ends in an empty name
  return fmt::format("{:016x} ({})", hash_bytes(folder.string()), folder.filename().string());
}

std::map<std::string, std::string> run_servers() {
  std::map<std::string, std::string> servers;
  const std::string id = run_identity();
  std::istringstream origins(environment_value(kRunServersVariable));
  for (std::string origin; !id.empty() && origins >> origin;) servers[origin] = id;
  return servers;
}

}  // namespace prl::launch
