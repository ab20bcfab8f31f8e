#include "net/request_guard.hpp"

#include <boost/asio/ip/address.hpp>

#include <algorithm>
#include <utility>

#include "net/errors.hpp"
#include "net/http_client.hpp"
#include "net/route_table.hpp"

namespace prl::net {
namespace {

/// Seconds for which a browser remembers what it may ask for.
constexpr const char* kPreflightSeconds = "600";
constexpr std::size_t kMaxRequestedHeaders = 4096;

[[noreturn]] void forbid(const std::string& message) { throw HttpError(403, ErrorCode::kUnauthorized, message); }

/// "localhost" of "localhost:8000", "::1" of "[::1]:8000".
std::string_view name_of(std::string_view host) {
  if (!host.empty() && host.front() == '[') {
    const std::size_t close = host.find(']');
    return close == std::string_view::npos ? host : host.substr(1, close - 1);
  }
  return host.substr(0, host.rfind(':'));
}

bool is_address(std::string_view name) {
  boost::system::error_code error;
  boost::asio::ip::make_address(name, error);
  return !error;
}

bool is_localhost(std::string_view name) {
  constexpr std::string_view kSuffix = ".localhost";
  return iequals(name, "localhost") || (name.size() > kSuffix.size() && iequals(name.substr(name.size() - kSuffix.size()), kSuffix));
}

bool is_loopback_name(std::string_view host) {
  boost::system::error_code error;
  const auto address = boost::asio::ip::make_address(host, error);
  return error ? is_localhost(host) : address.is_loopback();
}

/// The types that a page may send to another origin without asking first.
bool is_simple_type(std::string_view content_type) {
  content_type = content_type.substr(0, content_type.find_first_of("; \t"));
  return iequals(content_type, "text/plain") || iequals(content_type, "application/x-www-form-urlencoded") ||
         iequals(content_type, "multipart/form-data");
}

bool has_body(const HttpRequest& request) {
  const std::string_view length = request.headers.get("Content-Length");
  return request.headers.find("Transfer-Encoding") != nullptr || (!length.empty() && length != "0");
}

}  // namespace

bool is_same_key(std::string_view a, std::string_view b) noexcept {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(i < b.size() ? b[i] : 0);
  return difference == 0;
}

bool has_key(const HttpRequest& request, std::string_view key) noexcept {
  return is_same_key(request.bearer(), key) || is_same_key(request.headers.get("x-api-key"), key);
}

void check_run_key(std::string_view key, std::string_view api_key, std::string_view admin_api_key) {
  constexpr std::size_t kMinBytes = 16, kMaxBytes = 512;
  if (api_key.empty())
    fail_param("api_key", "api_key: this server asks nobody for a key, so a run's own has no effect; start it with server.api_key");
  if (key.size() < kMinBytes || key.size() > kMaxBytes)
    fail_param("api_key", fmt::format("api_key: wanted {} to {} bytes", kMinBytes, kMaxBytes));
  if (is_same_key(key, api_key) || is_same_key(key, admin_api_key)) fail_param("api_key", "api_key: that is the key of the server itself");
}

RequestGuard::RequestGuard(Options options) : options_(std::move(options)), is_loopback_(is_loopback_name(options_.host)) {}

bool RequestGuard::is_listed(std::string_view origin) const {
  return std::ranges::any_of(options_.cors_origins, [&](const std::string& one) { return one == "*" || iequals(one, origin); });
}

void RequestGuard::forbid_page(std::string_view origin) const {
  forbid(fmt::format("web pages of {} may not use this server{}", origin.substr(0, 128), options_.origin_advice));
}

bool RequestGuard::is_known_host(std::string_view host) const {
  const std::string_view name = name_of(host);
  if (name.empty() || is_address(name) || is_localhost(name) || iequals(name, options_.host)) return true;
  return std::ranges::any_of(options_.allowed_hosts, [&](const std::string& one) { return one == "*" || iequals(one, name); });
}

HttpServer::Verdict RequestGuard::operator()(const HttpRequest& request) const {
  HttpServer::Verdict verdict;
  const std::string* origin = request.headers.find("Origin");
  const bool is_allowed = origin != nullptr && is_listed(*origin);
  if (!options_.cors_origins.empty()) verdict.headers.add("Vary", "Origin");
  if (is_allowed) {
    verdict.headers.add("Access-Control-Allow-Origin", *origin);
    verdict.headers.add("Access-Control-Expose-Headers", "Retry-After, X-Request-Id");
  }
  const Methods* const methods = find_route(routes_, request.path);
  try {
    if (request.method == "OPTIONS" && (methods != nullptr || request.path == "*")) {
      verdict.refusal = answer_options(request, methods, is_allowed);
      return verdict;
    }
    if (methods == nullptr) return verdict;  // answered 404
    const auto route = methods->find(request.method == "HEAD" ? "GET" : request.method);
    if (route == methods->end()) return verdict;  // answered 405
    if (route->second == Access::kOpen) return verdict;
    if (!check_key(request, route->second)) check_page(request, is_allowed);
    check_run(request, route->second);
    if (has_body(request) && is_simple_type(request.headers.get("Content-Type")))
      throw HttpError(415, ErrorCode::kInvalidArgument,
                      fmt::format("the body is sent as '{}'; send it with 'Content-Type: application/json'",
                                  request.headers.get("Content-Type").substr(0, 64)));
    const std::string_view coding = request.headers.get("Content-Encoding");
    if (has_body(request) && !coding.empty() && !iequals(coding, "identity"))
      throw HttpError(
          415, ErrorCode::kInvalidArgument,
          fmt::format("the body has Content-Encoding '{}'; this server reads bodies as they are, send it without", coding.substr(0, 64)));
  } catch (const Error&) {
    verdict.refusal = error_response(std::current_exception());
  }
  return verdict;
}

HttpResponse RequestGuard::answer_options(const HttpRequest& request, const Methods* methods, bool is_allowed) const {
  std::string allowed = "OPTIONS";
  if (methods != nullptr)
    for (const auto& [method, unused] : *methods) allowed += ", " + method;
  HttpResponse response;
  response.status = 204;
  response.content_type.clear();
  const bool is_preflight = request.headers.find("Origin") != nullptr && request.headers.find("Access-Control-Request-Method") != nullptr;
  if (!is_preflight) {
    response.headers.add("Allow", allowed);
    return response;
  }
  if (!is_allowed) forbid_page(request.headers.get("Origin"));
  response.headers.add("Access-Control-Allow-Methods", allowed);
  const std::string_view wanted = request.headers.get("Access-Control-Request-Headers");
  if (!wanted.empty() && wanted.size() <= kMaxRequestedHeaders) response.headers.add("Access-Control-Allow-Headers", std::string(wanted));
  if (request.headers.get("Access-Control-Request-Private-Network") == "true")
    response.headers.add("Access-Control-Allow-Private-Network", "true");
  response.headers.add("Access-Control-Max-Age", kPreflightSeconds);
  return response;
}

bool RequestGuard::check_key(const HttpRequest& request, Access access) const {
  const bool is_admin = access != Access::kApiKey && !options_.admin_api_key.empty();
  const std::string& key = is_admin ? options_.admin_api_key : options_.api_key;
  if (key.empty()) return false;
  if (has_key(request, key)) return true;
  const bool is_other = has_other_key_ && has_other_key_(request);
  if (access == Access::kApiKey && is_other) return true;
  if (is_admin && options_.api_key != key && (is_other || (!options_.api_key.empty() && has_key(request, options_.api_key))))
    forbid("this key may ask the model, not change its server; the route wants the admin key");
  fail(ErrorCode::kUnauthorized, "the {} is missing or wrong; send it as 'Authorization: Bearer <key>'",
       is_admin ? "admin key" : "API key");
}

void RequestGuard::check_run(const HttpRequest& request, Access access) const {
  const std::string_view wanted = request.headers.get(kRunIdHeader);
  const std::string& own = options_.run_id;
  if (wanted == own || (wanted.empty() && access != Access::kWeights)) return;
  const std::string belongs = own.empty() ? "this server belongs to no run" : fmt::format("this server belongs to run {}", own);
  const std::string found = wanted.empty() ? fmt::format("only that run may change its weights, and the request has no {}", kRunIdHeader)
                                           : fmt::format("the request is for the server of run {}: this one has taken its port", wanted);
  throw HttpError(421, ErrorCode::kOutOfSync, fmt::format("{}: {}", belongs, found));
}

void RequestGuard::check_page(const HttpRequest& request, bool is_allowed) const {
  if (is_allowed) return;
  if (is_loopback_ && !is_known_host(request.host))
    forbid(fmt::format("this server is on {} and asks for no key, so it answers only to addresses and localhost, not to '{}'{}",
                       options_.host, request.host.substr(0, 256), options_.host_advice));
  const std::string* origin = request.headers.find("Origin");
  if (origin != nullptr) {
    const bool is_own = is_known_host(request.host) && !request.host.empty() &&
                        (iequals(*origin, "http://" + request.host) || iequals(*origin, "https://" + request.host));
    if (!is_own) forbid_page(*origin);
    return;
  }
  const std::string_view site = request.headers.get("Sec-Fetch-Site");
  if (iequals(site, "cross-site") || iequals(site, "same-site")) forbid_page("other origins");
}

}  // namespace prl::net
