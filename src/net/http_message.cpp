#include "net/http_message.hpp"

#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>

#include <algorithm>
#include <mutex>

#include "base/ascii.hpp"
#include "base/utf8.hpp"
#include "net/errors.hpp"

namespace prl::net {
bool iequals(std::string_view a, std::string_view b) noexcept {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) { return ascii_lower(x) == ascii_lower(y); });
}

const std::string* Fields::find(std::string_view name) const noexcept {
  for (const auto& [key, value] : entries_)
    if (iequals(key, name)) return &value;
  return nullptr;
}

std::string_view Fields::get(std::string_view name, std::string_view fallback) const noexcept {
  const std::string* value = find(name);
  return value ? std::string_view(*value) : fallback;
}

std::optional<std::string> percent_decode(std::string_view text, bool plus_is_space) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%') {
      if (i + 2 >= text.size()) return std::nullopt;
      const int high = hex_value(text[i + 1]);
      const int low = hex_value(text[i + 2]);
      if (high < 0 || low < 0) return std::nullopt;
      out.push_back(static_cast<char>(high * 16 + low));
      i += 2;
    } else {
      out.push_back(text[i] == '+' && plus_is_space ? ' ' : text[i]);
    }
  }
  return out;
}

Fields parse_query(std::string_view query) {
  Fields fields;
  while (!query.empty()) {
    const std::size_t end = query.find('&');
    const std::string_view pair = query.substr(0, end);
    query = end == std::string_view::npos ? std::string_view{} : query.substr(end + 1);
    if (pair.empty()) continue;
    const std::size_t equals = pair.find('=');
    const std::string_view key = pair.substr(0, equals);
    const std::string_view value = equals == std::string_view::npos ? std::string_view{} : pair.substr(equals + 1);
    fields.add(percent_decode(key, true).value_or(std::string(key)), percent_decode(value, true).value_or(std::string(value)));
  }
  return fields;
}

struct CancelToken::State {
  std::mutex mutex;
  bool cancelled = false;
  std::vector<std::function<void()>> callbacks;
};

CancelToken::CancelToken() : state_(std::make_shared<State>()) {}

bool CancelToken::is_cancelled() const noexcept {
  std::lock_guard lock(state_->mutex);
  return state_->cancelled;
}

void CancelToken::on_cancel(std::function<void()> callback) const {
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->cancelled) {
      state_->callbacks.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void CancelToken::cancel() const {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->cancelled) return;
    state_->cancelled = true;
    callbacks.swap(state_->callbacks);
  }
  for (const auto& callback : callbacks) callback();
}

void CancelToken::clear() const {
  std::vector<std::function<void()>> dropped;
  std::lock_guard lock(state_->mutex);
  dropped.swap(state_->callbacks);
}

std::string_view HttpRequest::bearer() const noexcept {
  constexpr std::string_view kScheme = "Bearer ";
  const std::string_view value = headers.get("Authorization");
  if (value.size() < kScheme.size() || !iequals(value.substr(0, kScheme.size()), kScheme)) return {};
  return value.substr(kScheme.size());
}

HttpResponse HttpResponse::json(std::string body, int status) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body);
  return response;
}

HttpResponse HttpResponse::text(std::string body, int status) {
  HttpResponse response = json(std::move(body), status);
  response.content_type = "text/plain; charset=utf-8";
  return response;
}

HttpResponse HttpResponse::streamed() {
  HttpResponse response;
  response.is_streamed = true;
  return response;
}

void fail_param(std::string param, const std::string& message) {
  throw HttpError(400, ErrorCode::kInvalidArgument, message, std::move(param));
}

std::string_view error_type(int status) noexcept {
  switch (status) {
    case 401: return "AuthenticationError";
    case 403: return "PermissionDeniedError";
    case 404: return "NotFoundError";
    case 405: return "MethodNotAllowedError";
    case 408: return "RequestTimeoutError";
    case 409: return "ConflictError";
    case 413: return "PayloadTooLargeError";
    case 415: return "UnsupportedMediaTypeError";
    case 421: return "MisdirectedRequestError";
    case 429: return "RateLimitError";
    case 431: return "HeaderTooLargeError";
    case 501: return "NotImplementedError";
    case 503: return "ServiceUnavailableError";
    case 504: return "TimeoutError";
    default: return status >= 500 ? "InternalServerError" : "BadRequestError";
  }
}

std::string_view status_reason(int status) noexcept {
  switch (status) {
    case 100: return "Continue";
    case 200: return "OK";
    case 201: return "Created";
    case 202: return "Accepted";
    case 204: return "No Content";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 409: return "Conflict";
    case 413: return "Payload Too Large";
    case 415: return "Unsupported Media Type";
    case 417: return "Expectation Failed";
    case 421: return "Misdirected Request";
    case 429: return "Too Many Requests";
    case 431: return "Request Header Fields Too Large";
    case 499: return "Client Closed Request";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 502: return "Bad Gateway";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    default: return "Unknown";
  }
}

HttpResponse error_response(int status, std::string_view message, std::string_view param) {
  boost::json::object error;
  // Messages quote what was sent, which may be cut within a character; clients refuse JSON that is no UTF-8.
  error["message"] = replace_invalid_utf8(message);
  error["type"] = error_type(status);
  error["param"] = param.empty() ? boost::json::value(nullptr) : boost::json::value(replace_invalid_utf8(param));
  error["code"] = status;
  boost::json::object body;
  body["error"] = std::move(error);
  HttpResponse response = HttpResponse::json(boost::json::serialize(body), status);
  if (status == 429 || status == 503) response.headers.add("Retry-After", "1");
  return response;
}

HttpResponse error_response(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const HttpError& error) {
    return error_response(error.status(), error.what(), error.param());
  } catch (const std::exception&) {
    const Error error = to_error(std::current_exception());
    const std::string_view param = error.code() == ErrorCode::kOverlong ? "input_tokens" : "";
    return error_response(http_status(error.code()), error.what(), param);
  }
}

}  // namespace prl::net
