#include <fmt/format.h>

#include <filesystem>

#include "config/bind.hpp"
#include "config/detail/check.hpp"

namespace prl::config {
namespace {

using detail::Check;

template <class C>
void check_common(C& config, const Check& check) {
  if (config.env.empty()) check.problem("env", "must list at least one environment");
  detail::check_env_names(config.env, "env", check);
  for (std::size_t i = 0; i < config.env.size(); ++i) detail::check_eval_env(config.env[i], check.sub(fmt::format("env.{}", i)));
  // A local folder is evaluated in this process, by no server, unless one is named.
  if (check.is_set("client.base_url") || !std::filesystem::is_directory(config.model.name))
    detail::check_client(config.client, check.sub("client"));
  detail::check_eval_sampling(config.sampling, check.sub("sampling"));
  if (config.save.disk && config.save.disk->path) check.not_built("save.disk.path", "results outside output_dir");
  if (config.save.hf) check.not_built("save.hf", "pushing results to the Hugging Face hub");
  if (config.save.env_hub) check.not_built("save.env_hub", "pushing results to the environments hub");
  if (config.retry.wait_min > config.retry.wait_max)
    check.problem("retry.wait_min", fmt::format("must be at most wait_max, which is {}", config.retry.wait_max));
}

}  // namespace

template <>
Resolution<EvalConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<EvalConfig>(raw);
  EvalConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  check_common(config, check);
  if (config.per_rollout) check.not_built("per_rollout", "scoring rollouts without their group");
  constexpr detail::Inert kInert[] = {{"use_tqdm", "progress is logged"}};
  detail::warn_inert(ops_of<EvalConfig>(), &config, kInert, check);
  detail::check_wandb(config.wandb, check);
  if (!config.eval_base && !config.weights_dir)
    check.problem("eval_base", "without weights_dir there is nothing else to evaluate; set weights_dir or leave eval_base on");
  if (config.steps && !config.weights_dir) check.warn("steps", "has no effect without weights_dir");
  if (config.resume_path && !config.save.stream) check.problem("resume_path", "needs save.stream");
  if (config.resume_path && config.weights_dir) check.problem("resume_path", "cannot be used with weights_dir");
  if (config.resume_path && config.env.size() > 1) check.problem("resume_path", "works with one environment only");
  return resolution;
}

template <>
Resolution<SynthesizeConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<SynthesizeConfig>(raw);
  check_common(resolution.config, Check(raw, "", resolution.report, context));
  return resolution;
}

}  // namespace prl::config
