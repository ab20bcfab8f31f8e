#include <fmt/core.h>

#include "base/hosts.hpp"
#include "config/bind.hpp"
#include "config/detail/check.hpp"

namespace prl::config {

using detail::Check;
namespace {
constexpr double kChatTemperature = 0.7;
constexpr int kChatReplyTokens = 1024;
}  // namespace

template <>
Resolution<InitModelConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<InitModelConfig>(raw);
  const InitModelConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.output_dir.empty()) check.problem("output_dir", "is needed: `prl init-model DIR`");
  if (config.num_heads % config.num_kv_heads != 0)
    check.problem("num_kv_heads", fmt::format("must divide num_heads, which is {}", config.num_heads));
  if (!config.head_dim && config.hidden_size % config.num_heads != 0)
    check.problem("num_heads", fmt::format("must divide hidden_size {}, or set head_dim", config.hidden_size));
  const int head_dim = config.head_dim.value_or(config.hidden_size / config.num_heads);
  if (head_dim % 2 != 0) check.problem("head_dim", fmt::format("must be even for rotary positions, but is {}", head_dim));
  if (config.dtype == ComputeDType::kFloat16) check.not_built("dtype", "saving float16");
  return resolution;
}

template <>
Resolution<MakeDataConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<MakeDataConfig>(raw);
  const Check check(raw, "", resolution.report, context);
  if (resolution.config.output.empty()) check.problem("output", "is needed: `prl make-data FILE.jsonl`");
  EnvConfig& env = resolution.config.env;
  detail::check_env(env, check.sub("env"));
  detail::pass_on_data(env.data, env.args, {"dataset_path"});
  return resolution;
}

template <>
Resolution<ResultsConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<ResultsConfig>(raw);
  const ResultsConfig& config = resolution.config;
  if (config.min_reward && config.max_reward && *config.min_reward > *config.max_reward)
    Check(raw, "", resolution.report, context)
        .problem("min_reward", fmt::format("must be at most max_reward, which is {}", *config.max_reward));
  return resolution;
}

template <>
Resolution<RunsToolConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<RunsToolConfig>(raw);
  const RunsToolConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.run.empty() && config.action != RunsAction::kList)
    check.problem("run", fmt::format("is needed: `prl runs {} NAME`", enum_name(config.action)));
  if (config.action == RunsAction::kAdd && !config.config)
    check.problem("config", "is needed: the configuration of the run's orchestrator");
  if (config.action != RunsAction::kAdd && config.config) check.problem("config", "goes with `prl runs add` alone");
  return resolution;
}

template <>
Resolution<ReplayConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<ReplayConfig>(raw);
  const ReplayConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.run.empty()) check.problem("run", "is needed: `prl replay RUN`");
  if (config.last_step && *config.last_step <= config.from_step)
    check.problem("last_step", fmt::format("must be after from_step, which is {}", config.from_step));
  if (!config.trainer.is_table()) check.problem("trainer", "expects keys of `prl trainer`, for example --trainer.loss.type gspo");
  return resolution;
}

template <>
Resolution<ConvertConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<ConvertConfig>(raw);
  const Check check(raw, "", resolution.report, context);
  if (resolution.config.input.empty() || resolution.config.output_dir.empty())
    check.problem(resolution.config.input.empty() ? "input" : "output_dir", "is needed: `prl convert IN OUT`");
  return resolution;
}

template <>
Resolution<ChatConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<ChatConfig>(raw);
  const Check check(raw, "", resolution.report, context);
  if (resolution.config.client) {
    detail::check_client(*resolution.config.client, check.sub("client"));
  } else if (!check.is_set("model.name")) {
    check.problem("model.name", "is needed: the folder of a model, or its name together with client.base_url");
  } else {
    detail::check_model_name(resolution.config.model.name, "model.name", check);
  }
  if (!resolution.config.client) {
    // A server has defaults of its own; a model loaded here has none, and small models wander at temperature 1.
    EvalSamplingConfig& sampling = resolution.config.sampling;
    if (!sampling.temperature) sampling.temperature = kChatTemperature;
    if (!sampling.max_completion_tokens) sampling.max_completion_tokens = kChatReplyTokens;
  }
  return resolution;
}

template <>
Resolution<BenchConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<BenchConfig>(raw);
  const Check check(raw, "", resolution.report, context);
  if (resolution.config.model) detail::check_model_name(*resolution.config.model, "model", check);
  if (const std::optional<std::string>& found = resolution.config.quantization; found && !detail::is_built_quantization(*found))
    check.problem("quantization", fmt::format("must be {} or {}, found \"{}\"", kFp8Weights, kFp8Products, *found));
  return resolution;
}

template <>
Resolution<RouterToolConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<RouterToolConfig>(raw);
  const RouterToolConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  for (const std::string& url : config.engines)
    if (!url.starts_with("http://") && !url.starts_with("https://"))
      check.problem("engines", fmt::format("wanted addresses such as http://host:8000, found '{}'", url));
  detail::check_routing(config, "", check);
  if (!is_loopback(config.host) && !config.api_key) check.warn("host", "other machines can reach the router, and it asks for no api_key");
  return resolution;
}

template <>
Resolution<DashboardToolConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<DashboardToolConfig>(raw);
  if (resolution.config.runs.empty()) Check(raw, "", resolution.report, context).problem("runs", "is needed: `prl dashboard RUN...`");
  return resolution;
}

template <>
Resolution<PlotConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<PlotConfig>(raw);
  const PlotConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.runs.empty()) check.problem("runs", "is needed: `prl plot RUN... --metric reward --out curve.svg`");
  if (config.out.extension() != ".svg" && config.out.extension() != ".png") check.problem("out", "must end in .svg or .png");
  return resolution;
}

template <>
Resolution<ReportConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<ReportConfig>(raw);
  if (resolution.config.run.empty()) Check(raw, "", resolution.report, context).problem("run", "is needed: `prl report RUN`");
  return resolution;
}

template <>
Resolution<TopConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<TopConfig>(raw);
  if (resolution.config.run.empty()) Check(raw, "", resolution.report, context).problem("run", "is needed: `prl top RUN`");
  return resolution;
}

template <>
Resolution<PlanConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<PlanConfig>(raw);
  const PlanConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.num_devices % config.dp_replicate != 0)
    check.problem("dp_replicate", fmt::format("must divide num_devices, which is {}", config.num_devices));
  if (config.sequence_tokens && *config.sequence_tokens > config.seq_len)
    check.problem("sequence_tokens", fmt::format("must be at most seq_len, which is {}", config.seq_len));
  if (config.work == PlanWork::kRl && config.prompt_tokens + config.completion_tokens > config.seq_len)
    check.problem("seq_len", fmt::format("a rollout has {} tokens, prompt_tokens and completion_tokens, and must fit into a row",
                                         config.prompt_tokens + config.completion_tokens));
  if (config.work == PlanWork::kSft && config.num_infer_devices > 0) check.problem("num_infer_devices", "goes with work = \"rl\" alone");
  return resolution;
}

template <>
Resolution<DoctorConfig> resolve(Value raw, const Context&) {
  return detail::bind_all<DoctorConfig>(raw);
}

template <>
Resolution<EnvCommandConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<EnvCommandConfig>(raw);
  const EnvCommandConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  const bool needs_target = config.action != EnvAction::kList && config.action != EnvAction::kUpdate;
  if (needs_target && !config.target) check.problem("target", fmt::format("is needed: `prl env {} ENVIRONMENT`", enum_name(config.action)));
  return resolution;
}

template <>
Resolution<LaunchConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<LaunchConfig>(raw);
  const LaunchConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  if (config.node_rank && config.nnodes && *config.node_rank >= *config.nnodes)
    check.problem("node_rank", fmt::format("must be below nnodes, which is {}", *config.nnodes));
  return resolution;
}

template <>
Resolution<EnvServerConfig> resolve(Value raw, const Context& context) {
  auto resolution = detail::bind_all<EnvServerConfig>(raw);
  const EnvServerConfig& config = resolution.config;
  const Check check(raw, "", resolution.report, context);
  detail::check_env(config.env, check.sub("env"));
  if (config.env.address) check.problem("env.address", "is where workers run; `address` is where this command listens");
  return resolution;
}

}  // namespace prl::config
