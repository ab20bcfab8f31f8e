#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nn/model_config.hpp"
#include "nn/models/config_reader.hpp"

namespace prl::nn {

/// What sets one Hugging Face model type apart: its switches in config.json, from which its tensors follow (TensorTable). One small file
/// each.
struct Family {
  std::string_view model_type;    ///< of config.json
  std::string_view architecture;  ///< "architectures" of config.json
  /// Sets the family's switches (biases, norms, head_dim default) after the common keys were read.
  void (*configure)(const ConfigReader& reader, ModelConfig& config);
  /// Adds the family's own keys to a config.json made here.
  void (*describe)(const ModelConfig& config, boost::json::object& object);
  // Where config.json says nothing:
  double partial_rotary_factor = 1.0;
  double rope_theta = 10000.0;
  bool tie_word_embeddings = false;
  double rms_norm_eps = 1e-6;
  std::int64_t max_position = 2048;
  std::int64_t original_max_position = 4096;   ///< of LongRoPE
  std::int64_t num_kv_heads = 0;               ///< 0: as many as heads, which null always means
  std::int64_t num_heads = 0, vocab_size = 0;  ///< 0: the key is wanted
  double window_rope_theta = 0;                ///< of `rope_local_base_freq`, of which no other family takes any; 0: that of full attention
  std::string_view norm_eps_key = "rms_norm_eps";
  std::string_view activation_key = "hidden_act", activation = "silu";  ///< and what it has to be
  // What config.json may ask for:
  bool rotates_parts = false;             ///< a partial_rotary_factor other than 1
  bool has_long_rope = false;             ///< LongRoPE in place of Llama 3's scaling and YaRN
  bool has_layer_ropes = false;           ///< rotary parameters by type of layer: those of full attention may be scaled
  std::string_view multimodal_type = {};  ///< model_type of files that hold such a model as "text_config" beside others, if there are any
  bool has_vision_tower = false;          ///< files of that type may have a vision tower that read_vision() reads
  bool drops_mtp = false;                 ///< files may hold tensors "mtp.*" for multi-token prediction, which are no part of the model
  /// How heads for multi-token prediction are named that this build computes; nullopt: "mtp.*" where config.json has
  /// `mtp_num_hidden_layers`, else none. Those of files that have others are left out.
  std::optional<MtpNames> mtp = {};
  bool has_dense_mlps = true;         ///< `intermediate_size` says their width; else all layers have experts
  bool has_latent_attention = false;  ///< keys have as many heads as queries
  /// Of families whose config.json says the number of layers by what each of them is; nullptr: by `num_hidden_layers`.
  std::int64_t (*count_layers)(const ConfigReader& reader) = nullptr;
  bool has_mxfp4 = false;  ///< experts in blocks of 4-bit numbers, which are read as what they stand for
};

/// All families of this build.
std::span<const Family* const> families() noexcept;
/// Error{kNotImplemented} that lists the known ones.
const Family& find_family(std::string_view model_type, std::string_view subject);

inline constexpr std::string_view kFullAttention = "full_attention";
/// What a key says, a type for each layer, `usual` or `other`; empty if it is not there. Error{kCorrupt|kNotImplemented}.
std::vector<std::string> read_layer_types(const ConfigReader& reader, std::int64_t num_layers, std::string_view other,
                                          std::string_view key = "layer_types", std::string_view usual = kFullAttention);
/// The layers of one type, ascending.
std::vector<std::int64_t> layers_of_type(const std::vector<std::string>& types, std::string_view type);

/// What a family's config.json says of sliding windows.
struct WindowKeys {
  std::int64_t without = 0;               ///< the window where there is no key `sliding_window`; 0: none
  std::int64_t of_null = 0;               ///< the window where that is null; 0: none
  bool is_switched = true;                ///< there is one with `use_sliding_window` alone
  bool are_layers_named = true;           ///< `layer_types` says which layers have it
  std::vector<std::int64_t> layers = {};  ///< those that have it where `layer_types` says nothing
};
/// Sets window and windowed_layers; a window that holds all positions is none. Error{kCorrupt|kNotImplemented} names the key.
void read_window(const ConfigReader& reader, const WindowKeys& keys, ModelConfig& config);
/// Of families of which all layers have the window or none: `without` and `is_switched` as in WindowKeys.
void read_common_window(const ConfigReader& reader, std::int64_t without, bool is_switched, ModelConfig& config);
/// That of Qwen 2 and 3: layers from `max_window_layers` on have it.
void read_qwen_window(const ConfigReader& reader, ModelConfig& config);
/// Head size, biases and norms of Qwen 3, with experts or without.
void read_qwen3_attention(const ConfigReader& reader, ModelConfig& config);
/// Layers of linear attention beside such of softmax attention with gated heads, and norms that add one: Qwen 3.5 and Qwen3-Next.
void read_gated_layers(const ConfigReader& reader, ModelConfig& config);
void describe_gated_layers(const ModelConfig& config, boost::json::object& object);
/// Experts that a softmax over all chooses (Qwen 3), where config.json says nothing.
struct SoftmaxExperts {
  std::int64_t num_experts = 0, num_active = 0, size = 0;
};
/// Numbers and widths of experts, and of one with a gate that all tokens pass where `has_shared` says so. Error{kCorrupt} if a token has
/// more than there are.
void read_softmax_experts(const ConfigReader& reader, const SoftmaxExperts& without, bool has_shared, ModelConfig& config);
void describe_softmax_experts(const ModelConfig& config, boost::json::object& object);
/// Experts under Mixtral's names in every layer, whose width is intermediate_size and whose weights are divided by their sum.
/// Error{kCorrupt} if a token has more than there are.
void read_numbered_experts(const ConfigReader& reader, std::int64_t num_experts, std::int64_t num_active, ModelConfig& config);
/// Experts that sigmoids with a bias choose (GLM-4.5, DeepSeek-V3), where config.json says nothing.
struct ScoredExperts {
  std::int64_t num_experts = 0, num_active = 0, size = 0;
  std::int64_t num_shared = 1;
  std::int64_t num_groups = 1, num_active_groups = 1;
  double scale = 1.0;
  std::int64_t num_dense = 0;  ///< of the first layers
};
/// Numbers, widths and groups of experts, those that all tokens pass, the first layers that have none, and layers that are skipped.
/// Error{kCorrupt|kNotImplemented} names the key.
void read_scored_experts(const ConfigReader& reader, const ScoredExperts& without, ModelConfig& config);
void describe_scored_experts(const ModelConfig& config, boost::json::object& object);
/// Sizes of latent attention, and what follows from them (head_dim, score_scale); `without`: where config.json says nothing.
/// Error{kNotImplemented} names the key.
void read_latent_attention(const ConfigReader& reader, const LatentAttention& without, ModelConfig& config);
void describe_latent_attention(const ModelConfig& config, boost::json::object& object);
/// Sets dense_layers by `decoder_sparse_step` and `mlp_only_layers`.
void read_sparse_layers(const ConfigReader& reader, ModelConfig& config);
/// Adds the keys that read_window() reads with these `keys`.
void describe_window(const ModelConfig& config, const WindowKeys& keys, boost::json::object& object);
/// Those of read_common_window() without a switch.
inline const WindowKeys kOneWindow{.is_switched = false, .are_layers_named = false};

/// How files name the tensors of a vision tower.
inline constexpr std::string_view kTowerPrefix = "model.visual.";
/// Sets `vision` if config.json of a model for text and images, `whole`, describes a tower and the folder's files have one. `text`: of
/// its part for text. Error{kCorrupt|kNotImplemented} names the key of what is not read.
void read_vision(const ConfigReader& whole, const ConfigReader& text, const std::filesystem::path& folder, ModelConfig& config);

/// Sets `mtp` if the folder's files have a head that this build computes.
void read_mtp(const ConfigReader& reader, const Family& family, const std::filesystem::path& folder, ModelConfig& config);

inline constexpr const char* kQuantization = "quantization_config";
/// Sets `fp8` where the key says how files are quantised: "fp8" and, as "float-quantized", "compressed-tensors" of every family, "mxfp4" of
/// those that have it. Error{kCorrupt|kNotImplemented} names the key of what is not read.
void read_quantization(const ConfigReader& reader, const Family& family, ModelConfig& config);

/// Refuses dropout, and other noise of training, that one of the keys asks for.
void refuse_dropout(const ConfigReader& reader, std::initializer_list<const char*> keys);

extern const Family kLlamaFamily;
extern const Family kMistralFamily;
extern const Family kSmolLm3Family;
extern const Family kQwen2Family;
extern const Family kQwen3Family;
extern const Family kQwen3MoeFamily;
extern const Family kQwen35Family;
extern const Family kQwen35MoeFamily;
extern const Family kQwen3NextFamily;
extern const Family kGlm4MoeFamily;
extern const Family kMixtralFamily;
extern const Family kMiniMaxM2Family;
extern const Family kOlmo2Family;
extern const Family kOlmo3Family;
extern const Family kGemma3Family;
extern const Family kPhi3Family;
extern const Family kGptOssFamily;
extern const Family kAfmoeFamily;
extern const Family kDeepseekV2Family;
extern const Family kDeepseekV3Family;
extern const Family kKimiK2Family;
extern const Family kGlm4MoeLiteFamily;
extern const Family kNemotronHFamily;

}  // namespace prl::nn
