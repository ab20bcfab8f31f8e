#include "nn/model_config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cmath>
#include <regex>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/regular_file.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/models/family.hpp"
#include "nn/tensor_table.hpp"
#include "ops/attention.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// A config.json is a few kilobytes; more is not one.
constexpr std::uint64_t kMaxConfigBytes = 4 << 20;

/// With what transformers 5 writes for it in place of Infinity, which earlier ones write though JSON has none.
std::string without_infinities(std::string text) {
  static const std::regex kInfinity(R"re(([\[,:]\s*)Infinity\b)re");
  if (text.find("Infinity") == std::string::npos) return text;
  return std::regex_replace(text, kInfinity, R"($1{"__float__": "Infinity"})");
}

json::value parse_json_file(const fs::path& path, std::string& text) {
  text = without_infinities(read_regular_file(path, kMaxConfigBytes));
  json::parse_options options;
  options.max_depth = 32;
  json::error_code error;
  json::value value = json::parse(text, error, json::storage_ptr(), options);
  if (error.failed() || !value.is_object())
    fail(ErrorCode::kCorrupt, "{}: not a JSON object{}{}", path.string(), error.failed() ? ": " : "",
         error.failed() ? error.message() : "");
  return value;
}

/// One table of rotary parameters for the whole model. A table per layer type ("rope_parameters": {"full_attention": {...}}) has no
/// meaning here; transformers overlooks it for Llama and computes with the defaults.
void refuse_nested_rope(const ConfigReader& reader, std::string_view key) {
  const std::optional<ConfigReader> rope = reader.object(key);
  if (!rope) return;
  for (const std::string& name : rope->keys_of_objects())
    fail(ErrorCode::kNotImplemented,
         "{}: key '{}' is a table of its own; this build has one set of rotary parameters for all layers: write 'rope_type', "
         "'rope_theta' and the others directly under '{}'",
         rope->subject(), name, key);
}

/// Phi-3's first files say "su" or "yarn" and mean the same.
bool is_long_rope(std::string_view type) { return type == "longrope" || type == "su" || type == "yarn"; }

/// As transformers reads it for Phi-3: the original length is that of the top level, whatever the inner one says, or the family's.
LongRope read_long_rope(const ConfigReader& reader, const ConfigReader& rope, const Family& family, std::int64_t max_position) {
  LongRope out;
  out.short_factors = rope.numbers("short_factor", 1e-6, 1e9);
  out.long_factors = rope.numbers("long_factor", 1e-6, 1e9);
  out.original_max_position = reader.integer("original_max_position_embeddings", family.original_max_position, 2, std::int64_t{1} << 31);
  const auto original = static_cast<double>(out.original_max_position);
  const double factor = rope.number("factor", static_cast<double>(max_position) / original, 1e-6, 1e9);
  const double advised = factor <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(factor) / std::log(original));
  out.attention_factor = rope.number("attention_factor", advised, 0.0, 1e6);
  if (max_position > out.original_max_position)
    log::warning(
        "{}: positions by LongRoPE's long factors in texts of every length, as {} positions ('max_position_embeddings') are more than the "
        "{} of 'original_max_position_embeddings'; transformers takes the short factors up to that length. For runs that stay within it, "
        "set 'max_position_embeddings' to {} and 'attention_factor' to {} beside the factors",
        reader.subject(), max_position, out.original_max_position, out.original_max_position, out.attention_factor);
  return out;
}

Yarn read_yarn(const ConfigReader& reader, const ConfigReader& rope, std::int64_t max_position) {
  constexpr std::int64_t kMaxPosition = std::int64_t{1} << 31;
  Yarn out;
  out.original_max_position = reader.integer(
      "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position, 2, kMaxPosition), 2, kMaxPosition);
  out.factor = rope.number("factor", static_cast<double>(max_position) / static_cast<double>(out.original_max_position), 1.0, 1e6);
  out.beta_fast = rope.number("beta_fast", 32.0, 1e-6, 1e6);
  out.beta_slow = rope.number("beta_slow", 1.0, 1e-6, 1e6);
  out.truncates = rope.boolean("truncate", true);
  const auto scale = [&](double m) { return out.factor <= 1.0 ? 1.0 : 0.1 * m * std::log(out.factor) + 1.0; };
  const double mscale = rope.number("mscale", 0.0, 0.0, 1e6), of_all = rope.number("mscale_all_dim", 0.0, 0.0, 1e6);
  out.mscale_all_dim = of_all;
  out.attention_factor = rope.number("attention_factor", mscale > 0 && of_all > 0 ? scale(mscale) / scale(of_all) : scale(1.0), 0.0, 1e6);
  return out;
}

/// The rotary parameters of full attention where a family has them by type of layer, and those of its windows into `config`.
std::optional<ConfigReader> read_layer_ropes(const ConfigReader& reader, const Family& family, ModelConfig& config) {
  const double of_windows =
      family.window_rope_theta > 0 ? reader.number("rope_local_base_freq", family.window_rope_theta, 1.0, 1e12) : config.rope_theta;
  config.window_rope_theta = of_windows;
  const std::optional<ConfigReader> all = reader.object("rope_parameters");
  std::optional<ConfigReader> full = reader.object("rope_scaling");
  if (!all || all->empty()) return full;
  for (const char* key : {"rope_type", "rope_theta"})
    if (all->has(key))
      fail(ErrorCode::kNotImplemented,
           "{}: key '{}' stands directly under 'rope_parameters'; of {} models tables 'full_attention' and "
           "'sliding_attention' are wanted there",
           reader.subject(), key, config.model_type);
  if (const std::optional<ConfigReader> sliding = all->object("sliding_attention")) {
    sliding->require_string("rope_type", "default", "default");
    config.window_rope_theta = sliding->number("rope_theta", of_windows, 1.0, 1e12);
  }
  const std::optional<ConfigReader> table = all->object("full_attention");
  if (!full || full->empty()) return table;
  // What a rope_scaling of Gemma 3 does not say is as the table has it.
  if (table && family.window_rope_theta > 0) config.rope_theta = table->number("rope_theta", config.rope_theta, 1.0, 1e12);
  return full;
}

/// Which keys count is what transformers 5 does: a "rope_scaling" that is not empty replaces "rope_parameters" as a whole; a missing
/// rope_theta comes from the top level; an "original_max_position_embeddings" at the top level wins over the inner one, and
/// "max_position_embeddings" stands in where there is neither. A "partial_rotary_factor" of the inner table wins over that of the top
/// level.
void read_rope(const ConfigReader& reader, const Family& family, ModelConfig& config) {
  constexpr std::int64_t kMaxPosition = std::int64_t{1} << 31;
  config.rope_theta = reader.number("rope_theta", family.rope_theta, 1.0, 1e12);
  std::optional<ConfigReader> rope;
  if (family.has_layer_ropes) {
    rope = read_layer_ropes(reader, family, config);
  } else {
    for (const char* key : {"rope_scaling", "rope_parameters"}) refuse_nested_rope(reader, key);
    rope = reader.object("rope_scaling");
    if (!rope || rope->empty()) rope = reader.object("rope_parameters");
  }
  config.partial_rotary_factor = family.partial_rotary_factor;
  for (const ConfigReader* where : {&reader, rope ? &*rope : &reader}) {
    config.partial_rotary_factor = where->number("partial_rotary_factor", config.partial_rotary_factor, 0.0, 1.0);
    if (config.partial_rotary_factor != 1.0 && !family.rotates_parts)
      fail(ErrorCode::kNotImplemented, "{}: key 'partial_rotary_factor' is {}; models of type '{}' rotate whole heads in this build",
           where->subject(), config.partial_rotary_factor, family.model_type);
  }
  if (!rope) return;
  config.rope_theta = rope->number("rope_theta", config.rope_theta, 1.0, 1e12);
  const std::string type = rope->string("rope_type", rope->string("type", "default"));
  if (type == "default") return;
  if (family.has_long_rope && is_long_rope(type)) {
    config.long_rope = read_long_rope(reader, *rope, family, config.max_position);
    return;
  }
  if (type == "yarn") {
    config.yarn = read_yarn(reader, *rope, config.max_position);
    return;
  }
  if (type == "linear" && !family.has_long_rope) {
    config.rope_divisor = rope->number("factor", std::nullopt, 1.0, 1e6);
    return;
  }
  if (type != "llama3" || family.has_long_rope)
    fail(ErrorCode::kNotImplemented, "{}: key 'rope_type' is '{}'; of {} models this build knows 'default'{}", rope->subject(), type,
         family.model_type, family.has_long_rope ? " and 'longrope'" : ", 'linear', 'llama3' and 'yarn'");
  config.rope_scaling.enabled = true;
  config.rope_scaling.factor = rope->number("factor", std::nullopt, 1.0, 1e6);
  config.rope_scaling.low_freq_factor = rope->number("low_freq_factor", std::nullopt, 1e-6, 1e6);
  config.rope_scaling.high_freq_factor = rope->number("high_freq_factor", std::nullopt, 1e-6, 1e6);
  config.rope_scaling.original_max_position =
      reader.integer("original_max_position_embeddings",
                     rope->integer("original_max_position_embeddings", config.max_position, 1, kMaxPosition), 1, kMaxPosition);
  if (config.rope_scaling.high_freq_factor <= config.rope_scaling.low_freq_factor)
    fail(ErrorCode::kCorrupt, "{}: high_freq_factor must be larger than low_freq_factor", rope->subject());
}

void check(const ConfigReader& reader, const ModelConfig& config) {
  const auto& subject = reader.subject();
  if (config.num_heads % config.num_kv_heads != 0)
    fail(ErrorCode::kCorrupt, "{}: num_attention_heads {} is not a multiple of num_key_value_heads {}", subject, config.num_heads,
         config.num_kv_heads);
  if (!ops::is_head_dim(config.head_dim))
    fail(ErrorCode::kNotImplemented, "{}: heads of {} elements (key 'head_dim', or hidden_size / num_attention_heads); this build has {}",
         subject, config.head_dim, fmt::join(ops::kHeadDims, ", "));
  if (config.rotary_dim() < 1 || config.rotary_dim() % ops::kRotaryStep != 0)
    fail(ErrorCode::kNotImplemented,
         "{}: key 'partial_rotary_factor' {} leaves {} elements of a head's {} to be rotated; this build rotates multiples of {}", subject,
         config.partial_rotary_factor, config.rotary_dim(), config.head_dim, ops::kRotaryStep);
  if (config.long_rope)
    for (const auto& [key, factors] :
         {std::pair("short_factor", &config.long_rope->short_factors), std::pair("long_factor", &config.long_rope->long_factors)})
      if (static_cast<std::int64_t>(factors->size()) != config.rotary_dim() / 2)
        fail(ErrorCode::kCorrupt, "{}: key '{}' has {} numbers, wanted one for each of the {} pairs of a head's elements that are rotated",
             subject, key, factors->size(), config.rotary_dim() / 2);
  if (config.mlp_bias) fail(ErrorCode::kNotImplemented, "{}: key 'mlp_bias' is true; this build has MLPs without biases only", subject);
  for (const std::int32_t id : config.eos_ids)
    if (id >= config.vocab_size)
      fail(ErrorCode::kCorrupt, "{}: eos_token_id {} is outside the vocabulary of {}", subject, id, config.vocab_size);
}

}  // namespace

bool ModelConfig::is_sparse(std::int64_t layer) const noexcept {
  return num_experts > 0 && !std::ranges::binary_search(dense_layers, layer);
}

bool ModelConfig::is_rotated(std::int64_t layer) const noexcept { return !std::ranges::binary_search(unrotated_layers, layer); }

bool ModelConfig::is_linear(std::int64_t layer) const noexcept { return std::ranges::binary_search(linear.layers, layer); }

bool ModelConfig::has_attention(std::int64_t layer) const noexcept { return !std::ranges::binary_search(mlp_layers, layer); }

std::int64_t ModelConfig::window_of(std::int64_t layer) const noexcept {
  return std::ranges::binary_search(windowed_layers, layer) ? window : 0;
}

std::int64_t ModelConfig::attended_keys(std::int64_t length) const noexcept {
  const auto num_windowed = static_cast<std::int64_t>(windowed_layers.size());
  return (num_softmax_layers() - num_windowed) * length + num_windowed * std::min(length, window);
}

std::int64_t ModelConfig::num_parameters() const { return count_parameters(*this).all; }
std::int64_t ModelConfig::num_active_parameters() const { return count_parameters(*this).active; }

double ModelConfig::flops_per_token(std::int64_t seq_len) const {
  return 6.0 * static_cast<double>(num_active_parameters()) + 12.0 * attended_width() * static_cast<double>(attended_keys(seq_len)) +
         (linear.is_state_space ? 12.0 : 18.0) * static_cast<double>(linear.layers.size()) * static_cast<double>(linear.state_elements());
}

namespace {

/// Of a model for text and images the part for text, as its own config.json would describe it.
void take_text_config(const fs::path& path, json::value& value, ModelConfig& config) {
  const json::value original = value;
  const ConfigReader whole(path.string(), value.get_object());
  const std::string type = whole.string("model_type", "");
  const auto family = std::ranges::find_if(families(), [&](const Family* of) { return !type.empty() && of->multimodal_type == type; });
  if (family == families().end() || !whole.object("text_config")) return;
  json::object text = value.at("text_config").as_object();
  text["model_type"] = json::string((*family)->model_type);
  text["architectures"] = json::array{json::string((*family)->architecture)};
  for (const char* key : {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", kQuantization, "dtype", "torch_dtype"})
    if (const json::value* found = value.get_object().if_contains(key); found != nullptr && !text.contains(key)) text[key] = *found;
  value = std::move(text);
  if ((*family)->has_vision_tower)
    read_vision(ConfigReader(path.string(), original.get_object()), ConfigReader(path.string() + ": text_config", value.get_object()),
                path.parent_path(), config);
  if (config.vision) return;  // the whole model is read, and what is saved has the whole file
  config.raw_json = pretty_json(value);
  log::info("{}: of the '{}' model the part for text is used; what is saved is a '{}' model", path.string(), type, (*family)->model_type);
}

/// A misspelt key would be overlooked in a file, as transformers does; here somebody has just written it.
constexpr std::string_view kRopeKeys[] = {"rope_type",       "type",
                                          "rope_theta",      "partial_rotary_factor",
                                          "factor",          "original_max_position_embeddings",
                                          "low_freq_factor", "high_freq_factor",
                                          "beta_fast",       "beta_slow",
                                          "truncate",        "mscale",
                                          "mscale_all_dim",  "attention_factor",
                                          "short_factor",    "long_factor"};

/// Writes the override into the keys of the file.
void replace_rope(const std::string& text, json::object& file) {
  json::error_code error;
  json::value parsed = json::parse(text, error);
  if (error.failed() || !parsed.is_object()) fail(ErrorCode::kInvalidArgument, "rope_scaling: wanted an object, found {}", text);
  json::object& rope = parsed.get_object();
  for (const json::key_value_pair& entry : rope)
    if (std::ranges::find(kRopeKeys, std::string_view(entry.key())) == std::ranges::end(kRopeKeys))
      fail(ErrorCode::kInvalidArgument, "rope_scaling: no type of scaling has the key '{}'; there are {}", std::string_view(entry.key()),
           fmt::join(kRopeKeys, ", "));
  if (!rope.contains("rope_type") && !rope.contains("type"))
    fail(ErrorCode::kInvalidArgument, "rope_scaling: wanted a 'rope_type', such as \"yarn\" or \"llama3\", found {}", text);
  const auto table = [](const json::object* outer, const char* key) {
    const json::value* found = outer != nullptr ? outer->if_contains(key) : nullptr;
    return found != nullptr ? found->if_object() : nullptr;
  };
  const json::object* all = table(&file, "rope_parameters");
  for (const json::object* was : {table(&file, "rope_scaling"), all, table(all, "full_attention")})
    for (const char* key : {"rope_theta", "partial_rotary_factor"})
      if (const json::value* kept = was != nullptr ? was->if_contains(key) : nullptr; kept != nullptr && !rope.contains(key))
        rope[key] = *kept;
  constexpr const char* kOriginal = "original_max_position_embeddings";
  if (const json::value* original = rope.if_contains(kOriginal)) file[kOriginal] = *original;
  file["rope_scaling"] = std::move(rope);
}

/// The positions that the scaling stretches the original ones to.
std::int64_t stretched_positions(const ConfigReader& reader, const ModelConfig& config) {
  if (config.rope_divisor != 1.0) {
    const std::int64_t original = reader.integer("original_max_position_embeddings", config.max_position, 1, std::int64_t{1} << 31);
    return static_cast<std::int64_t>(config.rope_divisor * static_cast<double>(original));
  }
  if (config.yarn) return static_cast<std::int64_t>(config.yarn->factor * static_cast<double>(config.yarn->original_max_position));
  const RopeScaling& llama = config.rope_scaling;
  return llama.enabled ? static_cast<std::int64_t>(llama.factor * static_cast<double>(llama.original_max_position)) : 0;
}

}  // namespace

ModelConfig load_model_config(const fs::path& folder, const ConfigOverrides& overrides) {
  const fs::path path = folder / "config.json";
  ModelConfig config;
  config.eight_bits = overrides.eight_bits;
  json::value value = parse_json_file(path, config.raw_json);
  take_text_config(path, value, config);
  if (!overrides.rope_scaling.empty()) replace_rope(overrides.rope_scaling, value.get_object());
  const ConfigReader reader(path.string(), value.get_object());

  config.model_type = reader.string("model_type", "");
  if (config.model_type.empty()) fail(ErrorCode::kCorrupt, "{}: key 'model_type' is missing", path.string());
  const Family& family = find_family(config.model_type, path.string());
  config.architecture = family.architecture;
  if (const std::vector<std::string> architectures = reader.strings("architectures");
      !architectures.empty() && architectures.front() != family.architecture)
    fail(ErrorCode::kNotImplemented, "{}: key 'architectures' names '{}'; of model type '{}' this build knows '{}'", path.string(),
         architectures.front(), config.model_type, family.architecture);

  constexpr std::int64_t kMax = std::int64_t{1} << 24;
  const auto wanted_unless = [](std::int64_t without) { return without > 0 ? std::optional(without) : std::nullopt; };
  config.vocab_size = reader.integer("vocab_size", wanted_unless(family.vocab_size), 1, kMax);
  config.hidden_size = reader.integer("hidden_size", std::nullopt, 1, 1 << 20);
  config.intermediate_size =
      reader.integer("intermediate_size", family.has_dense_mlps ? std::nullopt : std::optional<std::int64_t>(1), 1, kMax);
  config.num_layers =
      family.count_layers != nullptr ? family.count_layers(reader) : reader.integer("num_hidden_layers", std::nullopt, 1, 4096);
  config.num_heads = reader.integer("num_attention_heads", wanted_unless(family.num_heads), 1, 4096);
  config.num_kv_heads =
      reader.integer("num_key_value_heads",
                     reader.names("num_key_value_heads") || family.num_kv_heads == 0 ? config.num_heads : family.num_kv_heads, 1, 4096);
  config.max_position = reader.integer("max_position_embeddings", family.max_position, 1, std::int64_t{1} << 31);
  config.rms_norm_eps = static_cast<float>(reader.number(family.norm_eps_key, family.rms_norm_eps, 0.0, 1.0));
  config.tie_word_embeddings = reader.boolean("tie_word_embeddings", family.tie_word_embeddings);
  config.torch_dtype = reader.string("dtype", reader.string("torch_dtype", "bfloat16"));
  reader.require_string(family.activation_key, family.activation, family.activation);
  read_rope(reader, family, config);
  if (!overrides.rope_scaling.empty()) config.max_position = std::max(config.max_position, stretched_positions(reader, config));
  family.configure(reader, config);
  if (config.vision && config.vision->output_size != config.hidden_size)
    fail(ErrorCode::kCorrupt, "{}: key 'out_hidden_size' of vision_config is {}, hidden_size of text_config is {}", path.string(),
         config.vision->output_size, config.hidden_size);

  const std::vector<std::int32_t> bos = reader.ids("bos_token_id");
  const std::vector<std::int32_t> pad = reader.ids("pad_token_id");
  config.bos_id = bos.empty() ? -1 : bos.front();
  config.pad_id = pad.empty() ? -1 : pad.front();
  config.eos_ids = reader.ids("eos_token_id");
  // generation_config.json, where there is one, may list more ids that end a reply (Qwen does).
  if (const fs::path generation = folder / "generation_config.json"; fs::exists(generation)) {
    std::string text;
    const json::value generation_value = parse_json_file(generation, text);
    for (const std::int32_t id : ConfigReader(generation.string(), generation_value.get_object()).ids("eos_token_id"))
      if (std::find(config.eos_ids.begin(), config.eos_ids.end(), id) == config.eos_ids.end()) config.eos_ids.push_back(id);
  }
  config.attends_to_latents = overrides.attends_to_latents && config.latent && config.latent->has_attention();
  read_quantization(reader, family, config);
  check(reader, config);
  read_mtp(reader, family, folder, config);
  return config;
}

namespace {
/// Says of a head with names of its own that it is there.
void name_mtp_head(const ModelConfig& config, json::object& object) {
  constexpr const char* kKey = "mtp_num_hidden_layers";
  if (config.mtp && config.mtp->names == MtpNames::kApart && !object.contains(kKey)) object[kKey] = 1;
}
}  // namespace

std::string to_config_json(const ModelConfig& config) {
  const Family& family = find_family(config.model_type, "to_config_json");
  json::object object;
  object["architectures"] = json::array{json::string(family.architecture.data(), family.architecture.size())};
  object["model_type"] = config.model_type;
  object["vocab_size"] = config.vocab_size;
  object["hidden_size"] = config.hidden_size;
  object["intermediate_size"] = config.intermediate_size;
  object["num_hidden_layers"] = config.num_layers;
  object["num_attention_heads"] = config.num_heads;
  object["num_key_value_heads"] = config.num_kv_heads;
  object["head_dim"] = config.head_dim;
  object[family.activation_key] = boost::json::string_view(family.activation);
  object["max_position_embeddings"] = config.max_position;
  object["rms_norm_eps"] = std::stod(fmt::format("{}", config.rms_norm_eps));  // 1e-05 and not 9.999999747378752e-06
  object["rope_theta"] = config.rope_theta;
  if (config.rope_scaling.enabled) {
    object["rope_scaling"] = json::object{{"rope_type", "llama3"},
                                          {"factor", config.rope_scaling.factor},
                                          {"low_freq_factor", config.rope_scaling.low_freq_factor},
                                          {"high_freq_factor", config.rope_scaling.high_freq_factor},
                                          {"original_max_position_embeddings", config.rope_scaling.original_max_position}};
  }
  if (config.rope_divisor != 1.0) object["rope_scaling"] = json::object{{"rope_type", "linear"}, {"factor", config.rope_divisor}};
  if (const std::optional<Yarn>& rope = config.yarn)
    object["rope_scaling"] = json::object{{"rope_type", "yarn"},
                                          {"factor", rope->factor},
                                          {"beta_fast", rope->beta_fast},
                                          {"beta_slow", rope->beta_slow},
                                          {"truncate", rope->truncates},
                                          {"attention_factor", rope->attention_factor},
                                          {"mscale_all_dim", rope->mscale_all_dim},
                                          {"original_max_position_embeddings", rope->original_max_position}};
  if (const std::optional<LongRope>& rope = config.long_rope) {
    object["rope_scaling"] = json::object{{"rope_type", "longrope"},
                                          {"short_factor", json::value_from(rope->short_factors)},
                                          {"long_factor", json::value_from(rope->long_factors)},
                                          {"attention_factor", rope->attention_factor}};
    object["original_max_position_embeddings"] = rope->original_max_position;
  }
  object["tie_word_embeddings"] = config.tie_word_embeddings;
  object["attention_dropout"] = 0.0;
  object["initializer_range"] = 0.02;
  object["use_cache"] = true;
  family.describe(config, object);
  if (config.bos_id >= 0) object["bos_token_id"] = config.bos_id;
  if (config.pad_id >= 0) object["pad_token_id"] = config.pad_id;
  if (config.eos_ids.size() == 1) {
    object["eos_token_id"] = config.eos_ids.front();
  } else if (!config.eos_ids.empty()) {
    object["eos_token_id"] = json::array(config.eos_ids.begin(), config.eos_ids.end());
  }
  object["torch_dtype"] = config.torch_dtype;
  name_mtp_head(config, object);
  return pretty_json(object);
}

std::string saved_config_json(const ModelConfig& config, DType dtype) {
  const char* name = dtype == DType::kBF16 ? "bfloat16" : dtype == DType::kF16 ? "float16" : "float32";
  if (config.raw_json.empty()) {
    ModelConfig copy = config;
    copy.torch_dtype = name;
    return to_config_json(copy);
  }
  json::value value = json::parse(config.raw_json);
  json::object& object = value.get_object();
  object[object.contains("dtype") ? "dtype" : "torch_dtype"] = name;
  object.erase(kQuantization);  // what was read has been undone
  if (json::value* text = config.vision ? object.if_contains("text_config") : nullptr; text != nullptr && text->is_object())
    for (const char* key : {"dtype", "torch_dtype"})
      if (text->get_object().contains(key)) text->get_object()[key] = name;
  // The tensors of these layers go on as they are (mtp_sources), or were not read.
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules"})
    if (config.num_skipped_layers > 0 && !config.mtp && object.contains(key)) object[key] = 0;
  json::value* const text = config.vision ? object.if_contains("text_config") : nullptr;
  name_mtp_head(config, text != nullptr && text->is_object() ? text->get_object() : object);
  return pretty_json(value);
}

}  // namespace prl::nn
