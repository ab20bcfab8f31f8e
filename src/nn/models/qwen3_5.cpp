#include "base/error.hpp"
#include "nn/models/family.hpp"

// Qwen 3.5, the dense model for text: three of four layers have linear attention by the gated delta rule, the others softmax attention
// with output gates; norms multiply by 1 + weight.
namespace prl::nn {
namespace {

constexpr std::string_view kLinear = "linear_attention";

/// What `layer_types` says, or all but every `full_attention_interval`-th layer.
std::vector<std::int64_t> read_linear_layers(const ConfigReader& reader, std::int64_t num_layers) {
  const std::int64_t interval = reader.integer("full_attention_interval", 4, 1, 4096);
  if (reader.has("layer_types")) return layers_of_type(read_layer_types(reader, num_layers, kLinear), kLinear);
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers; ++layer)
    if ((layer + 1) % interval != 0) layers.push_back(layer);
  return layers;
}

std::int64_t read_head_size(const ConfigReader& reader, const char* key) {
  const std::int64_t size = reader.integer(key, 128, 1, 1024);
  if (size % 16 != 0 || size > 256)
    fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}; this build has multiples of 16 up to 256", reader.subject(), key, size);
  return size;
}

}  // namespace

void read_gated_layers(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", 256, 2, 1024);
  config.attention_bias = reader.boolean("attention_bias", false);
  if (config.attention_bias)
    fail(ErrorCode::kNotImplemented, "{}: key 'attention_bias' is true; models of type '{}' have none in this build", reader.subject(),
         config.model_type);
  if (!reader.boolean("attn_output_gate", true))
    fail(ErrorCode::kNotImplemented, "{}: key 'attn_output_gate' is false; this build has heads with gates only", reader.subject());
  refuse_dropout(reader, {"attention_dropout"});
  config.qk_norm = config.gates_heads = config.norms_add_one = true;
  LinearAttention& linear = config.linear;
  linear.layers = read_linear_layers(reader, config.num_layers);
  linear.num_key_heads = reader.integer("linear_num_key_heads", 16, 1, 4096);
  linear.num_value_heads = reader.integer("linear_num_value_heads", 32, 1, 4096);
  linear.key_dim = read_head_size(reader, "linear_key_head_dim");
  linear.value_dim = read_head_size(reader, "linear_value_head_dim");
  linear.num_taps = reader.integer("linear_conv_kernel_dim", 4, 2, 8);
  if (linear.num_value_heads % linear.num_key_heads != 0)
    fail(ErrorCode::kCorrupt, "{}: linear_num_value_heads {} is not a multiple of linear_num_key_heads {}", reader.subject(),
         linear.num_value_heads, linear.num_key_heads);
}

void describe_gated_layers(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = false;
  object["attn_output_gate"] = true;
  object["partial_rotary_factor"] = config.partial_rotary_factor;
  boost::json::array types;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer)
    types.emplace_back(boost::json::string_view(config.is_linear(layer) ? kLinear : kFullAttention));
  object["layer_types"] = std::move(types);
  object["linear_num_key_heads"] = config.linear.num_key_heads;
  object["linear_num_value_heads"] = config.linear.num_value_heads;
  object["linear_key_head_dim"] = config.linear.key_dim;
  object["linear_value_head_dim"] = config.linear.value_dim;
  object["linear_conv_kernel_dim"] = config.linear.num_taps;
}

const Family kQwen35Family{.model_type = "qwen3_5_text",
                           .architecture = "Qwen3_5ForCausalLM",
                           .configure = read_gated_layers,
                           .describe = describe_gated_layers,
                           .partial_rotary_factor = 0.25,
                           .max_position = 32768,
                           .num_kv_heads = 4,
                           .rotates_parts = true,
                           .multimodal_type = "qwen3_5",
                           .has_vision_tower = true,
                           .drops_mtp = true,
                           .mtp = MtpNames::kApart};

}  // namespace prl::nn
