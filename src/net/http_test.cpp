#include <gtest/gtest.h>

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/failure.hpp"
#include "base/rng.hpp"
#include "net/async_result.hpp"
#include "net/deadline.hpp"
#include "net/http_client.hpp"
#include "net/http_server.hpp"
#include "net/io_runtime.hpp"
#include "net/port_owner.hpp"
#include "net/task_group.hpp"
#include "net/test_support.hpp"

namespace prl::net {
namespace {

using namespace std::chrono_literals;

using testing::RawClient;

struct Seen {
  std::mutex mutex;
  std::vector<Signal> waiting;  // guarded by mutex; one per handler that hangs
  void release_all() {
    std::lock_guard lock(mutex);
    for (const Signal& signal : waiting) signal.notify();
  }
  Signal add_waiter() {
    std::lock_guard lock(mutex);
    return waiting.emplace_back();
  }
  std::atomic<int> num_running{0};
  std::atomic<int> num_cancel_callbacks{0};
  std::atomic<int> num_unwound{0};
  std::atomic<int> num_flaky{0};
};

struct CountOnExit {
  std::atomic<int>& counter;
  ~CountOnExit() { ++counter; }
};

asio::awaitable<HttpResponse> echo(HttpRequest request) {
  co_return HttpResponse::text(request.method + " " + request.path + " " + std::string(request.query.get("q")) + "\n" + request.body);
}
asio::awaitable<HttpResponse> throw_error(HttpRequest request) {
  if (request.body == "param") fail_param("temperature", "temperature is -1; it must be at least 0");
  if (request.body == "bug") throw std::runtime_error("a bug");
  fail(ErrorCode::kOverloaded, "the queue is full");
  co_return HttpResponse();
}
asio::awaitable<HttpResponse> hang(std::shared_ptr<Seen> seen, HttpRequest request) {
  const CountOnExit guard{seen->num_unwound};
  ++seen->num_running;
  request.cancelled.on_cancel([seen] { ++seen->num_cancel_callbacks; });
  const Signal release = seen->add_waiter();
  const bool released = co_await release.wait_until(Clock::now() + 30s);
  co_return HttpResponse::text(released ? "released" : "expired");
}
asio::awaitable<HttpResponse> stream_numbers(std::shared_ptr<Seen> seen, HttpRequest request) {
  const CountOnExit guard{seen->num_unwound};
  ++seen->num_running;
  ResponseStream& stream = *request.stream;
  Fields headers{{"X-Test", "1"}};
  co_await stream.start(200, "text/event-stream", headers);
  const std::string_view kind = request.query.get("kind");
  const int count = kind == "endless" ? 100'000'000 : 5;
  const std::string filler(kind == "endless" ? 10'000 : 0, 'x');
  for (int i = 0; i < count; ++i) {
    std::string event = format_sse(std::to_string(i) + filler);
    co_await stream.write(std::move(event));
    if (kind == "break" && i == 2) fail(ErrorCode::kInternal, "broke in the middle");
  }
  std::string done = format_sse("[DONE]");
  co_await stream.write(std::move(done));
  co_return HttpResponse::streamed();
}
asio::awaitable<HttpResponse> flaky(std::shared_ptr<Seen> seen, HttpRequest) {
  if (++seen->num_flaky < 3) fail(ErrorCode::kUnavailable, "not yet");
  co_return HttpResponse::json(R"({"ok":true})");
}

class HttpTest : public ::testing::Test {
 protected:
  void start(HttpServer::Options options = {}) {
    options.num_io_threads = 2;
    server_ = std::make_unique<HttpServer>(options);
    server_->route("GET", "/echo", echo);
    server_->route("POST", "/echo", echo);
    server_->route("POST", "/error", throw_error);
    const auto seen = seen_;
    server_->route("GET", "/hang", [seen](HttpRequest request) { return hang(seen, std::move(request)); });
    server_->route("GET", "/stream", [seen](HttpRequest request) { return stream_numbers(seen, std::move(request)); });
    server_->route("GET", "/flaky", [seen](HttpRequest request) { return flaky(seen, std::move(request)); });
    server_->start();
  }
  std::string url(std::string_view path) const { return fmt::format("http://127.0.0.1:{}{}", server_->port(), path); }
  template <typename Condition>
  static bool eventually(Condition condition) {
    for (const TimePoint deadline = Clock::now() + 5s; Clock::now() < deadline; std::this_thread::yield())
      if (condition()) return true;
    return false;
  }
  HttpClient::Options fast_client() {
    HttpClient::Options options;
    options.timeout = 10s;
    options.backoff_first = 1ms;
    options.backoff_max = 5ms;
    return options;
  }

  std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpTest, AnswersAndKeepsConnections) {
  start();
  BlockingHttpClient client(fast_client());
  for (int i = 0; i < 20; ++i) {
    HttpCall call;
    call.method = "POST";
    call.url = url("/echo?q=a%20b");
    call.body = std::string(static_cast<std::size_t>(i) * 50'000, 'z');
    const HttpReply reply = client.call(call);
    ASSERT_EQ(reply.status, 200);
    ASSERT_EQ(reply.body, "POST /echo a b\n" + call.body);
  }
  EXPECT_EQ(server_->stats().num_accepted, 1);
  EXPECT_EQ(server_->stats().num_requests, 20);
}

TEST_F(HttpTest, ErrorBodiesHaveTheOpenAiShape) {
  start();
  BlockingHttpClient client(fast_client());
  HttpCall call;
  call.url = url("/nowhere");
  call.max_retries = 0;
  EXPECT_EQ(client.call(call).status, 404);
  call.url = url("/error");
  const HttpReply wrong_method = client.call(call);
  EXPECT_EQ(wrong_method.status, 405);
  EXPECT_EQ(wrong_method.headers.get("allow"), "POST");
  call.method = "POST";
  const HttpReply full = client.call(call);
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.body, R"({"error":{"message":"the queue is full","type":"RateLimitError","param":null,"code":429}})");
  EXPECT_EQ(full.headers.get("Retry-After"), "1");
  call.body = "param";
  const HttpReply param = client.call(call);
  EXPECT_EQ(param.status, 400);
  EXPECT_NE(param.body.find(R"("param":"temperature")"), std::string::npos);
  call.body = "bug";
  EXPECT_EQ(client.call(call).status, 500);
  EXPECT_EQ(server_->stats().num_errors, 3);
}

TEST_F(HttpTest, MalformedRequestsGetAnAnswerOrAClose) {
  HttpServer::Options options;
  options.max_header_bytes = 4096;
  options.max_body_bytes = 1000;
  start(options);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"nonsense\r\n\r\n", "400"},
      {"GET / HTTP/9.9\r\n\r\n", "400"},
      {"GET /echo HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "400"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n", "413"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n", "413"},
      {"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" + std::string(2000, 'a'), "413"},
      {"GET /echo HTTP/1.1\r\nHost: x\r\nX: " + std::string(5000, 'a') + "\r\n\r\n", "431"},
      {std::string(8000, '\n'), "4"},
      {std::string("\0\0\0\x16\x03\x01", 6) + "\r\n\r\n", "400"},
  };
  for (const auto& [bytes, status] : cases) {
    RawClient client(server_->port());
    client.send(bytes);
    const std::string answer = client.read();
    EXPECT_EQ(answer.substr(0, 9 + status.size()), "HTTP/1.1 " + status) << bytes.substr(0, 60);
    EXPECT_NE(answer.find(R"("error":{"message")"), std::string::npos);
  }
  // Random damage to a good request: any status is fine, the server must stay alive and answer the next one.
  Rng rng(7);
  const std::string good = "POST /echo?q=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
  for (int i = 0; i < 200; ++i) {
    std::string bytes = good;
    for (int k = 0; k < 3; ++k) bytes[rng.next_below(bytes.size())] = static_cast<char>(rng.next_below(256));
    RawClient client(server_->port());
    client.send(bytes);
    ::usleep(0);
  }
  RawClient client(server_->port());
  client.send(good);
  EXPECT_NE(client.read("hello").find("200 OK"), std::string::npos);
  EXPECT_GE(server_->stats().num_malformed, static_cast<std::int64_t>(cases.size()));
}

TEST_F(HttpTest, PipelinedAndSplitRequestsAreAnsweredInOrder) {
  start();
  RawClient client(server_->port());
  std::string bytes;
  for (int i = 0; i < 10; ++i) bytes += fmt::format("GET /echo?q=n{} HTTP/1.1\r\nHost: x\r\n\r\n", i);
  bytes += "GET /echo?q=last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
  for (std::size_t i = 0; i < bytes.size(); i += 37) client.send(std::string_view(bytes).substr(i, 37));
  const std::string answer = client.read();
  std::size_t place = 0;
  for (const char* want : {"n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "last"}) {
    place = answer.find(std::string("/echo ") + want, place);
    ASSERT_NE(place, std::string::npos) << want;
  }
}

TEST_F(HttpTest, ExpectContinueAndHttp10) {
  start();
  RawClient waits(server_->port());
  waits.send("POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
  EXPECT_EQ(waits.read("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  waits.send("hello");
  EXPECT_NE(waits.read("hello").find("200 OK"), std::string::npos);
  RawClient old(server_->port());
  old.send("GET /stream HTTP/1.0\r\n\r\n");
  const std::string body = old.read();
  EXPECT_EQ(body.find("chunked"), std::string::npos);
  EXPECT_NE(body.find("data: 4\n\ndata: [DONE]\n\n"), std::string::npos);
}

TEST_F(HttpTest, SlowRequestsAndIdleConnectionsTimeOut) {
  HttpServer::Options options;
  options.header_timeout = 50ms;
  options.body_timeout = 50ms;
  options.idle_timeout = 50ms;
  start(options);
  RawClient slow_header(server_->port());
  slow_header.send("GET /echo HTT");
  EXPECT_EQ(slow_header.read().substr(0, 12), "HTTP/1.1 408");
  RawClient slow_body(server_->port());
  slow_body.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc");
  EXPECT_EQ(slow_body.read().substr(0, 12), "HTTP/1.1 408");
  RawClient idle(server_->port());
  EXPECT_EQ(idle.read(), "");
}

TEST_F(HttpTest, ClientThatLeavesCancelsItsHandler) {
  start();
  {
    RawClient client(server_->port());
    client.send("GET /hang HTTP/1.1\r\nHost: x\r\n\r\n");
    ASSERT_TRUE(eventually([&] { return seen_->num_running == 1; }));
  }
  EXPECT_TRUE(eventually([&] { return seen_->num_cancel_callbacks == 1 && seen_->num_unwound == 1; }));
  EXPECT_TRUE(eventually([&] { return server_->stats().num_connections == 0; }));
  EXPECT_EQ(server_->stats().num_disconnected, 1);
  EXPECT_EQ(server_->stats().num_errors, 0);
}

TEST_F(HttpTest, ClientThatStopsReadingAStreamCancelsIt) {
  HttpServer::Options options;
  options.write_timeout = 100ms;
  start(options);
  RawClient client(server_->port());
  client.send("GET /stream?kind=endless HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return seen_->num_running == 1; }));
  EXPECT_TRUE(eventually([&] { return seen_->num_unwound == 1; }));
}

TEST_F(HttpTest, StreamsEvents) {
  start();
  BlockingHttpClient client(fast_client());
  HttpCall call;
  call.url = url("/stream");
  const auto events = client.read_sse(call);
  ASSERT_EQ(events.size(), 6u);
  EXPECT_EQ(events[4].data, "4");
  EXPECT_EQ(events[5].data, "[DONE]");
  EXPECT_EQ(client.read_sse(call).size(), 6u);
  EXPECT_EQ(server_->stats().num_accepted, 1);  // the connection of a finished stream is used again
  call.url = url("/stream?kind=break");
  EXPECT_THROW(client.read_sse(call), Error);
  call.url = url("/missing");
  try {
    client.read_sse(call);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
  }
}

asio::awaitable<void> read_two_events(HttpClient& client, std::string url) {
  HttpCall call;
  call.url = std::move(url);
  auto opening = client.open_sse(std::move(call));
  SseStream stream = co_await std::move(opening);
  for (int i = 0; i < 2; ++i) {
    auto next = stream.next(5s);
    const auto event = co_await std::move(next);
    if (!event) fail(ErrorCode::kInternal, "the stream ended");
  }
}

TEST_F(HttpTest, DroppingAnSseStreamCancelsOnTheServer) {
  start();
  IoRuntime runtime(1);
  HttpClient client(runtime.executor(), fast_client());
  runtime.run_blocking(read_two_events(client, url("/stream?kind=endless")), 10s);
  EXPECT_TRUE(eventually([&] { return seen_->num_unwound == 1; }));
  EXPECT_EQ(client.num_open_connections(), 0u);
}

TEST_F(HttpTest, BodiesArriveInPiecesOfAnySize) {
  start();
  HttpClient::Options options = fast_client();
  options.max_reply_bytes = 100;  // pieces are bounded by nothing but the reader's patience
  BlockingHttpClient client(options);
  HttpCall call;
  call.method = "POST";
  call.url = url("/echo");
  call.body = std::string(3'000'000, 'b');
  const std::int64_t num_accepted = server_->stats().num_accepted;
  for (int i = 0; i < 2; ++i) {
    BodyStream body = client.open_body(call);
    EXPECT_EQ(body.head().status, 200);
    EXPECT_TRUE(body.head().body.empty());
    std::size_t size = 0, num_pieces = 0;
    for (std::string piece = client.next_piece(body, 5s); !piece.empty(); piece = client.next_piece(body, 5s), ++num_pieces)
      size += piece.size();
    EXPECT_GE(size, call.body.size());
    EXPECT_GT(num_pieces, 1u);
    EXPECT_EQ(client.next_piece(body, 5s), "") << "after the end there is nothing";
  }
  EXPECT_EQ(server_->stats().num_accepted, num_accepted + 1) << "a body read to its end leaves its connection to the next call";
  call.method = "GET";
  call.body.clear();
  call.url = url("/nowhere");
  EXPECT_EQ(client.open_body(call).head().status, 404);
  call.url = url("/stream?kind=endless");
  {
    BodyStream body = client.open_body(call);
    EXPECT_NE(client.next_piece(body, 5s), "");
  }
  EXPECT_TRUE(eventually([&] { return seen_->num_unwound == 1; })) << "dropping it closes the connection";
}

asio::awaitable<void> call_and_count(HttpClient& client, std::string url, std::atomic<int>& num_ok) {
  HttpCall call;
  call.url = std::move(url);
  call.max_retries = 0;
  auto calling = client.call(std::move(call));
  const HttpReply reply = co_await std::move(calling);
  if (reply.status == 200) ++num_ok;
}

TEST_F(HttpTest, CancelledCallClosesItsConnection) {
  start();
  IoRuntime runtime(1);
  HttpClient client(runtime.executor(), fast_client());
  TaskGroup group(runtime.executor(), "calls");
  std::atomic<int> num_ok{0};
  group.spawn("call", call_and_count(client, url("/hang"), num_ok));
  ASSERT_TRUE(eventually([&] { return seen_->num_running == 1; }));
  group.cancel();
  EXPECT_TRUE(group.join_blocking(5s));
  EXPECT_EQ(group.stats().num_cancelled, 1);
  EXPECT_TRUE(eventually([&] { return seen_->num_unwound == 1; }));
  EXPECT_EQ(num_ok, 0);
}

// Callers on other threads than the client's, cancelled while replies come in: whoever is first, nothing is touched twice.
TEST_F(HttpTest, CancellationRacesWithRepliesAcrossThreads) {
  start();
  IoRuntime callers(1);
  IoRuntime runtime(1);
  HttpClient client(runtime.executor(), fast_client());
  std::atomic<int> num_ok{0};
  std::int64_t num_cancelled = 0;
  constexpr int kRounds = 150, kCalls = 16;
  for (int round = 0; round < kRounds; ++round) {
    const int num_before = num_ok;
    TaskGroup group(callers.executor(), "calls");
    for (int i = 0; i < kCalls; ++i) group.spawn("call", call_and_count(client, url("/echo"), num_ok));
    const int enough = num_before + round % kCalls;  // from none to all but one
    ASSERT_TRUE(eventually([&] { return num_ok >= enough; }));
    group.cancel();
    ASSERT_TRUE(group.join_blocking(5s));
    EXPECT_EQ(group.stats().num_failed, 0);
    num_cancelled += group.stats().num_cancelled;
  }
  EXPECT_GT(num_cancelled, 0);
  EXPECT_GT(num_ok, 0);
}

TEST_F(HttpTest, RetriesDeadlinesAndUnreachableServers) {
  start();
  BlockingHttpClient client(fast_client());
  EXPECT_TRUE(client.get_json(url("/flaky")).at("ok").as_bool());
  EXPECT_EQ(seen_->num_flaky, 3);
  HttpCall call;
  call.url = url("/hang");
  call.timeout = 50ms;
  try {
    client.call(call);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline) << error.what();
  }
  const int port = server_->port();
  server_->stop(0ms);
  call.url = fmt::format("http://127.0.0.1:{}/echo", port);
  call.timeout = 5s;
  try {
    client.call(call);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable) << error.what();
  }
  call.url = "ftp://x";
  EXPECT_THROW(client.call(call), Error);
  call.url = "http://x:99999/";
  EXPECT_THROW(client.call(call), Error);
}

asio::awaitable<HttpResponse> refuse(std::shared_ptr<std::atomic<int>> count, HttpRequest request) {
  ++*count;
  co_return error_response(std::stoi(std::string(request.query.get("status"))), "no");
}

TEST_F(HttpTest, OnlyWhatMayPassIsTriedAgain) {
  const auto count = std::make_shared<std::atomic<int>>(0);
  server_ = std::make_unique<HttpServer>(HttpServer::Options{});
  server_->route("GET", "/refuse", [count](HttpRequest request) { return refuse(count, std::move(request)); });
  server_->start();
  HttpClient::Options options = fast_client();
  options.max_retries = 2;
  BlockingHttpClient client(options);
  for (const int status : {400, 401, 403, 404, 408, 409, 421, 429, 500, 501, 502, 503, 504}) {
    *count = 0;
    HttpCall call;
    call.url = url(fmt::format("/refuse?status={}", status));
    EXPECT_EQ(client.call(call).status, status);
    EXPECT_EQ(*count, is_transient(error_code_of_status(status)) ? 3 : 1) << status;
  }
}

TEST_F(HttpTest, AServerOfAnotherRunIsNeverTakenForOnesOwn) {
  HttpServer::Options served;
  served.headers.add(kRunIdHeader, "first");
  start(served);
  HttpClient::Options options = fast_client();
  options.run_ids[origin_of(url("/"))] = "first";
  BlockingHttpClient own(options);
  HttpCall call;
  call.url = url("/echo");
  EXPECT_EQ(own.call(call).status, 200);
  call.url = url("/nowhere");
  EXPECT_EQ(own.call(call).headers.get(kRunIdHeader), "first") << "errors carry it too";
  options.run_ids[origin_of(url("/"))] = "second";
  BlockingHttpClient other(options);
  try {
    other.call(call);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfSync);
    EXPECT_NE(std::string(error.what()).find("belongs to run first, wanted this run's own (second)"), std::string::npos) << error.what();
  }
  BlockingHttpClient foreign(fast_client());
  EXPECT_EQ(foreign.call(call).status, 404) << "who wants no identity gets replies of any server";
}

TEST_F(HttpTest, KeptConnectionClosedByTheServerIsReplaced) {
  HttpServer::Options options;
  options.idle_timeout = 20ms;
  start(options);
  BlockingHttpClient client(fast_client());
  HttpCall call;
  call.url = url("/echo");
  call.max_retries = 0;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(client.call(call).status, 200);
    EXPECT_TRUE(eventually([&] { return server_->stats().num_connections == 0; }));
  }
  EXPECT_EQ(server_->stats().num_accepted, 3);
}

TEST_F(HttpTest, PoolIsBoundedAndWaitersGetTheirTurn) {
  start();
  IoRuntime runtime(2);
  HttpClient::Options options = fast_client();
  options.max_connections_per_host = 3;
  HttpClient client(runtime.executor(), options);
  TaskGroup group(runtime.executor(), "calls");
  std::atomic<int> num_ok{0};
  for (int i = 0; i < 200; ++i) group.spawn("call", call_and_count(client, url("/echo"), num_ok));
  EXPECT_TRUE(group.join_blocking(10s));
  EXPECT_EQ(num_ok, 200);
  EXPECT_LE(server_->stats().num_accepted, 3);
}

TEST_F(HttpTest, ThousandConnectionsAtOnce) {
  ASSERT_GE(raise_fd_limit(8192), 4096u);
  start();
  IoRuntime runtime(1);
  HttpClient::Options options = fast_client();
  options.max_connections_per_host = 2000;
  HttpClient client(runtime.executor(), options);
  TaskGroup group(runtime.executor(), "calls");
  std::atomic<int> num_ok{0};
  for (int i = 0; i < 1000; ++i) group.spawn("call", call_and_count(client, url("/hang"), num_ok));
  ASSERT_TRUE(eventually([&] { return seen_->num_running == 1000; })) << seen_->num_running;
  EXPECT_EQ(server_->stats().num_connections, 1000u);
  group.cancel();
  EXPECT_TRUE(group.join_blocking(5s));
  EXPECT_TRUE(eventually([&] { return seen_->num_unwound == 1000; })) << seen_->num_unwound;
  EXPECT_TRUE(eventually([&] { return server_->stats().num_connections == 0; }));
}

TEST_F(HttpTest, ConnectionsBeyondTheLimitAreRefused) {
  HttpServer::Options options;
  options.max_connections = 4;
  start(options);
  std::vector<RawClient> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back(server_->port());
    clients.back().send("GET /hang HTTP/1.1\r\nHost: x\r\n\r\n");
  }
  ASSERT_TRUE(eventually([&] { return seen_->num_running == 4; }));
  RawClient fifth(server_->port());
  EXPECT_EQ(fifth.read().substr(0, 12), "HTTP/1.1 503");
  clients.clear();
  fifth.close();
  EXPECT_TRUE(eventually([&] { return server_->stats().num_connections == 0; }));
  RawClient sixth(server_->port());
  sixth.send("GET /echo HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_NE(sixth.read("/echo").find("200 OK"), std::string::npos);
}

TEST_F(HttpTest, StopLetsRunningRequestsEndThenCancels) {
  start();
  RawClient client(server_->port());
  client.send("GET /hang HTTP/1.1\r\nHost: x\r\n\r\n");
  RawClient idle(server_->port());
  ASSERT_TRUE(eventually([&] { return seen_->num_running == 1 && server_->stats().num_connections == 2; }));
  std::thread stopper([&] { server_->stop(10s); });
  EXPECT_EQ(idle.read(), "");  // closed at once
  seen_->release_all();
  EXPECT_NE(client.read().find("released"), std::string::npos);
  client.close();
  stopper.join();
  EXPECT_EQ(seen_->num_unwound, 1);

  start();
  RawClient stuck(server_->port());
  stuck.send("GET /hang HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return seen_->num_running == 2; }));
  const TimePoint began = Clock::now();
  server_->stop(20ms);
  EXPECT_LT(Clock::now() - began, 3s);
  EXPECT_EQ(seen_->num_unwound, 2);
  EXPECT_EQ(stuck.read(), "");
}

TEST_F(HttpTest, TakenPortIsNamed) {
  start();
  HttpServer::Options options;
  options.port = server_->port();
  HttpServer second(options);
  try {
    second.start();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_NE(std::string(error.what()).find(fmt::format("127.0.0.1:{}", server_->port())), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(fmt::format("process {} (", ::getpid())), std::string::npos) << error.what();
  }
  EXPECT_THROW(require_free_port("127.0.0.1", server_->port()), Error);
  const int port = server_->port();
  server_->stop(0ms);
  EXPECT_NO_THROW(require_free_port("127.0.0.1", port));
  EXPECT_EQ(describe_port_owner(port), "");
}

TEST(ToError, AThreadThatCouldNotBeStartedIsNamed) {
  const auto exception = std::make_exception_ptr(std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)));
  const Error error = to_error(exception);
  EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  EXPECT_NE(std::string(error.what()).find("starts no more threads"), std::string::npos) << error.what();
  const auto other = std::make_exception_ptr(std::system_error(std::make_error_code(std::errc::permission_denied)));
  EXPECT_EQ(to_error(other).code(), ErrorCode::kIo);
}

TEST(Url, ParsesAndRefuses) {
  const Url url = Url::parse("https://[::1]:8443/v1/x?y=1#frag");
  EXPECT_EQ(url.host, "::1");
  EXPECT_EQ(url.port, 8443);
  EXPECT_EQ(url.target, "/v1/x?y=1");
  EXPECT_EQ(Url::parse("http://host").target, "/");
  EXPECT_EQ(Url::parse("http://host?a=1").target, "/?a=1");
  for (const char* bad : {"", "host:80", "http://", "http://h:0/", "http://h:x/", "http://h/a b"})
    EXPECT_THROW(Url::parse(bad), Error) << bad;
}

}  // namespace
}  // namespace prl::net
