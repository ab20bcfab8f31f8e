#include "nn/models/family.hpp"

// Mistral 7B, Mistral NeMo, Ministral 8B: Llama's layers without biases. Mistral 7B v0.1 has sliding windows in all of them.
namespace prl::nn {
namespace {

void configure_mistral(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  // Null is no window; where the key is missing, transformers takes 4096.
  read_common_window(reader, /*without=*/4096, /*is_switched=*/false, config);
}

void describe_mistral(const ModelConfig& config, boost::json::object& object) { describe_window(config, kOneWindow, object); }

}  // namespace

const Family kMistralFamily{"mistral", "MistralForCausalLM", configure_mistral, describe_mistral};

}  // namespace prl::nn
