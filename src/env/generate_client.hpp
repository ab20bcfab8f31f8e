#pragma once

#include <string>

#include "net/asio.hpp"
#include "wire/generate.hpp"

namespace prl::env {

namespace asio = boost::asio;

/// Prompts in, tokens and log-probabilities out: the one interface between environments and an inference engine, over HTTP
/// or within the process. Implementations may be used by any number of coroutines at once.
class GenerateClient {
 public:
  virtual ~GenerateClient() = default;
  /// Cancelling the awaiting coroutine cancels the request.
  /// Error{kOverlong} when the prompt does not fit, {kDeadline} naming the service, {kUnavailable}, {kInvalidArgument}.
  virtual asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint deadline) = 0;
  /// Returns when the service is ready for requests. Error{kUnavailable} or {kDeadline} saying why it is not.
  virtual asio::awaitable<void> check_health(net::TimePoint deadline) = 0;
  /// For messages: "http://localhost:8000", "in-process engine".
  virtual std::string describe() const = 0;
};

}  // namespace prl::env
