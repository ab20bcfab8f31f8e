#include "router/router_server.hpp"

#include <fmt/format.h>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/system/error_code.hpp>

#include <array>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "net/run_claim.hpp"
#include "router/forward.hpp"
#include "router/order_routes.hpp"
#include "router/same_proof.hpp"

namespace prl::router {

using net::Access;
using net::HttpRequest;
using net::HttpResponse;
namespace json = boost::json;

struct RouterServer::Context {
  RouterServerOptions options;
  std::shared_ptr<Fleet> fleet;
  std::shared_ptr<WeightUpdater> updater;
  std::shared_ptr<net::HttpClient> client;
  std::shared_ptr<FleetOrders> orders;
  std::shared_ptr<OrderRoutes> order_routes;
  net::RunClaim claim;
  std::mutex mutex;                         ///< of what follows
  std::map<int, std::int64_t> num_replies;  ///< by status
  bool is_updating = false;
};

namespace {

using Context = std::shared_ptr<RouterServer::Context>;
using Reply = asio::awaitable<HttpResponse>;

constexpr std::array kPosts = {"/v1/chat/completions", "/v1/chat/completions/tokens", "/v1/completions",
                               "/v1/responses",        "/inference/v1/generate",      "/tokenize",
                               "/detokenize"};

json::object engine_json(const EngineView& engine) {
  json::object out{{"url", engine.url},
                   {"state", to_string(engine.state)},
                   {"num_requests", engine.load.num_requests},
                   {"num_tokens", engine.load.num_tokens},
                   {"num_finished", engine.load.num_finished},
                   {"num_lost", engine.num_lost}};
  if (engine.role == EngineRole::kPrefill) out["role"] = "prefill";
  if (engine.limits.max_requests > 0) out["max_requests"] = engine.limits.max_requests;
  if (engine.limits.max_tokens > 0) out["max_tokens"] = engine.limits.max_tokens;
  if (engine.load.num_sent_bytes > 0) out["tree_size"] = engine.load.num_sent_bytes;
  if (engine.version) out["policy_version"] = engine.version->value;
  if (!engine.problem.empty()) out["problem"] = engine.problem;
  return out;
}

HttpResponse list_of(const Context& context, int status = 200) {
  json::array engines;
  for (const EngineView& engine : context->fleet->engines()) engines.push_back(engine_json(engine));
  return HttpResponse::json(json::serialize(json::object{{"engines", std::move(engines)}}), status);
}

Reply list_engines(Context context, HttpRequest) { co_return list_of(context); }

std::string url_of(const HttpRequest& request) {
  if (const std::string* url = request.query.find("url")) return *url;
  const json::object body = body_of(request);
  const json::value* url = body.if_contains("url");
  if (!url || !url->is_string()) net::fail_param("url", "url: wanted the address of an engine, such as http://host:8000");
  return std::string(url->get_string());
}

Reply add_engine(Context context, HttpRequest request) {
  context->fleet->add(url_of(request));
  co_return list_of(context, 201);
}

Reply drain_engine(Context context, HttpRequest request) {
  context->fleet->drain(url_of(request));
  co_return list_of(context, 202);
}

Reply release(Context context, HttpRequest request) {
  co_return HttpResponse::json(context->claim.release(request) ? R"({"status":"released"})" : R"({"status":"not_held"})");
}

Reply update_weights(Context context, HttpRequest request) {
  const json::object body = body_of(request);
  const json::value* folder = body.if_contains("weight_dir");
  const json::value* version = body.if_contains("version");
  if (!folder || !folder->is_string())
    net::fail_param("weight_dir", fmt::format("weight_dir: wanted the path of a Hugging Face folder, found {}",
                                              folder ? json::serialize(*folder).substr(0, 60) : "nothing"));
  if (!version || !version->is_int64() || version->get_int64() < 0)
    net::fail_param("version", fmt::format("version: wanted the policy's version, 0 or more, which engines that join are compared with; "
                                           "found {}",
                                           version ? json::serialize(*version).substr(0, 60) : "nothing"));
  if (context->options.guard.run_id.empty()) context->claim.take(request);
  {
    std::lock_guard lock(context->mutex);
    if (std::exchange(context->is_updating, true)) fail(ErrorCode::kUnavailable, "a weight update is in progress");
  }
  const net::TimePoint deadline = net::Clock::now() + context->options.update_timeout;
  const auto proof = std::make_shared<SameProof>();
  WeightUpdate update;
  update.version = PolicyVersion{version->get_int64()};
  update.folder = std::string(folder->get_string());
  update.verify = [proof](const std::string& reply, const std::string& url) { proof->check(reply, url); };
  std::exception_ptr failure;
  try {
    auto taking = context->orders->take_turn(deadline);
    const Turns::Turn turn = co_await std::move(taking);
    auto applying = context->updater->apply(std::move(update), deadline);
    co_await std::move(applying);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  {
    std::lock_guard lock(context->mutex);
    context->is_updating = false;
  }
  if (failure) std::rethrow_exception(failure);
  co_return HttpResponse::json(proof->body());
}

bool has_ready(const Context& context) {
  for (const EngineView& engine : context->fleet->engines())
    if (engine.state == EngineState::kReady) return true;
  return false;
}

Reply health(Context context, HttpRequest) {
  if (!has_ready(context)) fail(ErrorCode::kUnavailable, "no engine is ready: {}", context->fleet->describe());
  co_return HttpResponse::text("");
}

Reply liveness(Context, HttpRequest) { co_return HttpResponse::json(R"({"status":"ok"})"); }

std::string label(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

std::string metrics_page(const Context& context) {
  std::string out;
  const auto head = [&out](std::string_view name, std::string_view type, std::string_view help) {
    out += fmt::format("# HELP {0} {2}\n# TYPE {0} {1}\n", name, type, help);
  };
  const auto one = [&](std::string_view name, std::string_view type, std::string_view help, std::int64_t value) {
    head(name, type, help);
    out += fmt::format("{} {}\n", name, value);
  };
  const FleetCounts counts = context->fleet->counts();
  one("prl_router:requests_waiting", "gauge", "Requests that wait for an engine with room.", counts.num_waiting);
  one("prl_router:requests_assigned_total", "counter", "Requests given to engines.", counts.router.num_assigned);
  one("prl_router:requests_at_home_total", "counter", "Requests given to the engine that has their session's prefix, or their prompt's.",
      counts.router.num_at_home);
  one("prl_router:requests_moved_total", "counter", "Requests given to another engine than that.", counts.router.num_moved);
  one("prl_router:requests_replayed_total", "counter", "Requests that started again because their engine was lost.", counts.num_replayed);
  one("prl_router:engines_lost_total", "counter", "Times that an engine was lost.", counts.num_lost);
  one("prl_router:prefills_total", "counter", "Prompts that a prefill engine computed.", counts.num_prefills);
  one("prl_router:prefills_skipped_total", "counter", "Prompts that the decode engine had computed before, all but a few tokens.",
      counts.num_prefills_skipped);
  one("prl_router:prefills_failed_total", "counter", "Prompts that no prefill engine computed: the decode engine did.",
      counts.num_prefills_failed);
  const std::vector<EngineView> engines = context->fleet->engines();
  const auto each = [&](std::string_view name, std::string_view type, std::string_view help, auto value) {
    head(name, type, help);
    for (const EngineView& engine : engines) out += fmt::format("{}{{engine=\"{}\"}} {}\n", name, label(engine.url), value(engine));
  };
  each("prl_router:engine_ready", "gauge", "1 while the engine takes requests.",
       [](const EngineView& e) { return e.state == EngineState::kReady ? 1 : 0; });
  each("prl_router:engine_requests", "gauge", "Requests in flight.", [](const EngineView& e) { return e.load.num_requests; });
  each("prl_router:engine_tokens", "gauge", "Tokens that the requests in flight are expected to hold.",
       [](const EngineView& e) { return e.load.num_tokens; });
  each("prl_router:engine_tree_size", "gauge", "Bytes of prompts that cache_aware remembers as sent to the engine.",
       [](const EngineView& e) { return e.load.num_sent_bytes; });
  each("prl_router:engine_finished_total", "counter", "Requests that ended well.", [](const EngineView& e) { return e.load.num_finished; });
  each("prl_router:engine_policy_version", "gauge", "Version that the engine has proven, -1 if none.",
       [](const EngineView& e) { return e.version ? e.version->value : -1; });
  head("prl_router:http_replies_total", "counter", "HTTP replies by status.");
  std::lock_guard lock(context->mutex);
  for (const auto& [status, count] : context->num_replies)
    out += fmt::format("prl_router:http_replies_total{{status=\"{}\"}} {}\n", status, count);
  return out;
}

Reply metrics(Context context, HttpRequest) {
  HttpResponse response = HttpResponse::text(metrics_page(context));
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  co_return response;
}

Reply pass_on(Context context, HttpRequest request) {
  context->order_routes->restrict_to_run(request);
  auto forwarding = forward(context->fleet, context->client, std::move(request), context->options.request_timeout);
  co_return co_await std::move(forwarding);
}

using Route = Reply (*)(Context, HttpRequest);

}  // namespace

RouterServer::RouterServer(RouterServerOptions options, std::shared_ptr<Fleet> fleet, std::shared_ptr<WeightUpdater> updater,
                           std::shared_ptr<net::HttpClient> client)
    : context_(std::make_shared<Context>()), http_(options.http) {
  context_->options = options;
  context_->fleet = std::move(fleet);
  context_->updater = std::move(updater);
  context_->client = std::move(client);
  context_->orders = std::make_shared<FleetOrders>(context_->fleet, context_->updater, context_->client,
                                                   FleetOrdersOptions{.api_key = options.engine_admin_key});
  context_->order_routes =
      std::make_shared<OrderRoutes>(context_->orders, OrderRoutes::Options{.timeout = options.update_timeout,
                                                                           .api_key = options.guard.api_key,
                                                                           .admin_api_key = options.guard.admin_api_key});
  net::RequestGuard guard(options.guard);
  guard.accept_keys([routes = context_->order_routes](const HttpRequest& request) { return routes->run_of(request).has_value(); });
  const auto add = [&](const char* method, const char* path, Route route, Access access) {
    guard.add_route(method, path, access);
    http_.route(method, path, [context = context_, route](HttpRequest request) { return route(context, std::move(request)); });
  };
  for (const char* path : kPosts) add("POST", path, pass_on, Access::kApiKey);
  for (const char* path : {"/v1/models", "/v1/models/*"}) add("GET", path, pass_on, Access::kApiKey);
  add("GET", "/engines", list_engines, Access::kAdminKey);
  add("POST", "/engines", add_engine, Access::kAdminKey);
  add("DELETE", "/engines", drain_engine, Access::kAdminKey);
  add("POST", "/update_weights", update_weights, Access::kWeights);
  add("POST", "/release", release, Access::kAdminKey);
  context_->order_routes->add_to([&](const char* method, const char* path, Access access, OrderRoutes::Handler handler) {
    guard.add_route(method, path, access);
    http_.route(method, path, std::move(handler));
  });
  add("GET", "/health", health, Access::kOpen);
  add("GET", "/liveness", liveness, Access::kOpen);
  add("GET", "/ping", liveness, Access::kOpen);
  add("GET", "/metrics", metrics, Access::kOpen);
  http_.set_gate(std::move(guard));
  http_.on_finished([context = context_](const std::string&, const std::string&, int status, net::Clock::duration) {
    std::lock_guard lock(context->mutex);
    ++context->num_replies[status];
  });
}

RouterServer::~RouterServer() { stop(std::chrono::milliseconds(0)); }

void RouterServer::start() { http_.start(); }
int RouterServer::port() const noexcept { return http_.port(); }
void RouterServer::stop(std::chrono::milliseconds drain) { http_.stop(drain); }

}  // namespace prl::router
