#include "base/error.hpp"
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

std::string llama_name_of(Slot slot, std::int64_t layer) {
  const auto in_layer = [&](const char* name) { return fmt::format("model.layers.{}.{}", layer, name); };
  switch (slot) {
    case Slot::kEmbedding: return "model.embed_tokens.weight";
    case Slot::kInputNorm: return in_layer("input_layernorm.weight");
    case Slot::kQ: return in_layer("self_attn.q_proj.weight");
    case Slot::kK: return in_layer("self_attn.k_proj.weight");
    case Slot::kV: return in_layer("self_attn.v_proj.weight");
    case Slot::kQBias: return in_layer("self_attn.q_proj.bias");
    case Slot::kKBias: return in_layer("self_attn.k_proj.bias");
    case Slot::kVBias: return in_layer("self_attn.v_proj.bias");
    case Slot::kQNorm: return in_layer("self_attn.q_norm.weight");
    case Slot::kKNorm: return in_layer("self_attn.k_norm.weight");
    case Slot::kO: return in_layer("self_attn.o_proj.weight");
    case Slot::kOBias: return in_layer("self_attn.o_proj.bias");
    case Slot::kPostNorm: return in_layer("post_attention_layernorm.weight");
    case Slot::kGate: return in_layer("mlp.gate_proj.weight");
    case Slot::kUp: return in_layer("mlp.up_proj.weight");
    case Slot::kDown: return in_layer("mlp.down_proj.weight");
    case Slot::kFinalNorm: return "model.norm.weight";
    case Slot::kLmHead: return "lm_head.weight";
  }
  PRL_CHECK(false, "slot without a name");
}

const Family kLlamaFamily{"llama", "LlamaForCausalLM", configure_llama, describe_llama, llama_name_of};

}  // namespace prl::nn
