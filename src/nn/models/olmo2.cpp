#include "nn/models/family.hpp"

// OLMo 2: norms of what attention and MLP give, inside the residual sums, and norms of q and k over all heads at once.
namespace prl::nn {
namespace {

void configure_olmo2(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  config.attention_bias = reader.boolean("attention_bias", false);
  config.attention_out_bias = config.attention_bias;
  config.qk_norm = true;
  config.qk_norm_is_whole = true;
  config.norms_outputs = true;
  config.norms_inputs = false;
  refuse_dropout(reader, {"attention_dropout"});
}

void describe_olmo2(const ModelConfig& config, boost::json::object& object) {
  object["attention_bias"] = config.attention_bias;
  // Overwritten where there are some; without the keys transformers takes ids of OLMo 2's own vocabulary.
  for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) object[id] = nullptr;
}

}  // namespace

const Family kOlmo2Family{.model_type = "olmo2",
                          .architecture = "Olmo2ForCausalLM",
                          .configure = configure_olmo2,
                          .describe = describe_olmo2,
                          .rms_norm_eps = 1e-5};

}  // namespace prl::nn
