#include "launch/memory_plan.hpp"

#include <boost/json.hpp>

#include <algorithm>
#include <cstdlib>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "engine/memory.hpp"
#include "engine/sharded_runner.hpp"
#include "launch/engine_host.hpp"
#include "launch/run_folder.hpp"
#include "launch/run_spans.hpp"
#include "nn/adapter.hpp"
#include "nn/decoder.hpp"
#include "nn/feature_cache.hpp"
#include "nn/mtp_head.hpp"
#include "nn/shards.hpp"
#include "nn/vision_tower.hpp"
#include "nn/weights.hpp"
#include "ops/delta_rule.hpp"
#include "ops/lm_head.hpp"
#include "trainer/memory.hpp"

namespace prl::launch {
namespace {

/// Product workspaces, staging rings and small arrays of one role.
constexpr std::size_t kRoleBytes = std::size_t{128} << 20;
/// Packed versions of the weights that can exist at once beside the first: one that the engine still serves and one that is being made.
constexpr std::size_t kMoreVersions = 2;
/// Of the host's free memory; more than that is worth a warning.
constexpr double kHostShare = 0.9;
/// A part of this many of what is left, for logits that a pass keeps instead of forming them twice: that saves 2% to 4% of a step.
constexpr std::size_t kLogitsParts = 6;
constexpr std::string_view kActivations = "activations";
/// What a group of ranks on GPUs takes for its channels beside the tensors that are planned: about 1.3 GiB with two H100 over NVLink.
/// More peers were not measured.
constexpr std::size_t kGroupBytes = std::size_t{3} << 29;
/// Each further group of the same ranks: 0.48 to 0.58 GiB was measured there.
constexpr std::size_t kFurtherGroupBytes = std::size_t{5} << 27;
/// What links to engines take for their channels.
constexpr std::size_t kLinksBytes = std::size_t{1} << 30;
constexpr const char* kSmallerState =
    "train a smaller model, divide the layers' weights among the ranks (model.reshard_after_forward), keep the optimizer's state in host "
    "memory (model.optim_cpu_offload; with the masters: "
    "model.fsdp_cpu_offload) or in bfloat16 (model.optimization_dtype), or choose an optimizer with less state";
constexpr const char* kSmallerActivations =
    "lower seq_len, recompute activations (model.ac) or keep them in host memory (model.ac_offloading)";

std::size_t weight_bytes(const nn::ModelConfig& model, DType compute) {
  const std::size_t values = static_cast<std::size_t>(model.num_parameters()) * size_of(compute);
  return model.eight_bits != nn::EightBits::kNone ? values + nn::eight_bit_code_bytes(*nn::make_tensor_table(model), compute) : values;
}

/// Of the weights of an engine's device, and of a version on its way.
struct EngineWeights {
  std::size_t served = 0, in_flight = 0;
};

std::string gib(std::size_t bytes) { return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / kGiB); }

std::size_t usable(const MemoryPlan& plan) { return static_cast<std::size_t>(static_cast<double>(plan.available) * (1 - kMemoryReserve)); }

void refuse_if_too_large(const MemoryPlan& plan, const char* advice) {
  if (plan.fits()) return;
  fail(ErrorCode::kOutOfMemory, "the GPU's memory is too small for this run: {}; {}", plan.to_string(), advice);
}

void warn_if_host_is_full(const MemoryPlan& plan) {
  std::size_t wanted = 0;
  for (const auto& [name, bytes] : plan.host) wanted += bytes;
  const auto free = static_cast<double>(make_cpu_runtime()->bytes_available());
  if (static_cast<double>(wanted) > kHostShare * free)
    log::warning("{} are to be kept in host memory, of which {} are free", gib(wanted), gib(static_cast<std::size_t>(free)));
}

}  // namespace

std::size_t MemoryPlan::total() const noexcept {
  std::size_t sum = 0;
  for (const auto& [name, bytes] : parts) sum += bytes;
  return sum;
}

bool MemoryPlan::fits() const noexcept { return total() <= usable(*this); }

std::size_t MemoryPlan::part(std::string_view name) const noexcept {
  const auto found = std::ranges::find(parts, name, [](const auto& p) { return std::string_view(p.first); });
  return found == parts.end() ? 0 : found->second;
}

std::string MemoryPlan::to_string() const {
  std::string out;
  for (const auto& [name, bytes] : parts) {
    out += fmt::format("{}{} {}", out.empty() ? "" : ", ", name, gib(bytes));
    if (name == kActivations && foretold_activations > 0) out += fmt::format(" (foretold {})", gib(foretold_activations));
  }
  out += fmt::format("; {} of {}", gib(total()), gib(available));
  for (std::size_t i = 0; i < host.size(); ++i)
    out += fmt::format("{}{} {}", i == 0 ? "; in host memory: " : ", ", host[i].first, gib(host[i].second));
  return out;
}

std::string MemoryPlan::to_json(std::string_view process) const {
  boost::json::object out{{"process", process}, {"available", available}, {"total", total()}, {"num_kv_blocks", num_kv_blocks}};
  for (const auto& [key, list] : {std::pair{"parts", &parts}, std::pair{"host", &host}}) {
    boost::json::array& rows = out[key].emplace_array();
    for (const auto& [name, bytes] : *list) {
      boost::json::object row{{"name", name}, {"bytes", bytes}};
      if (list == &parts && name == kActivations && foretold_activations > 0) row["foretold"] = foretold_activations;
      rows.push_back(std::move(row));
    }
  }
  return boost::json::serialize(out);
}

void keep_plan(const MemoryPlan& plan, const std::string& role, std::filesystem::path run_folder) {
  if (const char* prepared = std::getenv(kRunFolderVariable); run_folder.empty() && prepared != nullptr) run_folder = prepared;
  if (run_folder.empty()) return;
  const std::string process = process_name(role);
  const std::filesystem::path path = run_folder / "memory" / (process + ".json");
  try {
    std::filesystem::create_directories(path.parent_path());
    write_file_atomic(path, plan.to_json(process) + "\n");
  } catch (const std::exception& error) {
    log::warning("the memory plan is not kept: {}", error.what());
  }
}

void MemoryPlan::log_peak(std::size_t peak_bytes, std::string_view of) const {
  log::info("memory: {} planned, {} at the peak of {}", gib(total()), gib(peak_bytes), of);
}

namespace {

/// Of a tower, its kept features, and the largest picture of a sequence while it is computed.
std::size_t image_bytes(const nn::VisionConfig& vision, DType compute, std::int64_t sequence) {
  constexpr std::int64_t kMostImageTokens = 16384;  // the most that published processors make of a picture
  return nn::tower_bytes(vision, compute) + nn::FeatureCache::kMostBytes +
         nn::tower_pass_bytes(vision, std::min(sequence, kMostImageTokens), compute);
}

std::int64_t tokens_of_rank(const trainer::GradientStepOptions& step, std::int64_t seq_len) {
  return step.cut.padded(seq_len) / step.cut.num_ranks;
}

/// What ranks that share a row keep of it: a layer's heads of q, k, v and its output for as many elements as the rank has of its own
/// tokens, and in flight those of one layer's exchanges once more, each way.
std::size_t shared_row_bytes(const nn::ModelConfig& m, DType compute, std::int64_t own_tokens) {
  const auto heads = static_cast<std::size_t>((2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim * own_tokens) * size_of(compute);
  return heads * static_cast<std::size_t>(m.num_layers + 2);
}

/// Of a rank with several leaves of a row: the sums of a tree that are not added yet, of the largest matrix, or of a layer's adapters.
std::size_t leaf_bytes(const nn::TensorTable& trained, int leaves) {
  std::int64_t largest = 0, adapters = 0, layer = -1;
  for (const nn::BlockSpec& block : trained.blocks()) {
    if (block.layer != layer) adapters = 0;
    layer = block.layer;
    if (nn::is_lora(block.kind)) adapters += block.shape.num_elements();
    largest = std::max({largest, block.shape.num_elements(), adapters});
  }
  int levels = 0;
  for (int n = leaves; n > 1; n /= 2) ++levels;
  return static_cast<std::size_t>(levels * largest) * sizeof(float);
}

/// Of ranks beside the world's: for weights that are gathered beside other work, rows that ranks share, and copies of the state.
std::size_t num_further_groups(const TrainingShape& shape) {
  const trainer::GradientStepOptions& step = shape.step;
  const bool gathers =
      step.num_ranks > step.num_replicas && (shape.policy.gathers_layers || (step.overlaps_exchange && !shape.policy.lora));
  const bool has_copies = step.num_replicas > 1 && step.num_replicas < step.num_ranks;
  return std::size_t{gathers} + std::size_t{shape.policy.share.divides_experts} + std::size_t{step.cut.num_ranks > 1} +
         (has_copies ? 2 : 0);
}

}  // namespace

std::int64_t affordable_logits(const nn::ModelConfig& model, DType compute, std::int64_t num_tokens, std::size_t bytes_left) {
  const auto row_bytes = static_cast<std::size_t>(ops::kept_row_bytes(compute, model.vocab_size));
  return std::min(num_tokens, static_cast<std::int64_t>(bytes_left / kLogitsParts / row_bytes));
}

MemoryPlan foretell_training(std::size_t available, const TrainingShape& shape, bool may_keep_logits) {
  const DType compute = shape.policy.compute;
  const trainer::TrainingBytes bytes = trainer::training_bytes(shape.model, shape.policy, shape.step);
  MemoryPlan plan;
  plan.available = available;
  plan.parts = {{"masters", bytes.masters}, {"gradients", bytes.gradients}, {"optimizer", bytes.optimizer}, {"weights", bytes.weights}};
  if (bytes.widened > 0) plan.parts.emplace_back("values of codes", bytes.widened);
  if (shape.step.num_ranks > 1 && may_keep_logits) {
    // Each rank's new weights are gathered beside those that are computed with, and take their place then.
    const auto gathered = static_cast<std::size_t>(trainer::trained_tensors(shape.policy, shape.model)->num_trainable());
    if (shape.step.num_ranks > shape.step.num_replicas && (!shape.policy.gathers_layers || shape.policy.lora))
      plan.parts.emplace_back("new weights", gathered * size_of(compute));
    plan.parts.emplace_back("group of ranks", kGroupBytes + num_further_groups(shape) * kFurtherGroupBytes);
  }
  if (shape.policy.takes_images && shape.model.vision)
    plan.parts.emplace_back("images", image_bytes(*shape.model.vision, compute, shape.seq_len));
  if (shape.policy.share.divides_experts) {
    // As they travel, and rows of x beside those of gradients (autograd::divided_experts).
    const nn::ModelConfig& m = shape.model;
    plan.parts.emplace_back(
        "tokens to experts",
        static_cast<std::size_t>(3 * tokens_of_rank(shape.step, shape.seq_len) * m.num_active_experts * m.hidden_size) * size_of(compute));
  }
  if (shape.kept_for_engines > 0) {
    // A former version that engines are still getting, or that is on its way to host memory, when the next one is made.
    const auto all = static_cast<std::size_t>(trainer::trained_tensors(shape.policy, shape.model)->num_trainable()) * size_of(compute);
    plan.parts.emplace_back("weights for engines",
                            static_cast<std::size_t>(shape.kept_for_engines * static_cast<double>(all)) + kLinksBytes);
  }
  if (bytes.host_masters > 0) plan.host.emplace_back("masters", bytes.host_masters);
  if (bytes.host_optimizer > 0) plan.host.emplace_back("optimizer", bytes.host_optimizer);
  const std::int64_t own_tokens = tokens_of_rank(shape.step, shape.seq_len);
  if (const std::size_t rounded = nn::rounded_input_bytes(shape.model, own_tokens); rounded > 0)
    plan.parts.emplace_back("inputs of 8 bits", rounded);
  const auto activations_with = [&](std::int64_t num_kept_logits) {
    return nn::activation_bytes(shape.model, compute, own_tokens, shape.policy.checkpointing, shape.policy.offload, num_kept_logits);
  };
  if (const nn::LinearAttention& c = shape.model.linear; !c.layers.empty() && may_keep_logits)
    plan.parts.emplace_back("states of gradients",
                            ops::delta_rule_backward_bytes(compute, c.num_value_heads, c.key_dim, c.value_dim, own_tokens,
                                                           c.is_state_space ? ops::RuleKind::kStateSpace : ops::RuleKind::kGatedDelta));
  nn::ActivationBytes activations = activations_with(0);
  if (const std::size_t taken = plan.total() + activations.device + shape.bytes_of_others;
      may_keep_logits && shape.step.cut.leaves_of_rank() == 1 && taken < usable(plan)) {
    plan.num_kept_logits = affordable_logits(shape.model, compute, own_tokens, usable(plan) - taken);
    activations = activations_with(plan.num_kept_logits);
  }
  if (activations.host > 0) plan.host.emplace_back(kActivations, activations.host);
  plan.parts.emplace_back(kActivations, activations.device);
  if (shape.step.cut.num_ranks > 1) plan.parts.emplace_back("shared rows", shared_row_bytes(shape.model, compute, own_tokens));
  if (const int leaves = shape.step.cut.leaves_of_rank(); leaves > 1)
    plan.parts.emplace_back("leaves", leaf_bytes(*trainer::trained_tensors(shape.policy, shape.model), leaves));
  return plan;
}

MemoryPlan plan_training(const DeviceRuntime& runtime, const TrainingShape& shape) {
  MemoryPlan plan = foretell_training(runtime.bytes_available(), shape, is_planned(runtime));
  const bool has_room_for_state = plan.total() - plan.part(kActivations) <= usable(plan);
  refuse_if_too_large(plan, has_room_for_state ? kSmallerActivations : kSmallerState);
  warn_if_host_is_full(plan);
  return plan;
}

void measure_activations(MemoryPlan& plan, trainer::Policy& policy, std::int64_t seq_len) {
  const auto part = std::ranges::find(plan.parts, kActivations, [](const auto& p) { return std::string_view(p.first); });
  PRL_CHECK(part != plan.parts.end(), "a plan without activations");
  try {
    plan.foretold_activations = part->second;
    part->second = policy.reserve(seq_len);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    throw error.with_context(fmt::format("a step over {} tokens does not fit: {}; {}", seq_len, plan.to_string(), kSmallerActivations));
  }
  refuse_if_too_large(plan, kSmallerActivations);
}

PlannedPolicy make_policy(const std::shared_ptr<DeviceRuntime>& runtime, trainer::PolicyOptions options,
                          const trainer::GradientStepOptions& step, std::int64_t seq_len, std::size_t bytes_of_others,
                          double kept_for_engines) {
  PlannedPolicy made;
  if (is_planned(*runtime)) {
    made.plan = plan_training(*runtime, {trainer::model_config(options), options, step, seq_len, bytes_of_others, kept_for_engines});
    options.num_kept_logits = made.plan->num_kept_logits;
  }
  made.policy = std::make_unique<trainer::Policy>(runtime, std::move(options));
  if (made.plan) measure_activations(*made.plan, *made.policy, tokens_of_rank(step, seq_len));
  return made;
}

namespace {

/// Of what draws the drafts: another model, or this one's head.
std::optional<nn::ModelConfig> drafting_config(const config::InferenceConfig& inference, const nn::ModelConfig& model) {
  if (std::optional<nn::ModelConfig> head = draft_head_config(inference, model)) return head;
  return draft_model_config(inference);
}

engine::EngineBytes engine_bytes(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute) {
  // Plans are made for GPUs alone.
  const std::int64_t block = inference.kv.block_size.value_or(default_block_size(DeviceKind::kCuda));
  engine::EngineBytes bytes =
      engine::engine_bytes({.max_model_len = context_length(inference, model),
                            .block_size = block,
                            .max_num_seqs = inference.max_num_seqs,
                            .max_num_batched_tokens = inference.max_num_batched_tokens,
                            .num_state_snapshots = engine::default_state_snapshots(
                                model, inference.max_num_seqs, inference.enable_prefix_caching && inference.enable_chunked_prefill),
                            .num_draft_tokens = inference.speculative.num_tokens,
                            .num_devices = inference.parallel.tp},
                           model, compute);
  bytes.passes += 2 * kRoleBytes;
  bytes.block = nn::KvCache::bytes_per_block(nn::config_of_shard(model, inference.parallel.tp), compute, block);
  if (inference.enable_return_routed_experts) bytes.block += nn::KvCache::route_bytes_per_block(model, block);
  if (const auto drafts = drafting_config(inference, model)) bytes.block += nn::KvCache::bytes_per_block(*drafts, compute, block);
  if (draft_head_config(inference, model)) bytes.block += nn::KvCache::hidden_bytes_per_block(model, compute, block);
  return bytes;
}

/// Of the model that draws drafts: its weights and the largest step of it. Of a head those that it does not share.
std::size_t draft_model_bytes(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute) {
  const std::optional<nn::ModelConfig> drafts = drafting_config(inference, model);
  if (!drafts) return 0;
  const std::size_t of_weights = drafts->is_mtp_head
                                     ? static_cast<std::size_t>(nn::make_tensor_table(*drafts)->num_trainable()) * size_of(compute)
                                     : weight_bytes(*drafts, compute);
  return of_weights +
         engine::engine_bytes(
             {.max_model_len = 0, .max_num_seqs = inference.max_num_seqs, .max_num_batched_tokens = inference.max_num_batched_tokens},
             *drafts, compute)
             .passes;
}

EngineWeights engine_weights(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute) {
  const nn::TensorTablePtr table = nn::make_tensor_table(model, {0, inference.parallel.tp});
  const std::size_t all = inference.parallel.tp == 1 ? weight_bytes(model, compute)
                                                     : static_cast<std::size_t>(table->num_parameters()) * size_of(compute) +
                                                           nn::eight_bit_code_bytes(*table, compute);
  if (!nn::gpus_hold_codes_alone(model, compute)) return {all, all};
  // What comes from a trainer's memory comes as values, which are dropped once there are codes.
  const std::size_t alone = nn::codes_alone_bytes(*table, compute).weights;
  return {alone, std::holds_alternative<config::NcclBroadcast>(inference.weight_broadcast) ? all : alone};
}

/// What the devices of an engine exchange: two gathered tensors.
std::size_t exchange_bytes(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute) {
  if (inference.parallel.tp == 1) return 0;
  engine::EngineOptions options;
  options.max_num_seqs = inference.max_num_seqs;
  options.max_num_batched_tokens = inference.max_num_batched_tokens;
  options.drafts.num_tokens = inference.speculative.num_tokens;
  return 2 * engine::ShardedRunner::gathered_bytes(options, model, compute);
}

/// Of the adapters that are ready to compute with at a time, and of one that takes a place before another leaves it.
std::size_t adapter_bytes(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute) {
  if (!inference.enable_lora) return 0;
  return static_cast<std::size_t>(inference.max_loras + 1) *
         nn::most_adapter_bytes(model, largest_lora_rank(inference), adapter_dtype(inference.lora_dtype, compute, "lora_dtype"),
                                {0, inference.parallel.tp});
}

/// What the engine's passes take, and the cache.
void add_passes(MemoryPlan& plan, const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                const char* advice) {
  const engine::EngineBytes needs = engine_bytes(inference, model, compute);
  plan.parts.emplace_back("engine", needs.passes);
  if (const std::size_t bytes = exchange_bytes(inference, model, compute); bytes > 0) plan.parts.emplace_back("exchange", bytes);
  if (const std::size_t bytes = adapter_bytes(inference, model, compute); bytes > 0) plan.parts.emplace_back("adapters", bytes);
  if (const std::size_t bytes = draft_model_bytes(inference, model, compute); bytes > 0) plan.parts.emplace_back("draft model", bytes);
  const std::int64_t wanted =
      inference.kv.num_blocks ? static_cast<std::int64_t>(*inference.kv.num_blocks) : inference.max_num_seqs * needs.blocks_per_sequence;
  const std::size_t left = usable(plan) > plan.total() ? usable(plan) - plan.total() : 0;
  const auto affordable = static_cast<std::int64_t>(left / needs.block);
  plan.num_kv_blocks = inference.kv.num_blocks ? wanted : std::min(wanted, affordable);
  plan.parts.emplace_back("KV cache", static_cast<std::size_t>(std::max(plan.num_kv_blocks, needs.blocks_per_sequence)) * needs.block);
  if (const std::int64_t bytes = kv_offload_bytes(inference); bytes > 0) plan.host.emplace_back("KV blocks", bytes);
  refuse_if_too_large(plan, advice);
  if (plan.num_kv_blocks < wanted)
    log::info("the KV cache holds {} of the {} blocks that {} sequences of {} tokens could use; more will wait", plan.num_kv_blocks, wanted,
              inference.max_num_seqs, context_length(inference, model));
}

}  // namespace

std::size_t version_bytes(const trainer::PolicyOptions& policy, const nn::ModelConfig& model) {
  if (!policy.lora) return weight_bytes(model, policy.compute);
  const std::size_t size = std::max(size_of(policy.compute), size_of(policy.adapter_dtype.value_or(policy.compute)));
  return static_cast<std::size_t>(trainer::trained_tensors(policy, model)->num_trainable()) * size;
}

std::size_t least_engine_bytes(const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                               std::size_t of_version) {
  const engine::EngineBytes needs = engine_bytes(inference, model, compute);
  const std::int64_t blocks = std::max<std::int64_t>(needs.blocks_per_sequence, inference.kv.num_blocks.value_or(0));
  return kMoreVersions * of_version + needs.passes + adapter_bytes(inference, model, compute) +
         draft_model_bytes(inference, model, compute) + static_cast<std::size_t>(blocks) * needs.block;
}

void add_engine(MemoryPlan& plan, const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                std::size_t of_version) {
  plan.parts.emplace_back("weights in flight", kMoreVersions * of_version);
  add_passes(plan, inference, model, compute,
             "the cache must hold one sequence of inference.model.max_model_len tokens at least: lower that, seq_len or "
             "inference.kv.num_blocks");
}

std::size_t engine_share(const DeviceRuntime& runtime, const config::InferenceConfig& inference) {
  const std::size_t free = runtime.bytes_available();
  if (runtime.device().kind != DeviceKind::kCuda) return free;
  for (const CudaDeviceInfo& device : list_cuda_devices().devices)
    if (device.index == runtime.device().index)
      return std::min(free, static_cast<std::size_t>(static_cast<double>(device.total_bytes) * inference.gpu_memory_utilization));
  return free;
}

MemoryPlan plan_engine(std::size_t available, const config::InferenceConfig& inference, const nn::ModelConfig& model, DType compute,
                       int num_versions) {
  MemoryPlan plan;
  plan.available = available;
  const EngineWeights version = engine_weights(inference, model, compute);
  plan.parts = {{"weights", version.served}, {"weights in flight", static_cast<std::size_t>(num_versions - 1) * version.in_flight}};
  if (inference.parallel.tp > 1 && std::holds_alternative<config::NcclBroadcast>(inference.weight_broadcast))
    if (const std::size_t whole = weight_bytes(model, compute); plan.total() + whole <= usable(plan) / 2)
      plan.parts.emplace_back(kReceivedWeights, whole);
  if (model.vision) plan.parts.emplace_back("images", image_bytes(*model.vision, compute, context_length(inference, model)));
  add_passes(plan, inference, model, compute,
             "the cache must hold one sequence of model.max_model_len tokens at least: lower that or kv.num_blocks, or raise "
             "gpu_memory_utilization if the device has more");
  return plan;
}

}  // namespace prl::launch
