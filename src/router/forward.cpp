#include "router/forward.hpp"

#include <fmt/core.h>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/json/parse.hpp>
#include <boost/system/error_code.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/percent.hpp"
#include "net/sse.hpp"
#include "router/prefill_orders.hpp"
#include "router/stream_replay.hpp"
#include "text/json_python.hpp"

namespace prl::router {

using namespace std::chrono_literals;
namespace json = boost::json;

namespace {

constexpr int kMaxRepetitions = 8;
/// Nothing from an engine for so long, not even a comment that keeps the connection, and it is taken for lost.
constexpr auto kSilence = 120s;
/// Bytes of a request per token of its prompt, where it has no ids: only the balance of load depends on it.
constexpr std::int64_t kBytesPerToken = 4;

/// A request as it is sent to engines, the same each time.
struct Forwarded {
  net::HttpCall call;
  std::string path;
  RequestShape shape;
  net::TimePoint deadline;
  bool is_stream = false;
  bool adds_up = false;    ///< its stream can be repeated
  bool may_split = false;  ///< its prompt may be computed by another engine
};

std::uint64_t random_bits() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

std::int64_t integer_or(const json::object& object, std::string_view key, std::int64_t otherwise) {
  const json::value* value = object.if_contains(key);
  return value && value->is_int64() ? value->get_int64() : otherwise;
}

/// Where the route has its seed and its limit of tokens.
json::object* sampling_of(json::object& body, const std::string& path) {
  if (path != "/inference/v1/generate") return &body;
  json::value* params = body.if_contains("sampling_params");
  if (!params) params = &(body["sampling_params"] = json::object());
  return params->if_object();
}

constexpr std::string_view kKvParams = "kv_transfer_params";
/// Of a prefill engine's answer, which is short.
constexpr std::size_t kMaxPrefillReply = 64 << 10;

/// The body of a request, an object, with one more member.
std::string with_kv_params(const std::string& body, const std::string& params) {
  const std::size_t end = body.rfind('}');
  const bool is_first = body.find_first_not_of(" \t\r\n", body.find('{') + 1) == end;
  return fmt::format("{}{}\"{}\":{}}}", std::string_view(body).substr(0, end), is_first ? "" : ",", kKvParams, params);
}

bool generates(const std::string& path) { return path != "/tokenize" && path != "/detokenize"; }

/// Of the prompt as the request's JSON has it: what comes first in the model's prompt comes first. Requests that differ in anything else
/// may share it.
PrefixHashes prefixes_of(const json::object& body) {
  std::string prompt, space;
  const auto append = [&body](std::string& text, const char* key) {
    const json::value* value = body.if_contains(key);
    if (value) text += text::to_json_text(*value);
    return value != nullptr;
  };
  for (const char* key : {"model", "cache_salt"}) {
    append(space, key);
    space += '\n';
  }
  const bool has_tokens = append(prompt, "token_ids") || append(prompt, "tokens");
  if (!has_tokens)
    for (const char* key : {"tools", "instructions", "prompt", "messages", "input"}) append(prompt, key);
  return hash_prefixes(prompt, hash_bytes(space));
}

Forwarded prepare(const net::HttpRequest& request, std::chrono::milliseconds timeout, bool wants_prefixes) {
  Forwarded out;
  out.path = request.path;
  out.deadline = net::Clock::now() + timeout;
  out.call.method = request.method;
  out.call.max_retries = 0;
  out.call.deadline = out.deadline;
  out.call.timeout = timeout;
  for (const char* name : {"X-Session-ID", "X-Request-Id"})
    if (const std::string* value = request.headers.find(name)) out.call.headers.add(name, *value);
  if (!request.headers.find("X-Request-Id"))
    out.call.headers.add("X-Request-Id", fmt::format("{:016x}{:016x}", random_bits(), random_bits()));
  out.shape.session = std::string(request.headers.get("X-Session-ID"));
  out.shape.num_prompt_tokens = static_cast<std::int64_t>(request.body.size()) / kBytesPerToken;
  if (request.method != "POST") return out;
  out.may_split = generates(request.path);
  json::value body = text::parse_json(request.body, text::kJsonDepth, text::LargeNumbers::kKeepText);
  if (!body.is_object()) fail(ErrorCode::kInvalidArgument, "wanted a JSON object as the body, found something else");
  json::object& object = body.get_object();
  if (const json::value* stream = object.if_contains("stream")) out.is_stream = stream->is_bool() && stream->get_bool();
  out.adds_up = request.path != "/v1/responses";
  object.erase(kKvParams);  // who gets which blocks is decided here
  if (const json::value* ids = object.if_contains("token_ids"); ids && ids->is_array())
    out.shape.num_prompt_tokens = static_cast<std::int64_t>(ids->get_array().size());
  if (generates(request.path)) {
    if (wants_prefixes) out.shape.prefixes = prefixes_of(object);
    if (json::object* sampling = sampling_of(object, request.path)) {
      out.shape.max_new_tokens = integer_or(*sampling, "max_tokens", integer_or(*sampling, "max_completion_tokens", 0));
      const json::value* seed = sampling->if_contains("seed");
      if (!seed || seed->is_null()) (*sampling)["seed"] = static_cast<std::int64_t>(random_bits() >> 1);
    }
  }
  out.call.body = text::to_json_text(body);  // what the engine reads is what the client wrote
  return out;
}

/// Awaits `operation` unless the engine is lost first: Error{kUnavailable}.
template <typename T>
asio::awaitable<T> unless_lost(asio::awaitable<T> operation, net::Signal lost, std::string url, net::TimePoint deadline) {
  using namespace asio::experimental::awaitable_operators;
  auto captured = net::detail::capture<T>(std::move(operation));
  auto watching = lost.wait_until(deadline);
  auto race = std::move(captured) || std::move(watching);
  auto winner = co_await std::move(race);
  if (winner.index() == 1) {
    if (net::Clock::now() >= deadline) fail(ErrorCode::kDeadline, "waited for {} to answer a request: the deadline passed", url);
    fail(ErrorCode::kUnavailable, "{} was lost while it ran a request", url);
  }
  auto& outcome = std::get<0>(winner);
  if (outcome.exception) throw net::to_error(outcome.exception);
  co_return std::move(*outcome.value);
}

net::Fields reply_headers(const net::Fields& headers) {
  net::Fields kept;
  for (const auto& [name, value] : headers)
    if ((name.starts_with("X-") || name.starts_with("x-")) && !net::iequals(name, net::kRunIdHeader)) kept.add(name, value);
  return kept;
}

bool is_lost_status(int status) { return status == 502 || status == 503; }

/// What an event says of an engine that stops or failed; empty if it says nothing of the kind.
std::string failure_in(const std::string& data) {
  if (data.find("\"error\"") == std::string::npos) return {};
  boost::system::error_code error;
  const json::value event = json::parse(data, error);
  if (error || !event.is_object()) return {};
  const json::value* problem = event.get_object().if_contains("error");
  if (!problem || !problem->is_object()) return {};
  const std::int64_t code = integer_or(problem->get_object(), "code", 0);
  return is_lost_status(static_cast<int>(code)) ? text::to_json_text(*problem) : std::string();
}

/// Sends the events of one engine's stream to the client, those that it has not got. Returns when the stream has ended as it should;
/// Error{kUnavailable} when it broke off.
asio::awaitable<void> pass_events(net::BodyStream* body, StreamReplay* replay, net::ResponseStream* out, net::Signal lost, std::string url,
                                  net::TimePoint deadline) {
  net::SseParser parser;
  bool is_done = false;
  for (;;) {
    const auto patience = std::min<std::chrono::milliseconds>(
        kSilence, std::max(1ms, std::chrono::duration_cast<std::chrono::milliseconds>(deadline - net::Clock::now())));
    auto reading = body->next(patience);
    auto guarded = unless_lost<std::string>(std::move(reading), lost, url, deadline);
    const std::string bytes = co_await std::move(guarded);
    if (bytes.empty()) break;
    parser.feed(bytes);
    std::string pending;
    bool has_events = false;
    while (auto event = parser.next()) {
      has_events = true;
      if (const std::string failure = failure_in(event->data); !failure.empty())
        fail(ErrorCode::kUnavailable, "{} broke a stream off: {}", url, failure);
      is_done = is_done || event->data == "[DONE]";
      const std::optional<std::string> data = replay->take(event->data);
      if (!data) continue;
      if (!event->event.empty()) pending += fmt::format("event: {}\n", event->event);
      pending += net::format_sse(*data);
      is_done =
          is_done || event->event == "response.completed" || event->event == "response.incomplete" || event->event == "response.failed";
    }
    if (!has_events) pending = ": keep-alive\n\n";
    if (pending.empty()) continue;
    auto writing = out->write(std::move(pending));
    co_await std::move(writing);
  }
  if (!is_done) fail(ErrorCode::kUnavailable, "{} ended a stream before its end", url);
}

/// One engine's try at a stream; nullopt when it was streamed, else the engine's refusal.
/// `params`: kv_transfer_params of the request, empty for none.
asio::awaitable<std::optional<net::HttpResponse>> stream_once(std::shared_ptr<net::HttpClient> client, const Forwarded* request,
                                                              std::string params, const Lease* lease, StreamReplay* replay,
                                                              net::ResponseStream* out) {
  net::HttpCall call = request->call;
  if (!params.empty()) call.body = with_kv_params(call.body, params);
  call.url = lease->url() + net::percent_encode(request->path, true);
  auto opening = client->open_body(std::move(call));
  auto guarded = unless_lost<net::BodyStream>(std::move(opening), lease->lost(), lease->url(), request->deadline);
  net::BodyStream body = co_await std::move(guarded);
  const net::HttpReply& head = body.head();
  if (!head.is_ok()) {
    net::HttpResponse refusal;
    refusal.status = head.status;
    refusal.headers = reply_headers(head.headers);
    for (std::string piece; refusal.body.size() < (1 << 20);) {
      auto reading = body.next(10s);
      auto whole = unless_lost<std::string>(std::move(reading), lease->lost(), lease->url(), request->deadline);
      piece = co_await std::move(whole);
      if (piece.empty()) break;
      refusal.body += piece;
    }
    co_return refusal;
  }
  if (!out->is_started()) {
    net::Fields headers = reply_headers(head.headers);
    headers.add("Cache-Control", "no-cache");
    auto starting = out->start(200, "text/event-stream; charset=utf-8", std::move(headers));
    co_await std::move(starting);
  }
  auto passing = pass_events(&body, replay, out, lease->lost(), lease->url(), request->deadline);
  co_await std::move(passing);
  auto finishing = out->finish();
  co_await std::move(finishing);
  co_return std::nullopt;
}

asio::awaitable<std::optional<net::HttpResponse>> answer_once(std::shared_ptr<net::HttpClient> client, const Forwarded* request,
                                                              std::string params, const Lease* lease) {
  net::HttpCall call = request->call;
  if (!params.empty()) call.body = with_kv_params(call.body, params);
  call.url = lease->url() + net::percent_encode(request->path, true);
  auto calling = client->call(std::move(call));
  auto guarded = unless_lost<net::HttpReply>(std::move(calling), lease->lost(), lease->url(), request->deadline);
  net::HttpReply reply = co_await std::move(guarded);
  net::HttpResponse response;
  response.status = reply.status;
  response.content_type = std::string(reply.headers.get("Content-Type", "application/json"));
  response.headers = reply_headers(reply.headers);
  response.body = std::move(reply.body);
  co_return response;
}

/// The number of tokens that a whole reply says it holds.
std::int64_t completion_tokens(const std::string& body) {
  const std::size_t at = body.rfind("\"completion_tokens\":");
  if (at == std::string::npos) return 0;
  return std::strtoll(body.c_str() + at + 20, nullptr, 10);
}

/// What the decode engine is told of a prefill engine's reply; empty if it says nothing.
std::string kv_params_in(const net::HttpResponse& reply) {
  if (reply.status != 200 || reply.body.size() > kMaxPrefillReply) return {};
  boost::system::error_code error;
  const json::value body = json::parse(reply.body, error);
  const json::value* params = !error && body.is_object() ? body.get_object().if_contains(kKvParams) : nullptr;
  return params != nullptr && params->is_object() ? json::serialize(*params) : std::string();
}

/// Has a prefill engine compute the prompt. What the decode engine is to be told; empty if none did it, and the decode engine computes
/// the prompt itself. Throws only what ends the request: cancellation.
asio::awaitable<std::string> prefill(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client, const Forwarded* request) {
  RequestShape shape = request->shape;
  shape.max_new_tokens = 1;
  shape.failed_on.reset();
  for (int attempt = 0; attempt < kMaxPrefills && fleet->has_prefill(); ++attempt) {
    shape.is_replay = attempt > 0;
    std::optional<Lease> lease;
    std::optional<net::HttpResponse> reply;
    std::exception_ptr failure;
    try {
      auto acquiring = fleet->acquire_prefill(shape, std::min(request->deadline, net::Clock::now() + kPrefillPatience));
      lease.emplace(co_await std::move(acquiring));
      std::string params = kPrefillOnly;
      auto trying = answer_once(client, request, std::move(params), &*lease);
      reply = co_await std::move(trying);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    if (failure) {
      const Error error = net::to_error(failure);
      if (error.code() == ErrorCode::kCancelled || net::Clock::now() >= request->deadline) throw error;
      if (!lease) break;
      lease->report_lost(error.what());
      shape.failed_on = lease->engine();
      continue;
    }
    if (is_lost_status(reply->status)) {
      lease->report_lost(fmt::format("{} answers {}", request->path, reply->status));
      shape.failed_on = lease->engine();
      continue;
    }
    std::string params = kv_params_in(*reply);
    if (params.empty()) break;  // a refusal, which the decode engine will have words for, too
    lease->finish(1);
    fleet->count(PrefillOutcome::kDone);
    co_return params;
  }
  fleet->count(PrefillOutcome::kFailed);
  co_return std::string();
}

/// One engine's try at a request: its reply, or nothing when it was streamed. Where prompts have engines of their own, a long one is
/// computed there first.
asio::awaitable<std::optional<net::HttpResponse>> try_once(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client,
                                                           const Forwarded* request, const Lease* lease, StreamReplay* replay,
                                                           net::ResponseStream* out) {
  const bool may_split = request->may_split && request->shape.num_prompt_tokens > 0 && fleet->has_prefill();
  bool is_question = may_split;
  std::string params = may_split ? ask_for_prefill(fleet->max_uncached_tokens()) : std::string();
  for (;;) {
    std::optional<net::HttpResponse> reply;
    if (request->is_stream) {
      auto trying = stream_once(client, request, params, lease, replay, out);
      reply = co_await std::move(trying);
    } else {
      auto trying = answer_once(client, request, params, lease);
      reply = co_await std::move(trying);
    }
    if (!is_question || !reply || reply->status != kNeedsPrefill) {
      if (is_question && (!reply || reply->status == 200)) fleet->count(PrefillOutcome::kSkipped);
      co_return reply;
    }
    auto prefilling = prefill(fleet, client, request);
    params = co_await std::move(prefilling);
    is_question = false;
  }
}

asio::awaitable<void> end_with_error(net::ResponseStream* out, Error error) {
  std::string bytes = net::format_sse(net::error_response(std::make_exception_ptr(error)).body) + net::format_sse("[DONE]");
  auto writing = out->write(std::move(bytes));
  co_await std::move(writing);
  auto finishing = out->finish();
  co_await std::move(finishing);
}

}  // namespace

asio::awaitable<net::HttpResponse> forward(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client, net::HttpRequest http,
                                           std::chrono::milliseconds timeout) {
  Forwarded request = prepare(http, timeout, fleet->wants_prefixes());
  net::ResponseStream* const out = http.stream;
  StreamReplay replay;
  for (int attempt = 0;; ++attempt) {
    request.shape.is_replay = attempt > 0;
    std::optional<Error> error;
    std::optional<net::HttpResponse> response;
    bool is_streamed = false;
    std::exception_ptr failure;
    std::optional<Lease> lease;
    try {
      auto acquiring = fleet->acquire(request.shape, request.deadline);
      lease.emplace(co_await std::move(acquiring));
      auto trying = try_once(fleet, client, &request, &*lease, &replay, out);
      response = co_await std::move(trying);
      is_streamed = !response;
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    if (failure) error = net::to_error(failure);
    if (error && error->code() == ErrorCode::kCancelled) throw *error;
    if (is_streamed) {
      lease->finish(replay.num_delivered());
      co_return net::HttpResponse::streamed();
    }
    const bool is_lost = error ? lease && (error->code() == ErrorCode::kUnavailable || error->code() == ErrorCode::kCorrupt ||
                                           error->code() == ErrorCode::kIo ||
                                           (error->code() == ErrorCode::kDeadline && net::Clock::now() < request.deadline))
                               : is_lost_status(response->status);
    const bool is_busy = response && response->status == 429;
    const bool may_repeat = request.adds_up || !out->is_started();
    const bool is_last = attempt >= kMaxRepetitions || net::Clock::now() >= request.deadline || !may_repeat;
    if (is_lost) {
      lease->report_lost(error ? error->what() : fmt::format("{} answers {}", request.path, response->status));
      request.shape.failed_on = lease->engine();
    }
    if ((is_lost || is_busy) && !is_last) {
      lease.reset();
      if (is_busy) co_await net::sleep_until(std::min(request.deadline, net::Clock::now() + 100ms * (1 << attempt)));
      replay.restart();
      continue;
    }
    if (out->is_started()) {
      const Error last =
          error ? *error : Error(ErrorCode::kUnavailable, fmt::format("no engine could continue: status {}", response->status));
      auto ending = end_with_error(out, last);
      co_await std::move(ending);
      co_return net::HttpResponse::streamed();
    }
    if (error) throw *error;
    lease->finish(completion_tokens(response->body));
    co_return std::move(*response);
  }
}

}  // namespace prl::router
