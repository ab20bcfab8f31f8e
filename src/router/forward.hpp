#pragma once

#include <chrono>
#include <memory>

#include "net/http_client.hpp"
#include "net/http_server.hpp"
#include "router/fleet.hpp"

namespace prl::router {

/// Has an engine of the fleet answer a request, and another one if that is lost, until `timeout`. The seed and the id of a request that has
/// none are made up here, so that a repetition gives the same reply. A refusal of an engine (4xx) is its reply.
/// Error{kDeadline} or {kOverloaded} saying how the engines are; {kInvalidArgument} for a body that is not a JSON object.
asio::awaitable<net::HttpResponse> forward(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client, net::HttpRequest request,
                                           std::chrono::milliseconds timeout);

}  // namespace prl::router
