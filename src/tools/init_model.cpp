#include "tools/init_model.hpp"

#include "base/error.hpp"
#include "nn/init_model.hpp"
#include "nn/weight_files.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::tools {
namespace fs = std::filesystem;
namespace {

nn::InitModelOptions sizes_of(const config::InitModelConfig& config) {
  nn::InitModelOptions options;
  switch (config.family) {
    case config::ModelFamily::kQwen3: options.family = "qwen3"; break;
    case config::ModelFamily::kQwen3Moe: options.family = "qwen3_moe"; break;
    case config::ModelFamily::kGlm4Moe: options.family = "glm4_moe"; break;
    case config::ModelFamily::kQwen2: options.family = "qwen2"; break;
    case config::ModelFamily::kLlama: options.family = "llama"; break;
    case config::ModelFamily::kMistral: options.family = "mistral"; break;
    case config::ModelFamily::kSmolLm3: options.family = "smollm3"; break;
    case config::ModelFamily::kMixtral: options.family = "mixtral"; break;
    case config::ModelFamily::kOlmo2: options.family = "olmo2"; break;
    case config::ModelFamily::kOlmo3: options.family = "olmo3"; break;
    case config::ModelFamily::kPhi3: options.family = "phi3"; break;
    case config::ModelFamily::kQwen35: options.family = "qwen3_5_text"; break;
    case config::ModelFamily::kGptOss: options.family = "gpt_oss"; break;
    case config::ModelFamily::kQwen35Moe: options.family = "qwen3_5_moe_text"; break;
    case config::ModelFamily::kQwen3Next: options.family = "qwen3_next"; break;
    case config::ModelFamily::kMiniMaxM2: options.family = "minimax_m2"; break;
    case config::ModelFamily::kAfmoe: options.family = "afmoe"; break;
    case config::ModelFamily::kDeepseekV3: options.family = "deepseek_v3"; break;
    case config::ModelFamily::kGlm4MoeLite: options.family = "glm4_moe_lite"; break;
    case config::ModelFamily::kGemma3: options.family = "gemma3_text"; break;
    case config::ModelFamily::kNemotronH: options.family = "nemotron_h"; break;
  }
  options.vocab_size = config.vocab_size;
  options.hidden_size = config.hidden_size;
  options.intermediate_size = config.intermediate_size;
  options.num_layers = config.num_layers;
  options.num_heads = config.num_heads;
  options.num_kv_heads = config.num_kv_heads;
  options.head_dim = config.head_dim.value_or(config.hidden_size / config.num_heads);
  options.num_experts = config.num_experts;
  options.num_active_experts = config.num_experts_per_tok;
  options.expert_size = config.moe_intermediate_size;
  options.max_position = config.max_position_embeddings;
  options.sliding_window = config.sliding_window.value_or(0);
  options.rope_theta = config.rope_theta;
  options.rms_norm_eps = config.rms_norm_eps;
  options.tie_word_embeddings = config.tie_word_embeddings;
  options.std_dev = static_cast<float>(config.initializer_range);
  options.seed = static_cast<std::uint64_t>(config.seed);
  options.dtype = config.dtype == config::ComputeDType::kBFloat16 ? DType::kBF16 : DType::kF32;
  return options;
}

}  // namespace

void init_model(const config::InitModelConfig& config) {
  nn::check_output_folder(config.output_dir, config.overwrite);
  nn::InitModelOptions options = sizes_of(config);
  const auto fill = [&](const fs::path& temporary) {
    text::ByteTokenizerOptions tokenizer;
    tokenizer.model_max_length = config.max_position_embeddings;
    const text::ByteTokenizerIds ids = text::write_byte_level_tokenizer(temporary, tokenizer);
    if (config.vocab_size < ids.vocab_size)
      fail(ErrorCode::kInvalidArgument, "--vocab-size {} is too small: the byte-level tokenizer has {} tokens", config.vocab_size,
           ids.vocab_size);
    options.eos_id = ids.im_end;
    options.pad_id = ids.endoftext;
    const fs::path weights = temporary / "weights";
    nn::init_model(options, weights);
    // The tokenizer's own generation_config.json counts, if both have one.
    for (const auto& entry : fs::directory_iterator(weights))
      if (const fs::path to = temporary / entry.path().filename(); !fs::exists(to)) fs::rename(entry.path(), to);
    fs::remove_all(weights);
  };
  nn::make_model_folder(config.output_dir, fill, config.overwrite);
}

}  // namespace prl::tools
