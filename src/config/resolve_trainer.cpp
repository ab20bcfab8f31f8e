#include <fmt/core.h>

#include <algorithm>

#include "config/bind.hpp"
#include "config/detail/check.hpp"

namespace prl::config {

std::optional<std::string> served_quantization(const std::optional<QuantizationConfig>& trained) {
  if (!trained) return std::nullopt;
  const auto* fp8 = std::get_if<Fp8Quantization>(&*trained);
  return std::string(fp8 != nullptr && fp8->activations ? kFp8Products : kFp8Weights);
}

namespace detail {

bool is_built_quantization(std::string_view quantization) { return quantization == kFp8Weights || quantization == kFp8Products; }

namespace {

/// The warm-up step and three measured ones.
/// Profiler traces of more steps than this fill disks.
constexpr std::int64_t kMaxTracedSteps = 10;

void check_offload(const TrainerModelConfig& model, const OptimConfig& optim, const Check& check) {
  const int num_modes = (model.fsdp_cpu_offload ? 1 : 0) + (model.optim_cpu_offload ? 1 : 0) + (model.full_offload ? 1 : 0);
  if (num_modes > 1) check.problem("model.fsdp_cpu_offload", "fsdp_cpu_offload, optim_cpu_offload and full_offload exclude each other");
  if (std::holds_alternative<MuonConfig>(optim) && model.fsdp_cpu_offload)
    check.problem("model.fsdp_cpu_offload", "cannot be used with the optimizer muon");
  if (model.full_offload && !std::holds_alternative<AdamWConfig>(optim) && !std::holds_alternative<SignSgdConfig>(optim))
    check.problem("model.full_offload", "works with the optimizers adamw and sign_sgd only");
  if (model.optimization_dtype != ParamDType::kFloat32 && !std::holds_alternative<AdamWConfig>(optim) &&
      !std::holds_alternative<SignSgdConfig>(optim))
    check.problem("model.optimization_dtype", "bfloat16 works with the optimizers adamw and sign_sgd only");
}

void check_parallel(const TrainerModelConfig& model, const Check& check) {
  if (model.cp_style == ContextParallelStyle::kRing) {
    // Where no row is shared a file that says "ring" means nothing by it.
    constexpr const char* kInstead = "ring attention; leave cp_style out, or say \"ulysses\"";
    if (model.cp > 1)
      check.not_built("model.cp_style", kInstead);
    else
      check.inert("model.cp_style", "rows are shared where model.cp is more than 1");
  }
  if (model.reshard_after_forward && model.lora && !model.lora->modules_to_save.empty())
    check.not_built("model.reshard_after_forward", "layers of an adapter's base that are gathered, with model.lora.modules_to_save");
  const int leaves = model.leaves_per_row.value_or(model.cp);
  if (leaves == 1 && model.cp == 1) return;
  const auto is_power = [](int n) { return (n & (n - 1)) == 0; };
  if (!is_power(model.cp)) check.problem("model.cp", "must be 1, 2, 4, 8, ...: gradients of a row's parts are added as a balanced tree");
  if (!is_power(leaves) || leaves % model.cp != 0)
    check.problem("model.leaves_per_row", fmt::format("must be a power of two and a multiple of model.cp, which is {}", model.cp));
}

/// What ranks that divide experts cannot do beside it.
void check_experts(const TrainerModelConfig& model, const OptimConfig& optim, const Check& check) {
  if (model.ep.number.value_or(1) == 1) return;
  const auto refuse = [&](bool is_set, std::string_view with) {
    if (is_set) check.not_built("model.ep", fmt::format("experts divided among ranks together with {}", with));
  };
  refuse(model.lora.has_value(), "model.lora");
  refuse(std::holds_alternative<MuonConfig>(optim), "the optimizer muon");
  refuse(model.reduce == GradientReduce::kFast, "model.reduce = \"fast\"");
  refuse(model.cp > 1 || model.leaves_per_row.value_or(1) > 1, "rows in parts (model.cp, model.leaves_per_row)");
  refuse(model.dp_replicate > 1, "copies of the state (model.dp_replicate)");
}

/// What the training of a head for multi-token prediction does not go with.
void check_mtp(const TrainerModelConfig& model, const Check& check) {
  if (!model.mtp) return;
  const auto refuse = [&](bool is_set, std::string_view with) {
    if (is_set) check.not_built("model.mtp", fmt::format("a head for multi-token prediction that is trained together with {}", with));
  };
  refuse(model.lora.has_value(), "model.lora");
  refuse(model.cp > 1 || model.leaves_per_row.value_or(1) > 1, "rows in parts (model.cp, model.leaves_per_row)");
  refuse(model.reshard_after_forward, "model.reshard_after_forward");
  refuse(model.ep.number.value_or(1) > 1, "model.ep");
  refuse(model.dp_replicate > 1, "model.dp_replicate");
  refuse(model.fsdp_cpu_offload, "model.fsdp_cpu_offload");
  refuse(model.quantization.has_value(), "model.quantization");
}

/// Attention to latents applies their matrix to queries, so that no adapter can add to its product, and each rank has all heads.
void check_latent_attention(TrainerModelConfig& model, const Check& check) {
  const std::string_view key = "model.latent_attention";
  const bool adapts_matrix = model.lora && std::ranges::any_of(model.lora->target_modules, [](const std::string& target) {
                               return target.find("kv_b_proj") != std::string::npos;
                             });
  const std::string_view with = adapts_matrix ? "an adapter of kv_b_proj (model.lora.target_modules)" : model.cp > 1 ? "model.cp" : "";
  if (!model.latent_attention)
    model.latent_attention = with.empty() ? LatentAttention::kLatents : LatentAttention::kHeads;
  else if (*model.latent_attention == LatentAttention::kLatents && !with.empty())
    check.problem(key, fmt::format("must be heads with {}", with));
}

/// What selective recomputation can name, and why nothing comes of it where nothing does.
struct LayerPart {
  std::string_view name, why_inert;
};
constexpr LayerPart kLayerParts[] = {
    {"norm", ""},
    {"attn_proj", ""},
    {"mlp", ""},
    {"routed_experts", ""},
    {"mla_up_proj", "what the products of latents give is never kept"},
    {"linear_attn", "attn_proj names the projections of linear attention, too"},
};

void check_checkpointing(const ActivationCheckpointConfig& ac, const Check& check) {
  if (ac.mode == CheckpointMode::kFull) {
    if (ac.targets != ActivationCheckpointConfig{}.targets)
      check.problem("model.ac.targets", "belongs to mode selective; mode full recomputes whole layers");
    return;
  }
  constexpr const char* kWanted = "decoders have norm, attn_proj and mlp, which is routed_experts in a mixture of them";
  if (ac.targets.empty()) check.problem("model.ac.targets", fmt::format("mode selective needs at least one part: {}", kWanted));
  for (const std::string& target : ac.targets) {
    const auto* part = std::ranges::find(kLayerParts, target, &LayerPart::name);
    if (part == std::end(kLayerParts))
      check.problem("model.ac.targets", fmt::format("there is no part '{}': {}", target, kWanted));
    else if (!part->why_inert.empty())
      check.warn("model.ac.targets", fmt::format("'{}' has no effect: {}", target, part->why_inert));
  }
}

constexpr std::string_view kMaskedLossKeys[] = {"ratio_type",         "token_mask_low",     "token_mask_high",
                                                "sequence_clip_high", "geo_mask_low",       "geo_mask_high",
                                                "sequence_mask_low",  "sequence_mask_high", "teacher_tau"};

}  // namespace

void infer_loss_type(Value& trainer) {
  Value* loss = trainer.find("loss");
  if (!loss || !loss->is_table() || loss->find("type")) return;
  for (const std::string_view key : kMaskedLossKeys)
    if (loss->find(key)) {
      loss->set("type", Value("masked"));
      return;
    }
  if (loss->find("clip_ratio")) loss->set("type", Value("grpo"));
}

void choose_copies(TrainerModelConfig& model, const std::string& prefix, int num_nodes, const std::optional<int>& nodes_per_group,
                   const Check& check) {
  if (!nodes_per_group) return;
  constexpr const char* kKey = "deployment.nodes_per_fsdp_group";
  if (num_nodes % *nodes_per_group != 0) return check.problem(kKey, fmt::format("must divide the {} nodes of the trainer", num_nodes));
  const int copies = num_nodes / *nodes_per_group;
  if (check.is_set(prefix + "model.dp_replicate") && model.dp_replicate != copies)
    check.problem(kKey, fmt::format("{} nodes in groups of {} hold {} copies of the state, and {}model.dp_replicate is {}", num_nodes,
                                    *nodes_per_group, copies, prefix, model.dp_replicate));
  model.dp_replicate = copies;
}

namespace {

void check_quantization(const TrainerModelConfig& model, const Check& check) {
  if (!model.quantization) return;
  if (const auto* fp8 = std::get_if<Fp8Quantization>(&*model.quantization); fp8 != nullptr && !fp8->enable_grouped_gemm)
    check.not_built("model.quantization.enable_grouped_gemm", "8-bit weights without those of experts");
  if (model.reshard_after_forward || model.ep.number.value_or(1) != 1)
    check.not_built("model.quantization", "8-bit weights whose layers or experts are divided among ranks");
}

}  // namespace

void check_trainer_model(TrainerModelConfig& model, const OptimConfig& optim, const Check& check) {
  check_quantization(model, check);
  check_latent_attention(model, check);
  if (model.ac_offloading && !model.ac) model.ac.emplace();
  check_model_name(model.name, "model.name", check);
  check_offload(model, optim, check);
  check_parallel(model, check);
  check_experts(model, optim, check);
  check_mtp(model, check);
  if (model.ac) check_checkpointing(*model.ac, check);
  if (model.debug.force_balanced_routing)
    check.warn("model.debug.force_balanced_routing",
               "experts get tokens in turn and not those that their router chooses: times and memory can be measured, losses, rewards and "
               "weights mean nothing");
  if (model.lora && model.lora->dropout >= 1) check.problem("model.lora.dropout", "must be below 1: nothing would be left to learn from");
}

void check_ranks(const TrainerModelConfig& model, const std::string& prefix, int num_ranks, const Check& check) {
  const std::string ranks = fmt::format("which is {} in this deployment", num_ranks);
  if (num_ranks % model.cp != 0)
    check.problem(prefix + "model.cp", fmt::format("is {}, but must divide the number of trainer ranks, {}", model.cp, ranks));
  if (num_ranks % model.dp_replicate != 0)
    check.problem(prefix + "model.dp_replicate",
                  fmt::format("is {}, but must divide the number of trainer ranks, {}", model.dp_replicate, ranks));
}

namespace {

void check_routing(const TrainerConfig& config, const Check& check) {
  if (config.enable_router_replay && config.model.debug.force_balanced_routing)
    check.problem("model.debug.force_balanced_routing",
                  "gives tokens other experts than enable_router_replay, those that they were sampled with");
}

void check_recorded(const TrainerConfig& config, const Check& check) {
  if (!config.data.recorded) return;
  const RecordedStepsConfig& recorded = *config.data.recorded;
  if (recorded.run.empty()) check.problem("data.recorded.run", "is needed: the output folder of the run that recorded its steps");
  if (config.data.fake) check.problem("data.recorded", "does not go with data.fake");
  if (config.healing) check.problem("healing", "does not go with data.recorded: a replay that ends is started again");
  if (config.ckpt && config.ckpt->resume_step && recorded.from_step > 0)
    check.problem("data.recorded.from_step", "does not go with ckpt.resume_step, which says where to begin too");
  if (recorded.last_step && *recorded.last_step <= recorded.from_step)
    check.problem("data.recorded.last_step", fmt::format("must be after from_step, which is {}", recorded.from_step));
}

/// Of a trainer of several runs: what belongs to one run alone, or is not built for several.
void check_several_runs(const TrainerConfig& config, const Check& check) {
  if (config.max_concurrent_runs == 1) return;
  if (!config.model.lora) check.problem("max_concurrent_runs", "needs model.lora: each run trains an adapter of the same base model");
  if (!config.data.is_sent() || config.bench) check.problem("max_concurrent_runs", "goes with neither data.fake, data.recorded nor bench");
  if (config.record) check.not_built("record", "recording the steps of several runs");
  if (config.model.debug.random_init) check.problem("model.debug.random_init", "several runs share a base model that is loaded");
  if (config.ckpt && config.ckpt->resume_step)
    check.problem("ckpt.resume_step", "each of several runs goes on from its own newest checkpoint; remove it");
  if (config.ckpt && config.ckpt->output_dir) check.problem("ckpt.output_dir", "each of several runs saves in its own folder; remove it");
  if (config.healing) check.not_built("healing", "several runs on several ranks");
  if (config.model.reshard_after_forward)
    check.inert("model.reshard_after_forward", "the base model of several runs is whole on each device");
  if (config.wandb && config.wandb->id) check.problem("wandb.id", "each of several runs has one of its own, kept in its folder; remove it");
  if (std::holds_alternative<ZmqRollouts>(config.rollout_transport))
    check.problem("rollout_transport.type", "each of several runs names its own in its orchestrator's configuration; remove it");
  if (!std::holds_alternative<FilesystemBroadcast>(config.weight_broadcast) &&
      !std::holds_alternative<NcclBroadcast>(config.weight_broadcast))
    check.not_built("weight_broadcast.type", "several runs over anything but filesystem and nccl");
}

/// How an adapter reaches engines in other processes.
void check_lora_broadcast(const TrainerConfig& config, const Check& check) {
  const auto* nccl = std::get_if<NcclBroadcast>(&config.weight_broadcast);
  const bool leaves_process = nccl != nullptr || std::holds_alternative<FilesystemBroadcast>(config.weight_broadcast);
  if (leaves_process && !config.model.lora->modules_to_save.empty() && config.data.is_sent() && !config.bench)
    check.not_built("model.lora.modules_to_save", "whole modules beside an adapter in another process's engine; use deployment colocated");
  if (nccl != nullptr && nccl->num_senders.value_or(1) > 1)
    check.warn("weight_broadcast.num_senders", "has no effect with model.lora: an adapter is small, and the first rank sends it");
}

}  // namespace

void check_trainer(TrainerConfig& config, const Check& check) {
  check_routing(config, check);
  check_recorded(config, check);
  check_several_runs(config, check);
  if (config.bench) {
    config.max_steps = kBenchSteps;
    config.ckpt.reset();
    if (config.data.recorded) check.problem("data.recorded", "does not go with bench, which trains on random data");
    if (!config.data.fake) config.data.fake.emplace();
    if (config.wandb) mark_bench(*config.wandb);
  }
  check_trainer_model(config.model, config.optim, check);
  check_schedule(config.scheduler, config.optim, config.max_steps, check);
  check_ckpt(config.ckpt, check);
  check_wandb(config.wandb, check);
  check_env_vars(config.env_vars, check);
  if (const auto* custom = std::get_if<CustomLossConfig>(&config.loss)) {
    if (!custom->import_path || custom->import_path->find('.') == std::string::npos)
      check.problem("loss.import_path", "is needed by loss type custom, as module.name");
    if (!custom->kwargs.is_table()) check.problem("loss.kwargs", "expects a table of arguments");
  }
  if (const auto* cispo = std::get_if<CispoLossConfig>(&config.loss); cispo && cispo->clip_ratio_low > cispo->clip_ratio_high)
    check.problem("loss.clip_ratio_low", fmt::format("must be at most clip_ratio_high, which is {}", cispo->clip_ratio_high));
  if (const auto* files = std::get_if<FilesystemBroadcast>(&config.weight_broadcast)) {
    if (files->save_format != "safetensors") check.problem("weight_broadcast.save_format", "must be safetensors");
  }
  if (config.model.lora) check_lora_broadcast(config, check);
  if (config.model.mtp && std::holds_alternative<NcclBroadcast>(config.weight_broadcast))
    check.warn("model.mtp",
               "engines that receive weights over nccl keep the head that they began with; other broadcasts bring the trained one");
  if (config.trace_path && (!config.max_steps || *config.max_steps >= kMaxTracedSteps))
    check.problem("trace_path", fmt::format("needs max_steps below {}", kMaxTracedSteps));
  if (config.compute.dtype == ComputeDType::kFloat16) check.not_built("compute.dtype", "training in float16; use bfloat16 or float32");
}

}  // namespace detail

template <>
Resolution<TrainerConfig> resolve(Value raw, const Context& context) {
  detail::infer_loss_type(raw);
  auto resolution = detail::bind_all<TrainerConfig>(raw);
  resolution.report.decisive.insert("loss.type");
  const detail::Check check(raw, "", resolution.report, context);
  if (std::holds_alternative<LocalRollouts>(resolution.config.rollout_transport) && resolution.config.data.is_sent() &&
      !resolution.config.bench)
    check.problem("rollout_transport.type", "local works only inside `prl rl`; use filesystem or zmq");
  if (std::holds_alternative<LocalBroadcast>(resolution.config.weight_broadcast) && check.is_set("weight_broadcast") &&
      !resolution.config.data.recorded)
    check.problem("weight_broadcast.type", "local works only inside `prl rl`; use filesystem");
  detail::check_trainer(resolution.config, check);
  return resolution;
}

}  // namespace prl::config
