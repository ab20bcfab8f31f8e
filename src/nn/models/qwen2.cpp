#include <algorithm>

#include "base/error.hpp"
#include "nn/models/family.hpp"

// Qwen 2 and 2.5: biases on q, k, v.
namespace prl::nn {
namespace {

void configure_qwen2(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  config.attention_bias = true;
  refuse_sliding_window(reader, reader.boolean("use_sliding_window", false));
}

void describe_qwen2(const ModelConfig&, boost::json::object& object) { object["use_sliding_window"] = false; }

}  // namespace

void refuse_sliding_window(const ConfigReader& reader, bool window_in_use) {
  const std::vector<std::string> types = reader.strings("layer_types");
  const bool in_layers = std::any_of(types.begin(), types.end(), [](const std::string& t) { return t != "full_attention"; });
  if (window_in_use || in_layers)
    fail(ErrorCode::kNotImplemented,
         "{}: sliding-window attention is in use (keys 'use_sliding_window', 'layer_types'); this build has full attention only",
         reader.subject());
}

const Family kQwen2Family{"qwen2", "Qwen2ForCausalLM", configure_qwen2, describe_qwen2};

}  // namespace prl::nn
