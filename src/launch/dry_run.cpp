#include "launch/dry_run.hpp"

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/log.hpp"
#include "env/registry.hpp"
#include "launch/batch_job.hpp"
#include "launch/eval_role.hpp"
#include "launch/model_setup.hpp"
#include "launch/start_checks.hpp"
#include "nn/model_config.hpp"

namespace prl::launch {
namespace {

/// False, with a warning, where the start would download; what is neither a folder nor an id of the hub throws.
bool is_here(const std::string& name) {
  if (!std::filesystem::is_directory(name) && is_local_model(name)) {
    log::warning("{} is not a folder here: the start downloads it from the Hugging Face hub, and it was not checked", name);
    return false;
  }
  model_folder(name);
  return true;
}

bool are_here(const std::set<std::string>& names) {
  bool all = true;
  for (const std::string& name : names) all = is_here(name) && all;
  return all;
}

template <class Envs>
void check_environments(const Envs& envs) {
  for (const auto& entry : envs) env::make_environment(env_spec(entry));
}

void check_environments(const config::OrchestratorConfig& config) {
  check_environments(config.train.env);
  if (config.eval) check_environments(config.eval->env);
}

/// A job may find another device, other models and data than this machine has.
template <class C>
void write_script_of(const C& config) {
  write_batch_script(batch_job(config));
  log::warning("the job may run elsewhere: models, data and devices were not checked");
}

/// A name that a server serves is not looked for here.
template <class C>
void check_evaluation(const C& config) {
  check_environments(config.env);
  if (is_local_model(config.model.name) && is_here(config.model.name)) nn::load_model_config(config.model.name);
}

}  // namespace

void check_dry_run(const config::TrainerConfig& config, std::optional<int> num_ranks) {
  check_ranks(config, num_ranks);
  if (are_here({config.model.name, config.tokenizer.name.value_or(config.model.name)})) check_start(config, num_ranks);
}

void check_dry_run(const config::OrchestratorConfig& config) {
  check_environments(config);
  if (are_here({config.tokenizer.name.value_or(config.student.model.name)})) check_start(config);
}

void check_dry_run(const config::RlConfig& config) {
  check_environments(config.orchestrator);
  if (config.slurm) {
    check_heads_here(config.trainer.model);
    return write_script_of(config);
  }
  const config::TrainerConfig& trainer = config.trainer;
  const config::OrchestratorConfig& orchestrator = config.orchestrator;
  std::set<std::string> names = {trainer.model.name, trainer.tokenizer.name.value_or(trainer.model.name),
                                 orchestrator.tokenizer.name.value_or(orchestrator.student.model.name)};
  if (config.inference) names.insert(config.inference->model.name);
  if (config.teacher_inference) names.insert(config.teacher_inference->model.name);
  if (are_here(names)) check_start(config);
}

void check_dry_run(const config::SftConfig& config, std::optional<int> num_ranks) {
  if (config.eval) check_environments(config.eval->env);
  if (config.slurm) {
    check_heads_here(config.model);
    return write_script_of(config);
  }
  check_ranks(config, num_ranks);
  const auto has_data = [](const config::SftData& data) {
    const auto* real = std::get_if<config::SftDataConfig>(&data);
    return real == nullptr || std::filesystem::exists(real->name);
  };
  const bool is_model_here = are_here({config.model.name, config.tokenizer.name.value_or(config.model.name)});
  const bool is_data_here = has_data(config.data) && (!config.val || has_data(config.val->data));
  if (!is_data_here)
    log::warning("data.name is no file or folder here: the start looks for it on the Hugging Face hub, and it was not checked");
  if (is_model_here && is_data_here) check_start(config, num_ranks);
}

void check_dry_run(const config::InferenceConfig& config) {
  if (config.slurm) return write_script_of(config);
  if (is_here(config.model.name)) nn::load_model_config(config.model.name, config_overrides(config));
}

void check_dry_run(const config::EvalConfig& config) { check_evaluation(config); }
void check_dry_run(const config::EvalsConfig& config) { check_evaluation(eval_config_of(config)); }
void check_dry_run(const config::SynthesizeConfig& config) { check_evaluation(config); }

}  // namespace prl::launch
