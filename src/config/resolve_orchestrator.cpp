#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include "config/bind.hpp"
#include "config/detail/check.hpp"
#include "config/detail/sampling.hpp"

namespace prl::config {
namespace detail {
namespace {

constexpr int kDefaultBatchSize = 128;
/// A benchmark measures generation alone, so it never waits for weights.
constexpr int kBenchAsyncLevel = 64;

void check_batch(OrchestratorConfig& config, const Check& check) {
  if (config.batch_size && config.token_batch_size)
    check.problem("token_batch_size", "set either batch_size or token_batch_size, not both");
  if (!config.batch_size && !config.token_batch_size) config.batch_size = kDefaultBatchSize;
  const auto check_divides = [&](int group_size, std::string_view key) {
    if (config.batch_size && *config.batch_size % group_size != 0)
      check.problem(key, fmt::format("must divide batch_size: {} rollouts per step are no whole number of groups of {} "
                                     "(rollouts per example)",
                                     *config.batch_size, group_size));
  };
  check_divides(config.group_size, "group_size");
  int largest_group = config.group_size;
  for (std::size_t i = 0; i < config.train.env.size(); ++i) {
    if (!config.train.env[i].group_size) continue;
    check_divides(*config.train.env[i].group_size, fmt::format("train.env.{}.group_size", i));
    largest_group = std::max(largest_group, *config.train.env[i].group_size);
  }
  const auto oversampled = [&] {
    return std::max(largest_group, static_cast<int>(std::min(1e9, *config.batch_size * config.oversampling_factor)));
  };
  // A resolved file holds both, and then they agree.
  if (config.batch_size && check.is_set("max_inflight_rollouts") && check.is_set("oversampling_factor") &&
      config.oversampling_factor != 1.0 && config.max_inflight_rollouts != oversampled())
    check.problem("max_inflight_rollouts",
                  fmt::format("contradicts oversampling_factor, which makes it {}; set only one of them", oversampled()));
  if (!config.max_inflight_rollouts && check.is_set("concurrency.max_inflight"))
    config.max_inflight_rollouts = config.concurrency.max_inflight;
  if (!config.max_inflight_rollouts && config.batch_size) config.max_inflight_rollouts = oversampled();
  if (config.max_inflight_rollouts && *config.max_inflight_rollouts < largest_group)
    check.problem(check.is_set("max_inflight_rollouts") ? "max_inflight_rollouts" : "concurrency.max_inflight",
                  fmt::format("must be at least the group size {}, or no group can start", largest_group));
}

void check_teacher(const OrchestratorConfig& config, const Check& check) {
  const std::string_view mode = enum_name(config.training_mode);
  if (config.student.model.vlm && config.training_mode != TrainingMode::kRl)
    check.not_built("student.model.vlm", "images where a teacher is asked");
  if (!config.teacher) {
    if (config.training_mode == TrainingMode::kOpd || config.training_mode == TrainingMode::kSft)
      check.problem("teacher", fmt::format("training_mode {} needs a teacher: set its model and client", mode));
    return;
  }
  if (config.training_mode == TrainingMode::kOpsd)
    check.problem("teacher", "training_mode opsd has the policy itself for a teacher; unset it");
  check_client(config.teacher->client, check.sub("teacher.client"));
  if (!check.is_set("teacher.client.base_url") && config.teacher->client.base_url == ClientConfig{}.base_url)
    check.problem("teacher.client.base_url", "must name the teacher's server; its default is where the policy is served");
  if (config.training_mode == TrainingMode::kSft) return;
  const auto check_temperature = [&](const TrainSamplingConfig& sampling, std::string_view key) {
    if (sampling.temperature != 1.0)
      check.warn(key, fmt::format("is {}: the teacher scores at temperature 1, so even an equal student would differ from it",
                                  sampling.temperature));
  };
  check_temperature(config.train.sampling, "train.sampling.temperature");
  for (std::size_t i = 0; i < config.train.env.size(); ++i)
    if (config.train.env[i].sampling) check_temperature(*config.train.env[i].sampling, fmt::format("train.env.{}.sampling.temperature", i));
}

/// Fields that would be there twice, those that the program sets, and those that make the sampled distribution another one than the
/// trainer computes.
void check_extra_body(const Value& extra_body, bool is_policy, const Check& check) {
  if (!extra_body.is_table()) return check.problem("extra_body", "expects a table");
  for (const char* key : {"temperature", "max_completion_tokens", "max_tokens", "seed", "repetition_penalty", "min_tokens"})
    if (extra_body.find(key))
      check.problem("extra_body", fmt::format("{} is a key of sampling; a second one makes servers refuse every request", key));
  for (const char* key : {"model", "messages", "token_ids", "n", "stream", "logprobs", "prompt_logprobs", "stop_token_ids", "cache_salt"})
    if (extra_body.find(key)) check.problem("extra_body", fmt::format("{} is set by the program and cannot be chosen", key));
  for (const char* key :
       {"top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"})
    if (is_policy && extra_body.find(key))
      check.problem("extra_body",
                    fmt::format("{} would make the policy sample from another distribution than the one that is trained", key));
}

/// A Python function that stands in for something else. `where` is empty or " by type custom".
void check_function(const PythonFunctionConfig& function, const Check& check, std::string_view where = {}) {
  if (!function.import_path || function.import_path->find('.') == std::string::npos)
    check.problem("import_path", fmt::format("is needed{}, as module.name", where));
  if (!function.kwargs.is_table()) check.problem("kwargs", "expects a table of arguments");
}

void check_advantage(const AdvantageConfig& advantage, const Check& check) {
  if (advantage.type == AdvantageType::kCustom) {
    check_function(advantage, check, " by type custom");
  } else if (advantage.import_path) {
    check.problem("import_path", "belongs to type custom");
  }
  if (advantage.length_penalty && advantage.type != AdvantageType::kGrpo && advantage.type != AdvantageType::kEcho)
    check.problem("length_penalty", "works with types grpo and echo only");
  if (advantage.roles && advantage.type != AdvantageType::kEcho) check.problem("roles", "belongs to type echo");
  if (advantage.roles && !advantage.roles->system && !advantage.roles->user && !advantage.roles->assistant && !advantage.roles->tool)
    check.problem("roles", "names no role; unset it for tool alone");
  if (advantage.filter && advantage.type != AdvantageType::kEcho) check.problem("filter", "belongs to type echo");
  if (advantage.filter) check_function(*advantage.filter, check.sub("filter"));
  if (advantage.type == AdvantageType::kHierarchicalGrpo && advantage.episode_agents.empty())
    check.problem("episode_agents", "is needed by type hierarchical_grpo: the agents that are compared within their episode");
  if (!advantage.episode_agents.empty() && advantage.type != AdvantageType::kHierarchicalGrpo)
    check.problem("episode_agents", "belongs to type hierarchical_grpo");
}

void check_curriculum(const CurriculumConfig& curriculum, const Check& check) {
  std::vector<std::string> problems;
  advantage_gates(curriculum.gates, problems);
  for (const std::string& problem : std::exchange(problems, {})) check.problem("gates", problem);
  const auto* pools = std::get_if<DifficultyPoolSampler>(&curriculum.sampler);
  if (pools == nullptr) return;
  difficulty_pools(pools->pools, problems);
  for (const std::string& problem : problems) check.problem("sampler.pools", problem);
}

void check_train_env(EnvConfig& env, bool is_policy, const Check& check) {
  pass_on_data(env.data, env.args, {"dataset_path"});
  if (!env.args.is_table()) check.problem("args", "expects a table of arguments");
  check_env(env, check);
  if (env.sampling) check_extra_body(env.sampling->extra_body, is_policy, check.sub("sampling"));
  if (env.algo) check_advantage(*env.algo, check.sub("algo"));
  if (env.curriculum) check_curriculum(*env.curriculum, check.sub("curriculum"));
  if (env.reward) check_function(*env.reward, check.sub("reward"));
}

void check_buffer(const OrchestratorConfig& config, const Check& check) {
  const BufferConfig& buffer = config.buffer;
  if (buffer.easy_threshold && buffer.hard_threshold && *buffer.hard_threshold >= *buffer.easy_threshold)
    check.problem("buffer.hard_threshold", fmt::format("must be below easy_threshold, which is {}", *buffer.easy_threshold));
  if (buffer.env_ratios && buffer.env_ratios->size() != config.train.env.size())
    check.problem("buffer.env_ratios", fmt::format("must have one number for each of the {} environments", config.train.env.size()));
  if (buffer.env_ratios)
    for (std::size_t i = 0; i < config.train.env.size(); ++i)
      if (config.train.env[i].ratio) check.problem(fmt::format("train.env.{}.ratio", i), "buffer.env_ratios is set too; set only one");
  if (buffer.skip_verification && (buffer.easy_threshold || buffer.hard_threshold || buffer.online_difficulty_filtering))
    check.problem("buffer.skip_verification", "leaves no rewards to filter by; unset the thresholds and online_difficulty_filtering");
}

/// Names are part of addresses and of folders.
void check_adapter(const OrchestratorConfig& config, const Check& check) {
  constexpr std::size_t kMaxName = 128;
  const auto& lora = config.student.model.lora;
  if (lora && lora->name) {
    const std::string& name = *lora->name;
    const bool is_plain =
        std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.'; });
    if (name.empty() || name.size() > kMaxName || !is_plain)
      check.problem("student.model.lora.name", "wanted letters, digits, '_', '-' and '.', at most 128");
    if (name == config.student.model.name) check.problem("student.model.lora.name", "is the name of the model itself");
  }
  if (!config.run) return;
  if (!lora || !lora->name) check.problem("student.model.lora.name", "is needed with [run]: servers hold the adapters of several runs");
  if (config.run->optim || config.run->scheduler)
    check_schedule(config.run->scheduler.value_or(SchedulerConfig{}), config.run->optim.value_or(OptimConfig{}), config.max_steps,
                   check.sub("run"));
}

}  // namespace

void check_orchestrator(OrchestratorConfig& config, const Check& check) {
  if (config.bench) {
    config.max_steps = kBenchSteps;
    config.eval.reset();
    config.max_async_level = kBenchAsyncLevel;
    config.train.filter_zero_advantages = false;  // speed is measured, whatever the model answers
    if (config.wandb) {
      config.wandb->log_extras.reset();
      mark_bench(*config.wandb);
    }
  }
  check_routing(config.router, "router.", check);
  check_teacher(config, check);
  check_adapter(config, check);
  check_batch(config, check);
  check_buffer(config, check);
  check_advantage(config.advantage, check.sub("advantage"));
  if (config.train.env.empty()) check.problem("train.env", "must list at least one environment");
  check_env_names(config.train.env, "train.env", check);
  for (std::size_t i = 0; i < config.train.env.size(); ++i) {
    const Check entry = check.sub(fmt::format("train.env.{}", i));
    if (!entry.is_set("max_retries")) config.train.env[i].max_retries = config.train.max_retries;
    if (!entry.is_set("num_workers")) config.train.env[i].num_workers = config.train.num_workers;
    check_train_env(config.train.env[i], config.training_mode != TrainingMode::kSft, entry);
  }
  check_online_eval(config.eval, check);
  check_model_name(config.student.model.name, "student.model.name", check);
  check_client(config.student.client, check.sub("student.client"));
  check_wandb(config.wandb, check);
  check_env_vars(config.env_vars, check);
  check_extra_body(config.train.sampling.extra_body, config.training_mode != TrainingMode::kSft, check.sub("train.sampling"));
  for (std::size_t i = 0; i < config.filters.size(); ++i)
    if (const auto* filter = std::get_if<CustomFilter>(&config.filters[i]))
      check_function(*filter, check.sub(fmt::format("filters.{}", i)));
  if (config.opsd.prompt_template.find("{demonstration}") == std::string::npos)
    check.problem("opsd.template", "has no {demonstration} to replace");
  if (config.training_mode != TrainingMode::kSft) check_policy_sampling(config.train, check.sub("train"));
  if (config.train.sampling.max_completion_tokens && *config.train.sampling.max_completion_tokens > config.seq_len)
    check.warn("train.sampling.max_completion_tokens", "is more than seq_len: longer rollouts are cut");
}

}  // namespace detail

template <>
Resolution<OrchestratorConfig> resolve(Value raw, const Context& context) {
  std::set<std::string> inherited = detail::inherit_sampling(raw.find("train"), "train.");
  inherited.merge(detail::inherit_sampling(raw.find("eval"), "eval."));
  auto resolution = detail::bind_all<OrchestratorConfig>(raw);
  resolution.report.decisive.merge(inherited);
  const detail::Check check(raw, "", resolution.report, context);
  if (std::holds_alternative<LocalRollouts>(resolution.config.rollout_transport) && check.is_set("rollout_transport"))
    check.problem("rollout_transport.type", "local works only inside `prl rl`; use filesystem or zmq");
  if (std::holds_alternative<LocalBroadcast>(resolution.config.weight_broadcast) && check.is_set("weight_broadcast"))
    check.problem("weight_broadcast.type", "local works only inside `prl rl`; use filesystem");
  detail::check_orchestrator(resolution.config, check);
  if (resolution.config.teacher && resolution.config.training_mode == TrainingMode::kRl)
    check.warn("teacher", "is asked for log-probabilities that only trainer.loss.teacher_tau uses: training_mode is rl");
  return resolution;
}

}  // namespace prl::config
