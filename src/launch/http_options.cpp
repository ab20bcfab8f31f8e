#include "launch/http_options.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "launch/run_identity.hpp"
#include "net/service.hpp"

namespace prl::launch {
namespace {

bool is_local(const std::string& url) {
  const std::string host = net::Url::parse(url).host;
  return is_loopback(host) || host == "0.0.0.0";
}

}  // namespace

net::HttpClient::Options http_options(const config::ClientConfig& client) {
  net::HttpClient::Options options;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(client.timeout * 1000));
  const char* key = std::getenv(client.api_key_var.c_str());
  options.bearer = key != nullptr && *key != '\0' ? key : "EMPTY";
  if (key == nullptr && !std::all_of(client.base_url.begin(), client.base_url.end(), is_local))
    log::warning("client.api_key_var: the environment variable {} is not set; requests go out without a key", client.api_key_var);
  options.run_ids = run_servers();
  for (const auto& [name, value] : client.headers) options.headers.add(name, value);
  for (const auto& [name, variable] : client.headers_from_env) {
    const char* value = std::getenv(variable.c_str());
    if (value == nullptr)
      fail(ErrorCode::kInvalidArgument, "client.headers_from_env.{}: the environment variable {} is not set", name, variable);
    options.headers.add(name, value);
  }
  return options;
}

std::vector<std::string> admin_roots(const config::ClientConfig& client) {
  std::vector<std::string> roots;
  for (const std::string& url : client.admin_base_url ? *client.admin_base_url : client.base_url) roots.push_back(net::server_root(url));
  return roots;
}

}  // namespace prl::launch
