#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "net/http_client.hpp"

namespace prl::net {

/// "http://host:8000/v1/" to "http://host:8000".
std::string server_root(std::string url);
/// GET <root>/health, once. What is wrong with the server; empty if it answers below 500, and not with 408 or 429: one without that route
/// answers 401, 403 or 404, and is up when it says so. Ends within `timeout`. Error{kCancelled}.
asio::awaitable<std::string> probe_health(std::shared_ptr<HttpClient> client, std::string root, std::chrono::milliseconds timeout);

}  // namespace prl::net
