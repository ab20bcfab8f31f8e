#include "launch/inference_role.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "launch/engine_host.hpp"
#include "launch/prompt_images.hpp"
#include "launch/run_identity.hpp"
#include "net/io_runtime.hpp"
#include "net/port_owner.hpp"
#include "server/api_server.hpp"
#include "server/engine_backend.hpp"
#include "transfer/kv_gate.hpp"
#include "weights/transfer.hpp"

namespace prl::launch {
namespace {

/// Of one operation of a transfer of weights from a trainer: it may have to
/// wait for its turn.
constexpr std::chrono::minutes kTransferTimeout{10};
/// The same of an adapter, which is small, and others' adapters wait meanwhile.
constexpr std::chrono::minutes kAdapterTimeout{2};

server::ApiOptions api_options(const config::InferenceConfig& config) {
  server::ApiOptions options;
  options.host = config.server.host;
  options.port = config.server.port;
  options.served_names = {config.model.served_name.value_or(config.model.name)};
  if (config.model.served_name) options.served_names.push_back(config.model.name);
  options.api_key = config.server.api_key.value_or("");
  options.admin_api_key = config.server.admin_api_key.value_or("");
  options.cors_origins = config.server.cors_origins;
  options.allowed_hosts = config.server.allowed_hosts;
  options.run_id = run_identity();
  options.is_strict = config.server.strict;
  options.returns_routed_experts = config.enable_return_routed_experts;
  options.enable_tools = config.model.enable_auto_tool_choice;
  options.enable_reasoning = config.model.reasoning_parser.has_value();
  options.max_connections = static_cast<std::size_t>(config.server.max_connections);
  options.max_body_bytes = static_cast<std::size_t>(config.server.max_body_bytes);
  options.max_held_body_bytes = static_cast<std::size_t>(config.server.max_held_body_bytes);
  options.request_timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.server.request_timeout * 1000));
  options.liveness_timeout = std::chrono::milliseconds(static_cast<std::int64_t>(config.server.liveness_timeout_seconds * 1000));
  return options;
}

/// Weights that a trainer publishes while the server runs were trained with the rotary scaling of their own config.json.
void refuse_other_rope(const config::InferenceConfig& config, const EngineHost& host, const server::WeightSource& source) {
  if (config.model.rope_scaling.is_null() || (source.store.empty() && source.folder == host.folder())) return;
  fail(ErrorCode::kInvalidArgument,
       "{}: this server's model.rope_scaling is in place of the one that these weights were trained with, that of their config.json: it "
       "would "
       "sample from another model. Start the server without it, or set rope_scaling in config.json of the model folder, which trainers "
       "read, too",
       source.store.empty() ? source.folder.string() : source.store);
}

/// What engines show each other. Error{kInvalidArgument} if there is none and other machines can ask.
std::string kv_key_of(const config::InferenceConfig& config) {
  if (const char* made_up = std::getenv(kKvKeyVariable); made_up != nullptr && *made_up != '\0') return made_up;
  const config::ServerConfig& server = config.server;
  for (const auto* key : {&config.kv_transfer.api_key, &server.admin_api_key, &server.api_key})
    if (*key && !(*key)->empty()) return **key;
  if (!is_loopback(server.host))
    fail(ErrorCode::kInvalidArgument,
         "kv_transfer.api_key: wanted a key, for other machines can reach this engine at {} and could read prompts; found none, nor "
         "server.api_key",
         server.host);
  return {};
}

/// The name by which other engines reach this one.
std::string kv_host_of(const config::ServerConfig& server) {
  if (server.host != "0.0.0.0" && server.host != "::") return server.host;
  return weights::own_machine();
}

/// nullptr unless engines exchange blocks.
std::unique_ptr<transfer::KvGate> make_kv_gate(const config::InferenceConfig& config, engine::Engine& engine) {
  if (!config.use_pd_kv_transfer) return nullptr;
  const std::chrono::milliseconds timeout(static_cast<std::int64_t>(std::ceil(config.kv_transfer.timeout * 1000)));
  transfer::KvGateOptions options{.server = {.host = config.server.host, .port = config.kv_transfer.port, .key = kv_key_of(config)},
                                  .own_host = kv_host_of(config.server),
                                  .timeout = timeout};
  options.server.timeout = timeout;
  auto gate = std::make_unique<transfer::KvGate>(engine, std::move(options));
  log::info("key-value blocks of prompts go to other engines at port {}", gate->port());
  return gate;
}

/// How images in prompts are read, if the model has a vision tower.
server::ImageInput image_input(EngineHost& host) {
  std::shared_ptr<const vision::ImageProcessor> processor = image_processor_of(host);
  if (processor == nullptr) return {};
  return {.processor = std::move(processor), .token_id = host.engine().model_config().vision->image_token_id};
}

}  // namespace

int run_inference_role(const config::InferenceConfig& config, std::stop_token stop) {
  const auto started = std::chrono::steady_clock::now();
  net::raise_fd_limit(static_cast<std::uint64_t>(config.server.max_connections) + 512);
  net::require_free_port(config.server.host, config.server.port);  // before the model is loaded, which may take minutes
  EngineHost host(config, make_runtime(config.compute));
  server::EngineBackend backend(host.engine(),
                                [&](const server::WeightSource& source, PolicyVersion version, const nn::WeightsPtr& previous) {
                                  refuse_other_rope(config, host, source);
                                  return source.store.empty() ? host.load(source.folder, version, previous)
                                                              : host.receive(source.store, version, previous, kTransferTimeout);
                                });
  backend.reload_from(host.folder());
  if (config.enable_lora) {
    backend.serve_adapters(
        [&host, max_rank = largest_lora_rank(config)](const std::string& name, const server::WeightSource& source, PolicyVersion version) {
          return source.store.empty() ? host.load_adapter(source.folder, max_rank)
                                      : host.receive_adapter(source.store, name, version, max_rank, kAdapterTimeout);
        },
        static_cast<std::size_t>(config.max_cpu_loras));
    for (const auto& [name, folder] : config.lora_modules) backend.adapters()->load(name, {.folder = folder}, false);
  }
  const std::unique_ptr<transfer::KvGate> gate = make_kv_gate(config, host.engine());
  backend.exchange_blocks(gate.get());
  server::ApiOptions options = api_options(config);
  options.images = image_input(host);
  options.sampling_defaults = server::read_sampling_defaults(config.model.generation_config, host.folder());
  server::ApiServer server(std::move(options), backend, host.text().tokenizer, host.text().chat_template, host.text().renderer);
  server.start();
  if (!host.text().chat_template) log::warning("{} has no chat template: the chat routes answer 400", host.folder().string());
  log::success("{} {} on http://{}:{}/v1 after {:.2f} s", kServingMark, config.model.served_name.value_or(config.model.name),
               config.server.host, server.port(), std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  bool was_alive = true;
  while (!stop.stop_requested()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const bool is_alive = host.engine().is_alive(std::chrono::minutes(5));
    if (was_alive && !is_alive) log::error("the engine has not finished a step for 5 minutes; /liveness answers 503");
    was_alive = is_alive;
  }
  log::info("stopping: no new requests, running ones get 10 s");
  server.stop(std::chrono::seconds(10));
  if (gate != nullptr) {
    const transfer::KvGateStats kv = gate->stats();
    log::info("key-value blocks: {} came for {} prompts in {:.2f} s, {} of which were completed here; {} were given to other engines",
              kv.num_blocks, kv.num_transfers, kv.seconds, kv.num_fallbacks, kv.num_blocks_given);
  }
  host.engine().shutdown();
  host.log_memory();
  return 0;
}

}  // namespace prl::launch
