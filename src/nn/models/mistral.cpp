#include "base/error.hpp"
#include "nn/models/family.hpp"

// Mistral 7B, Mistral NeMo, Ministral 8B: Llama's layers without biases.
namespace prl::nn {
namespace {

/// A window that all positions fit into changes nothing.
void refuse_short_window(const ConfigReader& reader, const ModelConfig& config) {
  // Null is no window; where the key is missing, transformers takes this one.
  constexpr std::int64_t kDefaultWindow = 4096;
  const std::int64_t without = reader.names("sliding_window") ? config.max_position : kDefaultWindow;
  const std::int64_t window = reader.integer("sliding_window", without, 1, std::int64_t{1} << 31);
  if (window < config.max_position)
    fail(ErrorCode::kNotImplemented,
         "{}: key 'sliding_window' is {}{}, fewer than the {} positions of 'max_position_embeddings'; this build has full attention only",
         reader.subject(), window, reader.has("sliding_window") ? "" : " (what a missing one is)", config.max_position);
}

void configure_mistral(const ConfigReader& reader, ModelConfig& config) {
  config.head_dim = reader.integer("head_dim", config.hidden_size / config.num_heads, 2, 1024);
  refuse_short_window(reader, config);
  refuse_sliding_window(reader, /*window_in_use=*/false);
}

void describe_mistral(const ModelConfig&, boost::json::object& object) { object["sliding_window"] = nullptr; }

}  // namespace

const Family kMistralFamily{"mistral", "MistralForCausalLM", configure_mistral, describe_mistral};

}  // namespace prl::nn
