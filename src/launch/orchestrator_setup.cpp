#include "launch/orchestrator_setup.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/units.hpp"
#include "env/registry.hpp"
#include "env/token_chat_client.hpp"
#include "launch/model_subject.hpp"
#include "launch/prompt_images.hpp"
#include "launch/python_functions.hpp"
#include "launch/teacher_setup.hpp"
#include "text/json_python.hpp"
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
    case config::AdvantageType::kEcho: return "grpo";
    case config::AdvantageType::kHierarchicalGrpo: return std::string(orchestrator::kHierarchical);
    case config::AdvantageType::kCustom: break;  // comes with the group, see advantage_function
  }
  return "grpo";
}

/// What of the others' words is learnt.
orchestrator::RoleWeights echo_weights(const config::AdvantageConfig& config, bool masks_env_responses) {
  if (config.type != config::AdvantageType::kEcho)
    return masks_env_responses ? orchestrator::RoleWeights{} : orchestrator::RoleWeights{.system = 1, .user = 1, .tool = 1};
  const auto alpha = [](const std::optional<config::EchoRoleConfig>& role) { return role ? static_cast<float>(role->alpha) : 0.0f; };
  if (!config.roles) return {.tool = static_cast<float>(config::EchoRoleConfig{}.alpha)};
  return {.system = alpha(config.roles->system),
          .user = alpha(config.roles->user),
          .assistant = alpha(config.roles->assistant),
          .tool = alpha(config.roles->tool)};
}

orchestrator::AdvantageOptions advantage_options(const config::AdvantageConfig& config, bool masks_env_responses) {
  orchestrator::AdvantageOptions options;
  options.algorithm = algorithm_name(config.type);
  options.decay = config.decay;
  options.episode_agents = config.episode_agents;
  options.echo = echo_weights(config, masks_env_responses);
  if (config.length_penalty) options.length_penalty = length_penalty(*config.length_penalty);
  return options;
}

constexpr std::chrono::seconds kFunctionLimit{60};

net::asio::awaitable<std::vector<float>> ask_numbers(std::shared_ptr<env::python::PythonFunction> function, boost::json::array rollouts) {
  const std::size_t wanted = rollouts.size();
  boost::json::array args;
  args.push_back(std::move(rollouts));
  auto calling = function->call(std::move(args), kFunctionLimit);
  const boost::json::value value = co_await std::move(calling);
  std::vector<float> numbers;
  if (value.is_array())
    for (const boost::json::value& item : value.get_array()) {
      const std::optional<double> number = text::as_double(item);
      if (item.is_bool())
        numbers.push_back(item.get_bool() ? 1.0f : 0.0f);
      else if (number && std::isfinite(*number))
        numbers.push_back(static_cast<float>(*number));
    }
  if (numbers.size() != wanted)
    fail(ErrorCode::kInvalidArgument, "{}: wanted a list of {} finite numbers, got {}", function->name(), wanted,
         text::to_json_text(value).substr(0, 200));
  co_return numbers;
}

/// A function in Python; `key` names it in messages.
orchestrator::GroupFunction group_function(const std::string& key, const config::PythonFunctionConfig& config,
                                           const std::filesystem::path& output_dir) {
  const auto function = python_function(key, config.import_path.value(), config, output_dir);
  return [function](boost::json::array rollouts) { return ask_numbers(function, std::move(rollouts)); };
}

/// The answer of the worker's echo.masks, a list of booleans for each branch of each rollout.
std::vector<orchestrator::EchoMask> echo_masks(const boost::json::value& value) {
  std::vector<orchestrator::EchoMask> masks;
  for (const boost::json::value& rollout : value.as_array()) {
    orchestrator::EchoMask& mask = masks.emplace_back();
    for (const boost::json::value& branch : rollout.as_array()) {
      std::vector<std::uint8_t>& keep = mask.emplace_back();
      for (const boost::json::value& is_kept : branch.as_array()) keep.push_back(is_kept.as_bool() ? 1 : 0);
    }
  }
  return masks;
}

net::asio::awaitable<std::vector<orchestrator::EchoMask>> ask_masks(std::shared_ptr<env::python::PythonFunction> function,
                                                                    std::string filter, boost::json::array rollouts) {
  boost::json::array args;
  args.emplace_back(filter);
  args.push_back(std::move(rollouts));
  auto calling = function->call(std::move(args), kFunctionLimit);
  const boost::json::value value = co_await std::move(calling);
  co_return echo_masks(value);
}

/// Which words of others are learnt, where type echo has a filter of them; else empty.
orchestrator::EchoFilter echo_filter(const config::AdvantageConfig& config, const std::filesystem::path& output_dir) {
  if (!config.filter) return {};
  const auto function = python_function("filter of echo", "prl_worker.echo.masks", *config.filter, output_dir);
  return [function, filter = config.filter->import_path.value()](boost::json::array rollouts) {
    return ask_masks(function, filter, std::move(rollouts));
  };
}

/// The function of advantage type custom, shared by the environments that use it; empty for other types.
orchestrator::GroupFunction advantage_function(const config::AdvantageConfig& config, const std::filesystem::path& output_dir) {
  if (config.type != config::AdvantageType::kCustom) return {};
  return group_function("advantage", config, output_dir);
}

/// Filters of type custom, shared by all environments.
std::vector<orchestrator::GroupFilter> filter_functions(const config::OrchestratorConfig& config) {
  std::vector<orchestrator::GroupFilter> filters;
  for (const config::RolloutFilter& filter : config.filters)
    if (const auto* custom = std::get_if<config::CustomFilter>(&filter)) {
      const std::string name = custom->import_path->substr(custom->import_path->rfind('.') + 1);
      filters.push_back({name, custom->enforce, group_function("filter", *custom, config.output_dir)});
    }
  return filters;
}

/// How an environment's tasks are drawn; problems were found when the configuration was resolved.
orchestrator::Curriculum curriculum(const std::optional<config::CurriculumConfig>& config) {
  orchestrator::Curriculum out;
  if (!config) return out;
  out.order = orchestrator::Curriculum::Order::kSequential;
  if (const auto* sampler = std::get_if<config::DifficultyPoolSampler>(&config->sampler)) {
    out.order = orchestrator::Curriculum::Order::kDifficulty;
    out.seed = static_cast<std::uint64_t>(sampler->seed);
    std::vector<std::string> problems;
    for (const config::DifficultyPool& pool : config::difficulty_pools(sampler->pools, problems))
      out.pools.push_back({pool.name, pool.threshold, pool.weight});
  }
  return out;
}

std::vector<orchestrator::AdvantageRange> gates(const config::CurriculumConfig& config) {
  std::vector<orchestrator::AdvantageRange> ranges;
  std::vector<std::string> problems;
  for (const config::AdvantageGate& gate : config::advantage_gates(config.gates, problems))
    ranges.push_back({gate.reject_min, gate.reject_max});
  return ranges;
}

/// Everything that one environment has of its own.
void add_environment_options(const config::OrchestratorConfig& config, orchestrator::OrchestratorOptions& options) {
  for (std::size_t i = 0; i < config.train.env.size(); ++i) {
    const config::EnvConfig& entry = config.train.env[i];
    const auto env_idx = static_cast<std::int64_t>(i);
    options.dispatch.group_sizes.push_back(entry.group_size.value_or(config.group_size));
    if (entry.algo) options.collect.env_advantages[env_idx] = advantage_options(*entry.algo, config.mask_env_responses);
    options.sampler.curricula.push_back(curriculum(entry.curriculum));
    if (entry.curriculum) options.collect.gates[env_idx] = gates(*entry.curriculum);
  }
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
                          },
                          [](const config::CustomFilter&) {}},  // asked of the group, see filter_functions
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
                                     const config::OrchestratorConfig& config, const SharedTemplates& templates) {
  orchestrator::OnlineEval eval;
  eval.task.environment = env::make_environment(
      in_run(env_spec(entry), env_logs(config.output_dir, "eval"), config.batch_size.value_or(128), config.log.vf_level, templates));
  eval.task.environment->prepare();
  eval.task.num_examples = entry.num_examples.value_or(section.num_examples);
  eval.task.rollouts_per_example = entry.group_size.value_or(section.group_size);
  eval.task.skip_first = entry.skip_first;
  eval.task.sampling = sampling_params(entry.sampling.value_or(section.sampling));
  eval.task.seed = static_cast<std::uint64_t>(config.seed);
  eval.task.max_concurrent = config.batch_size.value_or(128);
  eval.task.retry.max_attempts = entry.max_retries + 1;
  if (entry.timeout) eval.task.rollout_timeout = to_ms(*entry.timeout);
  eval.interval = entry.interval.value_or(section.interval);
  return eval;
}

void set_state_headers(orchestrator::OrchestratorOptions& options, const config::OrchestratorConfig& config) {
  options.eval_headers_from_state = options.headers_from_state = config.student.client.extra_headers_from_state;
  if (!config.teacher) return;
  // As a server, a teacher either plays the rollouts or scores them.
  const env::StateHeaders& headers = config.teacher->client.extra_headers_from_state;
  (config.training_mode == config::TrainingMode::kSft ? options.headers_from_state : options.teacher_headers_from_state) = headers;
}

}  // namespace

orchestrator::OrchestratorOptions orchestrator_options(const config::OrchestratorConfig& config, std::int64_t vocab_size,
                                                       std::int64_t resume_step, const SharedTemplates& templates) {
  orchestrator::OrchestratorOptions options;
  const std::int64_t batch_size = config.batch_size.value_or(128);
  options.dispatch.batch_size = batch_size;
  options.dispatch.group_size = config.group_size;
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
  options.collect.advantage = advantage_options(config.advantage, config.mask_env_responses);
  add_environment_options(config, options);
  options.collect.strategy = config.trajectory_strategy == config::TrajectoryStrategy::kBranching
                                 ? orchestrator::TrajectoryStrategy::kBranching
                                 : orchestrator::TrajectoryStrategy::kInterleaved;
  switch (config.training_mode) {
    case config::TrainingMode::kRl: break;
    case config::TrainingMode::kOpd:
    case config::TrainingMode::kOpsd: options.collect.loss = orchestrator::SampleLoss::kDistillation; break;
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
    for (const config::EvalEnvConfig& entry : config.eval->env)
      options.evals.push_back(online_eval(*config.eval, entry, config, templates));
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
  if (!config.bench) options.orders = RunOrders::of(config.output_dir);
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
  set_state_headers(options, config);
  if (config.teacher) options.teacher_timeout = to_ms(config.teacher->client.wait_for_ready_timeout);
  if (config.concurrency.initial_inflight)
    options.concurrency = {.initial = config.concurrency.initial_inflight, .min = config.concurrency.min_inflight};
  return options;
}

namespace {

/// Prompts of an environment are much alike: the first tells whether the policy must take images.
void require_text(const env::Environment& environment) {
  if (environment.num_tasks(env::Split::kTrain) < 1) return;
  if (vision::has_images(environment.task(env::Split::kTrain, 0).prompt))
    fail(ErrorCode::kInvalidArgument,
         "orchestrator.train.env: prompts of '{}' have images: set model.vlm, with a model that has a vision tower", environment.name());
}

}  // namespace

std::vector<orchestrator::TrainEnv> train_environments(const config::OrchestratorConfig& config, const SharedTemplates& templates) {
  std::vector<orchestrator::TrainEnv> environments;
  const auto common = advantage_function(config.advantage, config.output_dir);
  const std::vector<orchestrator::GroupFilter> filters = filter_functions(config);
  for (const config::EnvConfig& entry : config.train.env) {
    orchestrator::TrainEnv train;
    train.environment = env::make_environment(
        in_run(env_spec(entry), env_logs(config.output_dir, "train"), rollouts_at_once(config), config.log.vf_level, templates));
    train.environment->prepare();
    if (!config.student.model.vlm) require_text(*train.environment);
    train.sampling = sampling_params(entry.sampling.value_or(config.train.sampling));
    train.max_retries = entry.max_retries;
    train.max_total_completion_tokens = entry.max_total_completion_tokens;
    train.wants_roles = echo_weights(entry.algo.value_or(config.advantage), config.mask_env_responses).is_any();
    if (entry.reward) train.rewards = group_function("reward", *entry.reward, config.output_dir);
    train.filters = filters;
    train.advantages = entry.algo ? advantage_function(*entry.algo, config.output_dir) : common;
    train.echo_filter = echo_filter(entry.algo.value_or(config.advantage), config.output_dir);
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
  options.template_kwargs = config.renderer.chat_template_kwargs;
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

namespace {

/// What the policy reads, as its own teacher, in front of a rollout.
orchestrator::Demonstrations demonstrations(const config::DemonstrationConfig& config, std::shared_ptr<const text::Renderer> renderer) {
  orchestrator::Demonstrations out;
  out.key = config.demo_key;
  out.prefix_of = [text = config.prompt_template, renderer = std::move(renderer)](const std::string& demonstration) {
    constexpr std::string_view kSlot = "{demonstration}";
    std::string content = text;
    content.replace(content.find(kSlot), kSlot.size(), demonstration);
    boost::json::array messages;
    messages.push_back(boost::json::object{{"role", "system"}, {"content", content}});
    return renderer->render_ids(messages, {}, false);
  };
  return out;
}

}  // namespace

orchestrator::OrchestratorServices orchestrator_services(const config::OrchestratorConfig& config, const TextSetup& text,
                                                         OrchestratorTransports transports, monitor::Monitor* monitor) {
  orchestrator::OrchestratorServices services;
  services.environments = train_environments(config, transports.templates);
  if (config.training_mode == config::TrainingMode::kOpsd) {
    services.teacher = env::make_generate_prompt_scorer(transports.generate);
    services.demonstrations = demonstrations(config.opsd, text.renderer);
  }
  std::shared_ptr<const vision::PromptImages> images;
  if (config.student.model.vlm) images = prompt_images_of(text_folder(config.student.model.name));
  services.chat = std::make_shared<env::TokenChatClientFactory>(text.renderer, std::move(transports.generate), std::move(images));
  PRL_CHECK(transports.io || !config.teacher, "an orchestrator with a teacher needs an executor for its requests");
  if (config.teacher) add_teacher(services, config, {text.tokenizer, text.renderer}, *transports.io);
  services.samples = std::move(transports.samples);
  services.policy = std::move(transports.policy);
  services.pressure = std::move(transports.pressure);
  services.load = std::move(transports.load);
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
