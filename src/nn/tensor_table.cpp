#include "nn/tensor_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "nn/exact_parts.hpp"
#include "nn/shards.hpp"

namespace prl::nn {
namespace {

namespace when {
bool always(const ModelConfig&, std::int64_t) { return true; }
bool softmax(const ModelConfig& c, std::int64_t layer) { return c.has_softmax(layer); }
bool linear(const ModelConfig& c, std::int64_t layer) { return c.is_linear(layer); }
bool linear_split(const ModelConfig& c, std::int64_t layer) {
  return c.is_linear(layer) && !c.linear.fuses_projections && !c.linear.is_state_space;
}
bool linear_fused(const ModelConfig& c, std::int64_t layer) { return c.is_linear(layer) && c.linear.fuses_projections; }
bool attention_bias(const ModelConfig& c, std::int64_t) { return c.attention_bias; }
bool out_bias(const ModelConfig& c, std::int64_t) { return c.attention_out_bias; }
bool head_norms(const ModelConfig& c, std::int64_t layer) { return c.qk_norm && !c.is_linear(layer); }
bool own_head(const ModelConfig& c, std::int64_t) { return !c.tie_word_embeddings; }
bool norm_before(const ModelConfig& c, std::int64_t layer) { return c.norms_inputs && c.has_attention(layer); }
bool mlp_norm_before(const ModelConfig& c, std::int64_t layer) { return c.norms_inputs && c.has_mlp(layer); }
bool space(const ModelConfig& c, std::int64_t layer) { return c.is_linear(layer) && c.linear.is_state_space; }
bool conv_bias(const ModelConfig& c, std::int64_t layer) { return space(c, layer) && c.linear.has_conv_bias; }
bool narrow_experts(const ModelConfig& c, std::int64_t layer) { return c.expert_input_size > 0 && c.is_sparse(layer); }
bool norm_after(const ModelConfig& c, std::int64_t) { return c.norms_outputs; }
bool head_gates(const ModelConfig& c, std::int64_t layer) { return c.gates_are_apart && !c.is_linear(layer); }
bool split(const ModelConfig& c, std::int64_t layer) { return !c.fuses_projections && c.has_softmax(layer) && !c.latent; }
bool latent(const ModelConfig& c, std::int64_t) { return c.latent.has_value(); }
bool query_latent(const ModelConfig& c, std::int64_t) { return c.latent && c.latent->query_rank > 0; }
bool no_query_latent(const ModelConfig& c, std::int64_t) { return c.latent && c.latent->query_rank == 0; }
bool fused(const ModelConfig& c, std::int64_t) { return c.fuses_projections; }
bool dense(const ModelConfig& c, std::int64_t layer) { return !c.is_sparse(layer) && c.has_mlp(layer); }
bool dense_split(const ModelConfig& c, std::int64_t layer) { return dense(c, layer) && !c.fuses_projections; }
bool dense_gate(const ModelConfig& c, std::int64_t layer) { return dense_split(c, layer) && !c.has_squared_relu_mlps; }
bool sparse(const ModelConfig& c, std::int64_t layer) { return c.is_sparse(layer); }
bool sparse_apart(const ModelConfig& c, std::int64_t layer) { return c.is_sparse(layer) && c.expert_names != ExpertNames::kStacked; }
bool sparse_gate(const ModelConfig& c, std::int64_t layer) { return sparse_apart(c, layer) && !c.has_squared_relu_mlps; }
bool stacked(const ModelConfig& c, std::int64_t layer) { return c.is_sparse(layer) && c.expert_names == ExpertNames::kStacked; }
bool expert_bias(const ModelConfig& c, std::int64_t layer) { return c.is_sparse(layer) && c.clamped_swiglu.has_value(); }
bool sinks(const ModelConfig& c, std::int64_t) { return c.attention_sinks; }
bool score_router(const ModelConfig& c, std::int64_t layer) { return c.has_score_router && c.is_sparse(layer); }
bool shared(const ModelConfig& c, std::int64_t layer) { return c.shared_expert_size > 0 && c.is_sparse(layer); }
bool shared_mlp_gate(const ModelConfig& c, std::int64_t layer) { return shared(c, layer) && !c.has_squared_relu_mlps; }
bool shared_gate(const ModelConfig& c, std::int64_t layer) { return c.gates_shared_expert && shared(c, layer); }
bool mtp_head(const ModelConfig& c, std::int64_t) { return c.is_mtp_head; }
}  // namespace when

namespace shape {
std::int64_t q_width(const ModelConfig& c) { return c.num_heads * c.head_dim; }
std::int64_t kv_width(const ModelConfig& c) { return c.num_kv_heads * c.head_dim; }
Shape vocab_by_hidden(const ModelConfig& c) { return {c.vocab_size, c.hidden_size}; }
Shape hidden(const ModelConfig& c) { return {c.hidden_size}; }
Shape q_norm(const ModelConfig& c) { return {c.qk_norm_is_whole ? q_width(c) : c.head_dim}; }
Shape k_norm(const ModelConfig& c) { return {c.qk_norm_is_whole ? kv_width(c) : c.head_dim}; }
Shape q_by_hidden(const ModelConfig& c) { return {(c.gates_heads && !c.gates_are_apart ? 2 : 1) * q_width(c), c.hidden_size}; }
Shape gates_by_hidden_of_heads(const ModelConfig& c) { return {q_width(c), c.hidden_size}; }
Shape kv_by_hidden(const ModelConfig& c) { return {kv_width(c), c.hidden_size}; }
Shape qkv_by_hidden(const ModelConfig& c) { return {q_width(c) + 2 * kv_width(c), c.hidden_size}; }
Shape q_bias(const ModelConfig& c) { return {q_width(c)}; }
Shape kv_bias(const ModelConfig& c) { return {kv_width(c)}; }
Shape hidden_by_q(const ModelConfig& c) { return {c.hidden_size, c.latent ? c.num_heads * c.latent->value_dim : q_width(c)}; }
Shape mlp_by_hidden(const ModelConfig& c) { return {c.intermediate_size, c.hidden_size}; }
Shape mlps_by_hidden(const ModelConfig& c) { return {2 * c.intermediate_size, c.hidden_size}; }
Shape hidden_by_mlp(const ModelConfig& c) { return {c.hidden_size, c.intermediate_size}; }
Shape experts_by_hidden(const ModelConfig& c) { return {c.num_experts, c.hidden_size}; }
std::int64_t expert_input(const ModelConfig& c) { return c.expert_input_size > 0 ? c.expert_input_size : c.hidden_size; }
Shape expert_by_hidden(const ModelConfig& c) { return {c.expert_size, expert_input(c)}; }
Shape hidden_by_expert(const ModelConfig& c) { return {expert_input(c), c.expert_size}; }
Shape narrow_by_hidden(const ModelConfig& c) { return {c.expert_input_size, c.hidden_size}; }
Shape hidden_by_narrow(const ModelConfig& c) { return {c.hidden_size, c.expert_input_size}; }
Shape heads(const ModelConfig& c) { return {c.num_heads}; }
Shape experts(const ModelConfig& c) { return {c.num_experts}; }
Shape pairs_by_hidden(const ModelConfig& c) { return {2 * c.expert_size, c.hidden_size}; }
Shape pairs_of_experts(const ModelConfig& c) { return {2 * c.num_experts * c.expert_size}; }
Shape hidden_of_experts(const ModelConfig& c) { return {c.num_experts * c.hidden_size}; }
Shape parts_by_experts(const ModelConfig& c) { return {kNumExactParts * c.num_experts}; }
Shape shared_by_hidden(const ModelConfig& c) { return {c.shared_expert_size, c.hidden_size}; }
Shape hidden_by_shared(const ModelConfig& c) { return {c.hidden_size, c.shared_expert_size}; }
Shape channels_by_hidden(const ModelConfig& c) { return {c.linear.num_channels(), c.hidden_size}; }
Shape value_by_hidden(const ModelConfig& c) { return {c.linear.value_width(), c.hidden_size}; }
Shape value_heads_by_hidden(const ModelConfig& c) { return {c.linear.num_value_heads, c.hidden_size}; }
Shape taps(const ModelConfig& c) { return {c.linear.num_channels() * c.linear.num_taps}; }
Shape value_heads(const ModelConfig& c) { return {c.linear.num_value_heads}; }
Shape value_norm(const ModelConfig& c) { return {c.linear.is_state_space ? c.linear.value_width() : c.linear.value_dim}; }
Shape channels(const ModelConfig& c) { return {c.linear.num_channels()}; }
Shape projected_by_hidden(const ModelConfig& c) { return {c.linear.projected_width(), c.hidden_size}; }
Shape qkvz_by_hidden(const ModelConfig& c) { return {c.linear.num_channels() + c.linear.value_width(), c.hidden_size}; }
Shape gates_by_hidden(const ModelConfig& c) { return {2 * c.linear.num_value_heads, c.hidden_size}; }
Shape query_rank_by_hidden(const ModelConfig& c) { return {c.latent->query_rank, c.hidden_size}; }
Shape queries_by_hidden(const ModelConfig& c) { return {c.num_heads * c.latent->query_dim(), c.hidden_size}; }
Shape kv_rank_by_hidden(const ModelConfig& c) { return {c.latent->kv_rank + c.latent->rotary_dim, c.hidden_size}; }
Shape query_rank(const ModelConfig& c) { return {c.latent->query_rank}; }
Shape queries_by_rank(const ModelConfig& c) { return {c.num_heads * c.latent->query_dim(), c.latent->query_rank}; }
Shape kv_rank(const ModelConfig& c) { return {c.latent->kv_rank}; }
Shape kv_by_rank(const ModelConfig& c) { return {c.num_heads * (c.latent->plain_dim + c.latent->value_dim), c.latent->kv_rank}; }
Shape hidden_by_pair(const ModelConfig& c) { return {c.hidden_size, 2 * c.hidden_size}; }
Shape hidden_by_value(const ModelConfig& c) { return {c.hidden_size, c.linear.value_width()}; }
}  // namespace shape

enum Place { kBefore, kInLayer, kInExpert, kAfter };
constexpr bool kReplicated = false, kShared = true;

/// What a slot is in every family. Names in layers follow "model.layers.N." and "blk.N.", those in experts
/// "model.layers.N.mlp.experts.E."; for other names see numbered_name().
struct Row {
  Slot slot;
  Block block;
  Place place;
  const char* name;
  const char* gguf;
  Shape (*shape)(const ModelConfig&);
  bool (*exists)(const ModelConfig&, std::int64_t layer);
  bool is_shared;
};

using S = Slot;
using B = Block;
// Rows of one block stay together: their order is that of the block's rows in memory.
// clang-format off
constexpr std::array kRowsOfTable{
    Row{S::kEmbedding, B::kEmbedding, kBefore, "model.embed_tokens.weight", "token_embd.weight", shape::vocab_by_hidden, when::always, kReplicated},
    Row{S::kInputNorm, B::kInputNorm, kInLayer, "input_layernorm.weight", "attn_norm.weight", shape::hidden, when::norm_before, kReplicated},
    Row{S::kQ, B::kQkv, kInLayer, "self_attn.q_proj.weight", "attn_q.weight", shape::q_by_hidden, when::split, kShared},
    Row{S::kHeadGate, B::kQkv, kInLayer, "self_attn.gate_proj.weight", "attn_gate.weight", shape::gates_by_hidden_of_heads, when::head_gates, kShared},
    Row{S::kK, B::kQkv, kInLayer, "self_attn.k_proj.weight", "attn_k.weight", shape::kv_by_hidden, when::split, kShared},
    Row{S::kV, B::kQkv, kInLayer, "self_attn.v_proj.weight", "attn_v.weight", shape::kv_by_hidden, when::split, kShared},
    Row{S::kFusedQkv, B::kQkv, kInLayer, "self_attn.qkv_proj.weight", "attn_qkv.weight", shape::qkv_by_hidden, when::fused, kShared},
    Row{S::kQBias, B::kQkvBias, kInLayer, "self_attn.q_proj.bias", "attn_q.bias", shape::q_bias, when::attention_bias, kShared},
    Row{S::kKBias, B::kQkvBias, kInLayer, "self_attn.k_proj.bias", "attn_k.bias", shape::kv_bias, when::attention_bias, kShared},
    Row{S::kVBias, B::kQkvBias, kInLayer, "self_attn.v_proj.bias", "attn_v.bias", shape::kv_bias, when::attention_bias, kShared},
    Row{S::kQNorm, B::kQNorm, kInLayer, "self_attn.q_norm.weight", "attn_q_norm.weight", shape::q_norm, when::head_norms, kReplicated},
    Row{S::kKNorm, B::kKNorm, kInLayer, "self_attn.k_norm.weight", "attn_k_norm.weight", shape::k_norm, when::head_norms, kReplicated},
    Row{S::kO, B::kO, kInLayer, "self_attn.o_proj.weight", "attn_output.weight", shape::hidden_by_q, when::softmax, kShared},
    Row{S::kOBias, B::kOBias, kInLayer, "self_attn.o_proj.bias", "attn_output.bias", shape::hidden, when::out_bias, kShared},
    Row{S::kAttentionOutNorm, B::kAttentionOutNorm, kInLayer, "post_attention_layernorm.weight", "post_attention_norm.weight", shape::hidden, when::norm_after, kReplicated},
    Row{S::kPostNorm, B::kPostNorm, kInLayer, "post_attention_layernorm.weight", "ffn_norm.weight", shape::hidden, when::mlp_norm_before, kReplicated},
    Row{S::kGate, B::kGateUp, kInLayer, "mlp.gate_proj.weight", "ffn_gate.weight", shape::mlp_by_hidden, when::dense_gate, kShared},
    Row{S::kUp, B::kGateUp, kInLayer, "mlp.up_proj.weight", "ffn_up.weight", shape::mlp_by_hidden, when::dense_split, kShared},
    Row{S::kFusedGateUp, B::kGateUp, kInLayer, "mlp.gate_up_proj.weight", "ffn_up.weight", shape::mlps_by_hidden, when::fused, kShared},
    Row{S::kDown, B::kDown, kInLayer, "mlp.down_proj.weight", "ffn_down.weight", shape::hidden_by_mlp, when::dense, kShared},
    Row{S::kMlpOutNorm, B::kMlpOutNorm, kInLayer, "post_feedforward_layernorm.weight", "post_ffw_norm.weight", shape::hidden, when::norm_after, kReplicated},
    Row{S::kFinalNorm, B::kFinalNorm, kAfter, "model.norm.weight", "output_norm.weight", shape::hidden, when::always, kReplicated},
    Row{S::kLmHead, B::kLmHead, kAfter, "lm_head.weight", "output.weight", shape::vocab_by_hidden, when::own_head, kReplicated},
    Row{S::kRouter, B::kRouter, kInLayer, "mlp.gate.weight", "ffn_gate_inp.weight", shape::experts_by_hidden, when::sparse, kReplicated},
    Row{S::kExpertGate, B::kGateUp, kInExpert, "gate_proj.weight", "ffn_gate_exps.weight", shape::expert_by_hidden, when::sparse_gate, kShared},
    Row{S::kExpertUp, B::kGateUp, kInExpert, "up_proj.weight", "ffn_up_exps.weight", shape::expert_by_hidden, when::sparse_apart, kShared},
    Row{S::kExpertDown, B::kDown, kInExpert, "down_proj.weight", "ffn_down_exps.weight", shape::hidden_by_expert, when::sparse_apart, kShared},
    Row{S::kRouterBias, B::kRouterBias, kInLayer, "mlp.gate.e_score_correction_bias", "exp_probs_b.bias", shape::parts_by_experts, when::score_router, kReplicated},
    Row{S::kSharedGate, B::kGateUp, kInLayer, "mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", shape::shared_by_hidden, when::shared_mlp_gate, kShared},
    Row{S::kSharedUp, B::kGateUp, kInLayer, "mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", shape::shared_by_hidden, when::shared, kShared},
    Row{S::kSharedDown, B::kDown, kInLayer, "mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight", shape::hidden_by_shared, when::shared, kShared},
    Row{S::kSharedExpertGate, B::kSharedExpertGate, kInLayer, "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", shape::hidden, when::shared_gate, kReplicated},
    Row{S::kLinearQkv, B::kQkv, kInLayer, "linear_attn.in_proj_qkv.weight", "attn_qkv.weight", shape::channels_by_hidden, when::linear_split, kShared},
    Row{S::kLinearZ, B::kQkv, kInLayer, "linear_attn.in_proj_z.weight", "attn_gate.weight", shape::value_by_hidden, when::linear_split, kShared},
    Row{S::kLinearB, B::kQkv, kInLayer, "linear_attn.in_proj_b.weight", "ssm_beta.weight", shape::value_heads_by_hidden, when::linear_split, kShared},
    Row{S::kLinearA, B::kQkv, kInLayer, "linear_attn.in_proj_a.weight", "ssm_alpha.weight", shape::value_heads_by_hidden, when::linear_split, kShared},
    Row{S::kLinearQkvz, B::kQkv, kInLayer, "linear_attn.in_proj_qkvz.weight", "ssm_in.weight", shape::qkvz_by_hidden, when::linear_fused, kShared},
    Row{S::kLinearBa, B::kQkv, kInLayer, "linear_attn.in_proj_ba.weight", "ssm_beta_alpha.weight", shape::gates_by_hidden, when::linear_fused, kShared},
    Row{S::kLinearConv, B::kLinearConv, kInLayer, "linear_attn.conv1d.weight", "ssm_conv1d.weight", shape::taps, when::linear, kShared},
    Row{S::kDecayRate, B::kDecayRate, kInLayer, "linear_attn.A_log", "ssm_a", shape::value_heads, when::linear, kShared},
    Row{S::kDecayBias, B::kDecayBias, kInLayer, "linear_attn.dt_bias", "ssm_dt.bias", shape::value_heads, when::linear, kShared},
    Row{S::kLinearNorm, B::kLinearNorm, kInLayer, "linear_attn.norm.weight", "ssm_norm.weight", shape::value_norm, when::linear, kShared},
    Row{S::kLinearOut, B::kO, kInLayer, "linear_attn.out_proj.weight", "ssm_out.weight", shape::hidden_by_value, when::linear, kShared},
    Row{S::kSinks, B::kSinks, kInLayer, "self_attn.sinks", "attn_sinks.weight", shape::heads, when::sinks, kShared},
    Row{S::kRouterOffset, B::kRouterOffset, kInLayer, "mlp.router.bias", "ffn_gate_inp.bias", shape::experts, when::expert_bias, kReplicated},
    Row{S::kExpertPairs, B::kGateUp, kInExpert, "gate_up_proj.weight", "ffn_gate_up_exps.weight", shape::pairs_by_hidden, when::stacked, kShared},
    Row{S::kStackedDown, B::kDown, kInExpert, "down_proj.weight", "ffn_down_exps.weight", shape::hidden_by_expert, when::stacked, kShared},
    Row{S::kExpertPairsBias, B::kGateUpBiases, kInLayer, "mlp.experts.gate_up_proj_bias", "ffn_gate_up_exps.bias", shape::pairs_of_experts, when::expert_bias, kShared},
    Row{S::kStackedDownBias, B::kDownBiases, kInLayer, "mlp.experts.down_proj_bias", "ffn_down_exps.bias", shape::hidden_of_experts, when::expert_bias, kShared},
    Row{S::kQueryDown, B::kQkv, kInLayer, "self_attn.q_a_proj.weight", "attn_q_a.weight", shape::query_rank_by_hidden, when::query_latent, kReplicated},
    Row{S::kLatentQuery, B::kQkv, kInLayer, "self_attn.q_proj.weight", "attn_q.weight", shape::queries_by_hidden, when::no_query_latent, kShared},
    Row{S::kKvDown, B::kQkv, kInLayer, "self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", shape::kv_rank_by_hidden, when::latent, kReplicated},
    Row{S::kQueryLatentNorm, B::kQueryLatentNorm, kInLayer, "self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", shape::query_rank, when::query_latent, kReplicated},
    Row{S::kQueryUp, B::kQueryUp, kInLayer, "self_attn.q_b_proj.weight", "attn_q_b.weight", shape::queries_by_rank, when::query_latent, kShared},
    Row{S::kKvLatentNorm, B::kKvLatentNorm, kInLayer, "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", shape::kv_rank, when::latent, kReplicated},
    Row{S::kKvUp, B::kKvUp, kInLayer, "self_attn.kv_b_proj.weight", "attn_kv_b.weight", shape::kv_by_rank, when::latent, kShared},
    Row{S::kStateIn, B::kQkv, kInLayer, "mixer.in_proj.weight", "ssm_in.weight", shape::projected_by_hidden, when::space, kShared},
    Row{S::kConvBias, B::kConvBias, kInLayer, "mixer.conv1d.bias", "ssm_conv1d.bias", shape::channels, when::conv_bias, kShared},
    Row{S::kSkip, B::kSkip, kInLayer, "mixer.D", "ssm_d", shape::value_heads, when::space, kShared},
    Row{S::kExpertsIn, B::kExpertsIn, kInLayer, "mixer.fc1_latent_proj.weight", "ffn_latent_down.weight", shape::narrow_by_hidden, when::narrow_experts, kReplicated},
    Row{S::kExpertsOut, B::kExpertsOut, kInLayer, "mixer.fc2_latent_proj.weight", "ffn_latent_up.weight", shape::hidden_by_narrow, when::narrow_experts, kReplicated},
    Row{S::kMtpEmbeddingNorm, B::kMtpEmbeddingNorm, kBefore, "mtp.pre_fc_norm_embedding.weight", "nextn.enorm.weight", shape::hidden, when::mtp_head, kReplicated},
    Row{S::kMtpHiddenNorm, B::kMtpHiddenNorm, kBefore, "mtp.pre_fc_norm_hidden.weight", "nextn.hnorm.weight", shape::hidden, when::mtp_head, kReplicated},
    Row{S::kMtpProjection, B::kMtpProjection, kBefore, "mtp.fc.weight", "nextn.eh_proj.weight", shape::hidden_by_pair, when::mtp_head, kReplicated},
};
// clang-format on
static_assert(std::ranges::is_sorted(kRowsOfTable, {}, &Row::slot) &&
                  kRowsOfTable.size() == static_cast<std::size_t>(Slot::kMtpProjection) + 1,
              "one row per slot, in order");
static_assert(kNumBlockKinds == static_cast<std::size_t>(Block::kExpertsOutLoraB) + 1);

constexpr const Row& row_of(Slot slot) { return kRowsOfTable[static_cast<std::size_t>(slot)]; }

/// Of ExpertNames::kNumbered, behind "block_sparse_moe." and the expert; nullptr for other tensors.
const char* numbered_name(Slot slot) {
  switch (slot) {
    case S::kRouter: return "gate.weight";
    case S::kRouterBias: return "e_score_correction_bias";
    case S::kExpertGate: return "w1.weight";
    case S::kExpertUp: return "w3.weight";
    case S::kExpertDown: return "w2.weight";
    default: return nullptr;
  }
}

/// Of models whose one shared expert has a gate, behind the layer; nullptr for other tensors.
const char* gated_shared_name(Slot slot) {
  switch (slot) {
    case S::kSharedGate: return "mlp.shared_expert.gate_proj.weight";
    case S::kSharedUp: return "mlp.shared_expert.up_proj.weight";
    case S::kSharedDown: return "mlp.shared_expert.down_proj.weight";
    default: return nullptr;
  }
}

/// Of models with norms of what attention and MLP take and of what they give, behind the layer; nullptr for other tensors.
const char* doubly_normed_name(Slot slot, bool is_afmoe) {
  switch (slot) {
    case S::kPostNorm: return is_afmoe ? "pre_mlp_layernorm.weight" : "pre_feedforward_layernorm.weight";
    case S::kMlpOutNorm: return is_afmoe ? "post_mlp_layernorm.weight" : nullptr;
    default: return nullptr;
  }
}

/// Of ExpertNames::kTokenChoice, behind the layer; nullptr for other tensors.
const char* token_choice_name(Slot slot) {
  switch (slot) {
    case S::kRouter: return "mlp.router.gate.weight";
    case S::kRouterBias: return "mlp.expert_bias";
    default: return nullptr;
  }
}

/// Of models whose layers have one part each, behind the layer, and behind "backbone." outside of them; nullptr for other tensors.
const char* single_part_name(Slot slot) {
  switch (slot) {
    case S::kEmbedding: return "embeddings.weight";
    case S::kFinalNorm: return "norm_f.weight";
    case S::kInputNorm:
    case S::kPostNorm: return "norm.weight";
    case S::kQ: return "mixer.q_proj.weight";
    case S::kK: return "mixer.k_proj.weight";
    case S::kV: return "mixer.v_proj.weight";
    case S::kO: return "mixer.o_proj.weight";
    case S::kUp: return "mixer.up_proj.weight";
    case S::kDown: return "mixer.down_proj.weight";
    case S::kRouter: return "mixer.gate.weight";
    case S::kRouterBias: return "mixer.gate.e_score_correction_bias";
    case S::kExpertUp: return "up_proj.weight";
    case S::kExpertDown: return "down_proj.weight";
    case S::kSharedUp: return "mixer.shared_experts.up_proj.weight";
    case S::kSharedDown: return "mixer.shared_experts.down_proj.weight";
    case S::kLinearConv: return "mixer.conv1d.weight";
    case S::kDecayRate: return "mixer.A_log";
    case S::kDecayBias: return "mixer.dt_bias";
    case S::kLinearNorm: return "mixer.norm.weight";
    case S::kLinearOut: return "mixer.out_proj.weight";
    default: return nullptr;
  }
}

/// In models whose layers have one part each.
std::string name_of_part(Slot slot, std::int64_t layer, std::int64_t expert) {
  if (slot == S::kLmHead) return row_of(slot).name;
  const char* own = single_part_name(slot);
  if (own == nullptr) own = row_of(slot).name;
  if (layer < 0) return fmt::format("backbone.{}", own);
  return expert >= 0 ? fmt::format("backbone.layers.{}.mixer.experts.{}.{}", layer, expert, own)
                     : fmt::format("backbone.layers.{}.{}", layer, own);
}

std::string name_of_model(const ModelConfig& config, Slot slot, std::int64_t layer, std::int64_t expert) {
  if (config.has_single_parts) return name_of_part(slot, layer, expert);
  const char* own = config.gates_shared_expert ? gated_shared_name(slot) : nullptr;
  if (config.norms_inputs && config.norms_outputs && own == nullptr)
    own = doubly_normed_name(slot, config.expert_names == ExpertNames::kTokenChoice);
  if (config.expert_names == ExpertNames::kTokenChoice && own == nullptr) own = token_choice_name(slot);
  return own != nullptr ? fmt::format("model.layers.{}.{}", layer, own) : checkpoint_name(slot, layer, expert, config.expert_names);
}

/// Of a head for multi-token prediction as one more layer, behind that layer; nullptr for tensors of layers and of the model.
const char* next_layer_name(Slot slot) {
  switch (slot) {
    case S::kMtpEmbeddingNorm: return "enorm.weight";
    case S::kMtpHiddenNorm: return "hnorm.weight";
    case S::kMtpProjection: return "eh_proj.weight";
    case S::kFinalNorm: return "shared_head.norm.weight";
    default: return nullptr;
  }
}

std::string name_in(const ModelConfig& config, Slot slot, std::int64_t layer, std::int64_t expert) {
  std::string name = name_of_model(config, slot, layer, expert);
  if (!config.is_mtp_head) return name;
  constexpr std::string_view kOneLayer = "model.layers.0.";
  const bool is_apart = config.mtp->names == MtpNames::kApart;
  const std::string of_head = is_apart ? "mtp.layers.0." : fmt::format("model.layers.{}.", config.mtp->layer);
  if (name.starts_with(kOneLayer)) return of_head + name.substr(kOneLayer.size());
  if (is_apart) return slot == S::kFinalNorm ? "mtp.norm.weight" : name;
  const char* own = next_layer_name(slot);
  return own != nullptr ? of_head + own : name;
}

/// Rows that a vector has as a matrix in files; 0: it is a vector there, too.
std::int64_t stored_rows_of_vector(const ModelConfig& config, Slot slot) {
  if (slot == S::kSharedExpertGate) return 1;
  return slot == S::kExpertPairsBias || slot == S::kStackedDownBias ? config.num_experts : 0;
}

/// Elements that a block of `num_elements` takes in the array of masters.
std::int64_t aligned_elements(std::int64_t num_elements) {
  constexpr std::int64_t kAlignedElements = 16;  // 64 bytes
  return (num_elements + kAlignedElements - 1) / kAlignedElements * kAlignedElements;
}

Shape with_rows(const Shape& shape, std::int64_t num_rows) { return shape.num_dims() == 1 ? Shape{num_rows} : Shape{num_rows, shape[1]}; }

}  // namespace

std::string checkpoint_name(Slot slot, std::int64_t layer, std::int64_t expert, ExpertNames names) {
  const Row& row = row_of(slot);
  if (const char* numbered = names == ExpertNames::kNumbered ? numbered_name(slot) : nullptr; numbered != nullptr)
    return row.place == kInExpert ? fmt::format("model.layers.{}.block_sparse_moe.experts.{}.{}", layer, expert, numbered)
                                  : fmt::format("model.layers.{}.block_sparse_moe.{}", layer, numbered);
  if (row.place == kInExpert) return fmt::format("model.layers.{}.mlp.experts.{}.{}", layer, expert, row.name);
  if (slot == S::kRouter && names == ExpertNames::kStacked) return fmt::format("model.layers.{}.mlp.router.weight", layer);
  return row.place == kInLayer ? fmt::format("model.layers.{}.{}", layer, row.name) : row.name;
}
std::string gguf_name(Slot slot, std::int64_t layer) {
  const Row& row = row_of(slot);
  return row.place == kInLayer || row.place == kInExpert ? fmt::format("blk.{}.{}", layer, row.gguf) : row.gguf;
}

std::optional<Block> bias_of(Block matrix) noexcept {
  if (matrix == Block::kQkv) return Block::kQkvBias;
  if (matrix == Block::kO) return Block::kOBias;
  if (matrix == Block::kRouter) return Block::kRouterOffset;
  return std::nullopt;
}
bool is_bias(Block block) noexcept {
  return block == Block::kQkvBias || block == Block::kOBias || block == Block::kRouterOffset || block == Block::kGateUpBiases ||
         block == Block::kDownBiases;
}
bool is_bias(Slot slot) noexcept { return is_bias(row_of(slot).block); }
bool is_stream_or_head_norm(Block block) noexcept {
  return block == Block::kInputNorm || block == Block::kPostNorm || block == Block::kQNorm || block == Block::kKNorm ||
         block == Block::kAttentionOutNorm || block == Block::kMlpOutNorm || block == Block::kFinalNorm ||
         block == Block::kMtpEmbeddingNorm || block == Block::kMtpHiddenNorm;
}

std::optional<Block> lora_a_of(Block matrix) noexcept {
  switch (matrix) {
    case Block::kQkv: return Block::kQkvLoraA;
    case Block::kO: return Block::kOLoraA;
    case Block::kGateUp: return Block::kGateUpLoraA;
    case Block::kDown: return Block::kDownLoraA;
    case Block::kQueryUp: return Block::kQueryUpLoraA;
    case Block::kKvUp: return Block::kKvUpLoraA;
    case Block::kExpertsIn: return Block::kExpertsInLoraA;
    case Block::kExpertsOut: return Block::kExpertsOutLoraA;
    default: return std::nullopt;
  }
}
std::optional<Block> lora_b_of(Slot slot) noexcept {
  switch (slot) {
    case Slot::kLatentQuery:
    case Slot::kQ: return Block::kQLoraB;
    case Slot::kQueryDown: return Block::kQueryDownLoraB;
    case Slot::kKvDown: return Block::kKvDownLoraB;
    case Slot::kQueryUp: return Block::kQueryUpLoraB;
    case Slot::kKvUp: return Block::kKvUpLoraB;
    case Slot::kStateIn: return Block::kStateInLoraB;
    case Slot::kExpertsIn: return Block::kExpertsInLoraB;
    case Slot::kExpertsOut: return Block::kExpertsOutLoraB;
    case Slot::kHeadGate: return Block::kHeadGateLoraB;
    case Slot::kK: return Block::kKLoraB;
    case Slot::kV: return Block::kVLoraB;
    case Slot::kLinearOut:
    case Slot::kO: return Block::kOLoraB;
    case Slot::kGate:
    case Slot::kSharedGate:
    case Slot::kExpertGate: return Block::kGateLoraB;
    case Slot::kUp:
    case Slot::kSharedUp:
    case Slot::kExpertUp: return Block::kUpLoraB;
    case Slot::kFusedQkv: return Block::kFusedQkvLoraB;
    case Slot::kLinearQkvz:
    case Slot::kLinearQkv: return Block::kLinearQkvLoraB;
    case Slot::kLinearZ: return Block::kLinearZLoraB;
    case Slot::kLinearBa:
    case Slot::kLinearB: return Block::kLinearBLoraB;
    case Slot::kLinearA: return Block::kLinearALoraB;
    case Slot::kFusedGateUp: return Block::kFusedGateUpLoraB;
    case Slot::kDown:
    case Slot::kSharedDown:
    case Slot::kExpertDown: return Block::kDownLoraB;
    default: return std::nullopt;
  }
}
bool is_lora(Block block) noexcept { return block >= Block::kQkvLoraA; }
bool is_lora_a(Block block) noexcept { return block >= Block::kQkvLoraA && block <= Block::kExpertsOutLoraA; }

namespace {

/// The products of attention and MLPs, those of experts too, which are most of a model and of its time; not routers and small gates, and
/// not the matrix of latents that is applied to queries of its own.
bool is_layer_product(const ModelConfig& config, Block block) {
  if (config.attends_to_latents && block == Block::kKvUp) return false;
  return block == Block::kQkv || block == Block::kO || block == Block::kGateUp || block == Block::kDown || block == Block::kQueryUp ||
         block == Block::kKvUp || block == Block::kExpertsIn || block == Block::kExpertsOut;
}

}  // namespace

TensorTablePtr make_tensor_table(const ModelConfig& config, Shard shard) {
  std::vector<TensorSpec> specs;
  const auto add = [&](Place place, std::int64_t layer, std::int64_t expert = -1) {
    for (const Row& row : kRowsOfTable) {
      if (row.place != place || !row.exists(config, layer)) continue;
      TensorSpec spec{.name = name_in(config, row.slot, layer, expert),
                      .slot = row.slot,
                      .layer = layer,
                      .expert = expert,
                      .shape = row.shape(config),
                      .block = row.block,
                      .trainable = !config.is_mtp_head || (row.slot != Slot::kEmbedding && row.slot != Slot::kLmHead),
                      .num_parts = row.slot == Slot::kRouterBias ? kNumExactParts : 1,
                      .num_taps = row.slot == Slot::kLinearConv ? config.linear.num_taps : 0,
                      .num_stored_rows = stored_rows_of_vector(config, row.slot),
                      .is_shared = row.is_shared && !(row.slot == S::kLinearNorm && !config.linear.is_state_space),
                      .is_eight_bit = config.eight_bits != EightBits::kNone && is_layer_product(config, row.block),
                      .rounds_inputs = config.eight_bits == EightBits::kProducts && is_layer_product(config, row.block)};
      if (spec.is_shared && shard.size > 1) {
        spec.held = held_rows(config, row.slot, spec.shape[0], shard);
        std::int64_t num_rows = 0;
        for (const RowRun& run : spec.held) num_rows += run.count;
        spec.shape = with_rows(spec.shape, num_rows);
      }
      specs.push_back(std::move(spec));
    }
  };
  add(kBefore, -1);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    add(kInLayer, layer);
    for (std::int64_t expert = 0; config.is_sparse(layer) && expert < config.num_experts; ++expert) add(kInExpert, layer, expert);
  }
  add(kAfter, -1);
  return std::make_shared<const TensorTable>(std::move(specs));
}

ParameterCounts count_parameters(const ModelConfig& config) {
  ParameterCounts counts;
  for (const Row& row : kRowsOfTable) {
    if (row.slot == Slot::kRouterBias) continue;  // exact
    std::int64_t layers = 0;
    if (row.place != kInLayer && row.place != kInExpert)
      layers = row.exists(config, -1) ? 1 : 0;
    else
      for (std::int64_t layer = 0; layer < config.num_layers; ++layer) layers += row.exists(config, layer) ? 1 : 0;
    if (layers == 0) continue;
    const Shape shape = row.shape(config);
    const auto times = [&](std::int64_t experts) { return layers * (row.place == kInExpert ? experts : 1) * shape.num_elements(); };
    counts.all += times(config.num_experts);
    const bool multiplies = shape.num_dims() == 2 || row.slot == Slot::kSharedExpertGate;
    if (multiplies && row.slot != Slot::kEmbedding) counts.active += times(config.num_active_experts);
  }
  if (config.tie_word_embeddings) counts.active += config.vocab_size * config.hidden_size;
  return counts;
}

ElementRange intersection(ElementRange a, ElementRange b) noexcept {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

TensorTable::TensorTable(std::vector<TensorSpec> specs, bool ties_head) : tensors_(std::move(specs)) {
  for (TensorSpec& spec : tensors_) {
    spec.first_row = 0;
    spec.offset = -1;
    num_layers_ = std::max(num_layers_, spec.layer + 1);
    num_experts_ = std::max(num_experts_, spec.expert + 1);
    if (spec.is_exact()) continue;
    num_parameters_ += spec.num_elements();
    if (spec.trainable) num_trainable_ += spec.num_elements();
  }
  make_blocks(ties_head);
  place_masters();
}

void TensorTable::make_blocks(bool ties_head) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    TensorSpec& spec = tensors_[i];
    PRL_CHECK(spec.shape.num_dims() == 1 || spec.shape.num_dims() == 2, "tensor {} of shape {}", spec.name, spec.shape.to_string());
    BlockSpec* last = blocks_.empty() ? nullptr : &blocks_.back();
    if (last == nullptr || last->kind != spec.block || last->layer != spec.layer || last->expert != spec.expert) {
      blocks_.push_back({spec.block, spec.layer, spec.expert, spec.shape, spec.trainable, i, 1});
      blocks_.back().is_eight_bit = spec.is_eight_bit;
      blocks_.back().rounds_inputs = spec.rounds_inputs;
      continue;
    }
    PRL_CHECK(last->trainable == spec.trainable && with_rows(last->shape, spec.shape[0]) == spec.shape,
              "tensor {} of shape {} does not fit below a block of shape {}", spec.name, spec.shape.to_string(), last->shape.to_string());
    spec.first_row = last->shape[0];
    last->shape = with_rows(last->shape, last->shape[0] + spec.shape[0]);
    ++last->num_tensors;
  }
  index_.assign(key(Block::kEmbedding, num_layers_, -1), kNone);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    std::size_t& entry = index_[key(blocks_[i].kind, blocks_[i].layer, blocks_[i].expert)];
    PRL_CHECK(entry == kNone, "two blocks hold {}", tensors_[blocks_[i].first_tensor].name);
    entry = i;
  }
  if (std::size_t& tied = index_[key(Block::kLmHead, -1, -1)]; tied == kNone && ties_head) tied = index_[key(Block::kEmbedding, -1, -1)];
}

void TensorTable::place_masters() {
  std::int64_t end = 0;
  for (const bool matrices : {false, true}) {
    for (BlockSpec& block : blocks_) {
      if (!block.trainable || block.is_matrix() != matrices) continue;
      block.offset = end;
      end += aligned_elements(block.shape.num_elements());
      for (std::size_t i = block.first_tensor; i < block.first_tensor + block.num_tensors; ++i)
        tensors_[i].offset = block.offset + tensors_[i].first_row * block.shape.num_elements() / block.shape[0];
    }
    if (!matrices) num_vector_elements_ = end;
  }
  num_master_elements_ = end;
}

std::size_t TensorTable::key(Block kind, std::int64_t layer, std::int64_t expert) const noexcept {
  const auto of_layer = static_cast<std::size_t>(layer + 1) * kNumBlockKinds + static_cast<std::size_t>(kind);
  return of_layer * static_cast<std::size_t>(num_experts_ + 1) + static_cast<std::size_t>(expert + 1);
}

std::size_t TensorTable::find(Block kind, std::int64_t layer, std::int64_t expert) const noexcept {
  if (layer >= num_layers_ || expert >= num_experts_) return kNone;
  return index_[key(kind, layer, expert)];
}

std::span<const TensorSpec> TensorTable::tensors_of(const BlockSpec& block) const {
  return std::span(tensors_).subspan(block.first_tensor, block.num_tensors);
}

}  // namespace prl::nn
