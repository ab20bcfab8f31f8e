// For tests alone: the HTTP side of an engine without a model.
#pragma once

#include <fmt/format.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "net/deadline.hpp"
#include "net/http_server.hpp"
#include "net/sse.hpp"
#include "router/fleet.hpp"

namespace prl::router::testing {

/// Tokens of a reply are functions of the seed and the place alone, as an engine's are of seed, prompt and weights.
inline std::int64_t token_at(std::int64_t seed, std::int64_t place) { return (seed * 31 + place * 7) % 1000; }

/// A fleet that asks often. An engine that answers is never taken for a silent one, however slow the machine is.
inline FleetOptions quick_fleet() {
  FleetOptions options;
  options.probe_interval = std::chrono::milliseconds(20);
  options.retry_interval = std::chrono::milliseconds(10);
  options.probe_timeout = std::chrono::seconds(60);
  options.num_failed_probes = 2;
  return options;
}

/// The same, and a silent engine is soon given up: for tests that have one. On a machine under load it may lose others for a moment.
inline FleetOptions hasty_fleet() {
  FleetOptions options = quick_fleet();
  options.probe_timeout = std::chrono::milliseconds(500);
  return options;
}

class ScriptedEngine {
 public:
  struct Script {
    std::int64_t version = 0;
    std::string checksum = "00000000000000aa";
    std::int64_t max_num_seqs = 4;
    std::int64_t num_tokens = 12;                 ///< of each reply
    std::int64_t breaks_after = -1;               ///< tokens after which a stream breaks off; -1: never
    bool drips = false;                           ///< refuses streams with a body that comes byte by byte, for half a minute
    bool is_silent = false;                       ///< takes requests and answers none, /health neither
    bool is_silent_on_unload = false;             ///< takes requests to unload an adapter and answers none
    std::int64_t num_uncached = 0;                ///< tokens of prompts that it would have to compute
    int refuse_status = 0;                        ///< of generation routes and updates
    int refuse_order_status = 0;                  ///< of adapters and runs
    std::map<std::string, std::string> adapters;  ///< folders by name
    std::map<std::string, std::string> runs;      ///< states by name
    std::map<std::string, double> weights;        ///< of runs
  };

  explicit ScriptedEngine(int port = 0) : http_({.port = port, .name = "engine"}) {
    route("GET", "/health", &ScriptedEngine::health);
    route("GET", "/metrics", &ScriptedEngine::metrics);
    route("POST", "/update_weights", &ScriptedEngine::update);
    route("GET", "/weight_proof", &ScriptedEngine::weight_proof);
    route("POST", "/v1/load_lora_adapter", &ScriptedEngine::load);
    route("POST", "/load_lora_adapter", &ScriptedEngine::load);
    route("POST", "/v1/unload_lora_adapter", &ScriptedEngine::unload);
    route("GET", "/runs", &ScriptedEngine::list_runs);
    route("POST", "/runs", &ScriptedEngine::put_run);
    for (const char* path : {"/runs/pause", "/runs/resume", "/runs/drain", "/runs/cancel", "/runs/remove"})
      route("POST", path, &ScriptedEngine::change_run);
    route("POST", "/inference/v1/generate", &ScriptedEngine::generate);
    route("POST", "/v1/completions", &ScriptedEngine::complete);
    http_.start();
  }
  ~ScriptedEngine() { http_.stop(std::chrono::milliseconds(0)); }

  int port() const { return http_.port(); }
  std::string url() const { return fmt::format("http://127.0.0.1:{}", port()); }
  Script script() const {
    std::lock_guard lock(mutex_);
    return script_;
  }
  template <typename Change>
  void change(Change change) {
    std::lock_guard lock(mutex_);
    change(script_);
  }
  std::vector<boost::json::object> updates() const {
    std::lock_guard lock(mutex_);
    return updates_;
  }
  /// Of /v1/completions, as they came.
  std::vector<std::string> bodies() const {
    std::lock_guard lock(mutex_);
    return bodies_;
  }
  /// kv_transfer_params of requests to /inference/v1/generate, "" where there were none.
  std::vector<std::string> kv_params() const {
    std::lock_guard lock(mutex_);
    return kv_params_;
  }
  /// Seeds of the requests that came, in their order.
  std::vector<std::int64_t> seeds() const {
    std::lock_guard lock(mutex_);
    return seeds_;
  }

 private:
  using Reply = net::asio::awaitable<net::HttpResponse>;
  using Handler = Reply (ScriptedEngine::*)(net::HttpRequest);

  void route(const char* method, const char* path, Handler handler) {
    http_.route(method, path, [this, handler](net::HttpRequest request) { return (this->*handler)(std::move(request)); });
  }

  net::asio::awaitable<void> wait_while_silent() {
    while (script().is_silent) co_await net::sleep_for(std::chrono::milliseconds(10));
  }

  Reply health(net::HttpRequest) {
    auto waiting = wait_while_silent();
    co_await std::move(waiting);
    co_return net::HttpResponse::text("");
  }
  Reply metrics(net::HttpRequest) {
    co_return net::HttpResponse::text(fmt::format("prl:max_num_seqs{{a=\"b\"}} {}\n", script().max_num_seqs));
  }

  std::string proof() const {
    const Script now = script();
    return fmt::format(R"({{"status":"ok","policy_version":{},"checksum":"{}","probe_logprobs":[-0.5]}})", now.version, now.checksum);
  }
  Reply weight_proof(net::HttpRequest request) {
    const std::string* adapter = request.query.find("adapter");
    if (!adapter) co_return net::HttpResponse::json(proof());
    const Script now = script();
    const auto found = now.adapters.find(*adapter);
    if (found == now.adapters.end()) co_return net::HttpResponse::text("no such adapter", 404);
    co_return net::HttpResponse::json(
        fmt::format(R"({{"status":"ok","policy_version":1,"checksum":"{} on {}","probe_logprobs":[-0.5]}})", found->second, now.checksum));
  }

  Reply load(net::HttpRequest request) {
    auto waiting = wait_while_silent();
    co_await std::move(waiting);
    const boost::json::object body = boost::json::parse(request.body).as_object();
    const std::string name(body.at("lora_name").as_string());
    const bool replaces = request.path == "/load_lora_adapter" || (body.contains("load_inplace") && body.at("load_inplace").as_bool());
    std::lock_guard lock(mutex_);
    if (script_.refuse_order_status != 0) co_return net::HttpResponse::text("no such folder", script_.refuse_order_status);
    if (script_.adapters.contains(name) && !replaces) co_return net::HttpResponse::text("already loaded", 400);
    script_.adapters[name] = body.at("lora_path").as_string();
    co_return net::HttpResponse::text("Success");
  }
  Reply unload(net::HttpRequest request) {
    while (script().is_silent_on_unload) co_await net::sleep_for(std::chrono::milliseconds(10));
    const boost::json::object body = boost::json::parse(request.body).as_object();
    std::lock_guard lock(mutex_);
    if (script_.adapters.erase(std::string(body.at("lora_name").as_string())) == 0)
      co_return net::HttpResponse::text("no such adapter", 404);
    co_return net::HttpResponse::text("Success");
  }

  Reply list_runs(net::HttpRequest) {
    boost::json::array data;
    for (const auto& [name, state] : script().runs)
      data.push_back(boost::json::object{{"name", name}, {"state", state}, {"num_tokens", 10}, {"has_api_key", false}});
    co_return net::HttpResponse::json(boost::json::serialize(boost::json::object{{"object", "list"}, {"data", std::move(data)}}));
  }
  Reply put_run(net::HttpRequest request) {
    const boost::json::object body = boost::json::parse(request.body).as_object();
    const std::string name(body.at("name").as_string());
    std::lock_guard lock(mutex_);
    if (script_.refuse_order_status != 0 || body.contains("api_key")) co_return net::HttpResponse::text("no", 400);
    script_.runs.try_emplace(name, "open");
    if (body.contains("weight")) script_.weights[name] = body.at("weight").to_number<double>();
    co_return net::HttpResponse::json(R"({"status":"ok"})");
  }
  Reply change_run(net::HttpRequest request) {
    const std::string name(boost::json::parse(request.body).as_object().at("name").as_string());
    std::lock_guard lock(mutex_);
    if (script_.refuse_order_status != 0) co_return net::HttpResponse::text("no", script_.refuse_order_status);
    if (!script_.runs.contains(name)) co_return net::HttpResponse::text("no such run", 404);
    if (request.path == "/runs/remove") script_.runs.erase(name);
    if (request.path == "/runs/cancel") co_return net::HttpResponse::json(R"({"status":"cancelled","num_requests":3})");
    if (script_.runs.contains(name)) script_.runs[name] = request.path.substr(6);
    co_return net::HttpResponse::json(R"({"status":"ok"})");
  }

  Reply update(net::HttpRequest request) {
    auto waiting = wait_while_silent();
    co_await std::move(waiting);
    {
      std::lock_guard lock(mutex_);
      updates_.push_back(boost::json::parse(request.body).as_object());
      if (script_.refuse_status == 0) script_.version = updates_.back().at("version").as_int64();
    }
    if (const int status = script().refuse_status) co_return net::HttpResponse::text("no", status);
    co_return net::HttpResponse::json(proof());
  }

  Reply generate(net::HttpRequest request) {
    const boost::json::object body = boost::json::parse(request.body).as_object();
    const std::int64_t seed = body.at("sampling_params").at("seed").as_int64();
    note(seed);
    auto waiting = wait_while_silent();
    co_await std::move(waiting);
    const Script now = script();
    if (now.refuse_status) co_return net::HttpResponse::text("no", now.refuse_status);
    const boost::json::object params =
        body.contains("kv_transfer_params") ? body.at("kv_transfer_params").as_object() : boost::json::object();
    {
      std::lock_guard lock(mutex_);
      kv_params_.push_back(params.empty() ? "" : boost::json::serialize(params));
    }
    if (params.contains("max_uncached_tokens") && params.at("max_uncached_tokens").as_int64() < now.num_uncached)
      co_return net::HttpResponse::text("another should compute it", 412);
    if (params.contains("do_remote_decode"))
      co_return net::HttpResponse::json(fmt::format(R"({{"kv_transfer_params":{{"remote_port":{}}}}})", port()));
    boost::json::array ids, logprobs, versions;
    for (std::int64_t i = 0; i < now.num_tokens; ++i) {
      ids.emplace_back(token_at(seed, i));
      logprobs.push_back(boost::json::object{{"logprob", -1.0}});
      versions.emplace_back(now.version);
    }
    boost::json::object choice{{"token_ids", std::move(ids)},
                               {"logprobs", boost::json::object{{"content", std::move(logprobs)}}},
                               {"policy_versions", std::move(versions)},
                               {"finish_reason", "length"}};
    co_return net::HttpResponse::json(
        boost::json::serialize(boost::json::object{{"request_id", "r"}, {"choices", boost::json::array{std::move(choice)}}}));
  }

  Reply complete(net::HttpRequest request) {
    boost::json::parse_options options;
    options.max_depth = 200;
    const boost::json::object body = boost::json::parse(request.body, {}, options).as_object();
    const std::int64_t seed = body.at("seed").as_int64();
    note(seed);
    {
      std::lock_guard lock(mutex_);
      bodies_.push_back(request.body);
    }
    net::ResponseStream* const out = request.stream;
    if (script().drips) {
      auto refusing = out->start(400, "text/plain", {});
      co_await std::move(refusing);
      for (int i = 0; i < 1500 && script().drips; ++i) {
        std::string drop = "x";
        auto dripping = out->write(std::move(drop));
        co_await std::move(dripping);
        co_await net::sleep_for(std::chrono::milliseconds(20));
      }
      auto stopping = out->finish();
      co_await std::move(stopping);
      co_return net::HttpResponse::streamed();
    }
    auto starting = out->start(200, "text/event-stream", {});
    co_await std::move(starting);
    const Script now = script();
    for (std::int64_t i = 0; i < now.num_tokens; ++i) {
      if (now.breaks_after == i) fail(ErrorCode::kInternal, "broke off");
      const bool is_last = i + 1 == now.num_tokens;
      std::string event =
          net::format_sse(fmt::format(R"({{"id":"c","choices":[{{"index":0,"text":"<{0}>","token_ids":[{0}],"finish_reason":{1}}}]}})",
                                      token_at(seed, i), is_last ? R"("length")" : "null"));
      auto writing = out->write(std::move(event));
      co_await std::move(writing);
    }
    auto ending = out->write(net::format_sse("[DONE]"));
    co_await std::move(ending);
    auto finishing = out->finish();
    co_await std::move(finishing);
    co_return net::HttpResponse::streamed();
  }

  void note(std::int64_t seed) {
    std::lock_guard lock(mutex_);
    seeds_.push_back(seed);
  }

  mutable std::mutex mutex_;
  Script script_;
  std::vector<boost::json::object> updates_;
  std::vector<std::int64_t> seeds_;
  std::vector<std::string> kv_params_;
  std::vector<std::string> bodies_;
  net::HttpServer http_;
};

}  // namespace prl::router::testing
