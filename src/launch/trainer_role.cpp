#include "launch/trainer_role.hpp"

#include <algorithm>
#include <cstdlib>

#include "base/log.hpp"
#include "launch/memory_plan.hpp"
#include "launch/metric_services.hpp"
#include "launch/model_setup.hpp"
#include "launch/python_functions.hpp"
#include "launch/ranks.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_slots.hpp"
#include "launch/transports.hpp"
#include "monitor/sinks.hpp"
#include "ops/context.hpp"
#include "orchestrator/progress.hpp"
#include "rollouts/step_record.hpp"
#include "text/chat_template.hpp"
#include "trainer/fake_rollouts.hpp"
#include "trainer/metrics.hpp"
#include "weights/collective_channel.hpp"

namespace prl::launch {
namespace {

template <typename T>
std::optional<std::int64_t> widen(const std::optional<T>& value) {
  return value ? std::optional<std::int64_t>(*value) : std::nullopt;
}

nn::ActivationCheckpointing checkpointing_of(const std::optional<config::ActivationCheckpointConfig>& ac) {
  if (!ac) return {};
  nn::ActivationCheckpointing out{ac->freq};
  if (ac->mode == config::CheckpointMode::kFull) return out;
  const auto has = [&](std::string_view name) { return std::ranges::find(ac->targets, name) != ac->targets.end(); };
  out.parts = {.norm = has("norm"), .attn_proj = has("attn_proj"), .mlp = has("mlp") || has("routed_experts")};
  return out;
}

/// Whether the run that was replayed came to the same weights.
void log_replay(const trainer::Replay& replay, std::int64_t last_step) {
  if (const auto first = replay.first_other())
    log::warning("replayed up to step {}: {} steps made the weights of the recorded run, from step {} on they are others", last_step,
                 replay.num_same(), *first);
  else
    log::success("replayed {} steps up to step {}: the weights of each have the bits of the recorded run", replay.num_same(), last_step);
}

/// Whether there is anything to offload from; `key` asked for it.
bool has_own_memory(const DeviceRuntime& runtime, std::string_view key) {
  if (runtime.device().kind != DeviceKind::kCpu) return true;
  log::info("{} has no effect on the CPU: everything is in host memory as it is", key);
  return false;
}

}  // namespace

trainer::PolicyOptions policy_options(const config::TrainerConfig& config, const std::shared_ptr<DeviceRuntime>& runtime) {
  trainer::PolicyOptions options;
  options.model = model_folder(config.model.name);
  options.compute = compute_dtype(config.compute.dtype, device_kind(config.compute));
  options.num_threads = config.compute.num_threads;
  options.checkpointing = checkpointing_of(config.model.ac);
  if (config.model.ac_offloading && has_own_memory(*runtime, "model.ac_offloading")) {
    options.offload.link = make_host_link(runtime, config.model.ac_offloading->pin_memory);
    options.offload.max_inflight = config.model.ac_offloading->max_inflight_activations;
  }
  if (config.model.fsdp_cpu_offload && runtime->device().kind != DeviceKind::kCpu)
    options.masters_host = make_host_link(runtime, /*page_locked=*/true);
  if (const auto* fp8 = config.model.quantization ? std::get_if<config::Fp8Quantization>(&*config.model.quantization) : nullptr) {
    PRL_CHECK(fp8->enable_grouped_gemm, "model.quantization: what is not built is refused where configurations are resolved");
    options.eight_bits = fp8->activations ? nn::EightBits::kProducts : nn::EightBits::kWeights;
  }
  options.attends_to_latents = config.model.latent_attention == config::LatentAttention::kLatents;
  options.freezes_routers = config.model.freeze_moe_router;
  options.replays_routes = config.enable_router_replay;
  options.balances_routes = config.model.debug.force_balanced_routing;
  options.takes_images = config.model.vlm.has_value();
  if (const auto& mtp = config.model.mtp) options.mtp = trainer::MtpTrainingOptions{.lr = mtp->lr, .init = mtp->init};
  options.random_init = config.model.debug.random_init;
  options.num_layers = widen(config.model.debug.num_layers);
  options.seed = static_cast<std::uint64_t>(config.seed);
  if (const auto& lora = config.model.lora)
    options.lora = nn::AdapterConfig{.rank = lora->rank,
                                     .alpha = lora->alpha,
                                     .dropout = lora->dropout,
                                     .rank_stabilized = lora->use_rslora,
                                     .target_modules = lora->target_modules,
                                     .modules_to_save = lora->modules_to_save,
                                     .rank_pattern = {},
                                     .alpha_pattern = {},
                                     .base_model = config.model.name};
  if (const auto& lora = config.model.lora) options.adapter_dtype = adapter_dtype(lora->dtype, options.compute, "model.lora.dtype");
  return options;
}

std::optional<trainer::CheckpointOptions> checkpoint_options(const std::optional<config::TrainerCkptConfig>& config,
                                                             const std::filesystem::path& output_dir,
                                                             const std::filesystem::path& tokenizer,
                                                             const std::optional<std::string>& chat_template) {
  if (!config) return std::nullopt;
  const std::filesystem::path root = config->output_dir.value_or(output_dir);
  trainer::CheckpointOptions options;
  options.checkpoints = root / "checkpoints";
  options.weights = root / "weights";
  options.companions.folder = tokenizer;
  if (chat_template) options.companions.chat_template = text::ChatTemplate::read_text_or_file(*chat_template);
  options.interval = widen(config->interval);
  options.keep_last = widen(config->keep_last);
  options.keep_interval = widen(config->keep_interval);
  options.save_weights = config->weights.has_value() || config->weights_only;
  options.save_adapter = config->weights && config->weights->save_adapter_separately;
  options.weights_only = config->weights_only;
  options.save_async = config->save_async;
  return options;
}

std::optional<trainer::ResumeOptions> resume_options(const std::optional<config::TrainerCkptConfig>& config) {
  if (!config || !config->resume_step) return std::nullopt;
  trainer::ResumeOptions options;
  options.step = *config->resume_step;
  options.skip_progress = config->skip_progress;
  options.skip_scheduler = config->skip_scheduler;
  options.skip_optimizer = config->skip_optimizer;
  options.skip_data = config->skip_dataloader;
  return options;
}

trainer::RowCut row_cut(const config::TrainerModelConfig& model) {
  // Sums in place have no order to keep.
  const bool is_fast = model.reduce == config::GradientReduce::kFast;
  return {.num_leaves = is_fast ? model.cp : model.leaves_per_row.value_or(model.cp), .num_ranks = model.cp};
}

trainer::GradientStepOptions step_options(const config::TrainerConfig& config, const std::shared_ptr<DeviceRuntime>& runtime) {
  trainer::GradientStepOptions options{.loss = config.loss,
                                       .loss_function = loss_function(config.loss, config.output_dir),
                                       .optim = config.optim,
                                       .scheduler = config.scheduler,
                                       .max_steps = config.max_steps};
  if (config.model.optimization_dtype == config::ParamDType::kBFloat16) options.optimizer_memory.dtype = DType::kBF16;
  if (config.enable_token_export) options.token_exports = config.output_dir / "token_exports";
  if (config.model.reduce == config::GradientReduce::kFast) options.reduce = trainer::Reduce::kFast;
  options.num_replicas = config.model.dp_replicate;
  PRL_CHECK(config.model.cp == 1 || config.model.cp_style == config::ContextParallelStyle::kUlysses,
            "model.cp_style: what is not built is refused where configurations are resolved");
  options.cut = row_cut(config.model);
  const char* overlaps = std::getenv("PRL_OVERLAP_EXCHANGE");
  options.overlaps_exchange = overlaps == nullptr || std::string_view(overlaps) != "0";
  if (config.model.fsdp_cpu_offload && has_own_memory(*runtime, "model.fsdp_cpu_offload")) {
    options.optimizer_memory.host = make_host_link(runtime, /*page_locked=*/true);
    options.optimizer_memory.holds_masters = true;
  }
  if (config.model.optim_cpu_offload && has_own_memory(*runtime, "model.optim_cpu_offload"))
    options.optimizer_memory.host = make_host_link(runtime, /*page_locked=*/true);
  return options;
}

trainer::RlRunOptions rl_run_options(const config::TrainerConfig& config, trainer::GradientStepOptions step, double measured_peak_flops) {
  trainer::RlRunOptions options;
  options.step = std::move(step);
  options.seq_len = config.model.seq_len;
  options.peak_flops = measured_peak_flops;
  options.checkpoint = checkpoint_options(config.ckpt, config.output_dir, text_folder(config.tokenizer.name.value_or(config.model.name)),
                                          config.tokenizer.chat_template);
  options.resume = resume_options(config.ckpt);
  if (config.data.is_sent() && options.checkpoint) options.checkpoint->units.emplace_back(orchestrator::kCheckpointUnit);
  // Both parts of a checkpoint are needed to go on: the orchestrator's holds the batches that are next.
  if (options.resume && config.data.is_sent() && !options.resume->skip_progress)
    options.resume->units.emplace_back(orchestrator::kCheckpointUnit);
  if (std::holds_alternative<config::FilesystemBroadcast>(config.weight_broadcast)) options.broadcasts = config.output_dir / "broadcasts";
  // The orchestrator may be this far ahead of the trainer's version, the step in hand not counted.
  if (config.data.is_sent()) options.max_steps_after_stop = config.max_async_level + 1;
  if (config.healing) options.max_losses = config.healing->max_restarts;
  options.log_interval = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * config.log.interval));
  if (!config.bench) options.orders = RunOrders::of(config.output_dir);
  options.memory_snapshots = config.memory_profiler_path.value_or(std::filesystem::path());
  options.is_bench = config.bench.has_value();
  if (config.bench) options.bench_json = config.bench->output_json;
  return options;
}

void add_records(trainer::RlRunOptions& options, const config::TrainerConfig& config, const DeviceRuntime& runtime) {
  if (config.record) options.recorder = std::make_shared<trainer::StepRecorder>(config.output_dir, ops::kernels_of(runtime));
  if (!config.data.recorded) return;
  const config::RecordedStepsConfig& recorded = *config.data.recorded;
  options.replay = std::make_shared<trainer::Replay>(recorded.run, ops::kernels_of(runtime), recorded.require_same);
  if (recorded.from_step == 0) return;
  options.resume.emplace().step = recorded.from_step;
  options.resume_from = recorded.run / "checkpoints";
}

std::unique_ptr<monitor::Monitor> make_monitor(monitor::MetricSet declared, const char* role, const std::filesystem::path& output_dir,
                                               const config::FileMonitorConfig& file, bool is_bench) {
  auto monitor = std::make_unique<monitor::Monitor>(std::move(declared), role);
  open_monitor(*monitor, output_dir, file, is_bench);
  return monitor;
}

void open_monitor(monitor::Monitor& monitor, const std::filesystem::path& output_dir, const config::FileMonitorConfig& file,
                  bool is_bench) {
  if (is_bench && !is_folder_prepared(output_dir)) return;
  std::filesystem::create_directories(output_dir);
  monitor.add_sink(monitor::make_jsonl_sink(output_dir / file.path));
}

int run_trainer_role(const config::TrainerConfig& given, std::stop_token stop) {
  if (given.max_concurrent_runs > 1) return run_trainer_of_runs(given, std::move(stop));
  RankEnv env = rank_env();
  use_replicas(env, given.model.dp_replicate);
  check_ranks_per_row(env, given.model.cp);
  const bool is_first = env.is_first();  // takes the samples, writes and publishes for all
  config::TrainerConfig config = given;
  config.compute = rank_compute(env, config.compute);
  const auto runtime = make_runtime(config.compute);
  trainer::GradientStepOptions step = step_options(config, runtime);
  step.num_ranks = env.size;
  trainer::PolicyOptions of_policy = policy_options(config, runtime);
  share_masters(of_policy, env, step, config.model);
  const bool publishes = config.data.is_sent() && (is_first || config.healing);
  // An adapter is small, and goes from the first rank's host memory.
  const bool has_adapter = config.model.lora.has_value();
  const int senders = !config.data.is_sent() || has_adapter ? 1 : num_senders(config.weight_broadcast, env.size);
  double kept_for_engines = senders > 1 && env.rank < senders ? 2.0 / senders : 0.0;
  if (publishes && !has_adapter && std::holds_alternative<config::NcclBroadcast>(config.weight_broadcast)) kept_for_engines = 1;
  const PlannedPolicy planned = make_policy(runtime, std::move(of_policy), step, config.model.seq_len, 0, kept_for_engines);
  trainer::Policy& policy = *planned.policy;
  if (planned.plan) log::info("memory plan: {}", planned.plan->to_string());
  if (planned.plan) keep_plan(*planned.plan, env.is_first() ? "trainer" : fmt::format("trainer_rank_{}", env.rank), config.output_dir);
  const double flops = measured_peak_flops(config.compute, policy.options().compute) * env.size;
  std::optional<comm::Mesh> mesh = meet(env, runtime, std::chrono::seconds(config.dist_timeout_seconds), stop);
  if (!mesh) return 0;
  step.mesh = &*mesh;
  trainer::RlRunOptions options = rl_run_options(config, step, flops);
  options.is_newcomer = !env.joins_as.empty();
  options.num_senders = senders;
  if (senders > 1) options.sender = make_part_server(config.weight_broadcast, env.host, config.max_async_level, *runtime);
  if (options.checkpoint) options.checkpoint->may_write = is_first;
  add_records(options, config, *runtime);
  if (!is_first) options.bench_json.reset();
  auto monitor =
      is_first ? make_monitor(trainer::trainer_metrics(), kTrainerRows, config.output_dir, config.file_monitor, config.bench.has_value())
               : std::make_unique<monitor::Monitor>(trainer::trainer_metrics(), kTrainerRows);
  if (is_first) {
    add_heartbeat(*monitor, config.heartbeat);
    add_metrics_server(*monitor, config.metrics_server);
  }
  std::shared_ptr<weights::WeightChannel> channel;
  if (publishes)
    channel = make_weight_channel(config.weight_broadcast, config.output_dir, BroadcastRetention(options.checkpoint), WeightEnd::kTrainer,
                                  config.max_async_level, has_adapter ? nullptr : runtime.get());
  const trainer::ReceiverFactory receiver = [&](std::int64_t first_step) -> std::unique_ptr<rollouts::SampleReceiver> {
    if (config.data.fake)
      return trainer::make_fake_rollouts({.num_micro_batches = config.data.fake->batch_size,
                                          .seq_len = config.model.seq_len,
                                          .vocab_size = policy.config().vocab_size,
                                          .generate_samples = config.data.fake->generate_samples,
                                          .first_step = first_step});
    if (config.data.recorded)
      return std::make_unique<rollouts::RecordedSteps>(config.data.recorded->run, first_step, config.data.recorded->last_step);
    return make_sample_receiver(config.rollout_transport, config.output_dir, first_step);
  };
  options.take_over = [&] {
    open_monitor(*monitor, config.output_dir, config.file_monitor, config.bench.has_value());
    add_heartbeat(*monitor, config.heartbeat);
    try {
      add_metrics_server(*monitor, config.metrics_server);
    } catch (const Error& error) {  // a rank that is silent, not dead, still has the port
      log::warning("metrics are served no more: {}", error.what());
    }
  };
  const trainer::TrainRunResult result = trainer::run_rl_trainer(options, policy, receiver, channel.get(), *monitor, stop);
  // Engines may still ask for the last version.
  if (auto* sender = dynamic_cast<weights::CollectiveChannel*>(channel.get()); sender && !result.was_stopped)
    sender->wait_until_released(stop);
  if (options.replay && is_first) log_replay(*options.replay, result.last_step);
  log::info("trainer finished after step {}{}", result.last_step, result.was_stopped ? " (stopped)" : "");
  return 0;
}

}  // namespace prl::launch
