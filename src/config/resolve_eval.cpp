#include <fmt/core.h>

#include <filesystem>
#include <set>

#include "config/bind.hpp"
#include "config/detail/check.hpp"
#include "config/detail/sampling.hpp"
#include "config/tool_config.hpp"

namespace prl::config {
namespace {

using detail::Check;

/// Fields that a request gets from sampling and from extra_body.
void check_request_sampling(const EvalSamplingConfig& sampling, const Check& check) {
  if (!sampling.extra_body.is_table()) return check.problem("extra_body", "expects a table of fields");
  for (const Member& member : sampling.extra_body.members()) {
    const std::string key = member.key == "max_tokens" ? "max_completion_tokens" : member.key;
    if (check.is_set(key))
      check.problem("extra_body." + member.key, fmt::format("is also set as {}; set only one of them", check.full(key)));
  }
  for (const char* key : {"model", "messages", "tools", "n", "stream"})
    if (sampling.extra_body.find(key)) check.problem(fmt::format("extra_body.{}", key), "is set by the program and cannot be chosen");
}

void check_envs(std::vector<EvalEnvConfig>& env, const Check& check) {
  if (env.empty()) check.problem("env", "must list at least one environment");
  detail::check_env_names(env, "env", check);
  for (std::size_t i = 0; i < env.size(); ++i) {
    const Check entry = check.sub(fmt::format("env.{}", i));
    detail::check_eval_env(env[i], entry);
    if (env[i].sampling) check_request_sampling(*env[i].sampling, entry.sub("sampling"));
  }
}

/// A local folder is evaluated in this process, by no server, unless one is named.
void check_server(const ClientConfig& client, const std::string& model, const Check& check) {
  if (check.is_set("client.base_url") || !std::filesystem::is_directory(model)) detail::check_client(client, check.sub("client"));
}

template <class C>
void check_common(C& config, const Check& check) {
  check_envs(config.env, check);
  for (std::size_t i = 0; i < config.env.size(); ++i)
    if (!check.sub(fmt::format("env.{}", i)).is_set("max_retries")) config.env[i].max_retries = config.retry.max_attempts - 1;
  check_server(config.client, config.model.name, check);
  check_request_sampling(config.sampling, check.sub("sampling"));
  if (config.retry.wait_min > config.retry.wait_max)
    check.problem("retry.wait_min", fmt::format("must be at most wait_max, which is {}", config.retry.wait_max));
}

}  // namespace

namespace detail {

void check_evaluations(OnlineEvalConfig& eval, const Check& check) {
  check_envs(eval.env, check);
  check_request_sampling(eval.sampling, check.sub("sampling"));
}

void check_eval_engine(EvalEngineConfig& engine, const std::string& name, std::string_view key, const Check& check) {
  if (check.is_set("model.name") && engine.model.name != name)
    check.problem("model.name", fmt::format("is another model than {}, which is {}; leave it out", key, name));
  engine.model.name = name;
  check_inference(engine, check);
}

}  // namespace detail

template <>
Resolution<EvalConfig> resolve(Value raw, const Context& context) {
  std::set<std::string> inherited = detail::inherit_sampling(&raw, "");
  auto resolution = detail::bind_all<EvalConfig>(raw);
  resolution.report.decisive.merge(inherited);
  EvalConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  check_common(config, check);
  detail::check_wandb(config.wandb, check);
  if (!config.eval_base && !config.weights_dir)
    check.problem("eval_base", "without weights_dir there is nothing else to evaluate; set weights_dir or leave eval_base on");
  if (config.steps && !config.weights_dir) check.warn("steps", "has no effect without weights_dir");
  if (config.resume_path && config.weights_dir) check.problem("resume_path", "cannot be used with weights_dir");
  if (config.resume_path && config.env.size() > 1) check.problem("resume_path", "works with one environment only");
  return resolution;
}

template <>
Resolution<EvalsConfig> resolve(Value raw, const Context& context) {
  std::set<std::string> inherited = detail::inherit_sampling(raw.find("eval"), "eval.");
  auto resolution = detail::bind_all<EvalsConfig>(raw);
  resolution.report.decisive.merge(inherited);
  EvalsConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  detail::check_evaluations(config.eval, check.sub("eval"));
  if (config.inference)
    detail::check_eval_engine(*config.inference, config.model, "model", check.sub("inference"));
  else
    check_server(config.client, config.model, check);
  detail::check_wandb(config.wandb, check);
  if (config.online && !config.online->broadcasts_dir)
    check.problem("online.broadcasts_dir", "is needed: the folder of step_N weights that the run writes, OUT/broadcasts or OUT/weights");
  return resolution;
}

template <>
Resolution<SynthesizeConfig> resolve(Value raw, const Context& context) {
  std::set<std::string> inherited = detail::inherit_sampling(&raw, "");
  auto resolution = detail::bind_all<SynthesizeConfig>(raw);
  resolution.report.decisive.merge(inherited);
  check_common(resolution.config, Check(raw, "", resolution.report, context));
  return resolution;
}

}  // namespace prl::config
