#include "nn/models/family.hpp"

// Qwen 3 dense: RMS norm per head on q and k, head_dim of its own.
namespace prl::nn {

void read_qwen3_attention(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", 128, 2, 1024);
  config.attention_bias = reader.boolean("attention_bias", false);
  config.attention_out_bias = config.attention_bias;
  config.qk_norm = true;
}

namespace {

void configure_qwen3(const ConfigReader& reader, ModelConfig& config) {
  read_qwen3_attention(reader, config);
  read_qwen_window(reader, config);
}

void describe_qwen3(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = config.attention_bias;
  describe_window(config, {}, object);
}

}  // namespace

const Family kQwen3Family{"qwen3", "Qwen3ForCausalLM", configure_qwen3, describe_qwen3};

}  // namespace prl::nn
