#include <utility>

#include "net/http_client.hpp"
#include "net/io_runtime.hpp"

namespace prl::net {
namespace {

/// Beyond the call's own deadline, so that its more telling error arrives first.
constexpr auto kGrace = std::chrono::seconds(10);

asio::awaitable<std::vector<SseEvent>> collect(HttpClient& client, HttpCall call, std::chrono::milliseconds timeout) {
  auto opening = client.open_sse(std::move(call));
  SseStream stream = co_await std::move(opening);
  std::vector<SseEvent> events;
  for (;;) {
    auto next = stream.next(timeout);
    std::optional<SseEvent> event = co_await std::move(next);
    if (!event) co_return events;
    events.push_back(std::move(*event));
  }
}

}  // namespace

BlockingHttpClient::BlockingHttpClient(HttpClient::Options options)
    : options_(options),
      runtime_(std::make_unique<IoRuntime>(1, "http-client")),
      client_(std::make_unique<HttpClient>(runtime_->executor(), std::move(options))) {}

BlockingHttpClient::~BlockingHttpClient() = default;

HttpReply BlockingHttpClient::call(HttpCall call) {
  const auto timeout = call.timeout.count() > 0 ? call.timeout : options_.timeout;
  const std::string what = call.url;
  return runtime_->run_blocking(client_->call(std::move(call)), timeout + kGrace, what);
}

boost::json::value BlockingHttpClient::get_json(std::string url) {
  const std::string what = url;
  return runtime_->run_blocking(client_->get_json(std::move(url)), options_.timeout + kGrace, what);
}

boost::json::value BlockingHttpClient::post_json(std::string url, boost::json::value body) {
  const std::string what = url;
  return runtime_->run_blocking(client_->post_json(std::move(url), std::move(body)), options_.timeout + kGrace, what);
}

std::vector<SseEvent> BlockingHttpClient::read_sse(HttpCall call) {
  const auto timeout = call.timeout.count() > 0 ? call.timeout : options_.timeout;
  const std::string what = call.url;
  return runtime_->run_blocking(collect(*client_, std::move(call), timeout), timeout * 2 + kGrace, what);
}

BodyStream BlockingHttpClient::open_body(HttpCall call) {
  const auto timeout = call.timeout.count() > 0 ? call.timeout : options_.timeout;
  const std::string what = call.url;
  return runtime_->run_blocking(client_->open_body(std::move(call)), timeout + kGrace, what);
}

std::string BlockingHttpClient::next_piece(BodyStream& body, std::chrono::milliseconds timeout) {
  return runtime_->run_blocking(body.next(timeout), timeout + kGrace, "the next piece of a reply");
}

}  // namespace prl::net
