#include "nn/models/family.hpp"

// Llama 2 and 3, SmolLM 2.
namespace prl::nn {
namespace {

void configure_llama(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  config.attention_bias = reader.boolean("attention_bias", false);
  config.attention_out_bias = config.attention_bias;
  config.mlp_bias = reader.boolean("mlp_bias", false);
}

void describe_llama(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = config.attention_bias;
  object["mlp_bias"] = config.mlp_bias;
}

}  // namespace

const Family kLlamaFamily{"llama", "LlamaForCausalLM", configure_llama, describe_llama};

}  // namespace prl::nn
