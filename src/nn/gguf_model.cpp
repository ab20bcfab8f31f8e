#include "nn/gguf_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <set>

#include "base/error.hpp"
#include "nn/models/family.hpp"
#include "nn/tensor_table.hpp"

namespace prl::nn {
namespace {

constexpr std::string_view kRopeFactors = "rope_freqs.weight";

/// Reads the keys of one architecture ("llama.block_count") with bounds.
class Keys {
 public:
  Keys(const io::GgufFile& file, std::string prefix) : file_(file), prefix_(std::move(prefix)) {}

  std::string full(std::string_view key) const { return fmt::format("{}.{}", prefix_, key); }
  std::int64_t integer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t min, std::int64_t max) const {
    const std::string name = full(key);
    std::optional<std::int64_t> value;
    if (file_.is_array(name)) {  // one per layer; models whose layers differ have no place here
      const std::vector<std::int64_t> all = file_.integers(name);
      if (all.empty() || std::any_of(all.begin(), all.end(), [&](std::int64_t v) { return v != all.front(); }))
        fail(ErrorCode::kNotImplemented, "{}: key '{}' differs from layer to layer; this build has equal layers only",
             file_.path().string(), name);
      value = all.front();
    } else {
      value = file_.integer(name);
    }
    if (!value) value = fallback;
    if (!value) fail(ErrorCode::kCorrupt, "{}: key '{}' is missing", file_.path().string(), name);
    if (*value < min || *value > max)
      fail(ErrorCode::kCorrupt, "{}: key '{}' is {}, wanted {} to {}", file_.path().string(), name, *value, min, max);
    return *value;
  }
  double number(std::string_view key, double fallback, double min, double max) const {
    const double value = file_.number(full(key)).value_or(fallback);
    if (!(value >= min && value <= max))
      fail(ErrorCode::kCorrupt, "{}: key '{}' is {}, wanted {} to {}", file_.path().string(), full(key), value, min, max);
    return value;
  }
  /// Refuses a switch of the architecture that is on.
  void refuse(std::string_view key, std::string_view what) const {
    const std::string name = full(key);
    if (!file_.has(name) || (!file_.is_array(name) && file_.number(name) == 0.0)) return;
    fail(ErrorCode::kNotImplemented, "{}: key '{}' is set: this build has no {}", file_.path().string(), name, what);
  }

 private:
  const io::GgufFile& file_;
  std::string prefix_;
};

/// The divisor of each rotary frequency under Llama 3 scaling.
std::vector<float> llama3_factors(const ModelConfig& c) {
  std::vector<float> factors;
  for (std::int64_t i = 0; i < c.head_dim; i += 2) {
    const double wavelength = 2 * std::numbers::pi * std::pow(c.rope_theta, static_cast<double>(i) / static_cast<double>(c.head_dim));
    const double turns = static_cast<double>(c.rope_scaling.original_max_position) / wavelength;
    const double low = c.rope_scaling.low_freq_factor, high = c.rope_scaling.high_freq_factor, factor = c.rope_scaling.factor;
    const double smooth = (turns - low) / (high - low);
    factors.push_back(static_cast<float>(turns > high ? 1 : turns < low ? factor : 1 / ((1 - smooth) / factor + smooth)));
  }
  return factors;
}

/// A llama file with scaled frequencies holds a table of their divisors instead of the four numbers it came from. Llama 3.1 and
/// 3.2 use low 1, high 4; factor is the table's largest value; the original context is found among powers of two.
void read_rope(const io::GgufFile& file, const Keys& keys, ModelConfig& config) {
  config.rope_theta = keys.number("rope.freq_base", 10000.0, 1.0, 1e12);
  const std::string type = std::string(file.string(keys.full("rope.scaling.type")).value_or("none"));
  if (type != "none" && type != "llama3")
    fail(ErrorCode::kNotImplemented, "{}: key '{}' is '{}'; this build knows none and Llama 3's table of factors", file.path().string(),
         keys.full("rope.scaling.type"), type);
  const io::GgufTensor* table = file.find(kRopeFactors);
  if (table == nullptr) return;
  if (table->num_elements() != config.head_dim / 2 || table->type.block_elements != 1)
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' holds {} factors, wanted {}", file.path().string(), kRopeFactors, table->num_elements(),
         config.head_dim / 2);
  std::vector<float> found(static_cast<std::size_t>(table->num_elements()));
  file.read_f32(*table, 0, found);
  if (std::all_of(found.begin(), found.end(), [](float v) { return v == 1.0f; })) return;
  RopeScaling& scaling = config.rope_scaling;
  scaling = {.enabled = true, .factor = *std::max_element(found.begin(), found.end()), .low_freq_factor = 1, .high_freq_factor = 4};
  std::vector<std::int64_t> contexts{8192};  // what Llama 3 was trained with first
  for (std::int64_t context = 32; context <= (1 << 20); context *= 2) contexts.push_back(context);
  for (const std::int64_t context : contexts) {
    scaling.original_max_position = context;
    const std::vector<float> wanted = llama3_factors(config);
    if (std::equal(found.begin(), found.end(), wanted.begin(), [](float a, float b) { return std::abs(a - b) <= 1e-4f * b; })) return;
  }
  fail(ErrorCode::kNotImplemented, "{}: tensor '{}' is no table of Llama 3's frequency scaling; this build knows no other",
       file.path().string(), kRopeFactors);
}

/// Tensors whose rows make heads that are rotated.
bool is_rotated(Slot slot) { return slot == Slot::kQ || slot == Slot::kK || slot == Slot::kQBias || slot == Slot::kKBias; }

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

ModelConfig gguf_model_config(const io::GgufFile& file) {
  const std::string path = file.path().string();
  const auto architecture = file.string("general.architecture");
  if (!architecture) fail(ErrorCode::kCorrupt, "{}: key 'general.architecture' is missing", path);
  const Family& family = find_family(*architecture, fmt::format("{}: general.architecture", path));
  // The others' files, where there are any, order rows and name keys in ways that are not known here. Mistral's say "llama".
  if (&family != &kLlamaFamily && &family != &kQwen2Family && &family != &kQwen3Family)
    fail(ErrorCode::kNotImplemented, "{}: key 'general.architecture' is '{}'; this build reads GGUF files of llama, qwen2 and qwen3", path,
         *architecture);
  const Keys keys(file, std::string(*architecture));

  ModelConfig config;
  config.model_type = family.model_type;
  config.architecture = family.architecture;
  config.hidden_size = keys.integer("embedding_length", std::nullopt, 1, 1 << 20);
  config.intermediate_size = keys.integer("feed_forward_length", std::nullopt, 1, 1 << 24);
  config.num_layers = keys.integer("block_count", std::nullopt, 1, 4096);
  config.num_heads = keys.integer("attention.head_count", std::nullopt, 1, 4096);
  config.num_kv_heads = keys.integer("attention.head_count_kv", config.num_heads, 1, 4096);
  config.head_dim = keys.integer("attention.key_length", config.hidden_size / config.num_heads, 2, 1024);
  config.max_position = keys.integer("context_length", std::nullopt, 1, std::int64_t{1} << 31);
  config.rms_norm_eps = static_cast<float>(keys.number("attention.layer_norm_rms_epsilon", 1e-6, 0.0, 1.0));
  for (const char* key : {"attention.value_length", "rope.dimension_count"})
    if (const std::int64_t size = keys.integer(key, config.head_dim, 1, 1024); size != config.head_dim)
      fail(ErrorCode::kNotImplemented, "{}: key '{}' is {}, the head size is {}; this build has one size of heads and rotates all of it",
           path, keys.full(key), size, config.head_dim);
  keys.refuse("expert_count", "mixture of experts");
  keys.refuse("attention.sliding_window", "sliding-window attention");
  if (config.num_heads % config.num_kv_heads != 0)
    fail(ErrorCode::kCorrupt, "{}: {} heads are no multiple of {} key-value heads", path, config.num_heads, config.num_kv_heads);
  if (config.head_dim % 2 != 0) fail(ErrorCode::kCorrupt, "{}: the head size {} is odd", path, config.head_dim);
  read_rope(file, keys, config);

  const io::GgufTensor* embedding = file.find("token_embd.weight");
  if (embedding == nullptr || embedding->shape.size() != 2)
    fail(ErrorCode::kCorrupt, "{}: tensor 'token_embd.weight' is missing or no matrix", path);
  config.vocab_size = embedding->shape[0];
  if (config.vocab_size > (1 << 24)) fail(ErrorCode::kCorrupt, "{}: tensor 'token_embd.weight' has {} rows", path, config.vocab_size);
  config.tie_word_embeddings = file.find("output.weight") == nullptr;
  const bool has_bias = file.find("blk.0.attn_q.bias") != nullptr, has_out_bias = file.find("blk.0.attn_output.bias") != nullptr;
  // The family sets its switches as it does for a file that has these keys.
  const boost::json::object switches{{"head_dim", config.head_dim}, {"attention_bias", has_bias}};
  family.configure(ConfigReader(path, switches), config);
  if (config.attention_bias != has_bias || config.attention_out_bias != has_out_bias)
    fail(ErrorCode::kNotImplemented,
         "{}: a {} model {} biases of q, k, v and {} one of the output projection; this build has no such model", path, config.model_type,
         has_bias ? "with" : "without", has_out_bias ? "with" : "without");

  const auto id = [&](const char* key) {
    const std::int64_t value = file.integer(std::string("tokenizer.ggml.") + key).value_or(-1);
    return value >= 0 && value < config.vocab_size ? static_cast<std::int32_t>(value) : -1;
  };
  config.bos_id = id("bos_token_id");
  config.pad_id = id("padding_token_id");
  for (const char* key : {"eos_token_id", "eot_token_id", "eom_token_id"})
    if (const std::int32_t stop = id(key);
        stop >= 0 && std::find(config.eos_ids.begin(), config.eos_ids.end(), stop) == config.eos_ids.end())
      config.eos_ids.push_back(stop);
  return config;
}

std::vector<WeightSource> gguf_weight_sources(const std::shared_ptr<const io::GgufFile>& file, const ModelConfig& config) {
  const std::string path = file->path().string();
  std::vector<WeightSource> sources;
  std::set<std::string, std::less<>> known{std::string(kRopeFactors)};
  const TensorTablePtr table = make_tensor_table(config);
  for (const TensorSpec& weight : table->tensors()) {
    const std::string name = gguf_name(weight.slot, weight.layer);
    const io::GgufTensor* tensor = file->find(name);
    if (tensor == nullptr) fail(ErrorCode::kCorrupt, "{}: tensor '{}' of the {} model is missing", path, name, config.model_type);
    known.insert(name);
    std::vector<std::int64_t> wanted;
    for (int d = 0; d < weight.shape.num_dims(); ++d) wanted.push_back(weight.shape[d]);
    if (tensor->shape != wanted)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' at byte {} has shape {}, the metadata wants {}", path, name, tensor->begin,
           shape_text(tensor->shape), shape_text(wanted));
    if (config.model_type != "llama" || !is_rotated(weight.slot)) {
      sources.push_back(
          {weight.name, weight.shape, [file, tensor](std::int64_t first, std::span<float> out) { file->read_f32(*tensor, first, out); }});
      continue;
    }
    // Exporters store rows (half, i) of a head as (i, half), so that pairs of a rotation are neighbours.
    const std::int64_t cols = wanted.size() == 2 ? wanted[1] : 1, head = config.head_dim;
    if (cols == 1 && tensor->type.block_elements != 1)
      fail(ErrorCode::kNotImplemented, "{}: tensor '{}' is a quantised bias of a rotated projection", path, name);
    sources.push_back({weight.name, weight.shape, [file, tensor, cols, head](std::int64_t first, std::span<float> out) {
                         const auto width = static_cast<std::size_t>(cols);
                         for (std::size_t at = 0; at < out.size(); at += width) {
                           const std::int64_t row = (first + static_cast<std::int64_t>(at)) / cols;
                           const std::int64_t begin = row / head * head, within = row % head;
                           const std::int64_t stored = begin + within % (head / 2) * 2 + within / (head / 2);
                           file->read_f32(*tensor, stored * cols, out.subspan(at, width));
                         }
                       }});
  }
  for (const io::GgufTensor& tensor : file->tensors())
    if (known.count(tensor.name) == 0)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' at byte {} is no part of a {} model with this metadata", path, tensor.name, tensor.begin,
           config.model_type);
  return sources;
}

DType gguf_natural_dtype(const io::GgufFile& file) {
  std::map<io::GgmlType, std::int64_t> counts;
  for (const io::GgufTensor& tensor : file.tensors()) counts[tensor.type.type] += tensor.num_elements();
  const auto most = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most == counts.end()) return DType::kBF16;
  return most->first == io::GgmlType::kF32 ? DType::kF32 : most->first == io::GgmlType::kF16 ? DType::kF16 : DType::kBF16;
}

}  // namespace prl::nn
