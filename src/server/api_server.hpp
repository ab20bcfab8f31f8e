#pragma once

#include <chrono>
#include <memory>

#include "net/http_server.hpp"
#include "server/server_context.hpp"

namespace prl::server {

/// The OpenAI-compatible HTTP service over one engine. Knows nothing of processes, signals or configuration files.
///
/// Routes: /v1/chat/completions, /v1/chat/completions/tokens, /v1/completions, /v1/models, /inference/v1/generate, /tokenize,
/// /detokenize, /health, /liveness, /ping, /version, /metrics, and for administrators /update_weights, /reload_weights,
/// /weight_proof, /pause, /resume, /reset_prefix_cache, /v1/load_lora_adapter, /v1/unload_lora_adapter, /load_lora_adapter, /runs.
/// docs/http-api.md has their fields.
class ApiServer {
 public:
  /// `backend` is borrowed and must outlive the server. `chat_template` and `renderer` may be null.
  ApiServer(ApiOptions options, Backend& backend, std::shared_ptr<const text::Tokenizer> tokenizer,
            std::shared_ptr<const text::ChatTemplate> chat_template, std::shared_ptr<const text::Renderer> renderer);
  /// stop(0), then waits for work of requests that has begun.
  ~ApiServer();

  /// Binds and serves. Error{kIo} naming host:port if it is taken; {kInvalidArgument} for options that contradict.
  void start();
  int port() const noexcept;
  /// Refuses new requests, lets running ones end for up to `drain`, then cancels them. Idempotent.
  void stop(std::chrono::milliseconds drain);
  net::HttpServer::Stats http_stats() const;

 private:
  void add_routes();
  net::asio::awaitable<net::HttpResponse> metrics(net::HttpRequest request);
  std::shared_ptr<ServerContext> context_;
  std::unique_ptr<net::HttpServer> http_;
};

}  // namespace prl::server
