#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "ops/experts.hpp"

// Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one part, a state space of Mamba-2, attention without rotary positions, an MLP
// without gate, or experts of that kind which sigmoids choose, perhaps between two matrices that narrow the stream and widen it again.
namespace prl::nn {
namespace {

constexpr std::string_view kPattern = "hybrid_override_pattern";
enum class Part : char { kStateSpace = 'M', kAttention = '*', kMlp = '-', kExperts = 'E' };

Part part_of_type(const ConfigReader& reader, std::string_view key, const std::string& type) {
  if (type == "mamba" || type == "linear_attention") return Part::kStateSpace;
  if (type == "attention" || type == "full_attention") return Part::kAttention;
  if (type == "mlp") return Part::kMlp;
  if (type == "moe") return Part::kExperts;
  fail(
      ErrorCode::kNotImplemented,
      "{}: key '{}': '{}'; this build has layers of the types 'mamba' or 'linear_attention', 'attention' or 'full_attention', 'mlp', 'moe'",
      reader.subject(), key, type);
}

/// What each layer is: by a list of types, or by a text with a letter for each layer; empty if config.json has neither.
std::vector<Part> read_parts(const ConfigReader& reader) {
  std::vector<Part> parts;
  for (const std::string_view key : {"layers_block_type", "layer_types"}) {
    for (const std::string& type : reader.strings(key)) parts.push_back(part_of_type(reader, key, type));
    if (!parts.empty()) return parts;
  }
  for (const char letter : reader.string(kPattern, "")) {
    if (std::string_view("M*-E").find(letter) == std::string_view::npos)
      fail(ErrorCode::kNotImplemented,
           "{}: key '{}' has the letter '{}'; this build has layers M (Mamba-2), * (attention), - (MLP) and E (experts)", reader.subject(),
           kPattern, letter);
    parts.push_back(static_cast<Part>(letter));
  }
  return parts;
}

std::int64_t count_nemotron_layers(const ConfigReader& reader) {
  const auto count = static_cast<std::int64_t>(read_parts(reader).size());
  if (count == 0)
    fail(ErrorCode::kCorrupt, "{}: key '{}': wanted a letter for each layer, or a list 'layers_block_type', found neither",
         reader.subject(), kPattern);
  if (const std::int64_t said = reader.integer("num_hidden_layers", count, 1, 4096); said != count)
    fail(ErrorCode::kCorrupt, "{}: key 'num_hidden_layers' is {}, and '{}' or 'layers_block_type' has {} layers", reader.subject(), said,
         kPattern, count);
  return count;
}

void take_parts(const ConfigReader& reader, ModelConfig& config) {
  const std::vector<Part> parts = read_parts(reader);
  if (static_cast<std::int64_t>(parts.size()) != config.num_layers)
    fail(ErrorCode::kCorrupt, "{}: key '{}' or 'layers_block_type' has {} layers, wanted {}", reader.subject(), kPattern, parts.size(),
         config.num_layers);
  const auto layers_of = [&](std::initializer_list<Part> wanted) {
    std::vector<std::int64_t> layers;
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (std::ranges::find(wanted, parts[i]) != wanted.end()) layers.push_back(static_cast<std::int64_t>(i));
    return layers;
  };
  config.has_single_parts = true;
  config.mlp_layers = layers_of({Part::kMlp, Part::kExperts});
  config.linear.layers = layers_of({Part::kStateSpace});
  config.unrotated_layers = layers_of({Part::kAttention});
  if (config.unrotated_layers.empty())
    fail(ErrorCode::kNotImplemented, "{}: key '{}' or 'layers_block_type' has no layer of attention; this build wants one or more",
         reader.subject(), kPattern);
}

void refuse_other_parts(const ConfigReader& reader) {
  for (const char* key : {"attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"})
    if (reader.boolean(key, false))
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is true; of nemotron_h models this build has matrices without biases only",
           reader.subject(), key);
  if (reader.boolean("residual_in_fp32", false))
    fail(ErrorCode::kNotImplemented, "{}: key 'residual_in_fp32' is true; this build adds up layers in the type it computes in",
         reader.subject());
  if (reader.has("sliding_window"))
    fail(ErrorCode::kNotImplemented, "{}: key 'sliding_window' is set; nemotron_h models have attention to all keys in this build",
         reader.subject());
  reader.require_string("mamba_hidden_act", "silu", "silu");
  refuse_dropout(reader, {"attention_dropout", "hidden_dropout"});
}

std::int64_t read_state_size(const ConfigReader& reader, const char* key, std::int64_t without) {
  const std::int64_t size = reader.integer(key, without, 1, 1024);
  if (size % 16 != 0 || size > 256)
    fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}; this build has multiples of 16 up to 256", reader.subject(), key, size);
  return size;
}

void read_state_space(const ConfigReader& reader, LinearAttention& space) {
  space.is_state_space = true;
  space.num_value_heads = reader.integer("mamba_num_heads", 128, 1, 4096);
  space.value_dim = read_state_size(reader, "mamba_head_dim", 64);
  space.num_key_heads = reader.integer("n_groups", reader.integer("mamba_n_groups", 8, 1, 4096), 1, 4096);
  space.key_dim = read_state_size(reader, "ssm_state_size", 128);
  space.num_taps = reader.integer("conv_kernel", reader.integer("mamba_d_conv", 4, 2, 8), 2, 8);
  space.has_conv_bias = reader.boolean("use_conv_bias", reader.boolean("mamba_conv_bias", true));
  if (space.num_value_heads % space.num_key_heads != 0)
    fail(ErrorCode::kCorrupt, "{}: mamba_num_heads {} is not a multiple of n_groups {}", reader.subject(), space.num_value_heads,
         space.num_key_heads);
  if (!reader.has("time_step_limit")) return;
  const std::vector<double> limits = reader.numbers("time_step_limit", 0.0, std::numeric_limits<double>::infinity());
  if (limits.size() != 2 || limits[0] > limits[1])
    fail(ErrorCode::kCorrupt, "{}: key 'time_step_limit': wanted the lower and the upper limit, found {} numbers or a lower one above",
         reader.subject(), limits.size());
  space.min_step = limits[0];
  space.max_step = limits[1];
}

/// Where there are experts: their sizes, and which layers have none.
void read_nemotron_experts(const ConfigReader& reader, ModelConfig& config) {
  const std::vector<Part> parts = read_parts(reader);
  if (std::ranges::find(parts, Part::kExperts) == parts.end()) return;
  read_scored_experts(reader, {.num_experts = 8, .num_active = 2, .size = 7688}, config);
  config.num_skipped_layers = 0;  // those of multi-token prediction have names of their own
  if (const std::int64_t shared = reader.integer("n_shared_experts", 1, 0, 1 << 10); shared != 1)
    fail(ErrorCode::kNotImplemented, "{}: key 'n_shared_experts' is {}; nemotron_h models have one in this build", reader.subject(),
         shared);
  config.shared_expert_size = reader.integer("moe_shared_expert_intermediate_size", 7688, 1, 1 << 24);
  config.expert_input_size = reader.integer("moe_latent_size", 0, 1, 1 << 20);
  config.dense_layers.clear();
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (parts[i] != Part::kExperts) config.dense_layers.push_back(static_cast<std::int64_t>(i));
}

void configure_nemotron_h(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", reader.integer("attention_head_dim", 128, 2, 1024), 2, 1024);
  refuse_other_parts(reader);
  config.has_squared_relu_mlps = true;
  read_state_space(reader, config.linear);
  read_nemotron_experts(reader, config);
  take_parts(reader, config);
}

void describe_nemotron_h(const ModelConfig& config, boost::json::object& object) {
  const LinearAttention& space = config.linear;
  object.erase("rms_norm_eps");
  object["layer_norm_epsilon"] = std::stod(fmt::format("{}", config.rms_norm_eps));
  object["attention_bias"] = object["mlp_bias"] = object["use_bias"] = false;
  std::string pattern;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    pattern += config.is_linear(layer) ? 'M' : config.has_attention(layer) ? '*' : config.is_sparse(layer) ? 'E' : '-';
  object[kPattern] = pattern;
  object["mamba_num_heads"] = space.num_value_heads;
  object["mamba_head_dim"] = space.value_dim;
  object["n_groups"] = space.num_key_heads;
  object["ssm_state_size"] = space.key_dim;
  object["conv_kernel"] = space.num_taps;
  object["use_conv_bias"] = space.has_conv_bias;
  object["mamba_hidden_act"] = "silu";
  object["expand"] = 2;
  const bool has_limit = space.max_step < std::numeric_limits<double>::infinity();
  object["time_step_limit"] =
      boost::json::array{space.min_step, has_limit ? boost::json::value(space.max_step) : boost::json::value{{"__float__", "Infinity"}}};
  if (config.num_experts == 0) return;
  describe_scored_experts(config, object);
  object.erase("first_k_dense_replace");
  object["n_shared_experts"] = 1;
  object["moe_shared_expert_intermediate_size"] = config.shared_expert_size;
  object["moe_latent_size"] = config.expert_input_size > 0 ? boost::json::value(config.expert_input_size) : nullptr;
}

}  // namespace

const Family kNemotronHFamily{.model_type = "nemotron_h",
                              .architecture = "NemotronHForCausalLM",
                              .configure = configure_nemotron_h,
                              .describe = describe_nemotron_h,
                              .rms_norm_eps = 1e-5,
                              .max_position = 4096,
                              .num_kv_heads = 8,
                              .num_heads = 32,
                              .vocab_size = 131072,
                              .norm_eps_key = "layer_norm_epsilon",
                              .activation_key = "mlp_hidden_act",
                              .activation = "relu2",
                              .rotates_parts = true,
                              .drops_mtp = true,
                              .count_layers = count_nemotron_layers};

}  // namespace prl::nn
