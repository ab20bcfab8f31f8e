#include "nn/models/family.hpp"

// Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: Llama's layers, with q, k, v as one matrix and gate and up as another. Their rows lie in files
// as they do in memory.
namespace prl::nn {
namespace {

void configure_phi3(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  config.fuses_projections = true;
  read_common_window(reader, /*without=*/0, /*is_switched=*/false, config);
  refuse_dropout(reader, {"attention_dropout", "embd_pdrop", "resid_pdrop"});
}

void describe_phi3(const ModelConfig& config, boost::json::object& object) {
  object["embd_pdrop"] = 0.0;
  object["partial_rotary_factor"] = config.partial_rotary_factor;
  object["resid_pdrop"] = 0.0;
  describe_window(config, kOneWindow, object);
  // Overwritten where there are some; without the keys transformers takes ids of Phi-3's own vocabulary.
  for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) object[id] = nullptr;
}

}  // namespace

const Family kPhi3Family{.model_type = "phi3",
                         .architecture = "Phi3ForCausalLM",
                         .configure = configure_phi3,
                         .describe = describe_phi3,
                         .rms_norm_eps = 1e-5,
                         .max_position = 4096,
                         .rotates_parts = true,
                         .has_long_rope = true};

}  // namespace prl::nn
