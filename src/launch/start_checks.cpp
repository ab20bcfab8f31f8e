#include "launch/start_checks.hpp"

#include "base/error.hpp"
#include "env/registry.hpp"
#include "io/hub/hub_settings.hpp"
#include "io/safetensors.hpp"
#include "launch/engine_host.hpp"
#include "launch/eval_child.hpp"
#include "launch/model_setup.hpp"
#include "launch/ranks.hpp"
#include "launch/trainer_role.hpp"
#include "launch/visible_gpus.hpp"
#include "nn/model_config.hpp"
#include "trainer/sft/sample_stream.hpp"

namespace prl::launch {
namespace {

void check_trained_model(const config::TrainerModelConfig& model) {
  const std::filesystem::path folder = model_folder(model.name);
  trainer::check_row_cut(nn::load_model_config(folder), row_cut(model));
  if (!model.debug.random_init) io::SafetensorsFolder::open(folder);
}

TextSetup check_text(const std::string& name, const config::RendererConfig& renderer, const std::optional<std::string>& chat_template) {
  const std::filesystem::path folder = text_folder(name);
  TextOptions options;
  options.renderer = renderer.name;
  options.template_kwargs = renderer.chat_template_kwargs;
  options.chat_template = chat_template;
  TextSetup text = load_text(folder, options);
  if (!text.chat_template) fail(ErrorCode::kInvalidArgument, "{} has no chat template; set tokenizer.chat_template", folder.string());
  return text;
}

void check_ranks(RankEnv env, const config::TrainerModelConfig& model) {
  use_replicas(env, model.dp_replicate);
  check_ranks_per_row(env, model.cp);
  check_expert_ranks(env, model);
}

RankEnv ranks_of(std::optional<int> num_ranks) {
  RankEnv env = rank_env();
  if (!num_ranks) return env;
  env.size = *num_ranks;
  env.is_told = true;
  return env;
}

}  // namespace

void check_heads_here(const config::TrainerModelConfig& model) {
  if (std::filesystem::is_directory(model.name)) trainer::check_row_cut(nn::load_model_config(model_folder(model.name)), row_cut(model));
}

void check_ranks(const config::TrainerConfig& config, std::optional<int> num_ranks) { check_ranks(ranks_of(num_ranks), config.model); }

void check_ranks(const config::SftConfig& config, std::optional<int> num_ranks) {
  RankEnv env = ranks_of(num_ranks);
  if (const auto* node = std::get_if<config::SftSingleNode>(&config.deployment); node != nullptr && !env.is_told) env.size = node->num_gpus;
  // Of several nodes the configuration says how many there are.
  if (env.is_told || std::holds_alternative<config::SftSingleNode>(config.deployment)) check_ranks(env, config.model);
}

void check_start(const config::TrainerConfig& config, std::optional<int> num_ranks) {
  check_ranks(config, num_ranks);
  check_trained_model(config.model);
  text_folder(config.tokenizer.name.value_or(config.model.name));
  make_runtime(config.compute);
}

void check_start(const config::OrchestratorConfig& config) {
  check_text(config.tokenizer.name.value_or(config.student.model.name), config.renderer, config.tokenizer.chat_template);
  for (const config::EnvConfig& entry : config.train.env) env::make_environment(env_spec(entry));
  if (config.eval)
    for (const config::EvalEnvConfig& entry : config.eval->env) env::make_environment(env_spec(entry));
}

void check_start(const config::RlConfig& config) {
  // Of several processes each makes a runtime of its own; one in the launcher would only take memory from them.
  const bool has_processes = config.deployment && !std::holds_alternative<config::ColocatedDeployment>(*config.deployment);
  if (has_processes)
    check_trained_model(config.trainer.model);
  else
    check_start(config.trainer);
  if (config.inference) model_folder(config.inference->model.name);
  if (config.teacher_inference) model_folder(config.teacher_inference->model.name);
  if (config.trainer.max_concurrent_runs == 1) check_start(config.orchestrator);  // each of several runs has its own
}

void check_start(const config::SftConfig& config, std::optional<int> num_ranks) {
  check_ranks(config, num_ranks);
  check_trained_model(config.model);
  make_runtime(config.compute);
  const std::string name = config.tokenizer.name.value_or(config.model.name);
  const auto check_data = [&](const config::SftData& data) {
    const auto* real = std::get_if<config::SftDataConfig>(&data);
    if (real == nullptr) return;
    const TextSetup text = check_text(name, config.renderer, config.tokenizer.chat_template);
    trainer::make_data_stream(*real, {text.tokenizer, text.chat_template, text.renderer}, io::HubSettings::from_environment());
  };
  check_data(config.data);
  if (config.val) check_data(config.val->data);
  if (!config.eval) return;
  for (const config::EvalEnvConfig& entry : config.eval->env) env::make_environment(env_spec(entry));
  check_text(config.model.name, {}, config.inference->model.chat_template);
  context_length(*config.inference, nn::load_model_config(model_folder(config.model.name), config_overrides(*config.inference)));
  if (std::holds_alternative<config::SftSingleNode>(config.deployment) && !rank_env().is_told)
    eval_devices(config, device_kind(config.compute) == DeviceKind::kCuda, num_visible_gpus());
}

}  // namespace prl::launch
