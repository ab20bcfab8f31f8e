#include "net/request_guard.hpp"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace prl::net {
namespace {

RequestGuard make_guard(RequestGuard::Options options) {
  if (options.host.empty()) options.host = "127.0.0.1";
  RequestGuard guard(std::move(options));
  guard.add_route("GET", "/health", Access::kOpen);
  guard.add_route("POST", "/v1/completions", Access::kApiKey);
  for (const char* path : {"/v1/models", "/v1/models/*"}) guard.add_route("GET", path, Access::kApiKey);
  guard.add_route("POST", "/pause", Access::kAdminKey);
  return guard;
}

HttpRequest request_of(std::string method, std::string path, Fields headers, std::string host = "127.0.0.1:8000") {
  HttpRequest request;
  request.method = std::move(method);
  request.path = std::move(path);
  request.headers = std::move(headers);
  request.host = std::move(host);
  return request;
}

/// 0: the request may go on.
int status_of(const RequestGuard& guard, const HttpRequest& request) {
  const auto verdict = guard(request);
  return verdict.refusal ? verdict.refusal->status : 0;
}

TEST(RequestGuard, KeysComeFirst) {
  const RequestGuard guard = make_guard({.api_key = "user", .admin_api_key = "admin"});
  const auto with = [](std::string key) { return Fields{{"Authorization", "Bearer " + key}}; };
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", {})), 401);
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", with("use"))), 401);
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", with("userX"))), 401);
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", with("user"))), 0);
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", {{"X-API-Key", "user"}})), 0);
  EXPECT_EQ(status_of(guard, request_of("HEAD", "/v1/models", {})), 401) << "HEAD is guarded as GET is";
  EXPECT_EQ(status_of(guard, request_of("GET", "/v1/models/org/name", {})), 401);
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", with("user"))), 403) << "who may sample may do nothing else";
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", with("other"))), 401);
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", with("admin"))), 0);
  EXPECT_EQ(status_of(guard, request_of("GET", "/health", {})), 0);
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", {{"Authorization", "Bearer admin"}, {"Origin", "http://evil"}}, "evil:8000")), 0)
      << "no page can know the key";
  const RequestGuard one_key = make_guard({.api_key = "user"});
  EXPECT_EQ(status_of(one_key, request_of("POST", "/pause", with("user"))), 0);
  EXPECT_EQ(status_of(one_key, request_of("POST", "/pause", {})), 401);
}

TEST(RequestGuard, PagesOfOtherOriginsMayNotAskWithoutAKey) {
  const RequestGuard guard = make_guard({});
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", {})), 0) << "a program";
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", {{"Origin", "https://evil.example"}})), 403);
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", {{"Origin", "null"}})), 403) << "a file or a sandboxed frame";
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", {{"Origin", "http://localhost:3000"}})), 403) << "another port";
  EXPECT_EQ(status_of(guard, request_of("POST", "/pause", {{"Origin", "http://127.0.0.1:8000"}})), 0) << "its own";
  EXPECT_EQ(status_of(guard, request_of("GET", "/v1/models", {{"Sec-Fetch-Site", "cross-site"}})), 403) << "an image or a script";
  EXPECT_EQ(status_of(guard, request_of("GET", "/v1/models", {{"Sec-Fetch-Site", "none"}})), 0) << "typed by the user";
  EXPECT_EQ(status_of(guard, request_of("GET", "/health", {{"Origin", "https://evil.example"}})), 0) << "open to all";
}

TEST(RequestGuard, ANameThatLeadsHereIsNotEnough) {
  const RequestGuard guard = make_guard({.allowed_hosts = {"gpu.lan"}});
  for (const char* host :
       {"127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000", "api.localhost:1", "10.1.2.3", "gpu.lan:8000", ""})
    EXPECT_EQ(status_of(guard, request_of("GET", "/v1/models", {}, host)), 0) << host;
  for (const char* host : {"evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost"}) {
    EXPECT_EQ(status_of(guard, request_of("GET", "/v1/models", {}, host)), 403) << host;
    EXPECT_EQ(status_of(guard, request_of("POST", "/pause", {{"Origin", "http://" + std::string(host)}}, host)), 403) << host;
  }
  const RequestGuard everywhere = make_guard({.host = "0.0.0.0"});
  EXPECT_EQ(status_of(everywhere, request_of("GET", "/v1/models", {}, "node7:8000")), 0) << "machines call it by any name";
  EXPECT_EQ(status_of(everywhere, request_of("POST", "/pause", {{"Origin", "http://evil:8000"}}, "evil:8000")), 403);
  EXPECT_EQ(status_of(make_guard({.allowed_hosts = {"*"}}), request_of("GET", "/v1/models", {}, "proxy.example")), 0);
}

TEST(RequestGuard, BodiesThatAPageCanSendUnaskedAreRefused) {
  const RequestGuard guard = make_guard({});
  const auto status = [&](std::string type, std::string length) {
    return status_of(guard,
                     request_of("POST", "/v1/completions", {{"Content-Type", std::move(type)}, {"Content-Length", std::move(length)}}));
  };
  EXPECT_EQ(status("text/plain;charset=UTF-8", "5"), 415);
  EXPECT_EQ(status("application/x-www-form-urlencoded", "5"), 415);
  EXPECT_EQ(status("Multipart/Form-Data; boundary=x", "5"), 415);
  EXPECT_EQ(status("application/x-www-form-urlencoded", "0"), 0);
  EXPECT_EQ(status("application/json", "5"), 0);
  EXPECT_EQ(status("application/json; charset=utf-8", "5"), 0);
  const auto coded = [&](const char* coding) {
    return status_of(guard, request_of("POST", "/v1/completions", {{"Content-Length", "5"}, {"Content-Encoding", coding}}));
  };
  EXPECT_EQ(coded("gzip"), 415) << "it would be read as JSON that is damaged";
  EXPECT_EQ(coded("Identity"), 0);
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", {{"Content-Length", "5"}})), 0);
  EXPECT_EQ(status_of(guard, request_of("POST", "/v1/completions", {{"Content-Type", "text/plain"}, {"Transfer-Encoding", "chunked"}})),
            415);
}

TEST(RequestGuard, ListedOriginsAreAnsweredAsBrowsersWant) {
  const RequestGuard guard = make_guard({.api_key = "user", .cors_origins = {"https://ui.example"}});
  const Fields preflight{{"Origin", "https://ui.example"},
                         {"Access-Control-Request-Method", "POST"},
                         {"Access-Control-Request-Headers", "authorization,content-type"},
                         {"Access-Control-Request-Private-Network", "true"}};
  const auto verdict = guard(request_of("OPTIONS", "/v1/completions", preflight));
  ASSERT_TRUE(verdict.refusal);
  EXPECT_EQ(verdict.refusal->status, 204) << "a browser sends no key with it";
  EXPECT_EQ(verdict.refusal->headers.get("Access-Control-Allow-Methods"), "OPTIONS, POST");
  EXPECT_EQ(verdict.refusal->headers.get("Access-Control-Allow-Headers"), "authorization,content-type");
  EXPECT_EQ(verdict.refusal->headers.get("Access-Control-Allow-Private-Network"), "true");
  EXPECT_EQ(verdict.headers.get("Access-Control-Allow-Origin"), "https://ui.example");
  EXPECT_EQ(verdict.headers.get("Vary"), "Origin");

  const auto refused = guard(request_of("POST", "/v1/completions", {{"Origin", "https://ui.example"}}));
  ASSERT_TRUE(refused.refusal);
  EXPECT_EQ(refused.refusal->status, 401);
  EXPECT_EQ(refused.headers.get("Access-Control-Allow-Origin"), "https://ui.example") << "else the page cannot read the error";

  Fields other{{"Origin", "https://other.example"}, {"Access-Control-Request-Method", "POST"}};
  const auto foreign = guard(request_of("OPTIONS", "/v1/completions", std::move(other)));
  ASSERT_TRUE(foreign.refusal);
  EXPECT_EQ(foreign.refusal->status, 403);
  EXPECT_EQ(foreign.headers.find("Access-Control-Allow-Origin"), nullptr);

  EXPECT_EQ(guard(request_of("OPTIONS", "/v1/models", {})).refusal->headers.get("Allow"), "OPTIONS, GET");
  EXPECT_EQ(guard(request_of("OPTIONS", "*", {})).refusal->status, 204);
  EXPECT_FALSE(guard(request_of("OPTIONS", "/nowhere", {})).refusal) << "answered 404";
  const auto any = make_guard({.cors_origins = {"*"}})(request_of("POST", "/pause", {{"Origin", "https://x.example"}}, "x.example"));
  EXPECT_FALSE(any.refusal);
  EXPECT_EQ(any.headers.get("Access-Control-Allow-Origin"), "https://x.example");
}

}  // namespace
}  // namespace prl::net
