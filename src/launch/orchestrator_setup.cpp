#include "launch/orchestrator_setup.hpp"

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <cmath>

#include "base/error.hpp"
#include "base/units.hpp"
#include "config/text_format.hpp"
#include "env/python/python_function.hpp"
#include "env/registry.hpp"
#include "env/token_chat_client.hpp"
#include "launch/model_subject.hpp"
#include "launch/teacher_setup.hpp"
#include "trainer/checkpoint.hpp"

namespace prl::launch {
namespace {
using std::chrono::milliseconds;

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};

orchestrator::LengthPenalty length_penalty(const config::LengthPenalty& penalty) {
  return std::visit(
      Overloaded{[](const config::TokensLengthPenalty& p) -> orchestrator::LengthPenalty {
                   return orchestrator::CorrectLengthPenalty{false, p.completion_weight, p.tool_response_weight};
                 },
                 [](const config::TurnsLengthPenalty&) -> orchestrator::LengthPenalty {
                   return orchestrator::CorrectLengthPenalty{true, 1.0, 1.0};
                 },
                 [](const config::LinearLengthPenalty& p) -> orchestrator::LengthPenalty {
                   return orchestrator::LinearLengthPenalty{p.num_output_tokens_weight, p.num_input_tokens_weight, p.num_turns_weight};
                 }},
      penalty);
}

std::string algorithm_name(config::AdvantageType type) {
  switch (type) {
    case config::AdvantageType::kGrpo: return "grpo";
    case config::AdvantageType::kRloo: return "rloo";
    case config::AdvantageType::kOpo: return "opo";
    case config::AdvantageType::kMaxRl: return "max_rl";
    case config::AdvantageType::kReward: return "reward";
    case config::AdvantageType::kRae: return std::string(orchestrator::kRunningAverage);
    case config::AdvantageType::kCustom: break;  // comes with the group, see advantage_function
  }
  return "grpo";
}

orchestrator::AdvantageOptions advantage_options(const config::AdvantageConfig& config) {
  orchestrator::AdvantageOptions options;
  options.algorithm = algorithm_name(config.type);
  options.decay = config.decay;
  if (config.length_penalty) options.length_penalty = length_penalty(*config.length_penalty);
  return options;
}

constexpr std::chrono::seconds kAdvantageLimit{60};

net::asio::awaitable<std::vector<float>> ask_advantages(std::shared_ptr<env::python::PythonFunction> function,
                                                        boost::json::array rollouts) {
  const std::size_t wanted = rollouts.size();
  boost::json::array args;
  args.push_back(std::move(rollouts));
  auto calling = function->call(std::move(args), kAdvantageLimit);
  const boost::json::value value = co_await std::move(calling);
  std::vector<float> advantages;
  if (value.is_array())
    for (const boost::json::value& number : value.get_array())
      if (number.is_number() && std::isfinite(number.to_number<double>())) advantages.push_back(number.to_number<float>());
  if (advantages.size() != wanted)
    fail(ErrorCode::kInvalidArgument, "{}: wanted a list of {} finite numbers, got {}", function->name(), wanted,
         boost::json::serialize(value).substr(0, 200));
  co_return advantages;
}

/// The function of advantage type custom, shared by the environments that use it; empty for other types.
std::function<net::asio::awaitable<std::vector<float>>(boost::json::array)> advantage_function(const config::AdvantageConfig& config,
                                                                                               const std::filesystem::path& output_dir) {
  if (config.type != config::AdvantageType::kCustom) return {};
  env::python::PythonSettings settings;
  settings.path = config.path.value_or("");
  settings.python = config.python.value_or("");
  settings.log_folder = output_dir / "logs";
  auto function = std::make_shared<env::python::PythonFunction>(
      "advantage", *config.import_path, boost::json::parse(config::to_compact_json(config.kwargs)).as_object(), settings);
  return [function](boost::json::array rollouts) { return ask_advantages(function, std::move(rollouts)); };
}

/// The zero-advantage filter becomes a switch of the collector; the others are filters of rollouts.
void add_filters(const config::OrchestratorConfig& config, std::int64_t vocab_size, orchestrator::CollectorOptions& options) {
  bool has_zero_advantage = false;
  for (const config::RolloutFilter& filter : config.filters) {
    std::visit(Overloaded{[&](const config::ZeroAdvantageFilter& f) { has_zero_advantage = f.enforce; },
                          [&](const config::GibberishFilter& f) {
                            options.filters.push_back({.kind = orchestrator::RolloutFilterOptions::Kind::kGibberish,
                                                       .enforce = f.enforce,
                                                       .token_id_threshold = f.token_id_threshold,
                                                       .logprob_offset = f.logprob_offset,
                                                       .vocab_size = vocab_size});
                          },
                          [&](const config::RepetitionFilter& f) {
                            options.filters.push_back({.kind = orchestrator::RolloutFilterOptions::Kind::kRepetition,
                                                       .enforce = f.enforce,
                                                       .window = f.window,
                                                       .prob_threshold = f.prob_threshold});
                          }},
               filter);
  }
  options.filter_zero_advantages = has_zero_advantage && config.train.filter_zero_advantages;
}

/// Of one environment at most.
std::int64_t rollouts_at_once(const config::OrchestratorConfig& config) {
  const std::int64_t batch_size = config.batch_size.value_or(128);
  return config.max_inflight_rollouts.value_or(static_cast<int>(static_cast<double>(batch_size) * config.oversampling_factor));
}

orchestrator::OnlineEval online_eval(const config::OnlineEvalConfig& section, const config::EvalEnvConfig& entry,
                                     const config::OrchestratorConfig& config) {
  orchestrator::OnlineEval eval;
  eval.task.environment =
      env::make_environment(in_run(env_spec(entry), config.output_dir, config.batch_size.value_or(128), config.log.vf_level));
  eval.task.environment->prepare();
  eval.task.num_examples = entry.num_examples.value_or(section.num_examples);
  eval.task.rollouts_per_example = entry.group_size.value_or(section.group_size);
  eval.task.skip_first = entry.skip_first;
  eval.task.sampling = local_sampling(entry.sampling.value_or(section.sampling));
  eval.task.seed = static_cast<std::uint64_t>(config.seed);
  eval.task.max_concurrent = config.batch_size.value_or(128);
  eval.task.retry.max_attempts = entry.max_retries + 1;
  if (entry.timeout) eval.task.rollout_timeout = to_ms(*entry.timeout);
  eval.interval = entry.interval.value_or(section.interval);
  return eval;
}

}  // namespace

orchestrator::OrchestratorOptions orchestrator_options(const config::OrchestratorConfig& config, std::int64_t vocab_size,
                                                       std::int64_t resume_step) {
  orchestrator::OrchestratorOptions options;
  const std::int64_t batch_size = config.batch_size.value_or(128);
  options.dispatch.batch_size = batch_size;
  options.dispatch.group_size = config.group_size;
  for (const config::EnvConfig& e : config.train.env) options.dispatch.group_sizes.push_back(e.group_size.value_or(config.group_size));
  options.dispatch.oversampling_factor = config.oversampling_factor;
  options.dispatch.max_inflight = config.max_inflight_rollouts.value_or(0);
  options.dispatch.max_async_level = config.max_async_level;
  options.dispatch.max_off_policy_steps = config.max_off_policy_steps;
  options.dispatch.strict_async_level = config.strict_async_level;
  options.dispatch.ordered = config.deterministic;
  options.dispatch.tasks_per_minute = config.tasks_per_minute;
  options.dispatch.max_steps = config.max_steps;
  options.collect.batch_size = batch_size;
  options.collect.token_batch_size = config.token_batch_size;
  options.collect.advantage = advantage_options(config.advantage);
  for (std::size_t i = 0; i < config.train.env.size(); ++i)
    if (const auto& algo = config.train.env[i].algo)
      options.collect.env_advantages[static_cast<std::int64_t>(i)] = advantage_options(*algo);
  options.collect.strategy = config.trajectory_strategy == config::TrajectoryStrategy::kBranching
                                 ? orchestrator::TrajectoryStrategy::kBranching
                                 : orchestrator::TrajectoryStrategy::kInterleaved;
  switch (config.training_mode) {
    case config::TrainingMode::kRl: break;
    case config::TrainingMode::kOpd: options.collect.loss = orchestrator::SampleLoss::kDistillation; break;
    case config::TrainingMode::kSft: options.collect.loss = orchestrator::SampleLoss::kImitation; break;
  }
  options.collect.online_difficulty_filtering = config.buffer.online_difficulty_filtering;
  options.collect.skip_verification = config.buffer.skip_verification;
  add_filters(config, vocab_size, options.collect);
  options.sampler.seed = static_cast<std::uint64_t>(config.buffer.seed.value_or(config.seed));
  if (config.buffer.env_ratios) options.sampler.env_ratios = *config.buffer.env_ratios;
  const bool has_ratio = std::any_of(config.train.env.begin(), config.train.env.end(), [](const auto& e) { return e.ratio.has_value(); });
  if (has_ratio && !config.buffer.env_ratios)
    for (const config::EnvConfig& e : config.train.env) options.sampler.env_ratios.push_back(e.ratio.value_or(1.0));
  options.sampler.easy_threshold = config.buffer.easy_threshold;
  options.sampler.hard_threshold = config.buffer.hard_threshold;
  options.sampler.easy_fraction = config.buffer.easy_fraction;
  options.sampler.hard_fraction = config.buffer.hard_fraction;
  options.pack.seq_len = config.seq_len;
  options.pack.pad_to_multiple_of = config.pad_to_multiple_of;
  options.seed = static_cast<std::uint64_t>(config.seed);
  options.deterministic = config.deterministic;
  if (config.eval) {
    for (const config::EvalEnvConfig& entry : config.eval->env) options.evals.push_back(online_eval(*config.eval, entry, config));
    options.eval_base_model = config.eval->eval_base_model;
    options.skip_eval_on_resume = config.eval->skip_eval_on_resume;
    options.cancel_inflight_on_eval = config.eval->cancel_inflight_rollouts_on_eval;
  }
  if (config.val)
    options.validation = orchestrator::ValidationOptions{.num_examples = config.val->num_examples,
                                                         .rollouts_per_example = config.val->group_size,
                                                         .interval = config.val->interval,
                                                         .max_concurrent = batch_size,
                                                         .seed = static_cast<std::uint64_t>(config.seed)};
  options.status_interval = to_ms(config.log.interval);
  options.output_dir = config.output_dir;
  options.log_tokens = config.log_tokens;
  if (config.ckpt) {
    options.checkpoints = orchestrator::OrchestratorCheckpoints{.folder = checkpoints_folder(config), .interval = std::nullopt};
    if (config.ckpt->interval) options.checkpoints->interval = *config.ckpt->interval;
    if (config.ckpt->keep_last) options.checkpoints->retention.keep_last = *config.ckpt->keep_last;
    if (config.ckpt->keep_interval) options.checkpoints->retention.keep_interval = *config.ckpt->keep_interval;
    options.skip_progress = config.ckpt->skip_progress;
    options.skip_buffer = config.ckpt->skip_buffer;
    if (config.ckpt->wait_for_weights_timeout) options.policy_timeout = to_ms(*config.ckpt->wait_for_weights_timeout);
  }
  options.resume_step = resume_step;
  options.inference_timeout = to_ms(config.student.client.wait_for_ready_timeout);
  if (config.teacher) options.teacher_timeout = to_ms(config.teacher->client.wait_for_ready_timeout);
  if (config.concurrency.initial_inflight)
    options.concurrency = {.initial = config.concurrency.initial_inflight, .min = config.concurrency.min_inflight};
  return options;
}

std::vector<orchestrator::TrainEnv> train_environments(const config::OrchestratorConfig& config) {
  std::vector<orchestrator::TrainEnv> environments;
  const auto common = advantage_function(config.advantage, config.output_dir);
  for (const config::EnvConfig& entry : config.train.env) {
    orchestrator::TrainEnv train;
    train.environment = env::make_environment(in_run(env_spec(entry), config.output_dir, rollouts_at_once(config), config.log.vf_level));
    train.environment->prepare();
    train.sampling = sampling_params(entry.sampling.value_or(config.train.sampling));
    train.max_retries = entry.max_retries;
    train.max_total_completion_tokens = entry.max_total_completion_tokens;
    train.advantages = entry.algo ? advantage_function(*entry.algo, config.output_dir) : common;
    if (entry.timeout) train.rollout_timeout = to_ms(*entry.timeout);
    environments.push_back(std::move(train));
  }
  return environments;
}

std::string policy_text_name(const config::OrchestratorConfig& config) { return config.tokenizer.name.value_or(config.student.model.name); }

TextOptions policy_text_options(const config::OrchestratorConfig& config) {
  TextOptions options;
  options.renderer = config.renderer.name;
  options.thinking_retention = config.renderer.thinking_retention;
  options.chat_template = config.tokenizer.chat_template;
  options.tool_parser = config.renderer.tool_call_parser.value_or("");
  options.reasoning_parser = config.renderer.reasoning_parser.value_or("");
  return options;
}

TextSetup load_policy_text(const config::OrchestratorConfig& config) {
  const std::filesystem::path folder = text_folder(policy_text_name(config));
  TextSetup text = load_text(folder, policy_text_options(config));
  if (!text.renderer) fail(ErrorCode::kInvalidArgument, "{} has no chat template; set tokenizer.chat_template", folder.string());
  return text;
}

orchestrator::OrchestratorServices orchestrator_services(const config::OrchestratorConfig& config, const TextSetup& text,
                                                         OrchestratorTransports transports, monitor::Monitor* monitor) {
  orchestrator::OrchestratorServices services;
  services.environments = train_environments(config);
  services.chat = std::make_shared<env::TokenChatClientFactory>(text.renderer, std::move(transports.generate));
  PRL_CHECK(transports.io || !config.teacher, "an orchestrator with a teacher needs an executor for its requests");
  if (config.teacher) add_teacher(services, config, {text.tokenizer, text.renderer}, *transports.io);
  services.samples = std::move(transports.samples);
  services.policy = std::move(transports.policy);
  services.pressure = std::move(transports.pressure);
  services.monitor = monitor;
  return services;
}

std::filesystem::path checkpoints_folder(const config::OrchestratorConfig& config) {
  const bool is_elsewhere = config.ckpt && config.ckpt->output_dir;
  return (is_elsewhere ? *config.ckpt->output_dir : config.output_dir) / "checkpoints";
}

std::int64_t orchestrator_resume_step(const config::OrchestratorConfig& config) {
  if (!config.ckpt || !config.ckpt->resume_step) return 0;
  trainer::ResumeOptions resume;
  resume.step = *config.ckpt->resume_step;
  if (!config.ckpt->skip_progress) resume.units.emplace_back(orchestrator::kCheckpointUnit);
  return trainer::find_resume_step(checkpoints_folder(config), resume).value_or(0);
}

}  // namespace prl::launch
