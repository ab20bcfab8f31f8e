#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/rule_cache.hpp"
#include "net/run_claim.hpp"
#include "net/worker_pool.hpp"
#include "server/backend.hpp"
#include "server/call_form.hpp"
#include "server/live_generations.hpp"
#include "server/response_store.hpp"
#include "server/sampling_defaults.hpp"
#include "server/server_metrics.hpp"
#include "server/tenant_book.hpp"
#include "text/chat_template.hpp"
#include "text/renderer.hpp"
#include "text/tokenizer.hpp"
#include "vision/image_processor.hpp"

namespace prl::server {

/// Images in prompts: nothing unless the model has a vision tower.
struct ImageInput {
  std::shared_ptr<const vision::ImageProcessor> processor = {};
  std::int32_t token_id = -1;  ///< the placeholder
  vision::ImageLimits limits = {};
  std::size_t max_images = 16;  ///< of one request
};

/// What a server is made of, and its limits.
struct ApiOptions {
  std::string host = "127.0.0.1";
  int port = 8000;                                 ///< 0 takes a free one
  std::vector<std::string> served_names{"model"};  ///< the first is the one in replies; all are accepted as `model`
  std::string api_key;                             ///< empty: routes are open
  std::string admin_api_key;                       ///< of the routes that change weights or state; empty: api_key
  std::vector<std::string> cors_origins;           ///< web pages that may use the server (RequestGuard)
  std::vector<std::string> allowed_hosts;          ///< names of the server besides addresses and localhost (RequestGuard)
  std::string run_id;                              ///< the run that the server belongs to; empty: none (net::kRunIdHeader)
  bool returns_routed_experts = false;  ///< /inference/v1/generate tells which experts tokens had: engine::EngineOptions::logs_routes
  bool is_strict = false;               ///< members of requests that have no effect are a 400; else a header names them
  SamplingDefaults sampling_defaults;   ///< of the chat, completions and responses routes
  bool enable_tools = false;            ///< read tool calls (needs a renderer that parses them)
  bool enable_reasoning = false;        ///< split reasoning off (needs a renderer that parses it)
  ImageInput images;
  std::size_t max_connections = 8192;
  std::size_t max_body_bytes = std::size_t{64} << 20;
  std::size_t max_held_body_bytes = std::size_t{256} << 20;  ///< of all requests together; beyond it 503
  std::int32_t max_n = 128;                                  ///< choices per prompt
  std::size_t max_prompts = 256;                             ///< prompts of one /v1/completions request
  std::int32_t max_logprobs = 20;                            ///< top log-probabilities per token
  std::chrono::milliseconds request_timeout{3'600'000};
  std::chrono::milliseconds liveness_timeout{30'000};
  std::chrono::milliseconds admin_timeout{1'200'000};
  std::chrono::milliseconds keep_alive_interval{15'000};  ///< between comments of a silent event stream
  int num_io_threads = 2;
  int num_text_threads = 4;
  std::size_t max_text_jobs = 4096;  ///< requests that wait to be tokenized; beyond it 429
};

/// State shared by the handlers of one server. Everything but the counters, `claim`, `tenants` and `broadcaster` is fixed after
/// construction.
struct ServerContext {
  ApiOptions options;
  Backend* backend = nullptr;  ///< borrowed
  std::shared_ptr<const text::Tokenizer> tokenizer;
  std::shared_ptr<const text::ChatTemplate> chat_template;                       ///< null: chat routes answer 400
  std::shared_ptr<const text::Renderer> renderer;                                ///< null: replies are plain text
  std::optional<CallForm> call_form;                                             ///< of the calls that the renderer reads
  std::unique_ptr<grammar::RuleCache> rules;                                     ///< of structured output
  std::unique_ptr<ResponseStore> responses = std::make_unique<ResponseStore>();  ///< behind previous_response_id
  ServerMetrics metrics;
  LiveGenerations live;
  std::unique_ptr<net::WorkerPool> text_workers;   ///< templates and tokenization
  std::unique_ptr<net::WorkerPool> large_workers;  ///< the same for large bodies, so that small ones never wait for them
  std::unique_ptr<net::WorkerPool> rule_workers;   ///< automata of structured output
  std::unique_ptr<net::WorkerPool> kv_workers;     ///< each brings blocks of one prompt from another engine; null: none are brought
  std::unique_ptr<net::WorkerPool> admin_worker;   ///< one thread: changes of weights happen one after the other
  TenantBook tenants;                              ///< runs that share the engine
  net::RunClaim claim;                             ///< of a server that belongs to no run by its start
  std::string broadcaster;                         ///< store of the trainer that sends weights; of the admin thread alone
  std::int64_t created = 0;                        ///< unix time of the start
  std::uint64_t id_seed = 0;
  mutable std::atomic<std::uint64_t> num_ids{0};

  /// The threads that take a body of that size apart.
  net::WorkerPool& workers_for(std::size_t num_body_bytes) const;
  /// `prefix` and 32 hex digits, or the client's own X-Request-Id.
  std::string make_id(std::string_view prefix, std::string_view client_id) const;
};

}  // namespace prl::server
