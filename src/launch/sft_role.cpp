#include "launch/sft_role.hpp"

#include <algorithm>
#include <utility>

#include "base/log.hpp"
#include "launch/memory_plan.hpp"
#include "launch/metric_services.hpp"
#include "launch/model_setup.hpp"
#include "launch/prompt_images.hpp"
#include "launch/ranks.hpp"
#include "launch/run_folder.hpp"
#include "launch/trainer_role.hpp"
#include "text/chat_template.hpp"
#include "trainer/metrics.hpp"
#include "trainer/sft/sft_trainer.hpp"
#include "weights/weight_channel.hpp"

namespace prl::launch {

std::int64_t sft_row_tokens(const config::SftData& data) {
  return std::visit([](const auto& d) { return std::int64_t{d.seq_len} * d.micro_batch_size; }, data);
}

namespace {

std::optional<trainer::EvaluatedWeights> evaluated_weights(const config::SftConfig& config, const std::filesystem::path& tokenizer) {
  if (!config.eval) return std::nullopt;
  trainer::EvaluatedWeights weights;
  for (const config::EvalEnvConfig& entry : config.eval->env) weights.intervals.push_back(entry.interval.value_or(config.eval->interval));
  weights::FileChannelOptions files{.folder = config.output_dir / "broadcasts", .keep_interval = {}};
  files.keep_versions = trainer::EvaluatedWeights::kKept * std::ranges::min(weights.intervals);
  weights.channel = weights::make_file_channel(std::move(files));
  weights.companions.folder = tokenizer;
  if (config.tokenizer.chat_template)
    weights.companions.chat_template = text::ChatTemplate::read_text_or_file(*config.tokenizer.chat_template);
  weights.publishes_start = !config.eval->skip_eval_on_resume;
  return weights;
}

}  // namespace

int run_sft_role(const config::SftConfig& config, std::stop_token stop) {
  config::TrainerConfig shared;
  shared.model = config.model;
  RankEnv env = rank_env();
  use_replicas(env, config.model.dp_replicate);
  check_ranks_per_row(env, config.model.cp);
  shared.compute = rank_compute(env, config.compute);
  shared.seed = config.seed;
  const auto runtime = make_runtime(shared.compute);
  const std::int64_t row_tokens = sft_row_tokens(config.data);
  shared.optim = config.optim;
  shared.scheduler = config.scheduler;
  shared.max_steps = config.max_steps;
  const bool is_first = env.is_first();  // writes for all
  trainer::GradientStepOptions step = step_options(shared, runtime);
  step.num_ranks = env.size;
  trainer::PolicyOptions of_policy = policy_options(shared, runtime);
  share_masters(of_policy, env, step, config.model);
  const PlannedPolicy planned = make_policy(runtime, std::move(of_policy), step, row_tokens);
  trainer::Policy& policy = *planned.policy;
  if (planned.plan) log::info("memory plan: {}", planned.plan->to_string());
  if (planned.plan) keep_plan(*planned.plan, env.is_first() ? "sft" : fmt::format("sft_rank_{}", env.rank), config.output_dir);
  const std::filesystem::path tokenizer_dir = text_folder(config.tokenizer.name.value_or(config.model.name));

  trainer::SftRunOptions options;
  options.data = config.data;
  options.val = config.val;
  options.hub = io::HubSettings::from_environment();
  if (std::holds_alternative<config::SftDataConfig>(config.data)) {
    TextOptions text_options;
    text_options.renderer = config.renderer.name;
    text_options.thinking_retention = config.renderer.thinking_retention;
    text_options.template_kwargs = config.renderer.chat_template_kwargs;
    text_options.chat_template = config.tokenizer.chat_template;
    TextSetup text = load_text(tokenizer_dir, text_options);
    if (!text.renderer)
      fail(ErrorCode::kInvalidArgument, "{} has no chat template; set tokenizer.chat_template, or name a renderer", tokenizer_dir.string());
    options.text = {text.tokenizer, text.chat_template, text.renderer, text.renderer_options};
    if (config.model.vlm) options.text.images = prompt_images_of(text_folder(config.model.name));
  }
  options.peak_flops = measured_peak_flops(shared.compute, policy.options().compute) * env.size;
  options.checkpoint = checkpoint_options(config.ckpt, config.output_dir, tokenizer_dir, config.tokenizer.chat_template);
  if (options.checkpoint) options.checkpoint->may_write = is_first;
  options.resume = resume_options(config.ckpt);
  options.evaluated = evaluated_weights(config, tokenizer_dir);
  if (config.healing) options.max_losses = config.healing->max_restarts;
  options.log_interval = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * config.log.interval));
  if (!config.bench) options.orders = RunOrders::of(config.output_dir);
  options.chooses_checkpoints = true;
  options.memory_snapshots = config.memory_profiler_path.value_or(std::filesystem::path());
  options.is_bench = config.bench.has_value();
  if (config.bench && is_first) options.bench_json = config.bench->output_json;
  auto monitor = is_first ? make_monitor(trainer::sft_metrics(), kSftRows, config.output_dir, config.file_monitor, config.bench.has_value())
                          : std::make_unique<monitor::Monitor>(trainer::sft_metrics(), kSftRows);
  if (is_first) add_heartbeat(*monitor, config.heartbeat);
  options.take_over = [&] {
    open_monitor(*monitor, config.output_dir, config.file_monitor, config.bench.has_value());
    add_heartbeat(*monitor, config.heartbeat);
  };
  std::optional<comm::Mesh> mesh = meet(env, runtime, std::chrono::seconds(config.dist_timeout_seconds), stop);
  if (!mesh) return 0;
  step.mesh = &*mesh;
  options.step = step;
  options.is_newcomer = !env.joins_as.empty();
  const trainer::TrainRunResult result = trainer::run_sft(options, policy, *monitor, stop);
  log::success("sft {} after step {}{}", result.was_stopped ? "stopped" : "finished", result.last_step,
               result.last_loss ? fmt::format(", loss {:.4f}", *result.last_loss) : "");
  return 0;
}

}  // namespace prl::launch
