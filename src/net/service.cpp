#include "net/service.hpp"

#include <fmt/format.h>

#include <exception>
#include <utility>

#include "base/error.hpp"
#include "net/errors.hpp"

namespace prl::net {

std::string server_root(std::string url) {
  while (!url.empty() && url.back() == '/') url.pop_back();
  if (url.ends_with("/v1")) url.resize(url.size() - 3);
  return url;
}

asio::awaitable<std::string> probe_health(std::shared_ptr<HttpClient> client, std::string root, std::chrono::milliseconds timeout) {
  std::exception_ptr failure;
  try {
    HttpCall call;
    call.url = root + "/health";
    call.timeout = timeout;
    call.max_retries = 0;
    auto calling = client->call(std::move(call));
    const HttpReply reply = co_await std::move(calling);
    if (reply.status < 500 && reply.status != 429 && reply.status != 408) co_return std::string();
    co_return fmt::format("/health answers {}: {}", reply.status, reply.error_message());
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const Error error = to_error(failure);
  if (error.code() == ErrorCode::kCancelled) throw error;
  co_return std::string(error.what());
}

}  // namespace prl::net
