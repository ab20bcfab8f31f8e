#include "nn/models/family.hpp"

// OLMo 3: OLMo 2's layers, of which three in four have sliding windows, whose heads rotate without the scaling of the others.
namespace prl::nn {
namespace {

/// All but every fourth layer.
std::vector<std::int64_t> windowed_by_default(std::int64_t num_layers) {
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers; ++layer)
    if ((layer + 1) % 4 != 0) layers.push_back(layer);
  return layers;
}

void configure_olmo3(const ConfigReader& reader, ModelConfig& config) {
  kOlmo2Family.configure(reader, config);
  if (!config.window_rope_theta) config.window_rope_theta = config.rope_theta;  // of models made here
  read_window(reader, {.without = 4096, .is_switched = false, .layers = windowed_by_default(config.num_layers)}, config);
}

void describe_olmo3(const ModelConfig& config, boost::json::object& object) {
  kOlmo2Family.describe(config, object);
  describe_window(config, {.is_switched = false}, object);
}

}  // namespace

const Family kOlmo3Family{.model_type = "olmo3",
                          .architecture = "Olmo3ForCausalLM",
                          .configure = configure_olmo3,
                          .describe = describe_olmo3,
                          .rope_theta = 500000.0,
                          .rms_norm_eps = 1e-5,
                          .has_layer_ropes = true};

}  // namespace prl::nn
