#include "base/error.hpp"
#include "nn/models/family.hpp"

// SmolLM 3: Llama's layers, some of them without rotary positions.
namespace prl::nn {
namespace {

/// Layers that are marked with 0; where there are no marks, one in every so many.
std::vector<std::int64_t> read_unrotated_layers(const ConfigReader& reader, std::int64_t num_layers) {
  const std::int64_t interval = reader.integer("no_rope_layer_interval", 4, 1, 1 << 20);
  const std::vector<std::int32_t> marks = reader.ids("no_rope_layers", "a list of 0 and 1");
  const bool is_marked = reader.has("no_rope_layers");
  if (is_marked && static_cast<std::int64_t>(marks.size()) < num_layers)
    fail(ErrorCode::kCorrupt, "{}: key 'no_rope_layers': wanted a 0 or 1 for each of the {} layers, found {}", reader.subject(), num_layers,
         marks.size());
  std::vector<std::int64_t> unrotated;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    const std::int64_t mark = is_marked ? marks[static_cast<std::size_t>(layer)] : (layer + 1) % interval != 0;
    if (mark > 1)
      fail(ErrorCode::kCorrupt, "{}: key 'no_rope_layers': wanted 0 or 1, found {} for layer {}", reader.subject(), mark, layer);
    if (mark == 0) unrotated.push_back(layer);
  }
  return unrotated;
}

void configure_smollm3(const ConfigReader& reader, ModelConfig& config) {
  kLlamaFamily.configure(reader, config);
  config.unrotated_layers = read_unrotated_layers(reader, config.num_layers);
  read_window(reader, {.layers = config.unrotated_layers}, config);
}

void describe_smollm3(const ModelConfig& config, boost::json::object& object) {
  kLlamaFamily.describe(config, object);
  boost::json::array marks;
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) marks.push_back(config.is_rotated(layer) ? 1 : 0);
  object["no_rope_layers"] = std::move(marks);
  // Overwritten where there are some; without the keys transformers takes ids of SmolLM 3's own vocabulary.
  for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) object[id] = nullptr;
  describe_window(config, {}, object);
}

}  // namespace

const Family kSmolLm3Family{.model_type = "smollm3",
                            .architecture = "SmolLM3ForCausalLM",
                            .configure = configure_smollm3,
                            .describe = describe_smollm3,
                            .rope_theta = 2000000.0,
                            .tie_word_embeddings = true};

}  // namespace prl::nn
