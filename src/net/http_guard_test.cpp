// What the server refuses, and what it holds while it decides.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "net/deadline.hpp"
#include "net/detail/body_reader.hpp"
#include "net/detail/request_rules.hpp"
#include "net/http_server.hpp"
#include "net/test_support.hpp"

namespace prl::net {
namespace {

using namespace std::chrono_literals;
using detail::BodyReader;
using testing::RawClient;

int status_of(const Fields& headers, bool is_http_1_0 = false, std::string_view target = "/", std::string_view method = "POST") {
  try {
    detail::read_framing(headers, is_http_1_0);
    detail::read_target(method, target, headers, is_http_1_0);
  } catch (const HttpError& error) {
    return error.status();
  }
  return 200;
}

TEST(RequestRules, FramingThatTwoReadersCouldTakeDifferentlyIsRefused) {
  const std::pair<std::string, std::string> host{"Host", "x"}, length{"Content-Length", "5"}, chunked{"Transfer-Encoding", "chunked"};
  const auto with = [&](std::string name, std::string value) { return Fields{host, {std::move(name), std::move(value)}}; };
  EXPECT_EQ(status_of({host}), 200);
  EXPECT_EQ(status_of({host, length}), 200);
  EXPECT_EQ(status_of({host, chunked}), 200);
  EXPECT_EQ(status_of(with("transfer-encoding", " Chunked ")), 200);
  EXPECT_EQ(status_of({host, length, length}), 400);
  EXPECT_EQ(status_of(with("Content-Length", "5, 5")), 400);
  EXPECT_EQ(status_of(with("Content-Length", "+5")), 400);
  EXPECT_EQ(status_of(with("Content-Length", "0x5")), 400);
  EXPECT_EQ(status_of(with("Content-Length", "")), 400);
  EXPECT_EQ(status_of({host, length, chunked}), 400);
  EXPECT_EQ(status_of({host, chunked, chunked}), 400);
  EXPECT_EQ(status_of(with("Transfer-Encoding", "chunked, chunked")), 400);
  EXPECT_EQ(status_of(with("Transfer-Encoding", "chunked, gzip")), 400);
  EXPECT_EQ(status_of(with("Transfer-Encoding", "gzip")), 400);
  EXPECT_EQ(status_of(with("Transfer-Encoding", "xchunked")), 400);
  EXPECT_EQ(status_of(with("Transfer-Encoding", "")), 400);
  EXPECT_EQ(status_of(with("Transfer-Encoding", "gzip, chunked")), 501);
  EXPECT_EQ(status_of({host, chunked}, true), 400);
  EXPECT_EQ(detail::read_framing(with("Content-Length", "99999999999999999999999"), false).length, ~std::uint64_t{0});
}

TEST(RequestRules, HostsAndTargets) {
  EXPECT_EQ(status_of({}), 400);
  EXPECT_EQ(status_of({}, true), 200);
  EXPECT_EQ(status_of({{"Host", "a"}, {"Host", "a"}}), 400);
  EXPECT_EQ(status_of({{"Host", "a"}, {"Host", "a"}}, true), 400);
  EXPECT_EQ(status_of({{"Host", "a b"}}), 400);
  EXPECT_EQ(status_of({{"Host", "a/b"}}), 400);
  EXPECT_EQ(status_of({{"Host", "user@a"}}), 400);
  EXPECT_EQ(status_of({{"Host", "[::1]:80"}}), 200);
  const Fields host{{"Host", "x"}};
  EXPECT_EQ(status_of(host, false, "relative"), 400);
  EXPECT_EQ(status_of(host, false, "x:80", "CONNECT"), 400);
  EXPECT_EQ(status_of(host, false, "*"), 400);
  EXPECT_EQ(status_of(host, false, "*", "OPTIONS"), 200);
  EXPECT_EQ(status_of(host, false, "/%zz"), 400);
  EXPECT_EQ(status_of(host, false, "/a%00b"), 400);
  EXPECT_EQ(status_of(host, false, "ftp://x/"), 400);
  const auto target = detail::read_target("GET", "http://other:81/p%20q?a=b#c", host, false);
  EXPECT_EQ(target.host, "other:81");
  EXPECT_EQ(target.path, "/p q");
  EXPECT_EQ(target.query, "a=b");
}

struct BodyCase {
  std::string bytes;
  BodyReader::State state;
  std::string body;
};

TEST(BodyReader, ChunkedBodiesInEveryCut) {
  using State = BodyReader::State;
  const std::vector<BodyCase> cases = {
      {"5\r\nhello\r\n0\r\n\r\n", State::kDone, "hello"},
      {"5;a=\"b\"\r\nhello\r\n00001\r\n!\r\n0\r\nX: y\r\nZ: \r\n\r\n", State::kDone, "hello!"},
      {"A\r\n0123456789\r\n0\r\n\r\n", State::kDone, "0123456789"},
      {"5\r\nhel", State::kMore, ""},
      {"5\nhello", State::kBad, ""},
      {"5\r\nhelloXX", State::kBad, ""},
      {"5\r\nhello\n", State::kBad, ""},
      {"\r\n", State::kBad, ""},
      {"-5\r\n", State::kBad, ""},
      {"0x5\r\n", State::kBad, ""},
      {"1234567890123456\r\n", State::kBad, ""},
      {"0\r\n\rX", State::kBad, ""},
      {"0\r\nX: \x01\r\n", State::kBad, ""},
      {"21\r\n", State::kTooLarge, ""},
      {"11\r\n" + std::string(17, 'a') + "\r\n10\r\n", State::kTooLarge, ""},
      {"1;" + std::string(65, 'x'), State::kTooMuch, ""},
      {"0\r\n" + std::string(40, 'x') + "\r\n" + std::string(40, 'x'), State::kTooMuch, ""},
  };
  for (const BodyCase& one : cases) {
    for (std::size_t cut = 1; cut <= one.bytes.size(); ++cut) {
      auto budget = std::make_shared<BodyBudget>(1 << 20);
      BodyReader reader({.is_chunked = true}, {.max_body_bytes = 32, .max_extra_bytes = 64}, std::make_shared<BodyLease>(budget));
      for (std::size_t i = 0; i < one.bytes.size() && reader.state() == State::kMore; i += cut)
        reader.feed(std::string_view(one.bytes).substr(i, cut));
      ASSERT_EQ(reader.state(), one.state) << one.bytes << " cut by " << cut;
      if (one.state == State::kDone) {
        ASSERT_EQ(reader.take(), one.body);
      }
    }
  }
}

TEST(BodyBudget, IsNeverExceededAndGivenBack) {
  auto budget = std::make_shared<BodyBudget>(100);
  BodyLease a(budget);
  EXPECT_TRUE(a.grow_to(60));
  {
    BodyLease b(budget);
    EXPECT_FALSE(b.grow_to(41));
    EXPECT_TRUE(b.grow_to(40));
    EXPECT_FALSE(a.grow_to(61));
    EXPECT_EQ(budget->num_bytes(), 100U);
    EXPECT_FALSE(budget->has_room(1));
  }
  EXPECT_EQ(budget->num_bytes(), 60U);
  EXPECT_TRUE(a.grow_to(100));
}

/// A server that keeps its requests until it is told to let go.
class GuardTest : public ::testing::Test {
 protected:
  void start(HttpServer::Options options = {}) {
    server_ = std::make_unique<HttpServer>(options);
    server_->set_gate([](const HttpRequest& request) {
      HttpServer::Verdict verdict;
      verdict.headers.add("X-Gate", "seen");
      if (request.headers.get("X-Key") != "right") verdict.refusal = error_response(401, "no key");
      return verdict;
    });
    server_->route("POST", "/echo", [](HttpRequest request) { return echo(std::move(request)); });
    server_->route("POST", "/keep", [this](HttpRequest request) { return keep(this, std::move(request)); });
    server_->start();
  }
  static asio::awaitable<HttpResponse> echo(HttpRequest request) { co_return HttpResponse::text(std::move(request.body)); }
  static asio::awaitable<HttpResponse> keep(GuardTest* self, [[maybe_unused]] HttpRequest request) {
    ++self->num_kept_;
    for (const TimePoint deadline = Clock::now() + 20s; !self->is_released_ && Clock::now() < deadline;) co_await sleep_for(1ms);
    co_return HttpResponse::text(self->is_released_ ? "kept" : "expired");
  }
  template <typename Condition>
  static bool eventually(Condition condition) {
    for (const TimePoint deadline = Clock::now() + 10s; Clock::now() < deadline; std::this_thread::yield())
      if (condition()) return true;
    return false;
  }

  std::atomic<bool> is_released_{false};
  std::atomic<int> num_kept_{0};
  std::unique_ptr<HttpServer> server_;
};

TEST_F(GuardTest, ARefusalComesBeforeTheBody) {
  start();
  for (const char* body :
       {"Content-Length: 60000000\r\n", "Transfer-Encoding: chunked\r\n", "Content-Length: 5\r\nExpect: 100-continue\r\n"}) {
    RawClient client(server_->port());
    client.send(std::string("POST /echo HTTP/1.1\r\nHost: x\r\n") + body + "\r\n");  // no byte of the body
    const std::string answer = client.read("no key");
    EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 401") << body;
    EXPECT_NE(answer.find("X-Gate: seen\r\n"), std::string::npos);
    EXPECT_NE(answer.find("Connection: close\r\n"), std::string::npos);
  }
  EXPECT_EQ(server_->stats().num_held_body_bytes, 0U);
  RawClient client(server_->port());
  client.send("GET /echo HTTP/1.1\r\nHost: x\r\n\r\nPOST /echo HTTP/1.1\r\nHost: x\r\nX-Key: right\r\nContent-Length: 5\r\n\r\nhello");
  const std::string answer = client.read("hello");
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 401");
  EXPECT_NE(answer.find("HTTP/1.1 200"), std::string::npos) << "a refusal without a body keeps the connection";
}

TEST_F(GuardTest, AllBodiesTogetherHaveABound) {
  HttpServer::Options options;
  options.max_body_bytes = 1'000'000;
  options.max_held_body_bytes = 2'000'000;
  start(options);
  const std::string head = "POST /keep HTTP/1.1\r\nHost: x\r\nX-Key: right\r\nContent-Length: 900000\r\n\r\n";
  std::vector<RawClient> kept;
  for (int i = 0; i < 2; ++i) kept.emplace_back(server_->port()).send(head + std::string(900'000, 'x'));
  ASSERT_TRUE(eventually([&] { return num_kept_ == 2; }));
  EXPECT_GE(server_->stats().num_held_body_bytes, 1'800'000U);
  RawClient refused(server_->port());
  refused.send(head);
  const std::string answer = refused.read("try again later");
  EXPECT_EQ(answer.substr(0, 12), "HTTP/1.1 503");
  EXPECT_NE(answer.find("Retry-After: "), std::string::npos);
  RawClient chunked(server_->port());  // its length is not known before
  chunked.send("POST /echo HTTP/1.1\r\nHost: x\r\nX-Key: right\r\nTransfer-Encoding: chunked\r\n\r\nF0000\r\n" + std::string(0xF0000, 'x'));
  EXPECT_EQ(chunked.read("try again later").substr(0, 12), "HTTP/1.1 503");
  RawClient small(server_->port());
  small.send("POST /echo HTTP/1.1\r\nHost: x\r\nX-Key: right\r\nContent-Length: 5\r\n\r\nhello");
  EXPECT_EQ(small.read("hello").substr(0, 12), "HTTP/1.1 200") << "small requests still fit";
  is_released_ = true;
  for (RawClient& client : kept) client.close();
  EXPECT_TRUE(eventually([&] { return server_->stats().num_held_body_bytes == 0; }));
}

TEST_F(GuardTest, EndlessTrailersAndExtensionsEnd) {
  HttpServer::Options options;
  options.max_header_bytes = 8192;
  start(options);
  const std::string head = "POST /echo HTTP/1.1\r\nHost: x\r\nX-Key: right\r\nTransfer-Encoding: chunked\r\n\r\n";
  RawClient trailers(server_->port());
  trailers.send(head + "1\r\na\r\n0\r\n");
  for (int i = 0; i < 300; ++i) trailers.send("Trailer-Field: " + std::string(50, 'x') + "\r\n");
  EXPECT_EQ(trailers.read("8192").substr(0, 12), "HTTP/1.1 431");
  RawClient extension(server_->port());
  extension.send(head + "1;" + std::string(9000, 'e'));
  EXPECT_EQ(extension.read("8192").substr(0, 12), "HTTP/1.1 431");
  RawClient fields(server_->port());  // a trailer is no header: it cannot set a key, or another length
  fields.send("POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Key: right\r\n\r\n");
  EXPECT_EQ(fields.read("no key").substr(0, 12), "HTTP/1.1 401");
}

TEST_F(GuardTest, HandlersMaySayGoodByeWhenTheServerStops) {
  start();
  RawClient client(server_->port());
  client.send("POST /keep HTTP/1.1\r\nHost: x\r\nX-Key: right\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return num_kept_ == 1; }));
  server_->stop(
      10ms, [this] { is_released_ = true; }, 10s);
  EXPECT_NE(client.read("kept").find("200 OK"), std::string::npos);
}

}  // namespace
}  // namespace prl::net
