#include <fmt/core.h>

#include "config/bind.hpp"
#include "config/detail/one_process.hpp"
#include "config/detail/urls.hpp"

namespace prl::config::detail {
namespace {

constexpr std::string_view kNoServer = "in one process there is no HTTP server";
constexpr std::string_view kNoClient = "in one process the policy is asked without a connection";
constexpr std::string_view kOneLog = "in one process there is one log, that of [trainer.log]";
constexpr Inert kInertInference[] = {
    {"server.host", kNoServer},
    {"server.port", kNoServer},
    {"server.api_key", kNoServer},
    {"server.admin_api_key", kNoServer},
    {"server.max_body_bytes", kNoServer},
    {"server.max_connections", kNoServer},
    {"server.request_timeout", kNoServer},
    {"server.liveness_timeout_seconds", kNoServer},
    {"model.enable_auto_tool_choice", kNoServer},
    {"gpu_memory_utilization", "in one process the cache gets what training leaves; inference.kv.num_blocks limits it"},
    {"log.level", kOneLog},
    {"log.json_logging", kOneLog},
    {"log.file", kOneLog},
    {"log.step_interval", kOneLog},
};
constexpr Inert kInertOrchestrator[] = {
    {"student.client.timeout", kNoClient},
    {"student.client.api_key_var", kNoClient},
    {"student.client.headers", kNoClient},
    {"student.client.headers_from_env", kNoClient},
    {"student.client.skip_model_check", kNoClient},
    {"student.client.admin_base_url", kNoClient},
    {"prefill.base_url", kNoClient},
    {"prefill.non_cached_tokens", kNoClient},
    {"student.model.lora.name", "in one process the adapter is part of the policy, which has the model's name"},
    {"log.level", kOneLog},
    {"log.json_logging", kOneLog},
    {"log.file", kOneLog},
    {"log.step_interval", kOneLog},
};

/// Trainer and engine hold the same weights on the same device.
void share_compute(const TrainerConfig& trainer, InferenceConfig& inference, const Check& written) {
  const ComputeConfig& compute = trainer.compute;
  if (written.is_set("inference.compute.device") && inference.compute.device != compute.device)
    written.problem(
        "inference.compute.device",
        fmt::format("differs from trainer.compute.device, which is {}: one process computes on one device. Set compute.device for "
                    "both, or deployment.type = \"single_node\"",
                    enum_name(compute.device)));
  for (const char* key : {"inference.model.dtype", "inference.compute.dtype"})
    if (written.is_set(key) && inference.compute.dtype != compute.dtype)
      written.inert(key,
                    fmt::format("in one process the engine computes with the trainer's weights, so trainer.compute.dtype decides, which "
                                "is {}",
                                enum_name(compute.dtype)));
  inference.compute.device = compute.device;
  inference.compute.dtype = inference.model.dtype = compute.dtype;
}

/// What is passed on by files elsewhere changes hands in memory. What is not built stays, to be refused by its name.
void use_memory(RlConfig& config, const Check& written) {
  bool has_files = false;
  const auto to_memory = [&](WeightBroadcast& broadcast) {
    if (!std::holds_alternative<FilesystemBroadcast>(broadcast)) return;
    broadcast.emplace<LocalBroadcast>();
    has_files = true;
  };
  to_memory(config.trainer.weight_broadcast);
  to_memory(config.orchestrator.weight_broadcast);
  to_memory(config.inference->weight_broadcast);
  if (has_files)
    for (const char* section : {"", "trainer.", "orchestrator.", "inference."})
      if (const std::string key = fmt::format("{}weight_broadcast.type", section); written.is_set(key))
        written.inert(key, "in one process weights change hands in memory");
  bool has_transport = false;
  const auto transport_to_memory = [&](RolloutTransport& transport) {
    if (std::holds_alternative<LocalRollouts>(transport)) return;
    transport.emplace<LocalRollouts>();
    has_transport = true;
  };
  transport_to_memory(config.trainer.rollout_transport);
  transport_to_memory(config.orchestrator.rollout_transport);
  if (has_transport)
    for (const char* section : {"", "trainer.", "orchestrator."})
      if (const std::string key = fmt::format("{}rollout_transport.type", section); written.is_set(key))
        written.inert(key, "in one process rollouts stay in memory");
}

}  // namespace

void resolve_one_process(RlConfig& config, const Check& written) {
  if (!config.inference) return;  // refused elsewhere
  share_compute(config.trainer, *config.inference, written);
  use_memory(config, written);
  warn_inert(ops_of<InferenceConfig>(), &*config.inference, kInertInference, written.sub("inference"));
  warn_inert(ops_of<OrchestratorConfig>(), &config.orchestrator, kInertOrchestrator, written.sub("orchestrator"));
  const ServerConfig& server = config.inference->server;
  if (written.is_set("orchestrator.student.client.base_url") &&
      config.orchestrator.student.client.base_url != std::vector{local_url(server.host, server.port)})
    written.inert("orchestrator.student.client.base_url", std::string(kNoClient));
}

}  // namespace prl::config::detail
