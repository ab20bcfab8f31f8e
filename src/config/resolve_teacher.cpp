#include <fmt/format.h>

#include "config/detail/check.hpp"
#include "config/detail/urls.hpp"

namespace prl::config::detail {
namespace {

bool uses_teacher_tau(const TrainerConfig& trainer) {
  const auto* masked = std::get_if<MaskedLossConfig>(&trainer.loss);
  return masked && masked->teacher_tau > 0;
}

/// The section of the server that teacher_gpu_ids asks for without describing it: the policy's, one port on.
InferenceConfig copy_of_inference(const RlConfig& config) {
  InferenceConfig server = config.inference.value_or(InferenceConfig{});
  server.model.name = InferenceConfig{}.model.name;
  server.model.served_name.reset();
  return server;
}

/// An engine on each of its GPUs, with a router in front of them.
void choose_teacher_engines(RlConfig& config, const Check& check) {
  InferenceConfig& server = *config.teacher_inference;
  if (!check.is_set("teacher_inference.parallel.dp")) server.parallel.dp = server.api_server_count = 1;
  if (!config.teacher_gpu_ids) return;
  const auto num_gpus = static_cast<int>(config.teacher_gpu_ids->size());
  const int tp = server.parallel.tp, num_engines = num_engines_on(server, num_gpus);
  if (num_gpus % tp != 0)
    check.problem("teacher_inference.parallel.tp",
                  fmt::format("is {}, which does not divide the {} GPUs that teacher_gpu_ids names", tp, num_gpus));
  if (num_gpus < 2) return;
  if (check.is_set("teacher_inference.parallel.dp") && server.parallel.dp != num_engines)
    check.problem("teacher_inference.parallel.dp", fmt::format("is {}, but the {} GPUs that teacher_gpu_ids names are {} engines",
                                                               server.parallel.dp, num_gpus, num_engines));
  server.parallel.dp = server.api_server_count = num_engines;
}

void name_model(RlConfig& config, const Check& check) {
  InferenceModelConfig& served = config.teacher_inference->model;
  PolicyModelConfig& teacher = config.orchestrator.teacher->model;
  const bool has_served = check.is_set("teacher_inference.model.name"), has_teacher = check.is_set("orchestrator.teacher.model.name");
  if (!has_served && !has_teacher)
    return check.problem("teacher_inference.model.name",
                         "is needed: which model is the teacher? orchestrator.teacher.model.name says it too");
  if (!has_served) served.name = teacher.name;
  const std::string name = served.served_name.value_or(served.name);
  if (!has_teacher) teacher.name = name;
  if (teacher.name != name)
    check.problem("orchestrator.teacher.model.name", fmt::format("differs from \"{}\", which teacher_inference serves", name));
}

void connect(RlConfig& config, const Check& check) {
  ServerConfig& server = config.teacher_inference->server;
  if (!check.is_set("teacher_inference.server.port"))
    server.port = config.inference ? config.inference->server.port + num_engines(*config.inference) : server.port + 1;
  if (server.port == 0)
    check.problem("teacher_inference.server.port", "must be a fixed port, so that the orchestrator knows where to connect");
  if (config.inference && server.port >= config.inference->server.port &&
      server.port < config.inference->server.port + num_engines(*config.inference))
    check.problem("teacher_inference.server.port",
                  fmt::format("must not be one of inference, whose engines listen at {} to {}", config.inference->server.port,
                              config.inference->server.port + num_engines(*config.inference) - 1));
  std::vector<std::string>& urls = config.orchestrator.teacher->client.base_url;
  if (!check.is_set("orchestrator.teacher.client.base_url"))
    urls = {local_url(server.host, server.port)};
  else if (!urls.empty() && url_port(urls.front()) != server.port)
    check.problem("orchestrator.teacher.client.base_url",
                  fmt::format("must name the port of teacher_inference.server, which is {}; or remove [teacher_inference]", server.port));
}

/// What the run's shared keys say to all servers.
void share(RlConfig& config, const Check& check) {
  InferenceConfig& server = *config.teacher_inference;
  server.output_dir = config.output_dir;
  if (!check.is_set("teacher_inference.log") && config.inference) server.log = config.inference->log;
  if (!check.is_set("teacher_inference.compute")) server.compute = config.compute;
  if (config.deterministic) server.deterministic = true;
  if (!check.is_set("teacher_inference.seed")) server.seed = config.seed;
}

}  // namespace

bool starts_teacher(const RlConfig& config) { return config.teacher_inference || config.teacher_gpu_ids; }

void resolve_teacher(RlConfig& config, const Check& check) {
  OrchestratorConfig& orchestrator = config.orchestrator;
  const bool has_use = orchestrator.training_mode != TrainingMode::kRl || uses_teacher_tau(config.trainer);
  if (!has_use) {
    constexpr std::string_view kReason = "training_mode rl uses no teacher; set training_mode to opd or sft, or trainer.loss.teacher_tau";
    if (orchestrator.teacher) check.problem("orchestrator.teacher", std::string(kReason));
    if (config.teacher_inference) check.problem("teacher_inference", std::string(kReason));
    if (config.teacher_gpu_ids) check.problem("teacher_gpu_ids", std::string(kReason));
    return;
  }
  if (starts_teacher(config)) {
    if (config.teacher_gpu_ids && config.teacher_gpu_ids->empty()) check.problem("teacher_gpu_ids", "names no GPU");
    if (!config.teacher_gpu_ids && check.context().num_devices > 1)
      check.problem("teacher_inference", "needs teacher_gpu_ids: which of the GPUs is the teacher's?");
    if (std::holds_alternative<ColocatedDeployment>(*config.deployment))
      check.problem("deployment.type",
                    "colocated is one process, and teacher_inference starts another: use single_node, or start the teacher by hand with "
                    "`prl inference` and name its address in orchestrator.teacher.client.base_url");
    if (!config.teacher_inference) config.teacher_inference = copy_of_inference(config);
    if (!orchestrator.teacher) orchestrator.teacher.emplace();
    choose_teacher_engines(config, check);
    name_model(config, check);
    connect(config, check);
    share(config, check);
    check_inference(*config.teacher_inference, check.sub("teacher_inference"));
  }
  if (uses_teacher_tau(config.trainer) && !orchestrator.teacher)
    check.problem("trainer.loss.teacher_tau", "needs orchestrator.teacher, whose log-probabilities it weighs");
}

}  // namespace prl::config::detail
