#include "server/api_server.hpp"

#include <ctime>
#include <random>
#include <utility>

#include "base/log.hpp"
#include "base/rng.hpp"
#include "net/io_runtime.hpp"
#include "server/routes.hpp"

namespace prl::server {
namespace {

constexpr std::size_t kMaxAdminJobs = 16;
/// File descriptors besides those of connections: models, logs, epoll.
constexpr std::uint64_t kSpareFiles = 512;

using Route = Reply (*)(Context, HttpRequest);
enum class Access { kOpen, kApiKey, kAdminKey };

/// Compares in time that does not depend on where the keys differ.
bool same_key(std::string_view a, std::string_view b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(i < b.size() ? b[i] : 0);
  return difference == 0;
}

/// Throws 401 unless the request shows `key`, as a bearer token or as x-api-key.
void check_key(const std::string& key, const HttpRequest& request, std::string_view what) {
  if (key.empty() || same_key(request.bearer(), key) || same_key(request.headers.get("x-api-key"), key)) return;
  fail(ErrorCode::kUnauthorized, "the {} is missing or wrong; send it as 'Authorization: Bearer <key>'", what);
}

Reply guarded(Context context, HttpRequest request, Route route, Access access) {
  if (access == Access::kApiKey) check_key(context->options.api_key, request, "API key");
  if (access == Access::kAdminKey) {
    const bool has_own = !context->options.admin_api_key.empty();
    check_key(has_own ? context->options.admin_api_key : context->options.api_key, request, has_own ? "admin key" : "API key");
  }
  auto running = route(std::move(context), std::move(request));
  co_return co_await std::move(running);
}

/// Client ids come back in headers and logs, so only harmless ones are taken over.
bool is_plain_id(std::string_view id) {
  constexpr std::size_t kMaxLength = 128;
  if (id.empty() || id.size() > kMaxLength) return false;
  for (const char c : id)
    if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.' || c == ':'))
      return false;
  return true;
}

}  // namespace

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
  context_->created = static_cast<std::int64_t>(std::time(nullptr));
  std::random_device device;
  context_->id_seed = mix_seed(device(), device());
  const ApiOptions& o = context_->options;
  context_->text_workers = std::make_unique<WorkerPool>(o.num_text_threads, o.max_text_jobs, "http-text");
  context_->admin_worker = std::make_unique<WorkerPool>(1, kMaxAdminJobs, "http-admin");
  net::HttpServer::Options http;
  http.host = o.host;
  http.port = o.port;
  http.num_io_threads = o.num_io_threads;
  http.max_connections = o.max_connections;
  http.max_body_bytes = o.max_body_bytes;
  http_ = std::make_unique<net::HttpServer>(http);
  add_routes();
}

ApiServer::~ApiServer() {
  stop(std::chrono::milliseconds(0));
  // Jobs hold the context, and use the backend, which need not outlive the server.
  context_->text_workers->stop();
  context_->admin_worker->stop();
}

void ApiServer::add_routes() {
  const auto add = [this](const char* method, std::string path, Route route, Access access) {
    http_->route(method, std::move(path),
                 [context = context_, route, access](HttpRequest request) { return guarded(context, std::move(request), route, access); });
  };
  add("POST", "/v1/chat/completions", chat_completions, Access::kApiKey);
  add("POST", "/v1/chat/completions/tokens", chat_completions_tokens, Access::kApiKey);
  add("POST", "/v1/completions", completions, Access::kApiKey);
  add("POST", "/inference/v1/generate", generate, Access::kApiKey);
  add("GET", "/v1/models", list_models, Access::kApiKey);
  for (const std::string& name : context_->options.served_names) add("GET", "/v1/models/" + name, list_models, Access::kApiKey);
  add("POST", "/tokenize", tokenize, Access::kApiKey);
  add("POST", "/detokenize", detokenize, Access::kApiKey);
  add("GET", "/health", health, Access::kOpen);
  add("GET", "/liveness", liveness, Access::kOpen);
  for (const char* method : {"GET", "POST"}) add(method, "/ping", ping, Access::kOpen);
  for (const char* method : {"GET", "POST"}) add(method, "/version", version, Access::kOpen);
  add("POST", "/update_weights", update_weights, Access::kAdminKey);
  add("POST", "/reload_weights", reload_weights, Access::kAdminKey);
  add("GET", "/weight_proof", weight_proof, Access::kAdminKey);
  add("POST", "/pause", pause, Access::kAdminKey);
  add("POST", "/resume", resume, Access::kAdminKey);
  add("POST", "/reset_prefix_cache", reset_prefix_cache, Access::kAdminKey);
  http_->route("GET", "/metrics", [this](HttpRequest request) { return metrics(std::move(request)); });
  http_->on_finished([context = context_](const std::string& method, const std::string& path, int status, net::Clock::duration duration) {
    context->metrics.count_http(status);
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
    log::debug("{} {} {} {} ms", method, path, status, milliseconds);
  });
}

net::asio::awaitable<net::HttpResponse> ApiServer::metrics(net::HttpRequest) {
  const std::string& model = context_->options.served_names.front();
  HttpResponse response = HttpResponse::text(context_->metrics.render(context_->backend->stats(), model, http_->stats().num_connections));
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

void ApiServer::stop(std::chrono::milliseconds drain) { http_->stop(drain); }

net::HttpServer::Stats ApiServer::http_stats() const { return http_->stats(); }

}  // namespace prl::server
