#include "nn/decoder.hpp"

#include <algorithm>
#include <numeric>

#include "autograd/tape.hpp"
#include "autograd/token_blocks.hpp"
#include "base/error.hpp"
#include "base/rng.hpp"
#include "nn/adapter_bank.hpp"
#include "nn/decode_recorder.hpp"
#include "nn/layers.hpp"
#include "ops/lm_head.hpp"
#include "ops/vision.hpp"

namespace prl::nn {
namespace {
using autograd::Arena;
using autograd::AttentionIndex;
using autograd::Frame;
using autograd::Var;

template <typename T>
TensorView upload(ops::OpContext& ctx, Arena& arena, std::span<const T> values, DType dtype) {
  const TensorView view = arena.take({static_cast<std::int64_t>(values.size())}, dtype);
  ctx.runtime->copy_from_host(view.data, values.data(), values.size_bytes());
  return view;
}

void check_tokens(const ModelConfig& config, std::span<const std::int32_t> ids, std::span<const std::int32_t> positions,
                  std::int64_t num_drawn = 0) {
  if (ids.empty() || ids.size() != positions.size())
    fail(ErrorCode::kShape, "[decoder] a batch of {} ids with {} positions; at least one of each is wanted", ids.size(), positions.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < -num_drawn || ids[i] >= config.vocab_size)
      fail(ErrorCode::kInvalidArgument, "[decoder] token {} is id {}, the vocabulary has {}", i, ids[i], config.vocab_size);
    if (positions[i] < 0 || positions[i] >= config.max_position)
      fail(ErrorCode::kOverlong, "[decoder] token {} is at position {}, the model ends at {}", i, positions[i], config.max_position);
  }
}

void check_packed(const ModelConfig& config, const PackedBatch& batch) {
  check_tokens(config, batch.ids_T, batch.positions_T);
  const int num_parts = batch.exchange != nullptr ? batch.exchange->size() : 1;
  const auto T = static_cast<std::int32_t>(batch.ids_T.size()) * num_parts;
  bool good = batch.cu_seqlens.size() >= 2 && batch.cu_seqlens.front() == 0 && batch.cu_seqlens.back() == T;
  for (std::size_t s = 1; good && s < batch.cu_seqlens.size(); ++s) good = batch.cu_seqlens[s] >= batch.cu_seqlens[s - 1];
  if (!good) fail(ErrorCode::kShape, "[decoder] cu_seqlens must rise from 0 to the {} tokens of the batch", T);
}

/// The adapters of a batch's rows: those that rows name, and that of the weights for the others, whose indices `rest` holds.
std::vector<AdapterRows> adapters_of(const Weights& weights, std::span<const AdapterRows> named, std::int64_t num_tokens,
                                     std::vector<std::int32_t>& rest) {
  std::vector<AdapterRows> all(named.begin(), named.end());
  if (weights.adapter == nullptr) return all;
  if (named.empty()) return {{weights.adapter.get(), {}}};
  std::vector<bool> is_named(static_cast<std::size_t>(num_tokens), false);
  for (const AdapterRows& of : named)
    for (const std::int32_t row : of.rows) is_named[static_cast<std::size_t>(row)] = true;
  rest.clear();
  for (std::int64_t row = 0; row < num_tokens; ++row)
    if (!is_named[static_cast<std::size_t>(row)]) rest.push_back(static_cast<std::int32_t>(row));
  if (!rest.empty()) all.push_back({weights.adapter.get(), rest});
  return all;
}

/// log p and entropy of targets under h; lse stays on the device for the backward pass.
/// Log-probabilities and entropies lie together, so that one copy moves both to the host.
struct HeadResult {
  TensorView logp_T, entropy_T, lse_T;
};
HeadResult make_head_result(Arena& arena, std::int64_t num_tokens) {
  const TensorView both_2T = arena.take({2, num_tokens}, DType::kF32);
  const auto half = [&](std::int64_t i) { return both_2T.rows(i, 1).reshaped({num_tokens}); };
  return {half(0), half(1), arena.take({num_tokens}, DType::kF32)};
}
HeadResult run_head(ops::OpContext& ctx, Arena& arena, const Weights& weights, ConstTensorView h_TH, std::span<const std::int32_t> targets,
                    std::span<const float> temperatures) {
  const HeadResult r = make_head_result(arena, h_TH.shape.num_rows());
  ops::lm_head_logprob(ctx, r.logp_T, r.entropy_T, r.lse_T, h_TH, weights.lm_head(), targets, temperatures);
  return r;
}

/// What the backward pass of the head reads and writes. The logits lie above everything else, and end with that pass.
struct HeadWork {
  TensorView dlogp_T, dh_TH;
  Arena::Mark below_logits;
  TensorView kept_RB = {};
};

std::vector<float> download(ops::OpContext& ctx, ConstTensorView view) {
  std::vector<float> out(static_cast<std::size_t>(view.shape.num_elements()));
  ctx.runtime->copy_to_host(out.data(), view.data, out.size() * sizeof(float));
  return out;
}

/// Each sequence has a state; that no two have the same one is the ops' to check.
void check_states(const PagedBatch& batch, std::int64_t num_states) {
  const bool good = batch.state_slot.size() == batch.context_len.size() &&
                    std::ranges::all_of(batch.state_slot, [&](std::int32_t slot) { return slot >= 0 && slot < num_states; });
  if (!good)
    fail(ErrorCode::kShape, "[decoder] {} states for {} sequences, one of the cache's {} is wanted for each", batch.state_slot.size(),
         batch.context_len.size(), num_states);
}

/// Which slots hold hidden states.
void check_hidden(const Weights& weights, const KvCache& cache, const PagedBatch& batch) {
  const std::size_t T = batch.ids_T.size();
  const std::int64_t num_slots = cache.hidden().defined() ? cache.hidden().shape()[0] : 0;
  const auto check = [&](const char* what, std::span<const std::int32_t> slots, bool is_wanted, std::int32_t least) {
    const bool good = slots.size() == (is_wanted ? T : 0) &&
                      std::ranges::all_of(slots, [&](std::int32_t slot) { return slot >= least && slot < num_slots; });
    if (!good)
      fail(ErrorCode::kShape, "[decoder] {} slots of hidden states to {}, wanted {} of the {} there are", slots.size(), what,
           is_wanted ? T : 0, num_slots);
  };
  check("read", batch.read_hidden_T, weights.config.is_mtp_head, 0);
  check("write", batch.write_hidden_T, num_slots > 0, -1);
}

void check_experts(const ModelConfig& config, const PackedBatch& batch) {
  const auto num = static_cast<std::int64_t>(batch.experts_LTK.size()), T = static_cast<std::int64_t>(batch.ids_T.size());
  if (num != 0 && (config.num_experts == 0 || num != config.num_layers * T * config.num_active_experts))
    fail(ErrorCode::kShape, "[decoder] {} experts for {} tokens, wanted {} of each in {} layers", num, T, config.num_active_experts,
         config.num_layers);
}

/// Of PackedBatch and PagedBatch.
template <typename Batch>
void check_images(const Weights& weights, const Batch& batch) {
  const auto T = static_cast<std::int64_t>(batch.ids_T.size());
  const auto num_positions = static_cast<std::int64_t>(batch.rope_positions_3T.size());
  if (num_positions != 0 && num_positions != 3 * T)
    fail(ErrorCode::kShape, "[decoder] {} rotary positions for {} tokens, wanted 3 of each", num_positions, T);
  if (num_positions != 0 && !weights.config.vision)
    fail(ErrorCode::kInvalidArgument, "[decoder] rotary positions on three axes for a {} model without a vision tower",
         weights.config.model_type);
  std::int64_t end = 0;
  for (const FeatureRows& of : batch.features) {
    const bool good = of.rows_NH.shape.num_dims() == 2 && of.rows_NH.shape[1] == weights.config.hidden_size &&
                      of.rows_NH.dtype == weights.compute && of.rows_NH.is_contiguous();
    if (!good || of.first < end || of.first + of.rows_NH.shape[0] > T)
      fail(ErrorCode::kShape, "[decoder] {} features of {} numbers at token {}; wanted rows of {} in {} within the batch's {} tokens",
           of.rows_NH.shape[0], of.rows_NH.shape[1], of.first, weights.config.hidden_size, to_string(weights.compute), T);
    end = of.first + of.rows_NH.shape[0];
  }
}

void check_targets(const Weights& weights, std::size_t num_tokens, std::span<const std::int32_t> targets,
                   std::span<const float> temperatures) {
  if (targets.size() != num_tokens || temperatures.size() != num_tokens)
    fail(ErrorCode::kShape, "[decoder] {} targets and {} temperatures for {} tokens", targets.size(), temperatures.size(), num_tokens);
  for (std::size_t i = 0; i < num_tokens; ++i) {
    if (targets[i] < -1 || targets[i] >= weights.config.vocab_size)
      fail(ErrorCode::kInvalidArgument, "[decoder] target {} is id {}, the vocabulary has {}", i, targets[i], weights.config.vocab_size);
    if (!(temperatures[i] > 0)) fail(ErrorCode::kInvalidArgument, "[decoder] temperature {} is {}, wanted > 0", i, temperatures[i]);
  }
}

}  // namespace

namespace {
/// Of a layer; 0 if there is no such layer.
std::int64_t floats_of_state(const LinearAttention& c, DType compute, DeviceKind device) noexcept {
  return ops::delta_rule_state_size(device, compute, c.num_key_heads, c.num_value_heads, c.key_dim, c.value_dim,
                                    c.is_state_space ? ops::RuleKind::kStateSpace : ops::RuleKind::kGatedDelta);
}
}  // namespace

KvCache::KvCache(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, DType compute, std::int64_t num_blocks,
                 std::int64_t block_size, bool logs_routes, std::int64_t num_states)
    : num_blocks_(num_blocks), block_size_(block_size), num_states_(num_states) {
  if (logs_routes && config.num_experts > 0)
    route_log_ = Tensor::zeros(runtime, {num_blocks * block_size, 2 * config.num_layers * config.num_active_experts}, DType::kU8);
  const bool has_values = !config.attends_to_latents;  // else they are parts of the keys
  const Shape shape{num_blocks, has_values ? config.num_kv_heads : 1, block_size, config.cached_key_dim()};
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    // Left as it is: no query reads a slot that was not written, and untouched pages cost nothing.
    const bool is_linear = config.is_linear(i), has_keys = config.has_softmax(i);
    k_.push_back(has_keys ? Tensor::empty(runtime, shape, compute) : Tensor());
    v_.push_back(has_keys && has_values ? Tensor::empty(runtime, shape, compute) : Tensor());
    const LinearAttention& c = config.linear;
    inputs_.push_back(is_linear ? Tensor::empty(runtime, {num_states, c.num_taps - 1, c.num_channels()}, compute) : Tensor());
    states_.push_back(is_linear ? Tensor::empty(runtime, {num_states, floats_of_state(c, compute, runtime->device().kind)}, DType::kF32)
                                : Tensor());
  }
}

namespace {
TensorView view_of(const std::vector<Tensor>& layers, std::int64_t i) {
  const Tensor& tensor = layers[static_cast<std::size_t>(i)];
  return tensor.defined() ? tensor.view() : TensorView{};
}
}  // namespace

ops::KvLayer KvCache::layer(std::int64_t i) const { return {view_of(k_, i), view_of(v_, i)}; }

void KvCache::copy_state(DeviceRuntime& runtime, std::int64_t from, std::int64_t to) const {
  for (const std::vector<Tensor>* layers : {&inputs_, &states_})
    for (const Tensor& all : *layers) {
      if (!all.defined()) continue;
      const std::size_t bytes = all.num_bytes() / static_cast<std::size_t>(num_states_);
      auto* const base = static_cast<std::byte*>(all.data());
      runtime.copy_within(base + static_cast<std::size_t>(to) * bytes, base + static_cast<std::size_t>(from) * bytes, bytes);
    }
}

CacheLayers KvCache::layers() const {
  CacheLayers all;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(k_.size()); ++i) {
    all.kv.push_back(layer(i));
    all.states.push_back({view_of(inputs_, i), view_of(states_, i)});
  }
  return all;
}

std::size_t KvCache::bytes_per_state(const ModelConfig& config, DType compute, DeviceKind device) noexcept {
  const LinearAttention& c = config.linear;
  return c.layers.size() * (static_cast<std::size_t>(floats_of_state(c, compute, device)) * sizeof(float) +
                            static_cast<std::size_t>(c.layers.empty() ? 0 : c.input_elements()) * size_of(compute));
}

std::size_t KvCache::bytes_per_block(const ModelConfig& config, DType compute, std::int64_t block_size) noexcept {
  return static_cast<std::size_t>(config.num_softmax_layers() * config.cached_width() * block_size) * size_of(compute);
}

std::size_t KvCache::route_bytes_per_block(const ModelConfig& config, std::int64_t block_size) noexcept {
  return static_cast<std::size_t>(2 * config.num_layers * config.num_active_experts * block_size);
}

void KvCache::keep_hidden(const std::shared_ptr<DeviceRuntime>& runtime, const ModelConfig& config, DType compute,
                          std::int64_t num_guesses) {
  hidden_ = Tensor::zeros(runtime, {num_slots() + num_guesses, config.hidden_size}, compute);
}

std::size_t KvCache::hidden_bytes_per_block(const ModelConfig& config, DType compute, std::int64_t block_size) noexcept {
  return static_cast<std::size_t>(config.hidden_size * block_size) * size_of(compute);
}

namespace {

/// A rotary table of a batch's tokens, one row each; its memory is kept.
class StepRope {
 public:
  /// Sets what `model` turns with, and the positions that count its rows.
  void set(ops::OpContext& ctx, Arena& arena, const Weights& weights, std::span<const std::int32_t> positions_3T, BoundModel& model,
           AttentionIndex& index) {
    const std::int64_t T = static_cast<std::int64_t>(positions_3T.size()) / 3, pairs = weights.rope.num_pairs();
    if (!memory_.cos_PR2.defined() || memory_.cos_PR2.shape()[0] < T || memory_.num_pairs() != pairs)
      memory_ = {Tensor::empty(ctx.runtime, {T, pairs}, DType::kF32), Tensor::empty(ctx.runtime, {T, pairs}, DType::kF32)};
    in_order_.resize(static_cast<std::size_t>(T));
    std::iota(in_order_.begin(), in_order_.end(), 0);
    const TensorView positions = upload(ctx, arena, positions_3T, DType::kI32).reshaped({3, T});
    ops::gather_rope_rows(ctx, memory_.cos_PR2.view().rows(0, T), memory_.sin_PR2.view().rows(0, T), weights.rope, positions,
                          {.height = weights.config.vision->height_section, .width = weights.config.vision->width_section});
    model.step_rope = &memory_;
    index.positions_T = upload(ctx, arena, std::span<const std::int32_t>(in_order_), DType::kI32);
  }

 private:
  ops::RopeTable memory_;
  std::vector<std::int32_t> in_order_;
};

}  // namespace

struct InferenceModel::Impl {
  Impl(ops::OpContext& c, bool record, ops::SharedLayers s)
      : ctx(c), arena(c.runtime), head_arena(c.runtime), may_record(record), shared(s), recorder(c, s), bank(c) {}
  ops::OpContext& ctx;
  Arena arena;       ///< of the last forward
  Arena head_arena;  ///< of the last logits()
  const bool may_record;
  const ops::SharedLayers shared;
  DecodeRecorder recorder;
  AdapterBank bank;
  std::vector<std::int32_t> tiles;        ///< of the last batch that was not recorded
  std::vector<std::int32_t> rest;         ///< rows of the last batch that name no adapter
  std::vector<std::int32_t> state_begin;  ///< of the last batch: ops::StateRows
  StepRope rope;
};

InferenceModel::InferenceModel(ops::OpContext& ctx, bool may_record, ops::SharedLayers shared)
    : impl_(std::make_unique<Impl>(ctx, may_record, shared)) {}
InferenceModel::~InferenceModel() = default;

TensorView InferenceModel::forward_paged(const Weights& weights, KvCache& cache, const PagedBatch& batch) {
  check_tokens(weights.config, batch.ids_T, batch.positions_T, batch.drawn_B.data == nullptr ? 0 : batch.drawn_B.shape.num_elements());
  if (batch.slot_T.size() != batch.ids_T.size())
    fail(ErrorCode::kShape, "[decoder] {} slots for {} tokens", batch.slot_T.size(), batch.ids_T.size());
  if (!weights.config.linear.layers.empty()) check_states(batch, cache.num_states());
  check_images(weights, batch);
  check_hidden(weights, cache, batch);
  const bool has_images = !batch.rope_positions_3T.empty() || !batch.features.empty();
  Impl& m = *impl_;
  const auto num_tokens = static_cast<std::int64_t>(batch.ids_T.size());
  std::vector<AdapterRows> adapters = adapters_of(weights, batch.adapters, num_tokens, m.rest);
  const bool is_recorded = m.may_record && !has_images && m.recorder.takes(weights, cache, batch, adapters);
  if (is_recorded && batch.adapters.empty() && !adapters.empty()) {
    m.rest.resize(static_cast<std::size_t>(num_tokens));
    std::iota(m.rest.begin(), m.rest.end(), 0);
    adapters[0].rows = m.rest;
  }
  const bool is_indexed =
      (!batch.adapters.empty() || (is_recorded && !adapters.empty())) && m.bank.bring(weights.config, weights.compute, adapters);
  if (is_recorded && (batch.adapters.empty() || is_indexed))
    return m.recorder.run(weights, cache, batch, is_indexed ? &m.bank : nullptr, adapters);
  m.arena.reset();
  const CacheLayers layers = cache.layers();
  ops::PagedAttention paged;
  paged.query_start = batch.query_start;
  paged.context_len = batch.context_len;
  paged.block_table = batch.block_table;
  paged.max_blocks = batch.max_blocks;
  AttentionIndex index;
  index.positions_T = upload(m.ctx, m.arena, batch.positions_T, DType::kI32);
  index.paged = &paged;
  index.slot_T = batch.slot_T;
  if (!weights.config.linear.layers.empty()) {
    m.state_begin.clear();
    for (std::size_t s = 0; s < batch.context_len.size(); ++s)
      m.state_begin.push_back(batch.context_len[s] - (batch.query_start[s + 1] - batch.query_start[s]));
    index.state_rows = {batch.query_start, batch.state_slot, m.state_begin};
  }
  Frame frame{m.ctx, m.arena};
  const ops::TokenIds ids(upload(m.ctx, m.arena, batch.ids_T, DType::kI32), batch.drawn_B);
  BoundModel model{weights};
  model.shared = m.shared;
  model.features = batch.features;
  if (!batch.rope_positions_3T.empty()) m.rope.set(m.ctx, m.arena, weights, batch.rope_positions_3T, model, index);
  if (cache.route_log().defined()) model.route_log = {cache.route_log().view(), upload(m.ctx, m.arena, batch.slot_T, DType::kI32)};
  if (is_indexed) {
    m.tiles.clear();
    m.bank.append_tiles(m.tiles, adapters);
    model.bank = &m.bank;
    model.tiles = {upload(m.ctx, m.arena, std::span<const std::int32_t>(m.tiles), DType::kI32)
                       .reshaped({static_cast<std::int64_t>(m.tiles.size()) / ops::kLoraTileWords, ops::kLoraTileWords}),
                   adapters.size() == 1 ? adapters[0].adapter : nullptr};
    if (model.tiles.single != nullptr) m.bank.use_single(*model.tiles.single);
  } else {
    model.adapters = adapters;
  }
  if (weights.config.is_mtp_head) {
    const TensorView hidden_TH = m.arena.take({num_tokens, weights.config.hidden_size}, weights.compute);
    ops::embedding(m.ctx, hidden_TH, cache.hidden(), upload(m.ctx, m.arena, batch.read_hidden_T, DType::kI32));
    model.hidden_TH = hidden_TH;
  }
  const TensorView h_TH = decoder_forward(frame, model, ids, index, &layers, nullptr).value;
  if (cache.hidden().defined()) ops::store_rows(m.ctx, cache.hidden(), h_TH, upload(m.ctx, m.arena, batch.write_hidden_T, DType::kI32));
  return h_TH;
}

TensorView InferenceModel::forward_packed(const Weights& weights, const PackedBatch& batch) {
  check_packed(weights.config, batch);
  check_images(weights, batch);
  Impl& m = *impl_;
  m.arena.reset();
  AttentionIndex index;
  index.positions_T = upload(m.ctx, m.arena, batch.positions_T, DType::kI32);
  index.cu_seqlens = batch.cu_seqlens;
  Frame frame{m.ctx, m.arena};
  BoundModel model{weights, nullptr, adapters_of(weights, {}, static_cast<std::int64_t>(batch.ids_T.size()), m.rest)};
  model.shared = m.shared;
  model.features = batch.features;
  model.hidden_TH = batch.hidden_TH;
  if (!batch.rope_positions_3T.empty()) m.rope.set(m.ctx, m.arena, weights, batch.rope_positions_3T, model, index);
  return decoder_forward(frame, model, upload(m.ctx, m.arena, batch.ids_T, DType::kI32), index, nullptr, nullptr).value;
}

ConstTensorView InferenceModel::hidden_rows(ConstTensorView h_TH, std::span<const std::int32_t> rows_B) {
  Impl& m = *impl_;
  m.head_arena.reset();
  const auto B = static_cast<std::int64_t>(rows_B.size());
  // As in a decoding step, where each sequence has a row.
  const bool lie_together = B > 0 && std::ranges::adjacent_find(rows_B, [](auto a, auto b) { return b != a + 1; }) == rows_B.end();
  if (lie_together) return h_TH.rows(rows_B[0], B);
  const TensorView gathered = m.head_arena.take({B, h_TH.shape.num_cols()}, h_TH.dtype);
  ops::embedding(m.ctx, gathered, h_TH, upload(m.ctx, m.head_arena, rows_B, DType::kI32));
  return gathered;
}

TensorView InferenceModel::logits(const Weights& weights, ConstTensorView h_BH) {
  Impl& m = *impl_;
  const TensorView logits_BV = m.head_arena.take({h_BH.shape.num_rows(), weights.config.vocab_size}, DType::kF32);
  ops::linear(m.ctx, logits_BV, h_BH, weights.lm_head(), &weights.first_matrix(0));
  return logits_BV;
}

struct TrainableModel::Impl {
  Impl(ops::OpContext& c, Parameters& p, ActivationCheckpointing k, ActivationOffload o)
      : ctx(c), parameters(p), checkpointing(k), arena(c.runtime), tape(arena), remade(c.runtime), remake(remade) {
    if (o.link != nullptr) offload = std::make_unique<autograd::OffloadedRegions>(c.runtime, std::move(o.link), o.max_inflight);
  }

  /// Shared by forward and evaluate; `tape_or_null` decides.
  TokenStats run(const WeightsPtr& w, const PackedBatch& batch, std::span<const std::int32_t> target_span,
                 std::span<const float> temperature_span, autograd::Tape* tape_or_null) {
    PRL_CHECK(w != nullptr, "forward without weights");
    check_packed(w->config, batch);
    check_experts(w->config, batch);
    check_images(*w, batch);
    check_targets(*w, batch.ids_T.size(), target_span, temperature_span);
    tape.clear();
    arena.reset();
    remade.reset();
    is_ready = false;
    weights = w;
    cu_seqlens.assign(batch.cu_seqlens.begin(), batch.cu_seqlens.end());
    targets.assign(target_span.begin(), target_span.end());
    temperatures.assign(temperature_span.begin(), temperature_span.end());

    AttentionIndex index;
    index.positions_T = upload(ctx, arena, batch.positions_T, DType::kI32);
    index.cu_seqlens = cu_seqlens;
    index.exchange = batch.exchange;
    tape.set_token_blocks(batch.num_token_blocks);
    const TensorView ids_T = upload(ctx, arena, batch.ids_T, DType::kI32);
    Frame frame{ctx, arena, tape_or_null};
    BoundModel model{*weights, tape_or_null != nullptr ? &parameters : nullptr};
    if (const std::int64_t K = weights->config.num_active_experts; !batch.experts_LTK.empty())
      model.given_LTK = upload(ctx, arena, batch.experts_LTK, DType::kI32)
                            .reshaped({weights->config.num_layers * static_cast<std::int64_t>(batch.ids_T.size()), K});
    if (weights->adapter != nullptr) {
      model.adapters = {{weights->adapter.get(), {}}};
      if (tape_or_null != nullptr) model.dropout = dropout_of(batch);
    }
    model.features = batch.features;
    model.hidden_TH = batch.hidden_TH;
    if (!batch.rope_positions_3T.empty()) rope.set(ctx, arena, *weights, batch.rope_positions_3T, model, index);
    loads.assign(static_cast<std::size_t>(tape_or_null != nullptr && weights->config.num_experts > 0 ? weights->config.num_layers : 0), {});
    model.loads = loads;
    if (offload != nullptr && tape_or_null != nullptr) offload->begin(static_cast<std::size_t>(weights->config.num_layers));
    const KeptActivations kept{checkpointing, &remake, offload.get()};
    h_TH = decoder_forward(frame, model, ids_T, index, nullptr, &kept);
    head = make_head_result(arena, h_TH.value.shape.num_rows());
    if (tape_or_null != nullptr) take_head_work();
    ops::lm_head_logprob(ctx, head.logp_T, head.entropy_T, head.lse_T, h_TH.value, weights->lm_head(), targets, temperatures,
                         tape_or_null != nullptr ? work.kept_RB : TensorView{});
    std::vector<float> logp(2 * targets.size());
    ctx.runtime->copy_to_host(logp.data(), head.logp_T.data, logp.size() * sizeof(float));
    std::vector<float> entropy(logp.begin() + static_cast<std::ptrdiff_t>(targets.size()), logp.end());
    logp.resize(targets.size());
    return {std::move(logp), std::move(entropy), loads};
  }

  /// The mask of this rank's part of the row.
  ops::DropoutMask dropout_of(const PackedBatch& batch) const {
    const std::int64_t first = batch.exchange != nullptr ? batch.exchange->rank() * static_cast<std::int64_t>(batch.ids_T.size()) : 0;
    return {batch.dropout_seed, static_cast<float>(weights->adapter->config.dropout), first};
  }

  void take_head_work() {
    work = {.dlogp_T = arena.take({static_cast<std::int64_t>(targets.size())}, DType::kF32),
            .dh_TH = arena.take(h_TH.value.shape, h_TH.value.dtype),
            .below_logits = arena.mark()};
    // Saved rows are counted from the first of a pass, and blocks have passes of their own.
    const std::int64_t most = tape.num_token_blocks() == 1 ? num_kept_logits : 0;
    const std::int64_t num_kept = std::min<std::int64_t>(most, std::ranges::count_if(targets, [](auto t) { return t >= 0; }));
    if (num_kept > 0)
      work.kept_RB = arena.take({num_kept, ops::kept_row_bytes(weights->lm_head().dtype(), weights->config.vocab_size)}, DType::kU8);
  }

  void head_backward() {
    const Tensor& grad = parameters.grad(Block::kLmHead);
    const TensorView dhead = grad.defined() ? grad.view() : TensorView{};
    const autograd::TokenSum sum{.outs = std::span(&dhead, 1), .accumulate = !parameters.grads_are_fresh(), .can_overwrite = true};
    autograd::sum_over_blocks(ctx, arena, sum, h_TH.value.shape.num_rows(), tape.num_token_blocks(),
                              [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool accumulate) {
                                const auto first = static_cast<std::size_t>(begin), n = static_cast<std::size_t>(count);
                                ops::lm_head_logprob_backward(
                                    ctx, work.dh_TH.rows(begin, count), to[0], autograd::part_of_vector(work.dlogp_T, begin, count),
                                    autograd::part_of_vector(head.lse_T, begin, count), h_TH.value.rows(begin, count), weights->lm_head(),
                                    std::span(targets).subspan(first, n), std::span(temperatures).subspan(first, n), accumulate,
                                    work.kept_RB);
                              });
  }

  ops::OpContext& ctx;
  Parameters& parameters;
  ActivationCheckpointing checkpointing;
  std::int64_t num_kept_logits = 0;
  Arena arena;
  autograd::Tape tape;
  Arena remade;  ///< values that layers do not keep
  autograd::Remake remake;
  std::unique_ptr<autograd::OffloadedRegions> offload;
  // What the recorded rules point to.
  WeightsPtr weights;
  std::vector<std::int32_t> cu_seqlens, targets;
  std::vector<float> temperatures;
  std::vector<autograd::ExpertLoad> loads;
  StepRope rope;
  Var h_TH;
  HeadResult head;
  HeadWork work;
  bool is_ready = false;  ///< forward() ran and backward() has not
};

TrainableModel::TrainableModel(ops::OpContext& ctx, Parameters& parameters, ActivationCheckpointing checkpointing,
                               ActivationOffload offload)
    : impl_(std::make_unique<Impl>(ctx, parameters, checkpointing, std::move(offload))) {
  if (checkpointing.freq < 0)
    fail(ErrorCode::kInvalidArgument, "activation checkpointing: freq is {}, wanted 0 (none) or more", checkpointing.freq);
}
TrainableModel::~TrainableModel() = default;

TokenStats TrainableModel::forward(const WeightsPtr& weights, const PackedBatch& batch, std::span<const std::int32_t> targets_T,
                                   std::span<const float> temperatures_T) {
  impl_->parameters.ensure_grads();
  TokenStats stats = impl_->run(weights, batch, targets_T, temperatures_T, &impl_->tape);
  impl_->is_ready = true;
  return stats;
}

TokenStats TrainableModel::evaluate(const WeightsPtr& weights, const PackedBatch& batch, std::span<const std::int32_t> targets_T,
                                    std::span<const float> temperatures_T) {
  return impl_->run(weights, batch, targets_T, temperatures_T, nullptr);
}

ConstTensorView TrainableModel::hidden() const { return impl_->h_TH.value; }

void TrainableModel::expect_tokens(std::int64_t num_tokens, DType compute) {
  Impl& m = *impl_;
  PRL_CHECK(!m.is_ready, "expect_tokens() between forward() and backward()");
  if (m.offload != nullptr) return;  // its regions take their memory layer by layer
  m.tape.clear();
  // Foretold within a hundredth, so a little more: a second block would be an eighth of the first.
  m.arena.expect(activation_bytes(m.parameters.config(), compute, num_tokens, m.checkpointing, {}, m.num_kept_logits).device / 50 * 51);
}

void TrainableModel::keep_logits(std::int64_t num_tokens) {
  PRL_CHECK(!impl_->is_ready, "keep_logits() between forward() and backward()");
  impl_->num_kept_logits = ops::keeps_logits(impl_->ctx) ? num_tokens : 0;
}

void TrainableModel::fit_memory() {
  Impl& m = *impl_;
  PRL_CHECK(!m.is_ready, "fit_memory() between forward() and backward()");
  m.tape.clear();
  m.arena.fit();
  m.remade.fit();
  if (m.offload != nullptr) m.offload->fit();
}

void TrainableModel::backward(std::span<const float> dlogp_T) {
  Impl& m = *impl_;
  PRL_CHECK(m.is_ready, "backward() needs a forward() of its own");
  if (dlogp_T.size() != m.targets.size()) fail(ErrorCode::kShape, "[decoder] {} gradients for {} tokens", dlogp_T.size(), m.targets.size());
  m.is_ready = false;
  m.ctx.runtime->copy_from_host(m.work.dlogp_T.data, dlogp_T.data(), dlogp_T.size_bytes());
  m.head_backward();
  m.arena.release(m.work.below_logits);
  m.parameters.section_is_done(GradSection::kHead);
  m.tape.set_grad(m.h_TH, m.work.dh_TH);
  m.tape.backward();
  m.tape.clear();
  for (const std::int64_t last : {GradSection::kEmbedding, GradSection::kAdapters, GradSection::kRest}) m.parameters.section_is_done(last);
  m.parameters.grads_were_written();
}

void TrainableModel::pass_forward(const Weights& weights) {
  if (weights.layers == nullptr) return;
  for (std::int64_t i = 0; i < weights.config.num_layers; ++i) weights.layers->enter(i, i + 1 < weights.config.num_layers ? i + 1 : -1);
}

void TrainableModel::pass_backward(const Weights& weights) {
  const Parameters& parameters = impl_->parameters;
  parameters.section_is_done(GradSection::kHead);
  for (std::int64_t i = weights.config.num_layers - 1; i >= 0; --i) {
    if (weights.layers != nullptr) weights.layers->enter(i, i - 1);
    parameters.section_is_done(i);
  }
  for (const std::int64_t last : {GradSection::kEmbedding, GradSection::kAdapters, GradSection::kRest}) parameters.section_is_done(last);
}

std::vector<float> probe_logprobs(InferenceModel& model, ops::OpContext& ctx, const Weights& weights,
                                  std::span<const std::int32_t> prompt) {
  if (prompt.size() < 2) fail(ErrorCode::kInvalidArgument, "a probe prompt has {} tokens, at least 2 are wanted", prompt.size());
  std::vector<std::int32_t> positions(prompt.size()), targets(prompt.begin() + 1, prompt.end());
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int32_t>(i);
  targets.push_back(-1);
  const std::vector<float> temperatures(prompt.size(), 1.0f);
  const std::int32_t cu_seqlens[2] = {0, static_cast<std::int32_t>(prompt.size())};
  const TensorView h_TH = model.forward_packed(weights, {prompt, positions, cu_seqlens});
  Arena arena(ctx.runtime);
  std::vector<float> logp = download(ctx, run_head(ctx, arena, weights, h_TH, targets, temperatures).logp_T);
  logp.pop_back();
  return logp;
}

std::vector<std::int32_t> probe_prompt(std::int64_t vocab_size, int length) {
  Rng rng(0x70726f6265ULL);
  std::vector<std::int32_t> prompt(static_cast<std::size_t>(length));
  for (std::int32_t& id : prompt) id = static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(vocab_size)));
  return prompt;
}

}  // namespace prl::nn
