#include "server/api_server.hpp"

#include <ctime>
#include <random>
#include <utility>

#include "base/ascii.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "net/http_client.hpp"
#include "net/io_runtime.hpp"
#include "net/request_guard.hpp"
#include "server/routes.hpp"
#include "server/structured_output.hpp"

namespace prl::server {

using net::Access;

namespace {

constexpr std::size_t kMaxAdminJobs = 16;
/// Transfers of blocks that run at once, each mostly waiting for another engine, and those that wait for a thread.
constexpr int kNumKvThreads = 16;
constexpr std::size_t kMaxKvJobs = 4096;
/// Bodies beyond it have threads of their own: up to here, taking one apart is a matter of milliseconds.
constexpr std::size_t kLargeBodyBytes = std::size_t{512} << 10;
/// Of the threads for large bodies, and of those for structured output.
constexpr int kNumSlowThreads = 2;
constexpr std::size_t kMaxSlowJobs = 256;
/// The engine and short requests come first on a busy machine.
constexpr int kSlowNiceness = 10;
/// How long streams have to tell their clients that the server stops.
constexpr auto kGoodByeTime = std::chrono::seconds(2);
/// File descriptors besides those of connections: models, logs, epoll.
constexpr std::uint64_t kSpareFiles = 512;

/// What OpenAI and vLLM offer besides, for models that do not generate text.
constexpr std::string_view kNotOffered[] = {"/v1/embeddings",
                                            "/v1/audio/speech",
                                            "/v1/audio/transcriptions",
                                            "/v1/audio/translations",
                                            "/v1/images/generations",
                                            "/v1/moderations",
                                            "/v1/rerank",
                                            "/v2/rerank",
                                            "/rerank",
                                            "/v1/score",
                                            "/score",
                                            "/pooling",
                                            "/classify",
                                            "/v1/messages",
                                            "/v1/batches",
                                            "/v1/files"};

using Route = Reply (*)(Context, HttpRequest);

/// Client ids come back in headers and logs, so only harmless ones are taken over.
bool is_plain_id(std::string_view id) {
  constexpr std::size_t kMaxLength = 128;
  if (id.empty() || id.size() > kMaxLength) return false;
  for (const char c : id)
    if (!(is_ascii_alnum(c) || c == '-' || c == '_' || c == '.' || c == ':')) return false;
  return true;
}

}  // namespace

net::WorkerPool& ServerContext::workers_for(std::size_t num_body_bytes) const {
  return num_body_bytes > kLargeBodyBytes ? *large_workers : *text_workers;
}

std::string ServerContext::make_id(std::string_view prefix, std::string_view client_id) const {
  if (is_plain_id(client_id)) return std::string(prefix) + std::string(client_id);
  const std::uint64_t number = num_ids.fetch_add(1);
  return fmt::format("{}{:016x}{:016x}", prefix, mix_seed(id_seed, number, 0), mix_seed(id_seed, number, 1));
}

ApiServer::ApiServer(ApiOptions options, Backend& backend, std::shared_ptr<const text::Tokenizer> tokenizer,
                     std::shared_ptr<const text::ChatTemplate> chat_template, std::shared_ptr<const text::Renderer> renderer)
    : context_(std::make_shared<ServerContext>()) {
  if (options.served_names.empty()) fail(ErrorCode::kInvalidArgument, "the server needs at least one model name to serve");
  if ((options.enable_tools || options.enable_reasoning) && !renderer)
    fail(ErrorCode::kInvalidArgument, "reading tool calls or reasoning needs a renderer");
  context_->options = std::move(options);
  context_->backend = &backend;
  context_->tokenizer = std::move(tokenizer);
  context_->rules = std::make_unique<grammar::RuleCache>(context_->tokenizer);
  context_->chat_template = std::move(chat_template);
  context_->renderer = std::move(renderer);
  if (context_->renderer) context_->call_form = call_form_of(*context_->tokenizer, *context_->renderer);
  context_->created = static_cast<std::int64_t>(std::time(nullptr));
  std::random_device device;
  context_->id_seed = mix_seed(device(), device());
  const ApiOptions& o = context_->options;
  context_->text_workers = std::make_unique<net::WorkerPool>(net::WorkerPool::Options{o.num_text_threads, o.max_text_jobs, "http-text"});
  context_->large_workers = std::make_unique<net::WorkerPool>(
      net::WorkerPool::Options{kNumSlowThreads, kMaxSlowJobs, "http-large", kSlowNiceness, /*gives_back=*/true});
  context_->rule_workers =
      std::make_unique<net::WorkerPool>(net::WorkerPool::Options{kNumSlowThreads, kMaxSlowJobs, "http-rules", kSlowNiceness});
  if (context_->backend->kv() != nullptr)
    context_->kv_workers = std::make_unique<net::WorkerPool>(net::WorkerPool::Options{kNumKvThreads, kMaxKvJobs, "http-kv"});
  context_->admin_worker = std::make_unique<net::WorkerPool>(net::WorkerPool::Options{1, kMaxAdminJobs, "http-admin"});
  net::HttpServer::Options http;
  http.host = o.host;
  http.port = o.port;
  http.num_io_threads = o.num_io_threads;
  http.max_connections = o.max_connections;
  http.max_body_bytes = o.max_body_bytes;
  http.max_held_body_bytes = o.max_held_body_bytes;
  if (!o.run_id.empty()) http.headers.add(net::kRunIdHeader, o.run_id);
  http_ = std::make_unique<net::HttpServer>(http);
  add_routes();
}

ApiServer::~ApiServer() {
  stop(std::chrono::milliseconds(0));
  // Jobs hold the context, and use the backend, which need not outlive the server.
  context_->text_workers->stop();
  context_->large_workers->stop();
  context_->rule_workers->stop();
  if (context_->kv_workers) context_->kv_workers->stop();
  context_->admin_worker->stop();
}

void ApiServer::add_routes() {
  const ApiOptions& o = context_->options;
  net::RequestGuard guard({o.api_key, o.admin_api_key, o.cors_origins, o.allowed_hosts, o.host, o.run_id});
  guard.accept_keys([context = context_](const net::HttpRequest& request) { return context->tenants.run_of(request).has_value(); });
  const auto add = [&](const char* method, std::string path, Route route, Access access) {
    guard.add_route(method, path, access);
    http_->route(method, std::move(path), [context = context_, route](HttpRequest request) { return route(context, std::move(request)); });
  };
  add("POST", "/v1/chat/completions", chat_completions, Access::kApiKey);
  add("POST", "/v1/chat/completions/tokens", chat_completions_tokens, Access::kApiKey);
  add("POST", "/v1/completions", completions, Access::kApiKey);
  add("POST", "/inference/v1/generate", generate, Access::kApiKey);
  add("GET", "/v1/models", list_models, Access::kApiKey);
  add("GET", "/v1/models/*", list_models, Access::kApiKey);
  add("POST", "/v1/responses", responses, Access::kApiKey);
  for (const std::string_view path : kNotOffered)
    for (const char* method : {"GET", "POST"}) add(method, std::string(path), not_offered, Access::kApiKey);
  add("POST", "/tokenize", tokenize, Access::kApiKey);
  add("POST", "/detokenize", detokenize, Access::kApiKey);
  add("GET", "/health", health, Access::kOpen);
  add("GET", "/liveness", liveness, Access::kOpen);
  for (const char* method : {"GET", "POST"}) add(method, "/ping", ping, Access::kOpen);
  for (const char* method : {"GET", "POST"}) add(method, "/version", version, Access::kOpen);
  add("POST", "/update_weights", update_weights, Access::kWeights);
  add("POST", "/init_broadcaster", init_broadcaster, Access::kWeights);
  add("POST", "/reload_weights", reload_weights, Access::kWeights);
  add("POST", "/release", release, Access::kAdminKey);
  add("GET", "/weight_proof", weight_proof, Access::kAdminKey);
  add("POST", "/pause", pause, Access::kAdminKey);
  add("POST", "/resume", resume, Access::kAdminKey);
  add("POST", "/reset_prefix_cache", reset_prefix_cache, Access::kAdminKey);
  add("POST", "/v1/load_lora_adapter", load_lora_adapter, Access::kWeights);
  add("POST", "/v1/unload_lora_adapter", unload_lora_adapter, Access::kWeights);
  add("POST", "/load_lora_adapter", put_lora_adapter, Access::kWeights);
  add("GET", "/runs", list_runs, Access::kAdminKey);
  add("POST", "/runs", put_run, Access::kAdminKey);
  add("POST", "/runs/pause", pause_run, Access::kAdminKey);
  add("POST", "/runs/resume", resume_run, Access::kAdminKey);
  add("POST", "/runs/drain", drain_run, Access::kAdminKey);
  add("POST", "/runs/cancel", cancel_run, Access::kAdminKey);
  add("POST", "/runs/remove", remove_run, Access::kAdminKey);
  guard.add_route("GET", "/metrics", Access::kOpen);
  http_->route("GET", "/metrics", [this](HttpRequest request) { return metrics(std::move(request)); });
  http_->set_gate(std::move(guard));
  http_->on_finished([context = context_](const std::string& method, const std::string& path, int status, net::Clock::duration duration) {
    context->metrics.count_http(status);
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
    log::debug("{} {} {} {} ms", method, path, status, milliseconds);
  });
}

net::asio::awaitable<net::HttpResponse> ApiServer::metrics(net::HttpRequest) {
  const std::string& model = context_->options.served_names.front();
  std::optional<transfer::KvGateStats> kv;
  if (const transfer::KvGate* gate = context_->backend->kv()) kv = gate->stats();
  HttpResponse response =
      HttpResponse::text(context_->metrics.render(context_->backend->stats(), model, http_->stats().num_connections, kv));
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  co_return response;
}

void ApiServer::start() {
  const std::uint64_t wanted = context_->options.max_connections + kSpareFiles;
  const std::uint64_t limit = net::raise_fd_limit(wanted);
  if (limit < wanted)
    log::warning("this process may open {} files, {} are needed for {} connections; raise the limit with ulimit -n", limit, wanted,
                 context_->options.max_connections);
  http_->start();
  log::debug("serving {} at http://{}:{}", context_->options.served_names.front(), context_->options.host, http_->port());
}

int ApiServer::port() const noexcept { return http_->port(); }

void ApiServer::stop(std::chrono::milliseconds drain) {
  http_->stop(
      drain, [this] { context_->live.end_all(); }, kGoodByeTime);
}

net::HttpServer::Stats ApiServer::http_stats() const { return http_->stats(); }

}  // namespace prl::server
