#include "nn/layers.hpp"

#include "autograd/fused.hpp"
#include "autograd/latent_attention.hpp"
#include "autograd/linear_attention.hpp"
#include "base/error.hpp"
#include "base/rng.hpp"
#include "nn/decoder.hpp"
#include "nn/exact_parts.hpp"
#include "nn/shards.hpp"

namespace prl::nn {
namespace {
using autograd::AttentionIndex;
using autograd::AttentionParameter;
using autograd::Frame;
using autograd::LinearParameter;
using autograd::NormParameter;
using autograd::Var;

TensorView view_or_none(const Tensor& tensor) { return tensor.defined() ? tensor.view() : TensorView{}; }

/// The matrix that is multiplied with after the last one of a layer.
const ops::LinearWeight& after_layer(const Weights& weights, std::int64_t layer) {
  return layer + 1 == weights.config.num_layers ? weights.lm_head() : weights.first_matrix(layer + 1);
}

/// Frames for the parts of a layer: each drops what its part need not keep.
struct PartFrames {
  Frame norm, attn_proj, heads, mlp;
  PartFrames(const Frame& frame, const LayerMemory& memory, bool has_head_norms)
      : norm(frame.remaking(memory.again.norm ? memory.remake : nullptr)),
        attn_proj(frame.remaking(memory.again.attn_proj ? memory.remake : nullptr)),
        // Without norms heads are rotated in place, so that they are kept as the projections are.
        heads(frame.remaking(memory.again.attn_proj || (memory.again.norm && has_head_norms) ? memory.remake : nullptr)),
        mlp(frame.remaking(memory.again.mlp ? memory.remake : nullptr)) {}
};

/// norm(stream) or W norm(stream), and the stream as the one sum that was normed.
struct Projected {
  Var value, sum;
};
/// norm(stream), and the stream as the one sum that was normed.
Projected norm_stream(Frame& frame, const Stream& in, const NormParameter& norm, TensorView sum_out) {
  if (!in.delta_TH.is_defined()) return {autograd::rms_norm(frame, in.residual_TH, norm), in.residual_TH};
  const autograd::NormedSum x = autograd::add_rms_norm(frame, in.delta_TH, in.residual_TH, norm, sum_out);
  return {x.normed, x.sum};
}

/// What a product passes before the next one. Kernels fuse kSilu with the product alone.
enum class Gate : std::uint8_t { kNone, kSilu, kGelu, kSquaredRelu };

Gate gate_of(const BoundModel& model) {
  const ModelConfig& c = model.weights.config;
  return c.has_gelu_mlps ? Gate::kGelu : c.has_squared_relu_mlps ? Gate::kSquaredRelu : Gate::kSilu;
}

Var through_gate(Frame& frame, const Var& x, Gate gate) {
  switch (gate) {
    case Gate::kNone: return x;
    case Gate::kSilu: return autograd::swiglu(frame, x);
    case Gate::kGelu: return autograd::geglu(frame, x);
    case Gate::kSquaredRelu: return autograd::squared_relu(frame, x);
  }
  return x;
}

/// W x, through a gate.
Var project(Frame& frame, const Var& x, const LinearParameter& w, Gate gate) {
  if (gate == Gate::kSilu) {
    ops::LinearFusion fusion;
    fusion.swiglu = true;
    if (const Var value = autograd::fused_linear(frame, x, w, fusion); value.is_defined()) return value;
  }
  return through_gate(frame, autograd::linear(frame, x, w), gate);
}

/// W norm(stream), through a gate.
Projected project_normed(Frame& norm_frame, Frame& frame, const Stream& in, const NormParameter& norm, const LinearParameter& w, Gate gate,
                         TensorView sum_out) {
  ops::LinearFusion fusion;
  fusion.eps = norm.eps;
  fusion.swiglu = gate == Gate::kSilu;
  if (!in.delta_TH.is_defined()) {
    fusion.norm_K = norm.weight;
    if (const Var value = autograd::fused_linear(frame, in.residual_TH, w, fusion); value.is_defined())
      return {fusion.swiglu ? value : through_gate(frame, value, gate), in.residual_TH};
  }
  const Projected normed = norm_stream(norm_frame, in, norm, sum_out);
  return {project(frame, normed.value, w, gate), normed.sum};
}

/// The stream residual + W x: summed at once where the product's pass can do it. `memory.residual_TH` may be the residual.
Stream project_onto(Frame& frame, const BoundModel& model, const Var& residual, const Var& x, const LinearParameter& w,
                    const LayerMemory& memory, bool is_block_output) {
  if (model.shared.group != nullptr) return {residual, model.whole(frame, autograd::linear(frame, x, w))};
  ops::LinearFusion fusion;
  fusion.residual_TN = residual.value;
  if (!(is_block_output && memory.wants_delta))
    if (const Var sum = autograd::fused_linear(frame, x, w, fusion, memory.residual_TH); sum.is_defined()) return {sum, {}};
  return {residual, autograd::linear(frame, x, w, memory.delta_TH, is_block_output)};
}

/// A parameter that is a vector, with its gradient.
autograd::VectorParameter vector_of(const BoundModel& model, Block block, std::int64_t layer) {
  return {model.weights.vector(block, layer).view(), model.gradient(block, layer)};
}

/// One without data if the layer has no such vector.
autograd::VectorParameter vector_or_none(const BoundModel& model, Block block, std::int64_t layer) {
  return {view_or_none(model.weights.vector(block, layer)), model.gradient(block, layer)};
}

/// What the last product of the experts that every token passes reads, from the others'. `next` is that product's matrix.
Var shared_hidden(Frame& frame, const BoundModel& model, std::int64_t layer, const Var& x, const ops::LinearWeight* next) {
  const LinearParameter gate_up = model.linear(Block::kGateUp, layer, next);
  if (model.weights.config.gates_shared_expert)
    return autograd::gated_swiglu(frame, autograd::linear(frame, x, gate_up), x, vector_of(model, Block::kSharedExpertGate, layer));
  return model.shared.group != nullptr ? through_gate(frame, autograd::linear(frame, x, gate_up), gate_of(model))
                                       : project(frame, x, gate_up, gate_of(model));
}

/// routed + the MLP of the experts that every token passes, in memory.delta_TH where there is that.
Var add_shared_experts(Frame& frame, Frame& mlp, const BoundModel& model, std::int64_t layer, const Var& x, const Var& routed,
                       const LayerMemory& memory) {
  if (model.shared.group != nullptr) {
    // What was gathered is overwritten by the next but one.
    const Var kept{frame.take(routed.value.shape, routed.value.dtype)};
    frame.ctx.runtime->copy_within(kept.value.data, routed.value.data,
                                   static_cast<std::size_t>(routed.value.shape.num_elements()) * size_of(routed.value.dtype));
    const Var hidden = shared_hidden(mlp, model, layer, x, nullptr);
    const Var part = autograd::linear(mlp, model.whole(mlp, hidden), model.linear(Block::kDown, layer, nullptr));
    return autograd::add(frame, kept, model.whole(mlp, part), memory.delta_TH);
  }
  const bool is_block_output = !model.weights.config.norms_outputs;
  const Var hidden = shared_hidden(mlp, model, layer, x, &model.weights.matrix(Block::kDown, layer));
  const LinearParameter down = model.linear(Block::kDown, layer, nullptr);
  ops::LinearFusion fusion;
  fusion.residual_TN = routed.value;
  if (const Var sum = autograd::fused_linear(mlp, hidden, down, fusion, memory.delta_TH); sum.is_defined()) return sum;
  return autograd::add(frame, routed, autograd::linear(mlp, hidden, down, memory.shared_TH, is_block_output), memory.delta_TH,
                       is_block_output);
}

/// Attention of a layer by the heads of this device, with norms of each head or none.
AttentionParameter attention_of(const BoundModel& model, std::int64_t i, const NormParameter& q_norm, const NormParameter& k_norm) {
  const ModelConfig& c = model.weights.config;
  const std::int64_t num_shards = model.weights.shard.size;
  return {.num_heads = c.num_heads / num_shards,
          .num_kv_heads = num_kv_heads_of_shard(c, model.weights.shard.size),
          .head_dim = c.head_dim,
          .q_norm = q_norm,
          .k_norm = k_norm,
          .rope = model.step_rope != nullptr ? model.step_rope : &model.weights.rope_of(i),
          .window = c.window_of(i),
          .sinks_H = view_or_none(model.weights.vector(Block::kSinks, i)),
          .dsinks_H = model.gradient(Block::kSinks, i),
          .scale = static_cast<float>(c.score_scale),
          .gates_are_apart = c.gates_are_apart};
}

/// Projections whose queries and keys have norms over all heads at once. A device that has some of the heads norms whole rows.
Var norm_projections(Frame& frame, const BoundModel& model, std::int64_t i, const Var& qkv) {
  const NormParameter norms[] = {model.norm(Block::kQNorm, i), model.norm(Block::kKNorm, i)};
  if (model.shared.group == nullptr) return autograd::norm_projections(frame, qkv, norms[0], norms[1]);
  std::int64_t first = 0;
  for (const NormParameter& norm : norms) {
    const std::int64_t width = norm.weight.shape.num_elements() / model.weights.shard.size;
    const TensorView own = qkv.value.columns(first, width), all = model.whole(frame, {own}).value;
    ops::rms_norm(frame.ctx, all, all, norm.weight, norm.eps);
    ops::cast(frame.ctx, own, all.columns(model.weights.shard.rank * width, width));
    first += width;
  }
  return qkv;
}

/// A layer whose norms are of what attention and MLP give, and no others: x + norm(attention(x)), and the same of the MLP. `q_norm` and
/// `k_norm` are over all heads at once.
Stream output_normed_layer(Frame& frame, PartFrames& part, const BoundModel& model, std::int64_t i, const Stream& in,
                           const AttentionIndex& index, const LayerMemory& memory) {
  const auto linear = [&](Block block, const ops::LinearWeight& next) { return model.linear(block, i, &next); };
  const auto weight = [&](Block block) -> const ops::LinearWeight& { return model.weights.matrix(block, i); };
  Var x = in.residual_TH;
  if (in.delta_TH.is_defined()) x = autograd::add(frame, x, in.delta_TH, memory.residual_TH, /*is_block_output=*/false);
  const Var qkv = norm_projections(part.heads, model, i, project(part.attn_proj, x, linear(Block::kQkv, weight(Block::kO)), Gate::kNone));
  const Var heads = model.whole(frame, autograd::self_attention(part.heads, qkv, attention_of(model, i, {}, {}), index));
  const Var attended = model.whole(frame, autograd::linear(frame, heads, linear(Block::kO, weight(Block::kGateUp))));
  const Var normed = autograd::rms_norm(frame, attended, model.norm(Block::kAttentionOutNorm, i), memory.delta_TH);
  x = autograd::add(frame, x, normed, memory.residual_TH, /*is_block_output=*/false);
  const Var hidden = model.whole(frame, project(part.mlp, x, linear(Block::kGateUp, weight(Block::kDown)), gate_of(model)));
  const Var out = model.whole(frame, autograd::linear(frame, hidden, linear(Block::kDown, after_layer(model.weights, i))));
  return {x, autograd::rms_norm(frame, out, model.norm(Block::kMlpOutNorm, i), memory.delta_TH)};
}

float embedding_scale(const Weights& weights) {
  const auto scale = static_cast<float>(weights.config.embedding_scale);
  return weights.config.rounds_embedding_scale && weights.compute == DType::kBF16 ? to_f32(to_bf16(scale)) : scale;
}

/// With a tape: buffers for what no backward rule reads, which all layers share.
LayerMemory memory_of_all_layers(Frame& frame, const Weights& w, std::int64_t num_tokens) {
  const ModelConfig& c = w.config;
  const auto take = [&](std::int64_t width) { return frame.take({num_tokens, width}, w.compute); };
  LayerMemory memory{.delta_TH = take(c.hidden_size)};
  if (c.shared_expert_size > 0) memory.shared_TH = take(c.hidden_size);
  if (!c.latent || c.attends_to_latents) return memory;  // attention to latents reads queries once more in the backward pass
  if (c.latent->query_rank > 0) memory.queries_TQ = take(c.num_heads * c.latent->query_dim());
  memory.up_TU = take(c.num_heads * (c.latent->plain_dim + c.latent->value_dim));
  return memory;
}

/// Tokens of images in place of their rows of the embedding, which get no gradient from them: this rule runs right before the embedding's.
void put_features(Frame& frame, std::span<const FeatureRows> features, const autograd::Var& x_TH) {
  std::vector<std::pair<std::int64_t, std::int64_t>> places;
  for (const FeatureRows& of : features) {
    const std::int64_t count = of.rows_NH.shape[0];
    frame.ctx.runtime->copy_within(x_TH.value.rows(of.first, count).data, of.rows_NH.data,
                                   static_cast<std::size_t>(of.rows_NH.shape.num_elements()) * size_of(of.rows_NH.dtype));
    places.emplace_back(of.first, count);
  }
  if (frame.tape == nullptr || places.empty()) return;
  frame.tape->record([tape = frame.tape, runtime = frame.ctx.runtime, x_TH, places = std::move(places)] {
    if (!tape->has_grad(x_TH)) return;
    const TensorView dx = tape->grad(x_TH);
    for (const auto& [first, count] : places)
      runtime->zero(dx.rows(first, count).data, static_cast<std::size_t>(count * dx.shape.num_cols()) * size_of(dx.dtype));
  });
}

void set_layer(AttentionIndex& index, const CacheLayers& cache, std::size_t layer) {
  index.kv_layer = &cache.kv[layer];
  index.state_layer = &cache.states[layer];
}

// Rules run newest first: what is recorded before a layer's rules runs after them.
void record_release(autograd::OffloadedRegions* offload, autograd::Tape& tape, std::int64_t layer) {
  if (offload != nullptr) tape.record([offload, i = static_cast<std::size_t>(layer)] { offload->release(i); });
}
void record_section(const Parameters* gradients, autograd::Tape* tape, std::int64_t layer) {
  if (gradients != nullptr && tape != nullptr && gradients->divides_grads())
    tape->record([gradients, layer] { gradients->section_is_done(layer); });
}
void record_fetch(autograd::OffloadedRegions* offload, autograd::Tape& tape, std::int64_t layer) {
  if (offload != nullptr) tape.record([offload, i = static_cast<std::size_t>(layer)] { offload->fetch(i); });
}
void enter_layer(const Weights& weights, std::int64_t layer) {
  if (weights.layers != nullptr) weights.layers->enter(layer, layer + 1 < weights.config.num_layers ? layer + 1 : -1);
}
void record_enter(const Weights& weights, autograd::Tape* tape, std::int64_t layer) {
  if (weights.layers != nullptr && tape != nullptr) tape->record([from = weights.layers, layer] { from->enter(layer, layer - 1); });
}

}  // namespace

TensorView BoundModel::gradient(Block block, std::int64_t layer) const {
  return gradients != nullptr ? view_or_none(gradients->grad(block, layer)) : TensorView{};
}

NormParameter BoundModel::norm(Block block, std::int64_t layer) const {
  const Tensor& weight = weights.norm_scale(block, layer);
  if (!weight.defined()) return {};
  return {weight.view(), gradient(block, layer), weights.config.rms_norm_eps};
}

LinearParameter BoundModel::linear(Block block, std::int64_t layer, const ops::LinearWeight* next, std::int64_t expert) const {
  LinearParameter out{
      .weight = &weights.matrix(block, layer, expert), .dw = {}, .db = {}, .next = next, .lora = lora(block, layer, expert)};
  if (gradients == nullptr) return out;
  out.dw = view_or_none(gradients->grad(block, layer, expert));
  if (const std::optional<Block> bias = bias_of(block)) out.db = view_or_none(gradients->grad(*bias, layer));
  out.accumulate = !gradients->layer_grads_are_fresh();
  return out;
}

Var BoundModel::whole(Frame& frame, const Var& part) const {
  if (shared.group == nullptr) return part;
  PRL_CHECK(frame.tape == nullptr, "devices that share layers compute no gradients");
  return {shared.group->gather(frame.ctx, shared.rank, part.value)};
}

autograd::ExpertsParameter BoundModel::experts(std::int64_t layer) const {
  const ModelConfig& c = weights.config;
  autograd::ExpertsParameter out{.router = linear(Block::kRouter, layer, nullptr),
                                 .gate_up = {},
                                 .down = {},
                                 .num_active = c.num_active_experts,
                                 .renormalize = c.norm_topk_prob,
                                 .is_router_frozen = gradients != nullptr && gradients->is_frozen(Block::kRouter),
                                 .given_TK = given_LTK,
                                 .log = route_log,
                                 .load = loads.empty() ? nullptr : &loads[static_cast<std::size_t>(layer)],
                                 .shared = shared};
  if (const std::int64_t T = given_LTK.data != nullptr ? given_LTK.shape.num_rows() / c.num_layers : 0; T > 0)
    out.given_TK = given_LTK.rows(layer * T, T);
  out.log.first_entry = layer * c.num_active_experts;
  if (c.has_score_router) {
    out.by_score = {.num_groups = c.num_expert_groups,
                    .num_active_groups = c.num_active_groups,
                    .renormalize = c.norm_topk_prob,
                    .scale = static_cast<float>(c.routed_scale)};
    out.score_bias_PE = weights.vector(Block::kRouterBias, layer).view().reshaped({kNumExactParts, c.num_experts});
  }
  if (c.clamped_swiglu) {
    out.clamped = {.alpha = static_cast<float>(c.clamped_swiglu->alpha), .limit = static_cast<float>(c.clamped_swiglu->limit)};
    out.gate_up_biases_V = weights.vector(Block::kGateUpBiases, layer).view();
    out.down_biases_V = weights.vector(Block::kDownBiases, layer).view();
    out.dgate_up_biases_V = gradient(Block::kGateUpBiases, layer);
    out.ddown_biases_V = gradient(Block::kDownBiases, layer);
  }
  out.is_squared = c.has_squared_relu_mlps;
  out.share = weights.experts;
  out.ranks = weights.expert_ranks;
  const std::int64_t first = weights.experts.first(c.num_experts), count = weights.experts.count(c.num_experts);
  for (std::int64_t expert = first; expert < first + count; ++expert) {
    out.gate_up.push_back(linear(Block::kGateUp, layer, nullptr, expert));
    out.down.push_back(linear(Block::kDown, layer, nullptr, expert));
  }
  return out;
}

std::shared_ptr<const autograd::LoraParameter> BoundModel::lora(Block block, std::int64_t layer, std::int64_t expert) const {
  if (adapters.empty() && bank == nullptr) return nullptr;
  if (bank != nullptr && expert >= 0) return nullptr;  // a bank takes no adapters of experts
  auto out = std::make_shared<autograd::LoraParameter>();
  if (bank != nullptr) {
    out->index = bank->index(block, layer, tiles);
    return out->index ? out : nullptr;
  }
  for (const AdapterRows& of : adapters)
    if (const ops::LoraWeight* weight = of.adapter->find(block, layer, expert)) out->groups.push_back({weight, of.rows});
  if (out->groups.empty()) return nullptr;
  if (gradients == nullptr) return out;
  const TensorTable& table = *gradients->table();
  out->da = view_or_none(gradients->grad(*lora_a_of(block), layer, expert));
  for (const TensorSpec& a : table.tensors_of(table.blocks()[table.find(*lora_a_of(block), layer, expert)]))
    out->db.push_back(view_or_none(gradients->grad(*lora_b_of(a.slot), layer, expert)));
  out->accumulate = !gradients->grads_are_fresh();
  if (dropout.probability > 0)
    out->dropout = {mix_seed(dropout.seed, static_cast<std::uint64_t>(layer), static_cast<std::uint64_t>(block)), dropout.probability,
                    dropout.first_row};
  return out;
}

namespace {

/// What a layer of linear attention gives for its projections, before the product that ends it.
Var linear_attention_of(Frame& frame, const BoundModel& model, std::int64_t i, const Var& projected, const AttentionIndex& index) {
  const LinearAttention& c = model.weights.config.linear;
  const std::int64_t num_shards = model.weights.shard.size;
  return autograd::linear_attention(frame, projected,
                                    {.num_key_heads = c.num_key_heads / num_shards,
                                     .num_value_heads = c.num_value_heads / num_shards,
                                     .key_dim = c.key_dim,
                                     .value_dim = c.value_dim,
                                     .num_taps = c.num_taps,
                                     .taps = vector_of(model, Block::kLinearConv, i),
                                     .decay_rate = vector_of(model, Block::kDecayRate, i),
                                     .decay_bias = vector_of(model, Block::kDecayBias, i),
                                     .norm = model.norm(Block::kLinearNorm, i),
                                     .kind = c.is_state_space ? ops::RuleKind::kStateSpace : ops::RuleKind::kGatedDelta,
                                     .conv_bias = vector_or_none(model, Block::kConvBias, i),
                                     .skip = vector_or_none(model, Block::kSkip, i),
                                     .min_step = static_cast<float>(c.min_step),
                                     .max_step = static_cast<float>(c.max_step)},
                                    index);
}

/// Latent attention of a layer for what its first product gives.
Var latent_attention_of(PartFrames& part, const BoundModel& model, std::int64_t i, const Var& down, const AttentionIndex& index,
                        const LayerMemory& memory) {
  const ModelConfig& c = model.weights.config;
  // Whatever the model's other norms have (Liu et al. 2024, DeepSeek-V3).
  constexpr float kLatentEps = 1e-6f;
  autograd::LatentParameter p{.heads = {.num_heads = c.num_heads / model.weights.shard.size,
                                        .head_dim = c.head_dim,
                                        .plain_dim = c.latent->plain_dim,
                                        .rotary_dim = c.latent->rotary_dim,
                                        .value_dim = c.latent->value_dim,
                                        .are_pairs_neighbours = c.latent->are_pairs_neighbours},
                              .q_norm = model.norm(Block::kQueryLatentNorm, i),
                              .kv_norm = model.norm(Block::kKvLatentNorm, i)};
  p.q_norm.eps = p.kv_norm.eps = kLatentEps;
  const auto weight = [&](Block block) { return &model.weights.matrix(block, i); };
  Frame& frame = part.attn_proj;
  const autograd::Latents latents = autograd::norm_latents(frame, down, p);
  Var q;
  if (latents.q.is_defined())
    q = autograd::linear(frame, latents.q, model.linear(Block::kQueryUp, i, weight(Block::kKvUp)), memory.queries_TQ);
  if (c.attends_to_latents)
    return autograd::latent_attention(part.heads, down, latents, q, model.linear(Block::kKvUp, i, weight(Block::kO)), p,
                                      attention_of(model, i, {}, {}), index);
  const Var up = autograd::linear(frame, latents.kv, model.linear(Block::kKvUp, i, weight(Block::kO)), memory.up_TU);
  const Var qkv = autograd::latent_heads(part.heads, down, q, up, p);
  return autograd::narrow_heads(part.heads, autograd::self_attention(part.heads, qkv, attention_of(model, i, {}, {}), index), p);
}

/// Attention of a layer, of either kind, for its projections.
Var attend(Frame& frame, const BoundModel& model, std::int64_t i, const Var& projected, const AttentionParameter& attention,
           const AttentionIndex& index) {
  const ModelConfig& c = model.weights.config;
  return model.whole(frame, c.is_linear(i)  ? linear_attention_of(frame, model, i, projected, index)
                            : c.gates_heads ? autograd::gated_attention(frame, projected, attention, index)
                                            : autograd::self_attention(frame, projected, attention, index));
}

/// A layer with norms of what attention and MLP take and of what they give: x + norm(attention(norm(x))), and the same of the MLP.
Stream doubly_normed_layer(Frame& frame, PartFrames& part, const BoundModel& model, std::int64_t i, const Stream& in,
                           const AttentionIndex& index, const LayerMemory& memory) {
  const ModelConfig& c = model.weights.config;
  const bool is_sparse = c.is_sparse(i);
  const auto linear = [&](Block block, const ops::LinearWeight& next) { return model.linear(block, i, &next); };
  const auto weight = [&](Block block) -> const ops::LinearWeight& { return model.weights.matrix(block, i); };
  const AttentionParameter attention = attention_of(model, i, model.norm(Block::kQNorm, i), model.norm(Block::kKNorm, i));
  const Projected qkv = project_normed(part.norm, part.attn_proj, in, model.norm(Block::kInputNorm, i),
                                       linear(Block::kQkv, weight(Block::kO)), Gate::kNone, /*sum_out=*/{});
  const Var heads = attend(part.heads, model, i, qkv.value, attention, index);
  const Var attended =
      model.whole(frame, autograd::linear(frame, heads, linear(Block::kO, weight(is_sparse ? Block::kRouter : Block::kGateUp))));
  const Stream of_mlp{qkv.sum, autograd::rms_norm(frame, attended, model.norm(Block::kAttentionOutNorm, i), memory.delta_TH)};

  const auto give = [&](const Var& sum, const Var& out) -> Stream {
    return {sum, autograd::rms_norm(frame, out, model.norm(Block::kMlpOutNorm, i), memory.delta_TH)};
  };
  if (!is_sparse) {
    const Projected hidden = project_normed(part.norm, part.mlp, of_mlp, model.norm(Block::kPostNorm, i),
                                            linear(Block::kGateUp, weight(Block::kDown)), gate_of(model), memory.residual_TH);
    const Var whole = model.whole(frame, hidden.value);
    return give(hidden.sum, model.whole(frame, autograd::linear(frame, whole, linear(Block::kDown, after_layer(model.weights, i)))));
  }
  const Projected normed = norm_stream(part.norm, of_mlp, model.norm(Block::kPostNorm, i), memory.residual_TH);
  if (c.shared_expert_size == 0) return give(normed.sum, autograd::experts(part.mlp, normed.value, model.experts(i)));
  // What the last norm reads is kept; what is added to it is not.
  const Var routed = autograd::experts(part.mlp, normed.value, model.experts(i), memory.delta_TH);
  LayerMemory kept = memory;
  kept.delta_TH = {};
  return give(normed.sum, add_shared_experts(frame, part.mlp, model, i, normed.value, routed, kept));
}

/// The experts that a router chooses for each row of x, in memory.delta_TH; of narrower rows than x has where the model has such.
Var routed_experts(Frame& frame, PartFrames& part, const BoundModel& model, std::int64_t i, const Var& x, const LayerMemory& memory) {
  if (model.weights.config.expert_input_size == 0)
    return autograd::experts(part.mlp, x, model.experts(i), memory.delta_TH, /*is_block_output=*/true);
  const Var in = autograd::linear(part.mlp, x, model.linear(Block::kExpertsIn, i, &model.weights.matrix(Block::kExpertsOut, i)));
  const Var mixed = autograd::experts(part.mlp, x, model.experts(i), /*out=*/{}, /*is_block_output=*/false, in);
  return autograd::linear(frame, mixed, model.linear(Block::kExpertsOut, i, nullptr), memory.delta_TH, /*is_block_output=*/true);
}

/// A layer that is attention alone or an MLP alone: x + attention(norm(x)), or the same of the MLP.
Stream single_part_layer(Frame& frame, PartFrames& part, const BoundModel& model, std::int64_t i, const Stream& in,
                         const AttentionIndex& index, const LayerMemory& memory) {
  const ModelConfig& c = model.weights.config;
  const ops::LinearWeight* const after = &after_layer(model.weights, i);
  if (c.has_attention(i)) {
    const Projected projected =
        project_normed(part.norm, part.attn_proj, in, model.norm(Block::kInputNorm, i),
                       model.linear(Block::kQkv, i, &model.weights.matrix(Block::kO, i)), Gate::kNone, memory.residual_TH);
    const Var heads = attend(part.heads, model, i, projected.value, attention_of(model, i, {}, {}), index);
    return project_onto(frame, model, projected.sum, heads, model.linear(Block::kO, i, after), memory, /*is_block_output=*/true);
  }
  if (!c.is_sparse(i)) {
    const Projected hidden =
        project_normed(part.norm, part.mlp, in, model.norm(Block::kPostNorm, i),
                       model.linear(Block::kGateUp, i, &model.weights.matrix(Block::kDown, i)), gate_of(model), memory.residual_TH);
    return project_onto(frame, model, hidden.sum, model.whole(frame, hidden.value), model.linear(Block::kDown, i, after), memory,
                        /*is_block_output=*/true);
  }
  const Projected normed = norm_stream(part.norm, in, model.norm(Block::kPostNorm, i), memory.residual_TH);
  const Var routed = routed_experts(frame, part, model, i, normed.value, memory);
  return {normed.sum, c.shared_expert_size > 0 ? add_shared_experts(frame, part.mlp, model, i, normed.value, routed, memory) : routed};
}

/// What enters the first layer: the embedding with features in their places, or what a head for multi-token prediction makes of it.
Var first_input(Frame& frame, const BoundModel& model, const Var& embedded_TH) {
  put_features(frame, model.features, embedded_TH);
  if (!model.weights.config.is_mtp_head) return embedded_TH;
  const ConstTensorView hidden_TH = model.hidden_TH;
  PRL_CHECK(hidden_TH.data != nullptr && hidden_TH.shape == embedded_TH.value.shape,
            "a head for multi-token prediction without hidden states");
  const Var pair =
      autograd::normed_pair(frame, embedded_TH.value, model.norm(Block::kMtpEmbeddingNorm), hidden_TH, model.norm(Block::kMtpHiddenNorm));
  return autograd::linear(frame, pair, model.linear(Block::kMtpProjection, -1, &model.weights.first_matrix(0)));
}

}  // namespace

Stream decoder_layer(Frame& frame, const BoundModel& model, std::int64_t i, const Stream& in, const AttentionIndex& index,
                     const LayerMemory& memory) {
  const ModelConfig& c = model.weights.config;
  const bool is_sparse = c.is_sparse(i);
  const auto weight = [&](Block block) { return &model.weights.matrix(block, i); };
  const NormParameter q_norm = model.norm(Block::kQNorm, i), k_norm = model.norm(Block::kKNorm, i);
  PartFrames part(frame, memory, q_norm.weight.data != nullptr);
  if (c.has_single_parts) return single_part_layer(frame, part, model, i, in, index, memory);
  if (c.norms_outputs && c.norms_inputs) return doubly_normed_layer(frame, part, model, i, in, index, memory);
  if (c.norms_outputs) return output_normed_layer(frame, part, model, i, in, index, memory);

  const Projected qkv =
      project_normed(part.norm, part.attn_proj, in, model.norm(Block::kInputNorm, i),
                     model.linear(Block::kQkv, i, weight(c.latent ? Block::kKvUp : Block::kO)), Gate::kNone, /*sum_out=*/{});
  const Var projections = c.qk_norm_is_whole ? norm_projections(part.heads, model, i, qkv.value) : qkv.value;
  const AttentionParameter attention = c.qk_norm_is_whole ? attention_of(model, i, {}, {}) : attention_of(model, i, q_norm, k_norm);
  const Var heads = c.latent ? model.whole(frame, latent_attention_of(part, model, i, projections, index, memory))
                             : attend(part.heads, model, i, projections, attention, index);
  const Stream attended =
      project_onto(frame, model, qkv.sum, heads, model.linear(Block::kO, i, weight(is_sparse ? Block::kRouter : Block::kGateUp)), memory,
                   /*is_block_output=*/false);

  if (is_sparse) {
    const Projected normed = norm_stream(part.norm, attended, model.norm(Block::kPostNorm, i), memory.residual_TH);
    const Var routed = autograd::experts(part.mlp, normed.value, model.experts(i), memory.delta_TH, /*is_block_output=*/true);
    return {normed.sum, c.shared_expert_size > 0 ? add_shared_experts(frame, part.mlp, model, i, normed.value, routed, memory) : routed};
  }
  const Projected hidden = project_normed(part.norm, part.mlp, attended, model.norm(Block::kPostNorm, i),
                                          model.linear(Block::kGateUp, i, weight(Block::kDown)), gate_of(model), memory.residual_TH);
  return project_onto(frame, model, hidden.sum, model.whole(frame, hidden.value),
                      model.linear(Block::kDown, i, &after_layer(model.weights, i)), memory, /*is_block_output=*/true);
}

Var decoder_forward(Frame& frame, const BoundModel& model, const ops::TokenIds& ids, const AttentionIndex& index, const CacheLayers* cache,
                    const KeptActivations* kept) {
  const Weights& w = model.weights;
  const Parameters* g = model.gradients;
  const std::int64_t T = ids.ids_T.shape.num_elements(), H = w.config.hidden_size;
  const Shape shape{T, H};
  static const KeptActivations kAll;
  const KeptActivations& keep = kept != nullptr ? *kept : kAll;

  // What a layer's rules read lies in its region, if activations are offloaded: its place is another layer's later on.
  autograd::OffloadedRegions* offload = frame.tape != nullptr ? keep.offload : nullptr;
  const auto region_of = [&](std::int64_t i) -> autograd::Arena& {
    return offload != nullptr && i < w.config.num_layers ? offload->enter(static_cast<std::size_t>(i)) : frame.arena;
  };
  autograd::Arena* region = &region_of(0);

  Stream stream;
  Frame first = frame.in(*region);
  stream.residual_TH = autograd::embedding(first, w.embedding_VH(), g != nullptr ? view_or_none(g->grad(Block::kEmbedding)) : TensorView{},
                                           ids, embedding_scale(w));
  stream.residual_TH = first_input(first, model, stream.residual_TH);

  // Without a tape two pairs of stream buffers take turns, or three where a layer may leave its input's sum where it is, and everything
  // else of a layer is given back after it. With one, no backward rule reads the outputs that are added to the stream, so that all of them
  // share one buffer.
  LayerMemory turns[3];
  const std::int64_t num_turns = w.config.has_single_parts ? 3 : 2;
  if (frame.tape != nullptr)
    turns[0] = memory_of_all_layers(frame, w, T);
  else
    for (std::int64_t turn = 0; turn < num_turns; ++turn) turns[turn] = {frame.take(shape, w.compute), frame.take(shape, w.compute)};

  for (std::int64_t i = 0; i < w.config.num_layers; ++i) {
    Frame here = frame.in(*region);
    AttentionIndex layer_index = index;
    if (cache != nullptr) set_layer(layer_index, *cache, static_cast<std::size_t>(i));
    record_section(g, frame.tape, i);
    enter_layer(w, i);
    if (frame.tape == nullptr) {
      const autograd::Arena::Mark mark = frame.arena.mark();
      stream = decoder_layer(frame, model, i, stream, layer_index, turns[i % num_turns]);
      frame.arena.release(mark);
    } else if (keep.is_checkpointed(i) && !keep.checkpointing.parts.any()) {
      // The sum is what survives: adding and norming apart gives the same bits as the fused form.
      Var x = stream.residual_TH;
      if (stream.delta_TH.is_defined()) x = autograd::add(here, stream.residual_TH, stream.delta_TH);
      record_release(offload, *frame.tape, i);
      if (offload != nullptr) offload->leave(static_cast<std::size_t>(i));
      region = &region_of(i + 1);
      Frame next = frame.in(*region);
      stream = {autograd::checkpoint(next, x, shape,
                                     [model, i, layer_index](Frame& inner, const Var& block_in, TensorView out) {
                                       const Stream s = decoder_layer(inner, model, i, {block_in, {}}, layer_index, {.wants_delta = true});
                                       return autograd::add(inner, s.residual_TH, s.delta_TH, out);
                                     }),
                {}};
      record_fetch(offload, *frame.tape, i);
    } else {
      LayerMemory memory = turns[0];
      if (keep.is_checkpointed(i)) {
        memory.again = keep.checkpointing.parts;
        memory.remake = keep.remake;
        memory.remake->begin_block();
      }
      record_release(offload, *frame.tape, i);
      frame.tape->begin_block();
      stream = decoder_layer(here, model, i, stream, layer_index, memory);
      if (memory.remake != nullptr) memory.remake->end_block(*frame.tape);
      frame.tape->end_block();
      record_fetch(offload, *frame.tape, i);
      if (offload != nullptr) offload->leave(static_cast<std::size_t>(i));
      region = &region_of(i + 1);
    }
    record_enter(w, frame.tape, i);
  }

  const NormParameter final_norm = model.norm(Block::kFinalNorm);
  if (!stream.delta_TH.is_defined()) return autograd::rms_norm(frame, stream.residual_TH, final_norm);
  return autograd::add_rms_norm(frame, stream.delta_TH, stream.residual_TH, final_norm).normed;
}

}  // namespace prl::nn
