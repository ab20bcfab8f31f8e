#pragma once

#include <string>
#include <vector>

#include "config/transport_config.hpp"
#include "net/http_client.hpp"

namespace prl::launch {

/// How a client section reaches its servers: key, headers (also those from the environment), time limit. The key is "EMPTY" when
/// its variable is not set, as the field's clients do; a warning says so for servers that are not on this machine.
net::HttpClient::Options http_options(const config::ClientConfig& client);
/// Roots of the servers that take weight updates: admin_base_url, or base_url if that is not set.
std::vector<std::string> admin_roots(const config::ClientConfig& client);

}  // namespace prl::launch
