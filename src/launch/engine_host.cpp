#include "launch/engine_host.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/files.hpp"
#include "base/log.hpp"
#include "config/text_format.hpp"
#include "engine/memory.hpp"
#include "engine/resolve_request.hpp"
#include "nn/decoder.hpp"
#include "nn/mtp_head.hpp"
#include "nn/peft.hpp"
#include "nn/same_model.hpp"
#include "nn/shards.hpp"
#include "nn/tensor_table.hpp"

namespace prl::launch {
namespace {

/// Stands for a folder in errors about an adapter from a trainer.
std::filesystem::path image_name(const std::string& store, const std::string& adapter, PolicyVersion version) {
  const std::string step = fmt::format("step_{}", version.value);
  return adapter.empty() ? std::filesystem::path(store) / step : std::filesystem::path(store) / adapter / step;
}

/// Blocks of `block_bytes`, on all devices together, that `num_bytes` of host memory or of files have room for.
std::int64_t num_blocks_of(std::string_view key, std::int64_t num_bytes, std::int64_t block_size, std::int64_t block_bytes) {
  if (num_bytes > 0 && num_bytes < block_bytes)
    fail(ErrorCode::kInvalidArgument, "{}: wanted at least the {} bytes of a block of {} tokens, found {}", key, block_bytes, block_size,
         num_bytes);
  // More would not fit into the numbers of blocks.
  return std::min<std::int64_t>(num_bytes / block_bytes, (std::int64_t{1} << 30) - 1);
}

/// What host memory and files have room for.
void set_kv_offload(engine::EngineOptions& options, const config::InferenceConfig& config, std::int64_t block_bytes) {
  // What is known of a block in a file takes host memory: with the small blocks of small models less of the disk is used.
  constexpr std::int64_t kMostInFiles = std::int64_t{1} << 22;
  options.num_host_blocks = num_blocks_of(config.kv_cache_offload ? "kv_cache_offload.cpu.num_bytes" : "kv_transfer.num_bytes",
                                          kv_offload_bytes(config), options.block_size, block_bytes);
  const auto* native = config.kv_cache_offload ? std::get_if<config::NativeKvOffloadConfig>(&*config.kv_cache_offload) : nullptr;
  if (native == nullptr || !native->disk) return;
  const config::KvOffloadDiskConfig& disk = *native->disk;
  options.num_disk_blocks =
      std::min(num_blocks_of("kv_cache_offload.disk.num_bytes", disk.num_bytes, options.block_size, block_bytes), kMostInFiles);
  options.disk_folder = disk.path.value_or("");
  options.disk_read_timeout = std::chrono::milliseconds(std::max<std::int64_t>(1, std::llround(1000 * disk.read_timeout)));
}

/// Two tokenizers that agree on it are taken for one.
constexpr std::string_view kProbeText =
    "The quick brown fox (aged 12) can't jump 3.1415 m;\n\tdef f(x): return x ** 2  # na\u00efve \u6570\u5b66 \U0001f600";

}  // namespace

std::vector<std::shared_ptr<DeviceRuntime>> devices_beside(const std::shared_ptr<DeviceRuntime>& first, int num) {
  std::vector<std::shared_ptr<DeviceRuntime>> devices{first};
  const auto [kind, index] = first->device();
  try {
    for (int i = 1; i < num; ++i) devices.push_back(kind == DeviceKind::kCpu ? make_cpu_runtime() : make_cuda_runtime(index + i));
  } catch (const Error& error) {
    throw error.with_context(fmt::format("parallel.tp = {}", num));
  }
  return devices;
}

std::int64_t default_block_size(DeviceKind device) { return device == DeviceKind::kCuda ? 32 : 16; }

std::int64_t largest_lora_rank(const config::InferenceConfig& config) {
  constexpr std::int64_t kSizes[] = {8, 16, 32, 64, 128, 256, 320, 512};
  return *std::ranges::lower_bound(kSizes, config.max_lora_rank.value_or(16));
}

nn::ConfigOverrides config_overrides(const config::InferenceConfig& config) {
  const config::Value& rope = config.model.rope_scaling;
  return {.rope_scaling = rope.is_null() ? std::string() : config::to_json(rope),
          .eight_bits = eight_bits_of(config.model.quantization),
          .attends_to_latents = config.model.latent_attention == config::LatentAttention::kLatents};
}

std::int64_t context_length(const config::InferenceConfig& config, const nn::ModelConfig& model) {
  const std::int64_t context = config.model.max_model_len ? *config.model.max_model_len : model.max_position;
  if (context > model.max_position)
    fail(ErrorCode::kInvalidArgument, "inference.model.max_model_len {} is above the model's own limit of {} positions", context,
         model.max_position);
  return context;
}

std::optional<nn::ModelConfig> draft_model_config(const config::InferenceConfig& config) {
  const auto& method = config.speculative.method;
  if (!config.speculative.draft_model || method == config::DraftMethod::kNgram || method == config::DraftMethod::kMtp) return std::nullopt;
  return nn::load_model_config(model_folder(*config.speculative.draft_model));
}

std::optional<nn::ModelConfig> draft_head_config(const config::InferenceConfig& config, const nn::ModelConfig& model) {
  if (config.speculative.method != config::DraftMethod::kMtp) return std::nullopt;
  if (!model.mtp)
    fail(
        ErrorCode::kInvalidArgument,
        "speculative.method is mtp: wanted a model with a head for multi-token prediction ('mtp.*' tensors, or a layer behind the last one "
        "that key 'num_nextn_predict_layers' names); {} has none that this build computes",
        config.model.name);
  return nn::mtp_head_config(model);
}

std::int64_t kv_offload_bytes(const config::InferenceConfig& config) {
  const std::int64_t on_its_way = config.use_pd_kv_transfer ? config.kv_transfer.num_bytes : 0;
  if (!config.kv_cache_offload) return on_its_way;
  const auto* native = std::get_if<config::NativeKvOffloadConfig>(&*config.kv_cache_offload);
  return std::max(on_its_way, native != nullptr ? native->cpu.num_bytes : 0);
}

engine::EngineOptions engine_options(const config::InferenceConfig& config, const nn::ModelConfig& model, const DeviceRuntime& runtime) {
  engine::EngineOptions options;
  options.max_model_len = context_length(config, model);
  options.block_size = config.kv.block_size.value_or(default_block_size(runtime.device().kind));
  options.max_num_seqs = config.max_num_seqs;
  options.max_num_batched_tokens = std::max<std::int64_t>(config.max_num_batched_tokens, config.max_num_seqs);
  options.max_queued_requests = config.server.max_queued_requests;
  options.enable_prefix_caching = config.enable_prefix_caching;
  options.enable_chunked_prefill = config.enable_chunked_prefill;
  // Prompts that enter in one step leave no state behind a block.
  options.num_state_snapshots =
      engine::default_state_snapshots(model, options.max_num_seqs, options.enable_prefix_caching && options.enable_chunked_prefill);
  options.record_steps = !config.model.enforce_eager;
  if (config.enable_lora) options.adapters = std::make_shared<engine::AdapterSet>(config.max_loras);
  options.logs_routes = config.enable_return_routed_experts;
  options.drafts = {.num_tokens = config.speculative.num_tokens,
                    .min_ngram = config.speculative.min_ngram,
                    .max_ngram = config.speculative.max_ngram,
                    .from_completions = config.speculative.from_completions,
                    .max_stored_tokens = config.speculative.max_stored_tokens,
                    .adapts = config.speculative.adaptive,
                    .from_head = config.speculative.method == config::DraftMethod::kMtp};
  options.seed = static_cast<std::uint64_t>(config.seed);
  options.num_threads = config.compute.num_threads;
  const DType dtype = compute_dtype(config.model.dtype, runtime.device().kind);
  std::size_t per_block = nn::KvCache::bytes_per_block(nn::config_of_shard(model, config.parallel.tp), dtype, options.block_size);
  const std::size_t of_routes =
      options.logs_routes && model.num_experts > 0 ? nn::KvCache::route_bytes_per_block(model, options.block_size) : 0;
  const std::optional<nn::ModelConfig> head = draft_head_config(config, model);
  if (head) per_block += nn::KvCache::hidden_bytes_per_block(model, dtype, options.block_size);
  set_kv_offload(options, config, static_cast<std::int64_t>(per_block) * config.parallel.tp + static_cast<std::int64_t>(of_routes));
  if (const auto drafts = draft_model_config(config)) per_block += nn::KvCache::bytes_per_block(*drafts, dtype, options.block_size);
  if (head) per_block += nn::KvCache::bytes_per_block(*head, dtype, options.block_size);
  if (config.kv.num_blocks) {
    options.num_blocks = *config.kv.num_blocks;
    return options;
  }
  // Room for every running request at full length, but never more than an eighth of what is free on a CPU that other roles share.
  constexpr double kShare = 0.125;
  const std::int64_t blocks_per_seq = (options.max_model_len + options.block_size - 1) / options.block_size;
  const auto affordable =
      static_cast<std::int64_t>(static_cast<double>(runtime.bytes_available()) * kShare / static_cast<double>(per_block));
  options.num_blocks =
      std::clamp<std::int64_t>(options.max_num_seqs * blocks_per_seq, blocks_per_seq + 1, std::max(affordable, blocks_per_seq + 1));
  return options;
}

TextOptions engine_text_options(const config::InferenceConfig& config) {
  TextOptions text;
  text.chat_template = config.model.chat_template;
  text.tool_parser = config.model.tool_call_parser.value_or("");
  text.reasoning_parser = config.model.reasoning_parser.value_or("");
  return text;
}

EngineHost::EngineHost(const config::InferenceConfig& config, std::shared_ptr<DeviceRuntime> runtime, int num_versions)
    : runtime_(std::move(runtime)),
      devices_(devices_beside(runtime_, config.parallel.tp)),
      name_(config.model.name),
      folder_(model_folder(config.model.name)),
      dtype_(compute_dtype(config.model.dtype, runtime_->device().kind)),
      adapter_dtype_(adapter_dtype(config.lora_dtype, dtype_, "lora_dtype")),
      port_(config.server.port),
      gives_blocks_(config.use_pd_kv_transfer) {
  overrides_ = config_overrides(config);
  model_ = nn::load_model_config(folder_, overrides_);
  if (!overrides_.rope_scaling.empty())
    log::info("positions are rotated by model.rope_scaling, not by config.json of the model; up to {} of them", model_.max_position);
  nn::check_shards(model_, config.parallel.tp);
  if (config.enable_return_routed_experts && model_.num_experts == 0)
    fail(ErrorCode::kInvalidArgument, "enable_return_routed_experts: the model {} has no experts", name_);
  config::InferenceConfig planned = config;
  if (is_planned(*runtime_)) {
    plan_ = plan_engine(engine_share(*runtime_, config), config, model_, dtype_, num_versions);
    planned.kv.num_blocks = static_cast<int>(plan_->num_kv_blocks);
    log::info("memory plan: {}", plan_->to_string());
    keep_plan(*plan_, "inference", {});
  }
  start(planned, nullptr);
}

EngineHost::EngineHost(const config::InferenceConfig& config, std::shared_ptr<DeviceRuntime> runtime, nn::WeightsPtr weights)
    : runtime_(std::move(runtime)),
      devices_{runtime_},
      name_(config.model.name),
      folder_(model_folder(config.model.name)),
      dtype_(weights->compute),
      adapter_dtype_(adapter_dtype(config.lora_dtype, dtype_, "lora_dtype")),
      model_(weights->config),
      port_(config.server.port),
      gives_blocks_(config.use_pd_kv_transfer) {
  start(config, std::move(weights));
}

void EngineHost::start(const config::InferenceConfig& config, nn::WeightsPtr weights) {
  text_ = load_text(folder_, engine_text_options(config));
  wants_head_ = draft_head_config(config, model_).has_value();
  load_session_ = std::make_unique<ops::OpSession>(runtime_, config.compute.num_threads);
  for (std::size_t i = 1; i < devices_.size(); ++i)
    other_sessions_.push_back(std::make_unique<ops::OpSession>(devices_[i], config.compute.num_threads));
  if (weights == nullptr)
    weights = load(folder_, PolicyVersion{0}, nullptr);
  else if (wants_head_ && weights->mtp == nullptr)
    weights = nn::with_mtp_head(weights, nn::load_mtp_head(load_session_->context(), *weights, folder_));
  engine::EngineOptions options = engine_options(config, model_, *runtime_);
  options.draft_model = load_draft_model(config);
  engine_ = std::make_unique<engine::Engine>(runtime_, options, std::move(weights));
  log::info("engine: {} parameters in {}{}, {} KV blocks of {} tokens, up to {} requests at once, context {}", model_.num_parameters(),
            dtype_ == DType::kBF16 ? "bfloat16" : "float32",
            devices_.size() == 1 ? "" : fmt::format(" on {} devices that share the layers", devices_.size()),
            engine_->stats().num_blocks_total, options.block_size, options.max_num_seqs, options.max_model_len);
  if (options.draft_model != nullptr)
    log::info("engine: up to {} draft tokens of a sequence in one step, drawn by {} with {} parameters", options.drafts.num_tokens,
              *config.speculative.draft_model, options.draft_model->config.num_parameters());
  else if (wants_head_)
    log::info("engine: up to {} draft tokens of a sequence in one step, drawn by the model's head for multi-token prediction",
              options.drafts.num_tokens);
  else if (options.drafts.num_tokens > 0)
    log::info("engine: up to {} draft tokens of a sequence in one step, looked up in {}", options.drafts.num_tokens,
              options.drafts.from_completions ? "completions of its prompt" : "its own text");
  if (options.num_host_blocks > 0) log::info("engine: {} more KV blocks in host memory", options.num_host_blocks);
  if (options.num_disk_blocks > 0)
    log::info("engine: {} more KV blocks in files below {}", options.num_disk_blocks, options.disk_folder.string());
}

nn::WeightsPtr EngineHost::load_draft_model(const config::InferenceConfig& config) {
  const std::optional<nn::ModelConfig> drafts = draft_model_config(config);
  if (!drafts) return nullptr;
  engine::check_draft_model(*drafts, model_);
  const std::filesystem::path folder = model_folder(*config.speculative.draft_model);
  if (std::error_code ignored; std::filesystem::exists(folder / "tokenizer.json", ignored)) {
    const text::Tokenizer tokenizer = text::Tokenizer::load(folder);
    if (tokenizer.encode(kProbeText) != text_.tokenizer->encode(kProbeText))
      fail(ErrorCode::kInvalidArgument, "speculative.draft_model: wanted a model with the tokenizer of {}, found another in {}", name_,
           folder.string());
  }
  return nn::load_weights(load_session_->context(), *drafts, folder, dtype_, PolicyVersion{0}, nullptr);
}

std::vector<ops::OpContext*> EngineHost::contexts() const {
  std::vector<ops::OpContext*> all{&load_session_->context()};
  for (const auto& session : other_sessions_) all.push_back(&session->context());
  return all;
}

void EngineHost::log_memory() const {
  if (plan_) plan_->log_peak(runtime_->peak_bytes(), "the engine");
}

engine::AdapterWeights EngineHost::load_adapter(const nn::PeftSource& source, std::int64_t max_rank) {
  const std::lock_guard lock(loading_);
  const nn::PeftLimits limits{.max_rank = max_rank, .base = [this](DType) { return identity_of(engine_->weights()); }, .base_name = name_};
  nn::StoredAdapterPtr stored = nn::read_peft_adapter(model_, source, adapter_dtype_, *load_session_->context().pool, limits);
  warn_of_other_base(*stored, source);
  // A GPU gets it when a request names it; in host memory it is ready at once.
  std::uint64_t hash = gives_blocks_ ? 1 : 0;  // 0: not told apart by their values
  for (std::size_t i = 0; gives_blocks_ && i < stored->blocks.size(); ++i)
    hash = hash_bytes(std::as_bytes(std::span(stored->blocks[i])), hash);
  if (runtime_->device().kind == DeviceKind::kCuda) return {nullptr, std::move(stored), hash};
  return {nn::pack_adapter(contexts(), model_, *stored), nullptr, hash};
}

nn::BaseIdentity EngineHost::identity_of(const nn::WeightsPtr& weights) {
  if (weights->base_checksum != nullptr) return {.dtype = weights->compute, .checksum = weights->base_checksum->combined};
  if (identified_.lock() != weights) {
    nn::Weights base = *weights;
    base.adapter = nullptr;
    identity_ = {.dtype = base.compute, .checksum = nn::checksum(load_session_->context(), base).combined};
    identified_ = weights;
  }
  return identity_;
}

void EngineHost::warn_of_other_base(const nn::StoredAdapter& adapter, const nn::PeftSource& source) const {
  if (adapter.base) return;
  const nn::ModelConfig published = overrides_.rope_scaling.empty() ? model_ : nn::load_model_config(folder_);
  if (const std::string doubt = nn::doubt_of_base(adapter.config, published, folder_, name_); !doubt.empty())
    log::warning("the adapter {}: {}", source.folder.string(), doubt);
}

weights::Received EngineHost::take(const std::string& store, PolicyVersion version, const std::string& adapter,
                                   std::chrono::milliseconds timeout) {
  const weights::Acceptable acceptable{.dtype = dtype_,
                                       .num_values = nn::make_tensor_table(model_)->num_master_elements(),
                                       .adapter = adapter,
                                       .max_adapter_bytes = nn::max_peft_image_bytes(model_)};
  std::call_once(receives_, [this] {
    // Each of several devices takes its part out of host memory, unless the first has room for the whole.
    const bool is_on_device = devices_.size() == 1 || (plan_ && plan_->part(kReceivedWeights) > 0);
    receiver_ = std::make_unique<weights::WeightReceiver>(
        weights::WeightReceiverOptions{.engine = fmt::format("{}:{}", weights::own_machine(), port_),
                                       .path = is_on_device ? weights::make_device_path(*runtime_) : weights::DevicePath{},
                                       .memory = is_on_device ? runtime_ : make_cpu_runtime()});
  });
  return receiver_->receive(store, version, acceptable, timeout);
}

nn::WeightsPtr EngineHost::receive(const std::string& store, PolicyVersion version, const nn::WeightsPtr& previous,
                                   std::chrono::milliseconds timeout) {
  const weights::Received received = take(store, version, "", timeout);
  const std::lock_guard lock(loading_);
  if (received.is_adapter) return with_adapter({image_name(store, "", version), received.values}, version, previous);
  if (devices_.size() > 1) return nn::load_shared_weights(contexts(), model_, received.values, version, previous);
  return nn::load_flat_weights(load_session_->context(), model_, received.values, version, previous);
}

engine::AdapterWeights EngineHost::receive_adapter(const std::string& store, const std::string& name, PolicyVersion version,
                                                   std::int64_t max_rank, std::chrono::milliseconds timeout) {
  return load_adapter({image_name(store, name, version), take(store, version, name, timeout).values}, max_rank);
}

nn::WeightsPtr EngineHost::with_adapter(const nn::PeftSource& source, PolicyVersion version, const nn::WeightsPtr& previous) {
  PRL_CHECK(previous != nullptr, "an adapter without a base model");
  auto weights = std::make_shared<nn::Weights>(*previous);
  weights->version = version;
  weights->adapter = nullptr;
  if (weights->base_checksum == nullptr)
    weights->base_checksum = std::make_shared<const nn::WeightsChecksum>(nn::checksum(load_session_->context(), *weights));
  const nn::PeftLimits limits{.base = [&](DType) { return identity_of(weights); }, .base_name = name_};
  const auto stored = nn::read_peft_adapter(model_, source, adapter_dtype_, *load_session_->context().pool, limits);
  weights->adapter = nn::pack_adapter(contexts(), model_, *stored);
  for (std::size_t i = 0; i < weights->others.size(); ++i) {
    auto part = std::make_shared<nn::Weights>(*weights->others[i]);
    part->version = version;
    part->adapter = weights->adapter->others[i];
    weights->others[i] = std::move(part);
  }
  return weights;
}

nn::WeightsPtr EngineHost::load(const std::filesystem::path& folder, PolicyVersion version, const nn::WeightsPtr& previous) {
  const std::lock_guard lock(loading_);
  std::error_code ignored;
  if (previous != nullptr && std::filesystem::exists(folder / nn::kPeftConfig, ignored)) return with_adapter(folder, version, previous);
  bool has_head = false;
  if (const auto file = folder / "config.json"; previous != nullptr && std::filesystem::exists(file, ignored)) {
    const nn::ModelConfig found = nn::load_model_config(folder, overrides_);
    nn::check_same_model(model_, found, file);
    has_head = found.mtp.has_value();
  }
  nn::WeightsPtr weights = devices_.size() > 1 ? nn::load_shared_weights(contexts(), model_, folder, dtype_, version, previous)
                                               : nn::load_weights(load_session_->context(), model_, folder, dtype_, version, previous);
  // The first device has the head, whole. Weights without a head leave the one there.
  if (wants_head_ && (previous == nullptr || has_head))
    weights = nn::with_mtp_head(weights, nn::load_mtp_head(load_session_->context(), *weights, folder));
  return weights;
}

}  // namespace prl::launch
