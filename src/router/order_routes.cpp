#include "router/order_routes.hpp"

#include <fmt/format.h>

#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>

#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "text/json_python.hpp"

namespace prl::router {

using net::Access;
using net::HttpRequest;
using net::HttpResponse;
namespace json = boost::json;

namespace {

constexpr std::size_t kMaxNameBytes = 256;

std::string name_in(const json::object& body, const char* key) {
  const json::value* value = body.if_contains(key);
  if (!value || !value->is_string() || value->get_string().empty() || value->get_string().size() > kMaxNameBytes)
    net::fail_param(key, fmt::format("{}: wanted a name of 1 to {} bytes", key, kMaxNameBytes));
  return std::string(value->get_string());
}

HttpResponse first_of(const std::vector<net::HttpReply>& replies) {
  HttpResponse response;
  response.status = replies.front().status;
  response.content_type = std::string(replies.front().headers.get("Content-Type", "application/json"));
  response.body = replies.front().body;
  return response;
}

bool is_count(std::string_view key) { return key.starts_with("num_"); }

/// Adds the counts of a run on one engine to those on the engines before.
void add_counts(json::object& sum, const json::object& run) {
  for (const auto& [key, value] : run) {
    json::value& place = sum[key];
    if (is_count(key) && place.is_int64() && value.is_int64())
      place = place.get_int64() + value.get_int64();
    else
      place = value;
  }
}

}  // namespace

namespace {

json::object parse_object(const std::string& text, text::LargeNumbers large_numbers) {
  json::value body = text::parse_json(text, text::kJsonDepth, large_numbers);
  if (!body.is_object()) fail(ErrorCode::kInvalidArgument, "wanted a JSON object as the body, found something else");
  return std::move(body.get_object());
}

}  // namespace

json::object body_of(const HttpRequest& request) { return parse_object(request.body, text::LargeNumbers::kAsDoubles); }

OrderRoutes::OrderRoutes(std::shared_ptr<FleetOrders> orders, Options options) : orders_(std::move(orders)), options_(std::move(options)) {}

void OrderRoutes::add_to(const Add& add) {
  const auto self = shared_from_this();
  for (const char* path : {"/v1/load_lora_adapter", "/load_lora_adapter"})
    add("POST", path, Access::kWeights, [self, path](HttpRequest request) { return self->load(std::move(request), path); });
  add("POST", "/v1/unload_lora_adapter", Access::kWeights, [self](HttpRequest request) { return self->unload(std::move(request)); });
  add("GET", "/weight_proof", Access::kAdminKey, [self](HttpRequest request) { return self->weight_proof(std::move(request)); });
  add("GET", "/runs", Access::kAdminKey, [self](HttpRequest request) { return self->list_runs(std::move(request)); });
  add("POST", "/runs", Access::kAdminKey, [self](HttpRequest request) { return self->put_run(std::move(request)); });
  for (const char* path : {"/runs/pause", "/runs/resume", "/runs/drain"})
    add("POST", path, Access::kAdminKey,
        [self, path](HttpRequest request) { return self->change_run(std::move(request), path, OrderEffect::kState); });
  add("POST", "/runs/remove", Access::kAdminKey,
      [self](HttpRequest request) { return self->change_run(std::move(request), "/runs/remove", OrderEffect::kRemoved); });
  add("POST", "/runs/cancel", Access::kAdminKey, [self](HttpRequest request) { return self->cancel_run(std::move(request)); });
}

std::optional<std::string> OrderRoutes::run_of(const HttpRequest& request) const {
  const std::lock_guard lock(mutex_);
  std::optional<std::string> run;
  for (const auto& [name, key] : keys_)
    if (net::has_key(request, key)) run = name;
  return run;
}

void OrderRoutes::restrict_to_run(HttpRequest& request) const {
  const std::optional<std::string> run = run_of(request);
  if (!run || request.method != "POST") return;
  json::object body = parse_object(request.body, text::LargeNumbers::kKeepText);
  if (const json::value* model = body.if_contains("model"); model && !model->is_null()) {
    if (model->is_string() && std::string_view(model->get_string()) == *run) return;
    throw net::HttpError(403, ErrorCode::kUnauthorized,
                         fmt::format("the key is that of run '{}', and it may not use {}", *run, text::to_json_text(*model)), "model");
  }
  body["model"] = *run;
  request.body = text::to_json_text(body);
}

OrderRoutes::Reply OrderRoutes::load(HttpRequest request, std::string path) {
  json::object body = body_of(request);
  Order order{.kind = OrderKind::kAdapter, .name = name_in(body, "lora_name"), .path = std::move(path), .body = {}};
  order.body = std::move(body);
  order.effect = OrderEffect::kLoaded;
  auto carrying = orders_->carry_out(order, net::Clock::now() + options_.timeout);
  const std::vector<net::HttpReply> replies = co_await std::move(carrying);
  log::info("LoRA adapter '{}' is on {} engine{}", order.name, replies.size(), replies.size() == 1 ? "" : "s");
  co_return first_of(replies);
}

OrderRoutes::Reply OrderRoutes::unload(HttpRequest request) {
  json::object body = body_of(request);
  Order order{.kind = OrderKind::kAdapter, .name = name_in(body, "lora_name"), .path = "/v1/unload_lora_adapter", .body = {}};
  order.body = std::move(body);
  order.effect = OrderEffect::kRemoved;
  auto carrying = orders_->carry_out(std::move(order), net::Clock::now() + options_.timeout);
  const std::vector<net::HttpReply> replies = co_await std::move(carrying);
  co_return first_of(replies);
}

OrderRoutes::Reply OrderRoutes::weight_proof(HttpRequest request) {
  std::string adapter(request.query.get("adapter"));
  auto proving = orders_->proof(std::move(adapter), net::Clock::now() + options_.timeout);
  std::string body = co_await std::move(proving);
  co_return HttpResponse::json(std::move(body));
}

OrderRoutes::Reply OrderRoutes::list_runs(HttpRequest) {
  auto asking = orders_->ask("/runs", net::Clock::now() + options_.timeout);
  const std::vector<net::HttpReply> replies = co_await std::move(asking);
  std::map<std::string, json::object> runs;
  for (const net::HttpReply& reply : replies) {
    const json::value list = reply.json();
    const json::value* data = list.is_object() ? list.get_object().if_contains("data") : nullptr;
    if (!data || !data->is_array()) fail(ErrorCode::kCorrupt, "wanted a list of runs from an engine, found {}", reply.body.substr(0, 200));
    for (const json::value& one : data->get_array()) {
      if (!one.is_object()) fail(ErrorCode::kCorrupt, "wanted a run in an engine's list, found {}", json::serialize(one).substr(0, 200));
      add_counts(runs[name_in(one.get_object(), "name")], one.get_object());
    }
  }
  json::array data;
  const std::lock_guard lock(mutex_);
  for (auto& [name, run] : runs) {
    run["has_api_key"] = keys_.contains(name);
    data.push_back(std::move(run));
  }
  co_return HttpResponse::json(json::serialize(json::object{{"object", "list"}, {"data", std::move(data)}}));
}

void OrderRoutes::set_key(const std::string& run, const std::string& key) {
  const std::lock_guard lock(mutex_);
  if (key.empty())
    keys_.erase(run);
  else
    keys_[run] = key;
}

void OrderRoutes::require_free_key(const std::string& run, const std::string& key) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [other, its] : keys_)
    if (other != run && net::is_same_key(its, key))
      fail(ErrorCode::kAlreadyExists, "api_key: another run has that key; each run needs one of its own");
}

OrderRoutes::Reply OrderRoutes::put_run(HttpRequest request) {
  json::object body = body_of(request);
  Order order{.kind = OrderKind::kRun, .name = name_in(body, "name"), .path = "/runs", .body = {}};
  order.body = std::move(body);
  order.effect = OrderEffect::kShared;
  std::optional<std::string> key;
  if (const json::value* value = order.body.if_contains("api_key"); value && !value->is_null()) {
    if (!value->is_string()) net::fail_param("api_key", "api_key: wanted a string");
    key = std::string(value->get_string());
    if (!key->empty()) {
      net::check_run_key(*key, options_.api_key, options_.admin_api_key);
      require_free_key(order.name, *key);
    }
    order.body.erase("api_key");
  }
  const std::string name = order.name;
  auto carrying = orders_->carry_out(std::move(order), net::Clock::now() + options_.timeout);
  const std::vector<net::HttpReply> replies = co_await std::move(carrying);
  if (key) set_key(name, *key);
  co_return first_of(replies);
}

OrderRoutes::Reply OrderRoutes::change_run(HttpRequest request, std::string path, OrderEffect effect) {
  json::object body = body_of(request);
  Order order{.kind = OrderKind::kRun, .name = name_in(body, "name"), .path = std::move(path), .body = {}};
  order.body = std::move(body);
  order.effect = effect;
  const std::string name = order.name;
  auto carrying = orders_->carry_out(std::move(order), net::Clock::now() + options_.timeout);
  const std::vector<net::HttpReply> replies = co_await std::move(carrying);
  if (effect == OrderEffect::kRemoved) set_key(name, {});
  co_return first_of(replies);
}

OrderRoutes::Reply OrderRoutes::cancel_run(HttpRequest request) {
  json::object body = body_of(request);
  Order order{.kind = OrderKind::kRun, .name = name_in(body, "name"), .path = "/runs/cancel", .body = {}};
  order.body = std::move(body);
  auto carrying = orders_->carry_out(std::move(order), net::Clock::now() + options_.timeout);
  const std::vector<net::HttpReply> replies = co_await std::move(carrying);
  json::object sum;
  for (const net::HttpReply& reply : replies) {
    const json::value one = reply.json();
    if (!one.is_object()) fail(ErrorCode::kCorrupt, "wanted an object from an engine, found {}", reply.body.substr(0, 200));
    add_counts(sum, one.get_object());
  }
  co_return HttpResponse::json(json::serialize(sum));
}

}  // namespace prl::router
