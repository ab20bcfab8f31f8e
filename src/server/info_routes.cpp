#include <algorithm>
#include <utility>
#include <vector>

#include "net/errors.hpp"
#include "server/json_fields.hpp"
#include "server/json_writer.hpp"
#include "server/prepared_request.hpp"
#include "server/routes.hpp"
#include "text/utf8.hpp"

namespace prl::server {
namespace {

constexpr auto kTextTime = std::chrono::minutes(5);
/// Tokens that one request may turn into text or text into.
std::size_t max_token_count(const ServerContext& context) {
  constexpr std::int64_t kLeast = std::int64_t{1} << 20;
  return static_cast<std::size_t>(std::max<std::int64_t>(kLeast, 4 * context.backend->max_model_len()));
}

constexpr const char* kVersion = "0.1.0";

std::string tokenize_body(const ServerContext& context, const HttpRequest& request) {
  const boost::json::object body = parse_body(request.body);
  const JsonFields fields(body);
  check_model(context, request, body);
  std::vector<std::int32_t> ids;
  if (fields.has("messages")) {
    ids = render_chat(context, body, fields.boolean("add_special_tokens").value_or(false)).ids;
  } else {
    const auto prompt = fields.string("prompt");
    if (!prompt) net::fail_param("prompt", "wanted prompt (a string) or messages (a list), found neither");
    text::EncodeOptions encode;
    encode.add_special_tokens = fields.boolean("add_special_tokens").value_or(true);
    if (const std::size_t limit = max_token_count(context); is_beyond(*context.tokenizer, *prompt, limit))
      net::fail_param("prompt", fmt::format("prompt: the text has more than {} tokens, the limit of one request", limit));
    ids = context.tokenizer->encode(*prompt, encode);
  }
  JsonWriter out;
  out.begin_object();
  out.key("count").integer(static_cast<std::int64_t>(ids.size()));
  out.key("max_model_len").integer(context.backend->max_model_len());
  out.key("tokens").begin_array();
  for (const std::int32_t id : ids) out.integer(id);
  out.end_array().key("token_strs");
  if (fields.boolean("return_token_strs").value_or(false)) {
    out.begin_array();
    for (const std::int32_t id : ids) out.string(context.tokenizer->token_of(id));
    out.end_array();
  } else {
    out.null();
  }
  return out.end_object().take();
}

std::string detokenize_body(const ServerContext& context, const HttpRequest& request) {
  const boost::json::object body = parse_body(request.body);
  const JsonFields fields(body);
  check_model(context, request, body);
  const boost::json::array* list = fields.array("tokens");
  if (list && list->size() > max_token_count(context))
    net::fail_param("tokens",
                    fmt::format("tokens: {} tokens are more than the limit of one request, {}", list->size(), max_token_count(context)));
  const auto ids = fields.token_ids("tokens", context.backend->vocab_size());
  if (!ids) net::fail_param("tokens", "tokens: wanted a list of token ids, found nothing");
  JsonWriter out;
  out.begin_object().key("prompt").string(context.tokenizer->decode(*ids, fields.boolean("skip_special_tokens").value_or(false)));
  return out.end_object().take();
}

Reply on_worker(Context context, HttpRequest request, std::string (*function)(const ServerContext&, const HttpRequest&)) {
  net::WorkerPool& workers = context->workers_for(request.body.size());
  auto http = std::make_shared<const HttpRequest>(std::move(request));
  auto work = [context, http = std::move(http), function]() mutable {
    const std::shared_ptr<const HttpRequest> mine = std::move(http);
    if (mine->cancelled.is_cancelled()) fail(ErrorCode::kCancelled, "the client closed its connection");
    return function(*context, *mine);
  };
  std::string what = "a free thread to tokenize the request";
  auto running = workers.run(std::move(work), kTextTime, std::move(what));
  std::string body = co_await std::move(running);
  co_return HttpResponse::json(std::move(body));
}

}  // namespace

Reply tokenize(Context context, HttpRequest request) { return on_worker(std::move(context), std::move(request), tokenize_body); }
Reply detokenize(Context context, HttpRequest request) { return on_worker(std::move(context), std::move(request), detokenize_body); }

Reply list_models(Context context, HttpRequest request) {
  constexpr std::string_view kPrefix = "/v1/models/";
  const auto write_model = [&](JsonWriter& out, const std::string& name, const AdapterInfo* adapter = nullptr) {
    out.begin_object();
    out.key("id").string(name).key("object").string("model").key("created").integer(context->created);
    out.key("owned_by").string("prl").key("root").string(adapter != nullptr ? adapter->source.describe() : name);
    out.key("parent");
    if (adapter != nullptr)
      out.string(context->options.served_names.front());
    else
      out.null();
    if (adapter != nullptr) out.key("policy_version").integer(adapter->version.value);
    out.key("max_model_len").integer(context->backend->max_model_len());
    out.key("permission").begin_array().end_array();
    out.end_object();
  };
  JsonWriter out;
  AdapterBook* const book = context->backend->adapters();
  const std::vector<AdapterInfo> adapters = book != nullptr ? book->list() : std::vector<AdapterInfo>();
  if (request.path.starts_with(kPrefix)) {
    const std::string name = request.path.substr(kPrefix.size());
    const auto adapter = std::ranges::find(adapters, name, &AdapterInfo::name);
    if (adapter != adapters.end())
      write_model(out, name, &*adapter);
    else if (std::ranges::find(context->options.served_names, name) != context->options.served_names.end())
      write_model(out, name);
    else
      throw net::HttpError(404, ErrorCode::kNotFound, fmt::format("The model `{}` does not exist.", name), "model");
    co_return HttpResponse::json(out.take());
  }
  out.begin_object().key("object").string("list").key("data").begin_array();
  for (const std::string& name : context->options.served_names) write_model(out, name);
  for (const AdapterInfo& adapter : adapters) write_model(out, adapter.name, &adapter);
  out.end_array().end_object();
  co_return HttpResponse::json(out.take());
}

Reply not_offered(Context, HttpRequest request) {
  fail(
      ErrorCode::kNotFound,
      "{} is not built: this server generates text; it has /v1/chat/completions, /v1/completions, /v1/responses and /inference/v1/generate",
      request.path);
  co_return HttpResponse();
}

Reply health(Context context, HttpRequest) {
  if (!context->backend->is_alive(context->options.liveness_timeout))
    fail(ErrorCode::kUnavailable, "the engine has not answered for {} ms", context->options.liveness_timeout.count());
  co_return HttpResponse::text("");
}

Reply liveness(Context context, HttpRequest) {
  const bool is_alive = context->backend->is_alive(context->options.liveness_timeout);
  co_return HttpResponse::json(is_alive ? R"({"status":"ok"})" : R"({"status":"engine_unresponsive"})", is_alive ? 200 : 503);
}

Reply ping(Context, HttpRequest) { co_return HttpResponse::text(""); }

Reply version(Context context, HttpRequest) {
  JsonWriter out;
  out.begin_object().key("version").string(kVersion);
  out.key("policy_version").integer(context->backend->stats().version.value);
  if (!context->options.run_id.empty()) out.key("run_id").string(context->options.run_id);
  if (const std::string holder = context->claim.holder(); !holder.empty()) out.key("claimed_by").string(holder);
  co_return HttpResponse::json(out.end_object().take());
}

}  // namespace prl::server
