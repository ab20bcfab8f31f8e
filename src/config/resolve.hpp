#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/eval_config.hpp"
#include "config/kubernetes_config.hpp"
#include "config/problem.hpp"
#include "config/rl_config.hpp"
#include "config/sft_config.hpp"
#include "config/tool_config.hpp"
#include "config/value.hpp"

namespace prl::config {

/// What resolving may know about the machine. Tests make their own; load() uses from_process().
struct Context {
  std::map<std::string, std::string> environment;  ///< process environment
  int num_devices = 1;                             ///< devices this build can use on this machine
  /// Environments built into this program.
  std::vector<std::string> native_envs = {
      "reverse-text", "alphabet-sort", "gsm8k",    "gsm8k-synthetic", "math-env",    "math-env-synthetic",
      "math500",      "aime2024",      "aime2025", "wordle",          "wiki-search", "wiki-search-synthetic"};
  std::function<bool(const std::string&)> is_directory;  ///< whether a model name is a local folder
  /// Positions of a model, max_position_embeddings in its folder's config.json; nullopt where there is no such folder.
  std::function<std::optional<int>(const std::string&)> num_positions = [](const std::string&) { return std::nullopt; };

  static Context from_process();
};

/// A typed configuration with all that was found on the way. `config` is complete only if report.problems is empty.
template <class C>
struct Resolution {
  C config;
  Report report;
};

/// From the merged tree (canonical keys) to a complete configuration; nothing else derives or changes values later.
///
/// Reports all problems at once: unknown keys, types, ranges, and contradictions between keys. What is understood but not
/// built yet lands in report.not_built: several
/// devices or nodes, NCCL, LoRA, vision models, 8-bit products, offloading of parameters, Python environments,
/// losses and advantages, https addresses, and model names that would have to be downloaded. Keys that
/// cannot matter here (attention kernels, compilation, garbage collection) give a warning when they are set.
///
/// rl: shared keys are copied to the roles that did not set theirs (model.name, tokenizer, log, ckpt, wandb, max_steps,
/// seq_len, max_model_len, max_async_level, weight_broadcast, rollout_transport, compute, seed, deterministic, bench,
/// output_dir, env_vars); a different explicit value is a problem that names both. Loss types opo and rloo choose the
/// advantage of the same name. The deployment is colocated if there is one device and an [inference] section, and then
/// weights and rollouts stay in memory; otherwise both go through files.
template <class C>
Resolution<C> resolve(Value raw, const Context& context);

/// What the process that evaluates a run of `prl sft` is given; the run has an [eval] section.
EvalsConfig evals_of(const SftConfig& config);

template <>
Resolution<RlConfig> resolve(Value raw, const Context& context);
template <>
Resolution<TrainerConfig> resolve(Value raw, const Context& context);
template <>
Resolution<OrchestratorConfig> resolve(Value raw, const Context& context);
template <>
Resolution<InferenceConfig> resolve(Value raw, const Context& context);
template <>
Resolution<SftConfig> resolve(Value raw, const Context& context);
template <>
Resolution<EvalConfig> resolve(Value raw, const Context& context);
template <>
Resolution<SynthesizeConfig> resolve(Value raw, const Context& context);
template <>
Resolution<InitModelConfig> resolve(Value raw, const Context& context);
template <>
Resolution<MakeDataConfig> resolve(Value raw, const Context& context);
template <>
Resolution<ResultsConfig> resolve(Value raw, const Context& context);
template <>
Resolution<ConvertConfig> resolve(Value raw, const Context& context);
template <>
Resolution<ChatConfig> resolve(Value raw, const Context& context);
template <>
Resolution<BenchConfig> resolve(Value raw, const Context& context);
template <>
Resolution<PlanConfig> resolve(Value raw, const Context& context);
template <>
Resolution<DoctorConfig> resolve(Value raw, const Context& context);
template <>
Resolution<RouterToolConfig> resolve(Value raw, const Context& context);
template <>
Resolution<K8sConfig> resolve(Value raw, const Context& context);
template <>
Resolution<RunsToolConfig> resolve(Value raw, const Context& context);
template <>
Resolution<ReplayConfig> resolve(Value raw, const Context& context);
template <>
Resolution<DashboardToolConfig> resolve(Value raw, const Context& context);
template <>
Resolution<PlotConfig> resolve(Value raw, const Context& context);
template <>
Resolution<ReportConfig> resolve(Value raw, const Context& context);
template <>
Resolution<TopConfig> resolve(Value raw, const Context& context);
template <>
Resolution<EvalsConfig> resolve(Value raw, const Context& context);
template <>
Resolution<EnvCommandConfig> resolve(Value raw, const Context& context);
template <>
Resolution<EnvServerConfig> resolve(Value raw, const Context& context);
template <>
Resolution<LaunchConfig> resolve(Value raw, const Context& context);

}  // namespace prl::config
