#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "nn/mtp_config.hpp"
#include "nn/vision_config.hpp"
#include "tensor/dtype.hpp"

namespace prl::nn {

/// Llama 3 frequency scaling, "rope_type": "llama3" of config.json.
struct RopeScaling {
  bool enabled = false;
  double factor = 1.0, low_freq_factor = 1.0, high_freq_factor = 4.0;
  std::int64_t original_max_position = 8192;
};

/// LongRoPE, "rope_type": "longrope" of config.json. A model has one of the two lists for all lengths: see ModelConfig::long_rope.
struct LongRope {
  std::vector<double> short_factors, long_factors;  ///< what the frequency of each pair of a head's elements is divided by
  std::int64_t original_max_position = 4096;
  double attention_factor = 1.0;  ///< multiplies cosines and sines
  bool operator==(const LongRope&) const = default;
};

/// YaRN (Peng et al. 2023), "rope_type": "yarn" of config.json: long waves are slowed by `factor`, those that turn beta_fast times within
/// the original length are kept, those between this and beta_slow turns are blended.
struct Yarn {
  double factor = 1.0, beta_fast = 32.0, beta_slow = 1.0;
  double mscale_all_dim = 0;  ///< more than 0: scores of latent attention are multiplied by (0.1 mscale_all_dim ln(factor) + 1)^2
  bool truncates = true;      ///< the pairs of elements between which it blends are whole numbers
  std::int64_t original_max_position = 4096;
  double attention_factor = 1.0;  ///< multiplies cosines and sines
  bool operator==(const Yarn&) const = default;
};

/// How files hold the matrices of a layer's experts: "mlp.experts.0.gate_proj", up_proj and down_proj, or as Mixtral's do
/// "block_sparse_moe.experts.0.w1", w3 and w2, or as GPT-OSS's do all experts' in one tensor "mlp.experts.gate_up_proj" and one
/// "mlp.experts.down_proj" (stored_layout.hpp), the outputs of gate and up taking turns, or as Qwen 3.5's do in two such tensors the
/// matrices themselves, the outputs of gate before those of up. AFMoE's have the first names, and "mlp.router.gate" and "mlp.expert_bias"
/// for what chooses experts.
enum class ExpertNames : std::uint8_t { kProjections, kNumbered, kStacked, kStackedRows, kTokenChoice };

/// How files hold matrices of 8-bit numbers (E4M3, nn/fp8.hpp): each is multiplied by the scale of its block.
struct Fp8Format {
  std::int64_t block_rows = 0, block_cols = 0;  ///< a block's; 0: all that a matrix has
  std::string scale_suffix = {};                ///< behind the name of a matrix: that of its scales
  bool operator==(const Fp8Format&) const = default;
};

/// The activation of experts whose gate and up take turns (GPT-OSS): see ops::ClampedGate.
struct ClampedSwiglu {
  double alpha = 1.702, limit = 7.0;
  bool operator==(const ClampedSwiglu&) const = default;
};

/// Layers of linear attention by the gated delta rule (Qwen 3.5) or by state spaces (Nemotron-H) in place of softmax attention: see
/// ops/delta_rule.hpp. Of a state space queries and keys are what Mamba-2 calls C and B, whose groups are key heads, and values are its x.
struct LinearAttention {
  std::vector<std::int64_t> layers;  ///< ascending; empty: there are none
  std::int64_t num_key_heads = 0, num_value_heads = 0, key_dim = 0, value_dim = 0;
  std::int64_t num_taps = 0;  ///< of the convolution over time
  /// Files have two matrices of projections, with the rows of one key head and its value heads after those of another, in place of four
  /// (Qwen3-Next): see stored_rows().
  bool fuses_projections = false;
  // Of a state space:
  bool is_state_space = false;
  bool has_conv_bias = false;
  double min_step = 0.0, max_step = std::numeric_limits<double>::infinity();
  bool operator==(const LinearAttention&) const = default;
  std::int64_t value_width() const noexcept { return num_value_heads * value_dim; }
  /// Queries, keys and values, which the convolution treats one by one.
  std::int64_t num_channels() const noexcept { return 2 * num_key_heads * key_dim + value_width(); }
  /// Of one product: the channels, the output gate, and two numbers for each value head, or the step of a state space.
  std::int64_t projected_width() const noexcept { return num_channels() + value_width() + (is_state_space ? 1 : 2) * num_value_heads; }
  /// Elements of a sequence's state in a layer: of the rule, fp32, and the convolution's last inputs.
  std::int64_t state_elements() const noexcept { return num_value_heads * key_dim * value_dim; }
  std::int64_t input_elements() const noexcept { return (num_taps - 1) * num_channels(); }
};

/// Multi-head latent attention in all layers (DeepSeek-V2 and V3): see ops/latent.hpp. Heads of attention have ModelConfig::head_dim
/// elements, the smallest size of ops::kHeadDims that holds a query and a value, and there are as many of keys as of queries.
struct LatentAttention {
  std::int64_t query_rank = 0;  ///< of queries' latents; 0: they have none
  std::int64_t kv_rank = 0;     ///< of keys' and values'
  std::int64_t plain_dim = 0, rotary_dim = 0, value_dim = 0;
  bool are_pairs_neighbours = true;  ///< as in ops::LatentHeads
  bool operator==(const LatentAttention&) const = default;
  /// Whether every device has attention to latents of these sizes, which those of all published models are.
  bool has_attention() const noexcept { return kv_rank % 16 == 0 && kv_rank <= 512 && rotary_dim <= 64; }
  std::int64_t query_dim() const noexcept { return plain_dim + rotary_dim; }
  /// Of what the products of normed latents give in a layer with `num_heads`.
  std::int64_t widened(std::int64_t num_heads) const noexcept {
    return num_heads * ((query_rank > 0 ? query_dim() : 0) + plain_dim + value_dim);
  }
  /// Of all products, and the normed latents between them.
  std::int64_t projected_width(std::int64_t num_heads) const noexcept {
    const std::int64_t queries = num_heads * query_dim();
    return (query_rank > 0 ? 2 * query_rank : 0) + queries + 2 * kv_rank + rotary_dim + num_heads * (plain_dim + value_dim);
  }
};

/// How the matrices of layers are multiplied with; routers, the embedding and the head as they are. A choice of the run: no config.json
/// says it.
enum class EightBits : std::uint8_t {
  kNone,
  kWeights,   ///< as those of 8 bits that are nearest to their values (ops/eight_bit.hpp)
  kProducts,  ///< and their inputs are rounded to 8 bits as well (ops::WeightUse::kEightBitProduct)
};

/// A decoder as Hugging Face's config.json describes it. Families differ in names and in these switches only.
struct ModelConfig {
  std::string model_type;    ///< "llama", "mistral", "qwen3_moe", ...: that of a Family; SmolLM2 says "llama"
  std::string architecture;  ///< "LlamaForCausalLM", ...
  std::int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0;
  std::int64_t num_layers = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  std::int64_t max_position = 2048;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  /// Takes its long factors if max_position is larger than its original_max_position, else the short ones: a choice by the length of a
  /// text, as transformers makes it, would change the rows that were computed before.
  std::optional<LongRope> long_rope;
  std::optional<Yarn> yarn;
  double rope_divisor = 1.0;  ///< frequencies are divided by it, "rope_type": "linear" of config.json
  /// Base of the angles in windowed layers, which are not scaled (OLMo 3, Gemma 3); nullopt: all layers rotate alike.
  std::optional<double> window_rope_theta;
  double partial_rotary_factor = 1.0;          ///< the part of a head, its first elements, that is rotated
  std::vector<std::int64_t> unrotated_layers;  ///< whose heads have no rotary positions (SmolLM3), ascending
  std::int64_t window = 0;                     ///< keys that a query of windowed_layers sees at most, its own included; 0: there are none
  std::vector<std::int64_t> windowed_layers;   ///< with sliding windows (Mistral 7B v0.1), ascending
  LinearAttention linear;
  std::optional<LatentAttention> latent;
  /// Attention is to the latents themselves and the cache holds them, not the heads that they form (ops/latent.hpp). A choice of the run,
  /// as eight_bits is: the same up to rounding.
  bool attends_to_latents = false;
  bool gates_heads = false;      ///< heads have output gates, which q_proj gives beside each query (Qwen 3.5)
  bool gates_are_apart = false;  ///< these gates are the outputs of a matrix of their own (AFMoE)
  bool norms_add_one = false;    ///< norms multiply by 1 + weight: those of the stream and of heads (Qwen 3.5, Gemma 3)
  float rms_norm_eps = 1e-6f;
  bool tie_word_embeddings = false;
  bool attention_bias = false;  ///< q, k, v have a bias (Qwen2)
  bool attention_out_bias = false;
  bool mlp_bias = false;
  bool attention_sinks = false;   ///< each head's softmax has a learned logit more, without a key and a value (GPT-OSS)
  bool qk_norm = false;           ///< RMS norm on q and k, per head (Qwen3)
  bool qk_norm_is_whole = false;  ///< that norm is over all heads at once (OLMo 2)
  double score_scale = 0;         ///< of queries times keys; 0: 1 / sqrt(head_dim)
  // A layer has norms of what attention and MLP take, or of what they give (OLMo 2), or of both (AFMoE, Gemma 3).
  bool norms_inputs = true, norms_outputs = false;
  double embedding_scale = 1.0;         ///< multiplies the rows of the embedding that enter the first layer (AFMoE)
  bool rounds_embedding_scale = false;  ///< that number is rounded to the type that is computed in (Gemma 3)
  bool has_gelu_mlps = false;           ///< MLPs have ops::geglu in place of ops::swiglu (Gemma 3)
  bool has_squared_relu_mlps =
      false;  ///< MLPs, those of experts too, have no gate, but ops::squared_relu between two matrices (Nemotron-H)
  /// Layers have one part each, with one norm before it, under the names of Nemotron-H: these, ascending, an MLP alone, the others
  /// attention alone.
  bool has_single_parts = false;
  std::vector<std::int64_t> mlp_layers;
  bool fuses_projections = false;  ///< q, k, v are one tensor in files and adapters, and so are gate and up (Phi-3)
  // Layers whose MLP is a mixture of experts (Qwen3-MoE, GLM-4.5, Mixtral); 0 experts: there is none.
  std::int64_t num_experts = 0;
  std::vector<std::int64_t> dense_layers;  ///< those that have one MLP all the same, ascending
  std::int64_t num_active_experts = 0;     ///< of a token
  std::int64_t expert_size = 0;            ///< width of an expert; intermediate_size is that of the dense layers
  std::int64_t expert_input_size = 0;      ///< of what experts take and give, between two matrices (Nemotron 3 Super); 0: hidden_size
  std::int64_t shared_expert_size = 0;     ///< width of the MLP that every token of a sparse layer passes beside its experts; 0: none
  bool gates_shared_expert = false;        ///< its output is multiplied by a sigmoid, one number a token (Qwen3-Next)
  ExpertNames expert_names = ExpertNames::kProjections;
  std::optional<ClampedSwiglu> clamped_swiglu;  ///< of experts, in place of SwiGLU; router and experts have biases then (GPT-OSS)
  bool norm_topk_prob = false;                  ///< the active experts' probabilities are divided by their sum
  // Experts are chosen by sigmoids of their own and a bias (GLM-4.5, DeepSeek-V3) in place of one softmax over all.
  bool has_score_router = false;
  EightBits eight_bits = EightBits::kNone;
  std::int64_t num_expert_groups = 1, num_active_groups = 1;  ///< a token's experts are of the groups that have the best
  double routed_scale = 1.0;                                  ///< multiplies the weights of a token's experts
  /// Layers behind the last one that files may hold (multi-token prediction): they are no part of the model here.
  std::int64_t num_skipped_layers = 0;
  /// The head for multi-token prediction that the model's files have and this build computes. What is saved has it too.
  std::optional<MtpConfig> mtp;
  /// This is the decoder of one layer that `mtp` is (mtp_head.hpp), which takes hidden states beside tokens.
  bool is_mtp_head = false;
  std::int32_t bos_id = -1, pad_id = -1;
  std::vector<std::int32_t> eos_ids;
  std::string torch_dtype = "bfloat16";
  /// Of the folder that config.json is from: matrices of its files may be FP8. What is saved has none.
  std::optional<Fp8Format> fp8;
  /// Of models for text and images whose files have a tower that this build computes; what is saved has it then.
  std::optional<VisionConfig> vision;
  std::string raw_json;  ///< config.json as read, kept so that saving changes nothing else

  std::int64_t num_parameters() const;
  /// Whether a layer is a mixture of experts.
  bool is_sparse(std::int64_t layer) const noexcept;
  /// Whether a layer's heads have rotary positions.
  bool is_rotated(std::int64_t layer) const noexcept;
  /// Whether a layer has linear attention.
  bool is_linear(std::int64_t layer) const noexcept;
  /// Whether a layer has attention of some kind, and whether it has an MLP: most models' have both.
  bool has_attention(std::int64_t layer) const noexcept;
  bool has_mlp(std::int64_t layer) const noexcept { return !has_single_parts || !has_attention(layer); }
  /// Whether a layer has keys and values in a cache: attention that is not linear.
  bool has_softmax(std::int64_t layer) const noexcept { return has_attention(layer) && !is_linear(layer); }
  std::int64_t num_softmax_layers() const noexcept {
    return num_layers - static_cast<std::int64_t>(linear.layers.size()) - static_cast<std::int64_t>(mlp_layers.size());
  }
  /// Of a key in the cache, and of a token in a layer: its keys and values, or its latent and the rotated elements of all its keys.
  std::int64_t cached_key_dim() const noexcept { return attends_to_latents ? latent->kv_rank + latent->rotary_dim : head_dim; }
  std::int64_t cached_width() const noexcept { return attends_to_latents ? cached_key_dim() : 2 * num_kv_heads * head_dim; }
  /// Keys that a query of a layer sees at most; 0: all.
  std::int64_t window_of(std::int64_t layer) const noexcept;
  bool is_windowed(std::int64_t layer) const noexcept { return window_of(layer) > 0; }
  /// Keys that the last query of `length` tokens sees, of all layers of softmax attention together.
  std::int64_t attended_keys(std::int64_t length) const noexcept;
  /// Of attention, half of the elements that a query's two products with a key have in all heads together: hidden_size as spec 8.10 counts,
  /// of latent attention what its heads have without padding.
  double attended_width() const noexcept {
    return latent ? 0.5 * static_cast<double>(num_heads * (latent->query_dim() + latent->value_dim)) : static_cast<double>(hidden_size);
  }
  /// Width of all MLPs that one token passes in a layer.
  std::int64_t active_mlp_size(std::int64_t layer) const noexcept {
    return !has_mlp(layer) ? 0 : is_sparse(layer) ? num_active_experts * expert_size + shared_expert_size : intermediate_size;
  }
  /// The first elements of a head, as many as are rotated.
  std::int64_t rotary_dim() const noexcept {
    return latent ? latent->rotary_dim : static_cast<std::int64_t>(static_cast<double>(head_dim) * partial_rotary_factor);
  }
  /// Matmul weights of one token's forward pass, embeddings excluded, LM head included; of experts the active ones (spec 8.10).
  std::int64_t num_active_parameters() const;
  /// Forward + backward FLOPs per trained token at `seq_len`: 6 P + 12 L attended_width() seq (spec 8.10), a window in place of seq where
  /// it is shorter, and for a layer of linear attention 6 FLOPs for each element of its state and product with it (three; of a state
  /// space two).
  double flops_per_token(std::int64_t seq_len) const;
};

/// What an engine puts in place of keys of config.json.
struct ConfigOverrides {
  /// A JSON object in place of "rope_scaling" and "rope_parameters"; empty: those of the file. A rope_theta and a partial_rotary_factor
  /// that it does not have stay the file's, its original_max_position_embeddings is also that of the top level. max_position_embeddings
  /// becomes `factor` times the original length where that is more.
  std::string rope_scaling = {};
  EightBits eight_bits = EightBits::kNone;
  bool attends_to_latents = false;  ///< no effect on models without latents, and on those whose LatentAttention::has_attention() is false
};

/// Reads <folder>/config.json. Error{kNotFound|kCorrupt|kNotImplemented} names the key and what was found: an unknown
/// model_type, unknown types of layers, unknown rope types and checkpoints quantised in other ways than read_quantization() knows are
/// refused, never ignored. Error{kInvalidArgument} naming a key of an override that no type of rotary scaling has.
ModelConfig load_model_config(const std::filesystem::path& folder, const ConfigOverrides& overrides = {});
/// config.json text for a model that init-model made.
std::string to_config_json(const ModelConfig& config);
/// config.json text for weights saved as `dtype`: raw_json with that one key changed, or to_config_json where there is none.
std::string saved_config_json(const ModelConfig& config, DType dtype);

}  // namespace prl::nn
