#pragma once

#include <memory>
#include <string>

#include "net/http_client.hpp"

namespace prl::env::detail {

namespace asio = boost::asio;

/// Polls GET <root>/health until the server answers it below 500 (one without that route counts as up), then checks that
/// /v1/models lists `model` (skipped when empty). Error{kDeadline} naming the server and its last answer; Error{kNotFound}
/// listing the models it serves.
asio::awaitable<void> wait_for_service(std::shared_ptr<net::HttpClient> client, std::string root, std::string model,
                                       net::TimePoint deadline);

}  // namespace prl::env::detail
