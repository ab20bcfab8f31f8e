#include "nn/models/family.hpp"

// Qwen 2 and 2.5: biases on q, k, v.
namespace prl::nn {
namespace {

void configure_qwen2(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  config.attention_bias = true;
  read_qwen_window(reader, config);
}

void describe_qwen2(const ModelConfig& config, boost::json::object& object) { describe_window(config, {}, object); }

}  // namespace

const Family kQwen2Family{"qwen2", "Qwen2ForCausalLM", configure_qwen2, describe_qwen2};

}  // namespace prl::nn
