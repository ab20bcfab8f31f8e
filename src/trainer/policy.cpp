#include "trainer/policy.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "nn/mtp_head.hpp"
#include "nn/peft.hpp"
#include "ops/pointwise.hpp"
#include "trainer/expert_group.hpp"
#include "trainer/optim/host_state.hpp"

namespace prl::trainer {

nn::ModelConfig model_config(const PolicyOptions& options) {
  if (options.shape) {
    PRL_CHECK(options.random_init, "a shape has no weights to load");
    return *options.shape;
  }
  nn::ModelConfig config =
      nn::load_model_config(options.model, {.eight_bits = options.eight_bits, .attends_to_latents = options.attends_to_latents});
  if (options.mtp && options.mtp->init && !config.mtp && !config.has_single_parts) config.mtp = nn::MtpConfig{};
  if (options.mtp && !config.mtp)
    fail(ErrorCode::kInvalidArgument,
         "model.mtp is set, and {} has no head for multi-token prediction that this build computes; model.mtp.init makes one",
         options.model.string());
  if (options.num_layers) {
    if (!options.random_init)
      fail(ErrorCode::kInvalidArgument, "[model] debug.num_layers cuts the model, so it needs debug.random_init = true");
    config.num_layers = std::min(config.num_layers, *options.num_layers);
    config.raw_json.clear();  // it would still say the full number of layers
    config.vision.reset();    // what is saved is described anew, as a model for text
  }
  return config;
}

nn::TensorTablePtr trained_tensors(const PolicyOptions& options, const nn::ModelConfig& model) {
  return options.lora ? nn::make_adapter_table(model, *options.lora) : nn::make_tensor_table(model);
}

ShardPlan shard_plan(const nn::TensorTable& table, int num_ranks, const MasterShare& share) {
  return {table, num_ranks, share.keeps_blocks, share.divides_experts};
}

namespace {

/// Of a row's dropout masks: by its tokens, so that it does not matter which rank has the row, nor when.
std::uint64_t dropout_seed(const PolicyOptions& options, PolicyVersion version, const wire::MicroBatch& row) {
  const std::string_view ids(reinterpret_cast<const char*>(row.input_ids.data()), row.input_ids.size() * sizeof(row.input_ids[0]));
  return mix_seed(options.seed, static_cast<std::uint64_t>(version.value), hash_bytes(ids));
}

std::vector<std::int32_t> cumulative(const wire::MicroBatch& row) {
  std::vector<std::int32_t> cu{0};
  for (const std::int32_t n : row.sequence_lengths) cu.push_back(cu.back() + n);
  return cu;
}

/// The same weights, which know their own checksum: who adapts them need not form it again.
nn::WeightsPtr with_checksum(ops::OpContext& context, const nn::WeightsPtr& weights) {
  auto known = std::make_shared<nn::Weights>(*weights);
  known->base_checksum = std::make_shared<const nn::WeightsChecksum>(nn::checksum(context, *weights));
  return known;
}

/// Of the model's folder. Error{kInvalidArgument} if it has none.
nn::VisionTowerPtr load_tower(ops::OpContext& context, const PolicyOptions& options, const nn::ModelConfig& config) {
  nn::VisionTowerPtr tower;
  if (config.vision) tower = nn::VisionTower::load(context, *config.vision, options.model, options.compute);
  if (tower == nullptr)
    fail(ErrorCode::kInvalidArgument, "model.vlm is set, and {} has no vision tower (vision_config in config.json, tensors in its files)",
         options.model.string());
  return tower;
}

/// Engines of this process compute with the same tower; later versions have that of the one before.
nn::WeightsPtr with_tower(nn::WeightsPtr weights, const nn::VisionTowerPtr& tower) {
  if (tower == nullptr || weights->vision != nullptr) return weights;
  auto seeing = std::make_shared<nn::Weights>(*weights);
  seeing->vision = tower;
  return seeing;
}

/// The weights with the frozen tower and with the head that is trained, if there are any.
nn::WeightsPtr with_others(nn::WeightsPtr weights, const nn::VisionTowerPtr& tower, const MtpTraining* head) {
  weights = with_tower(std::move(weights), tower);
  return head == nullptr ? weights : nn::with_mtp_head(weights, head->weights_of(*weights));
}

/// All masters are held, and on the device, so that weights may be packed from them.
bool are_at_hand(const nn::Parameters& masters, const PolicyOptions& options) noexcept {
  return masters.holds_all() && options.masters_host == nullptr;
}

/// The held part of the model that is trained or adapted, as it is at first.
void fill_model(nn::Parameters& parameters, const PolicyOptions& options) {
  if (options.random_init)
    parameters.init_random(options.seed);
  else
    nn::load_parameters(parameters, options.model);
}

/// The held part of the masters at first. `shares_base`: other policies adapt the base, too.
void fill_initial(nn::Parameters& parameters, const PolicyOptions& options, const std::shared_ptr<DeviceRuntime>& runtime,
                  bool shares_base) {
  if (!options.lora) return fill_model(parameters, options);
  const bool has_saved = !options.lora->modules_to_save.empty();
  if (!options.random_init) {
    // A base that is there already has been checked, and has all that an adapter alone leaves as it is.
    if (!shares_base || has_saved) nn::load_parameters(parameters, options.model);
  } else if (has_saved) {
    nn::Parameters all(runtime, parameters.config());
    all.init_random(options.seed);
    std::vector<float> values;
    for (const nn::NamedParameter& p : parameters.named()) {
      if (nn::is_lora(p.block)) continue;
      values.resize(static_cast<std::size_t>(p.num_elements()));
      runtime->copy_to_host(values.data(), all.at(p.name).value.data(), values.size() * sizeof(float));
      parameters.write_held(p.offset, values);
    }
  }
  nn::init_adapter(parameters, options.seed);
}

/// Loads what lies outside of layers, which are those of version 0 then.
void load_outside(ops::OpContext& context, nn::LayeredWeights& layered, const PolicyOptions& options) {
  std::vector<nn::ElementRange> ranges;
  for (const nn::GradSection& section : layered.outside()) ranges.push_back(section.range);
  std::ranges::sort(ranges, {}, &nn::ElementRange::begin);
  const nn::Weights& weights = *layered.weights();
  nn::Parameters outside(context.runtime, weights.config, weights.table, nn::ElementRanges(ranges));
  fill_model(outside, options);
  for (std::size_t i = 0; i < layered.outside().size(); ++i)
    ops::cast(context, layered.outside_values(i), outside.values_in(layered.outside()[i].range));
  layered.renew(PolicyVersion{0});
}

DType adapter_dtype(const PolicyOptions& options) noexcept { return options.adapter_dtype.value_or(options.compute); }

}  // namespace

BaseModel load_base_model(std::shared_ptr<DeviceRuntime> runtime, const PolicyOptions& options) {
  PRL_CHECK(!options.random_init, "a base that is shared is loaded");
  BaseModel base{.runtime = runtime, .session = std::make_shared<ops::OpSession>(runtime, options.num_threads), .weights = {}, .tower = {}};
  ops::OpContext& context = base.session->context();
  const nn::ModelConfig config = model_config(options);
  base.weights = with_checksum(context, nn::load_weights(context, config, options.model, options.compute, PolicyVersion{0}, nullptr, true));
  if (options.takes_images) base.tower = load_tower(context, options, config);
  return base;
}

Policy::Policy(std::shared_ptr<DeviceRuntime> runtime, PolicyOptions options)
    : Policy(runtime, std::make_shared<ops::OpSession>(runtime, options.num_threads), nullptr, nullptr, options) {}

Policy::Policy(const BaseModel& base, PolicyOptions options)
    : Policy(base.runtime, base.session, base.weights, base.tower, std::move(options)) {
  PRL_CHECK(options_.lora.has_value() && !options_.gathers_layers, "policies share what they do not train, whole");
}

Policy::Policy(std::shared_ptr<DeviceRuntime> runtime, std::shared_ptr<ops::OpSession> session, nn::WeightsPtr base,
               nn::VisionTowerPtr tower, PolicyOptions options)
    : options_(std::move(options)),
      runtime_(std::move(runtime)),
      session_(std::move(session)),
      parameters_([this, config = model_config(options_)] {
        const nn::TensorTablePtr table = trained_tensors(options_, config);
        const MasterShare& share = options_.share;
        nn::Parameters::Allocate allocate;
        if (options_.masters_host != nullptr)
          allocate = [host = HostState(runtime_, options_.masters_host)](std::int64_t n) mutable { return host.zeros({n}, DType::kF32); };
        return nn::Parameters(runtime_, config, table, shard_plan(*table, share.num_ranks, share).elements(share.rank),
                              std::move(allocate));
      }()),
      base_(std::move(base)),
      shares_base_(base_ != nullptr) {
  if (options_.lora && adapter_dtype(options_) != options_.compute && !are_at_hand(parameters_, options_))
    fail(ErrorCode::kNotImplemented, "model.lora.dtype: adapters in float32 beside a bfloat16 model whose masters lie elsewhere");
  if (options_.takes_images && tower == nullptr) tower = load_tower(context(), options_, config());
  images_ = std::make_unique<RowImages>(context(), std::move(tower));
  if (options_.mtp) {
    if (options_.lora || options_.gathers_layers || !are_at_hand(parameters_, options_) || options_.share.num_ranks > 1)
      fail(ErrorCode::kNotImplemented, "model.mtp: a head is trained beside a policy whose masters are whole on one device");
    head_ = std::make_unique<MtpTraining>(context(), config(), *options_.mtp, options_.seed);
  }
  if (options_.lora && base_ == nullptr && !options_.gathers_layers) base_ = with_checksum(context(), initial_weights());
  if (options_.freezes_routers) {
    if (config().num_experts == 0) log::warning("model.freeze_moe_router has no effect: a {} model has no routers", config().model_type);
    parameters_.freeze(nn::Block::kRouter);
    parameters_.freeze(nn::Block::kRouterOffset);
  }
  if (options_.replays_routes && config().num_experts == 0)
    fail(ErrorCode::kInvalidArgument, "enable_router_replay: a {} model has no routers", config().model_type);
  if (options_.balances_routes && config().num_experts == 0)
    log::warning("model.debug.force_balanced_routing has no effect: a {} model has no routers", config().model_type);
  const bool splits_tied = options_.share.splits_tied && parameters_.table()->has_tied_head();
  const bool divides_experts = options_.share.divides_experts;
  PRL_CHECK(!divides_experts || options_.gathers_layers, "ranks divide the experts of weights whose layers are brought");
  if (divides_experts) check_experts_divide(config(), options_.share.num_ranks);
  parameters_.divide_grads(options_.share.divides_grads || splits_tied || divides_experts, splits_tied, options_.share.grad_places,
                           divides_experts);
  parameters_.ensure_grads();
  parameters_.zero_grads();
  model_ = std::make_unique<nn::TrainableModel>(context(), parameters_, options_.checkpointing, options_.offload);
  model_->keep_logits(options_.num_kept_logits);
  probe_model_ = std::make_unique<nn::InferenceModel>(context());
  PRL_CHECK(!options_.gathers_layers || !options_.lora || options_.lora->modules_to_save.empty(), "layers of a base with trained modules");
  if (divides_experts)
    share_experts({options_.share.rank, options_.share.num_ranks});
  else if (options_.gathers_layers)
    layered_ = std::make_unique<nn::LayeredWeights>(context(), config(), options_.compute);
  load_initial();
}

void Policy::share_experts(nn::ExpertShare share) {
  PRL_CHECK(options_.share.divides_experts, "experts that are not divided");
  if (layered_ != nullptr && layered_->weights()->experts == share) return;
  auto layered = std::make_unique<nn::LayeredWeights>(context(), config(), options_.compute, share);
  if (layered_ != nullptr) {
    for (std::size_t i = 0; i < layered->outside().size(); ++i) {
      const Tensor &to = layered->outside_values(i), &from = layered_->outside_values(i);
      runtime_->copy_within(to.data(), from.data(), from.num_bytes());
    }
    layered->renew(weights_->version);
  }
  layered_ = std::move(layered);
  weights_ = layered_->weights();
}

void Policy::pass(bool is_forward) {
  if (!options_.share.divides_experts) return is_forward ? model_->pass_forward(*weights_) : model_->pass_backward(*weights_);
  if (!is_forward) return model_->backward(std::vector<float>(static_cast<std::size_t>(num_row_tokens_), 0.0f));
  wire::MicroBatch row;
  row.input_ids = row.position_ids = {0};
  row.sequence_lengths = {1};
  row.temperatures = {1.0f};
  forward(row, std::vector<std::int32_t>{-1});
}

Policy::~Policy() = default;

nn::WeightsPtr Policy::initial_weights() {
  const PolicyVersion start{0};
  nn::WeightsPtr weights;
  if (!options_.random_init) {
    weights = nn::load_weights(context(), config(), options_.model, options_.compute, start, nullptr, /*with_backward=*/true,
                               /*keeps_values=*/!options_.lora);
  } else {
    nn::Parameters all(runtime_, config());
    all.init_random(options_.seed);
    weights = nn::make_weights(context(), all, options_.compute, start, true, nullptr);
  }
  return with_others(std::move(weights), images_->tower(), head_.get());
}

void Policy::write_layer(nn::ElementRange of_model, const Tensor& to) {
  if (!options_.lora) return round(of_model, to);
  if (of_model.count() == 0) return;
  nn::Parameters part(runtime_, config(), layered_->weights()->table, nn::ElementRanges({of_model}));
  fill_model(part, options_);
  ops::cast(context(), to, part.values_in(of_model));
}

void Policy::know_base(const std::function<bool(bool)>& any) {
  // Where one does not know it, as one that has joined later, all bring the layers of which it is formed.
  if (!options_.lora || !any(base_->base_checksum == nullptr)) return;
  base_ = with_checksum(context(), layered_->weights());
  auto known = std::make_shared<nn::Weights>(*weights_);
  known->base_checksum = base_->base_checksum;
  weights_ = std::move(known);
}

void Policy::load_initial() {
  late_.reset();
  fill_initial(parameters_, options_, runtime_, shares_base_);
  gathered_ = {};
  if (layered_ != nullptr && (!options_.lora || base_ == nullptr)) {
    load_outside(context(), *layered_, options_);
    (options_.lora ? base_ : weights_) = layered_->weights();
  }
  if (layered_ != nullptr && !options_.lora) return;
  if (are_at_hand(parameters_, options_)) return refresh(PolicyVersion{0});
  if (options_.lora) {
    nn::Parameters all(runtime_, config(), parameters_.table());
    fill_initial(all, options_, runtime_, shares_base_);
    weights_ =
        with_tower(nn::adapt_weights(context(), all, *options_.lora, adapter_dtype(options_), base_, PolicyVersion{0}), images_->tower());
  } else {
    weights_ = initial_weights();
  }
}

void Policy::gather_values(bool asks) {
  gathered_ = asks ? Tensor::zeros(make_cpu_runtime(), {parameters_.table()->num_master_elements()}, options_.compute) : Tensor();
  layered_->for_each_section([&](const nn::GradSection& section, const Tensor& values) {
    if (asks) runtime_->copy_to_host(gathered_.slice(section.range.begin, section.range.count()).data(), values.data(), values.num_bytes());
  });
}

void Policy::save(const std::filesystem::path& folder, const nn::Companions& companions, std::uint64_t max_shard_bytes) const {
  if (options_.lora)
    nn::save_merged(weights(), folder, options_.compute, companions, max_shard_bytes);
  else if (gathered_.defined())
    nn::save_model_folder(config(), nn::flat_sources(*parameters_.table(), gathered_), folder, options_.compute, companions,
                          max_shard_bytes);
  else if (parameters_.holds_all() && config().eight_bits == nn::EightBits::kNone)  // else what is computed with is saved, not the masters
    nn::save_pretrained(parameters_, folder, options_.compute, companions, max_shard_bytes,
                        head_ != nullptr ? &head_->parameters() : nullptr);
  else
    nn::save_merged(weights(), folder, options_.compute, companions, max_shard_bytes);
}

void Policy::save_for_engines(const std::filesystem::path& folder, const nn::Companions& companions, std::uint64_t max_shard_bytes) const {
  if (!options_.lora) return save(folder, companions, max_shard_bytes);
  nn::make_model_folder(
      folder, [&](const std::filesystem::path& temporary) { nn::save_peft_adapter(*weights(), *parameters_.table(), temporary); });
}

Tensor Policy::room_for_weights() {
  if (are_at_hand(parameters_, options_) && (!ops::shares_weights(context()) || options_.lora)) return {};
  return Tensor::empty(runtime_, {parameters_.table()->num_master_elements()}, options_.compute);
}

void Policy::round(nn::ElementRange masters, const Tensor& to) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 24;
  for (std::int64_t begin = masters.begin; begin < masters.end; begin += kPiece) {
    const nn::ElementRange piece{begin, std::min(begin + kPiece, masters.end)};
    Tensor values = parameters_.values_in(piece);
    if (options_.masters_host != nullptr) {
      const Tensor on_device = Tensor::empty(runtime_, values.shape(), DType::kF32);
      runtime_->copy_from_host(on_device.data(), values.data(), values.num_bytes());
      values = on_device;
    }
    ops::cast(context(), to.slice(begin - masters.begin, piece.count()), values);
  }
}

Tensor Policy::flat_values() {
  if (layered_ != nullptr) {
    PRL_CHECK(gathered_.defined(), "values that were not gathered");
    return gathered_;
  }
  if (are_at_hand(parameters_, options_) && !weights()->flat.defined()) return nn::flat_values(context(), parameters_, options_.compute);
  return nn::flat_values(weights());
}

void Policy::refresh(PolicyVersion version, nn::LateValues rounded) {
  if (layered_ != nullptr && !options_.lora) {
    gathered_ = {};
    return layered_->renew(version);
  }
  std::unique_ptr<nn::LateWeights> late;  // in place of those that are, once it is made
  if (rounded.await != nullptr) {
    PRL_CHECK(!options_.lora, "late values of an adapter");
    late = std::make_unique<nn::LateWeights>(context(), parameters_, options_.compute, version, true, weights_, std::move(rounded));
    weights_ = late->weights();
  } else if (options_.lora) {
    weights_ = with_tower(nn::adapt_weights(context(), parameters_, *options_.lora, adapter_dtype(options_), base_, version,
                                            are_at_hand(parameters_, options_) ? Tensor() : rounded.values),
                          images_->tower());
  } else {
    weights_ = with_others(nn::make_weights(context(), parameters_, options_.compute, version, true, weights_, rounded.values),
                           images_->tower(), head_.get());
  }
  late_ = std::move(late);
}

const nn::WeightsPtr& Policy::weights() const {
  if (late_ != nullptr) late_->complete();
  return weights_;
}

void Policy::share_rows(const RowCut& cut, ContextGroup* group) {
  PRL_CHECK(cut.num_ranks == (group != nullptr ? group->size() : 1), "rows for {} ranks", cut.num_ranks);
  check_row_cut(config(), cut);
  cut_ = cut;
  group_ = group;
}

namespace {

/// nn::PackedBatch::experts_LTK of tokens [first, first + count) of the row; of those behind its end nothing is known.
std::vector<std::int32_t> experts_of(const wire::MicroBatch& row, std::size_t first, std::size_t count) {
  const wire::RoutedExperts& from = row.routed_experts;
  if (from.empty()) return {};
  const auto K = static_cast<std::size_t>(from.top_k), L = static_cast<std::size_t>(from.num_layers);
  std::vector<std::int32_t> out(L * count * K, -1);
  const std::size_t end = std::min(first + count, static_cast<std::size_t>(from.num_tokens()));
  for (std::size_t t = first; t < end; ++t)
    for (std::size_t l = 0; l < L; ++l)
      for (std::size_t k = 0; k < K; ++k) out[(l * count + t - first) * K + k] = from.ids[(t * L + l) * K + k];
  return out;
}

/// The same of tokens that take the experts in turn.
std::vector<std::int32_t> experts_in_turn(const nn::ModelConfig& model, std::size_t first, std::size_t count) {
  const auto K = static_cast<std::size_t>(model.num_active_experts), E = static_cast<std::size_t>(model.num_experts);
  if (E == 0) return {};
  std::vector<std::int32_t> out;
  out.reserve(static_cast<std::size_t>(model.num_layers) * count * K);
  for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
    for (std::size_t i = first * K; i < (first + count) * K; ++i) out.push_back(static_cast<std::int32_t>(i % E));
  return out;
}

/// The same of those that tokens do not get from the routers; empty where they do.
std::vector<std::int32_t> given_experts(const PolicyOptions& options, const nn::ModelConfig& model, const wire::MicroBatch& row,
                                        std::size_t first, std::size_t count) {
  if (options.balances_routes) return experts_in_turn(model, first, count);
  return options.replays_routes ? experts_of(row, first, count) : std::vector<std::int32_t>();
}

}  // namespace

nn::TokenStats Policy::forward(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T) {
  if (late_ != nullptr) late_->begin();
  num_row_tokens_ = static_cast<std::int64_t>(row.input_ids.size());
  std::vector<std::int32_t> cu = cumulative(row);
  const std::uint64_t seed = options_.lora && options_.lora->dropout > 0 ? dropout_seed(options_, weights_->version, row) : 0;
  if (cut_.num_leaves == 1) {
    const std::vector<std::int32_t> experts = given_experts(options_, config(), row, 0, row.input_ids.size());
    nn::PackedBatch batch{
        .ids_T = row.input_ids, .positions_T = row.position_ids, .cu_seqlens = cu, .dropout_seed = seed, .experts_LTK = experts};
    images_->add(row, batch);
    if (head_ != nullptr) head_->read_row(row, targets_T);
    return model_->forward(weights_, batch, targets_T, row.temperatures);
  }
  // Filled up by a sequence of which no token is a target, so that all leaves have as many tokens.
  const auto padded = static_cast<std::size_t>(cut_.padded(num_row_tokens_));
  std::vector<std::int32_t> ids(row.input_ids), positions(row.position_ids), targets(targets_T.begin(), targets_T.end());
  std::vector<float> temperatures(row.temperatures);
  for (std::size_t i = ids.size(); i < padded; ++i) positions.push_back(static_cast<std::int32_t>(i - ids.size()));
  ids.resize(padded, 0);
  targets.resize(padded, -1);
  temperatures.resize(padded, 1.0f);
  if (padded > row.input_ids.size()) cu.push_back(static_cast<std::int32_t>(padded));
  const std::size_t part = padded / static_cast<std::size_t>(cut_.num_ranks);
  const std::size_t first = part * static_cast<std::size_t>(group_ != nullptr ? group_->rank() : 0);
  const auto own = [&](const auto& values) { return std::span(values).subspan(first, part); };
  const std::vector<std::int32_t> experts = given_experts(options_, config(), row, first, part);
  nn::PackedBatch batch{.ids_T = own(ids),
                        .positions_T = own(positions),
                        .cu_seqlens = cu,
                        .dropout_seed = seed,
                        .exchange = group_,
                        .num_token_blocks = cut_.leaves_of_rank(),
                        .experts_LTK = experts};
  images_->add(row, batch);
  nn::TokenStats stats = model_->forward(weights_, batch, own(targets), own(temperatures));
  if (group_ != nullptr) stats = {group_->gather(stats.logp_T), group_->gather(stats.entropy_T)};
  stats.logp_T.resize(static_cast<std::size_t>(num_row_tokens_));
  stats.entropy_T.resize(static_cast<std::size_t>(num_row_tokens_));
  return stats;
}

void Policy::backward(std::span<const float> dlogp_T) {
  if (cut_.num_leaves == 1) {
    model_->backward(dlogp_T);
    if (head_ != nullptr) head_->add_row(weights_, model_->hidden());
    return;
  }
  std::vector<float> padded(dlogp_T.begin(), dlogp_T.end());
  padded.resize(static_cast<std::size_t>(cut_.padded(num_row_tokens_)), 0.0f);
  const std::size_t part = padded.size() / static_cast<std::size_t>(cut_.num_ranks);
  model_->backward(std::span<const float>(padded).subspan(part * static_cast<std::size_t>(group_ != nullptr ? group_->rank() : 0), part));
}

nn::TokenStats Policy::evaluate(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T) {
  if (late_ != nullptr) late_->begin();
  const auto cu = cumulative(row);
  const std::vector<std::int32_t> experts =
      options_.balances_routes ? experts_in_turn(config(), 0, row.input_ids.size()) : std::vector<std::int32_t>();
  nn::PackedBatch batch{.ids_T = row.input_ids, .positions_T = row.position_ids, .cu_seqlens = cu, .experts_LTK = experts};
  images_->add(row, batch);
  return model_->evaluate(weights_, batch, targets_T, row.temperatures);
}

std::size_t Policy::reserve(std::int64_t num_tokens) {
  const std::size_t before = runtime_->bytes_in_use();
  wire::MicroBatch row;
  std::vector<std::int32_t> targets;
  const std::int64_t longest = std::min(num_tokens, config().max_position);
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (i % longest == 0) row.sequence_lengths.push_back(0);
    ++row.sequence_lengths.back();
    row.position_ids.push_back(static_cast<std::int32_t>(i % longest));
    row.input_ids.push_back(static_cast<std::int32_t>(i % config().vocab_size));
    targets.push_back(row.input_ids.back());
  }
  row.temperatures.assign(targets.size(), 1.0f);
  model_->expect_tokens(num_tokens, options_.compute);
  forward(row, targets);
  backward(std::vector<float>(targets.size(), 0.0f));
  model_->fit_memory();
  parameters_.zero_grads();
  runtime_->synchronize();
  const std::size_t after = runtime_->bytes_in_use();
  return after > before ? after - before : 0;
}

weights::WeightManifest Policy::manifest() {
  weights::WeightManifest manifest;
  manifest.version = weights()->version;
  manifest.checksum = nn::checksum(context(), *weights()).combined;
  manifest.compute_dtype = std::string(to_string(options_.compute));
  manifest.probe_prompt = nn::probe_prompt(config().vocab_size);
  manifest.probe_logprobs = nn::probe_logprobs(*probe_model_, context(), *weights(), manifest.probe_prompt);
  return manifest;
}

}  // namespace prl::trainer
