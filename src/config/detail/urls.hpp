#pragma once

#include <string>

/// Addresses of servers in a configuration. Private to config/.
namespace prl::config::detail {

/// The port that a base_url names, or its scheme's.
int url_port(const std::string& url);
/// Where a server that listens on `host` is reached from this machine: "http://127.0.0.1:8000/v1".
std::string local_url(const std::string& host, int port);

}  // namespace prl::config::detail
