#include "nn/peft.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json.hpp>
#include <charconv>
#include <map>
#include <string_view>

#include "base/error.hpp"
#include "base/files.hpp"
#include "io/safetensors.hpp"
#include "nn/exact_parts.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/same_model.hpp"
#include "nn/stored_layout.hpp"
#include "nn/stored_weights.hpp"
#include "ops/hash.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

constexpr std::uint64_t kMaxAdapterConfigBytes = 1 << 20;
constexpr std::size_t kImageLengthBytes = 8;

/// Keys that change what an adapter computes and that this build does not know, with what they are.
constexpr std::pair<const char*, const char*> kRefused[] = {
    {"use_dora", "DoRA (use_dora)"},
    {"lora_bias", "biases of B (lora_bias)"},
    {"fan_in_fan_out", "transposed weights (fan_in_fan_out)"},
    {"layer_replication", "repeated layers (layer_replication)"},
    {"use_qalora", "QALoRA (use_qalora)"},
    {"alora_invocation_tokens", "activated LoRA (alora_invocation_tokens)"},
    {"arrow_config", "Arrow routing (arrow_config)"},
    {"trainable_token_indices", "trained rows of the embedding (trainable_token_indices)"},
    {"target_parameters", "adapters of bare parameters (target_parameters)"},
};

bool is_set(const json::value& value) {
  if (value.is_bool()) return value.get_bool();
  if (value.is_array()) return !value.get_array().empty();
  if (value.is_object()) return !value.get_object().empty();
  return !value.is_null();
}

std::vector<std::string> names_of(const json::object& object, const char* key, const std::string& subject) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr || value->is_null()) return {};
  if (value->is_string()) return {std::string(value->get_string())};
  std::vector<std::string> out;
  if (value->is_array())
    for (const json::value& item : value->get_array())
      if (item.is_string()) out.emplace_back(item.get_string());
  if (!value->is_array() || out.size() != value->get_array().size())
    fail(ErrorCode::kCorrupt, "{}: key '{}' must be text or a list of text", subject, key);
  return out;
}

template <typename T>
std::vector<std::pair<std::string, T>> pattern_of(const json::object& object, const char* key, const std::string& subject) {
  std::vector<std::pair<std::string, T>> out;
  const json::value* value = object.if_contains(key);
  if (value == nullptr || value->is_null()) return out;
  if (!value->is_object()) fail(ErrorCode::kCorrupt, "{}: key '{}' must be an object of numbers", subject, key);
  for (const auto& [pattern, number] : value->get_object()) {
    if (!number.is_number()) fail(ErrorCode::kCorrupt, "{}: '{}' of key '{}' must be a number", subject, std::string(pattern), key);
    out.emplace_back(std::string(pattern), number.template to_number<T>());
  }
  return out;
}

/// A and B of one module in a file.
struct StoredPair {
  const io::SafetensorsEntry* a = nullptr;
  const io::SafetensorsEntry* b = nullptr;
};

[[noreturn]] void fail_other_base(const fs::path& file, const std::string& name, const std::string& wanted, const std::string& found) {
  fail(ErrorCode::kInvalidArgument, "{}: tensor '{}' has shape {}, this base model wants {}: the adapter is of another model",
       file.string(), name, found, wanted);
}

std::string shape_text(const io::SafetensorsEntry& entry) { return fmt::format("[{}]", fmt::join(entry.shape, ", ")); }

/// "BF16:0123456789abcdef" in the file's metadata.
std::optional<BaseIdentity> base_of(const io::SafetensorsFile& file) {
  const auto found = file.metadata().find(kBaseKey);
  if (found == file.metadata().end()) return std::nullopt;
  const std::string& text = found->second;
  const std::size_t colon = text.find(':');
  BaseIdentity base;
  const char* const begin = text.data() + (colon == std::string::npos ? text.size() : colon + 1);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), base.checksum, 16);
  const std::string dtype = text.substr(0, colon);
  if (error != std::errc() || end != text.data() + text.size() || (dtype != to_string(DType::kF32) && dtype != to_string(DType::kBF16)))
    fail(ErrorCode::kCorrupt, "{}: {} of its metadata is '{}', wanted a type and a checksum", file.path().string(), kBaseKey,
         text.substr(0, 64));
  base.dtype = dtype == to_string(DType::kF32) ? DType::kF32 : DType::kBF16;
  return base;
}

/// Checksums of different dtypes say nothing of each other.
void check_base(const fs::path& file, const StoredAdapter& adapter, const PeftLimits& limits) {
  const BaseIdentity& trained_on = *adapter.base;
  const BaseIdentity here = limits.base(trained_on.dtype);
  if (trained_on.dtype != here.dtype || trained_on.checksum == here.checksum) return;
  fail(
      ErrorCode::kInvalidArgument,
      "{}: the adapter was trained on another base model: on {}, whose weights have checksum {:016x} in {}, and those of {} have {:016x}{}",
      file.string(), adapter.config.base_model.empty() ? "one without a name" : adapter.config.base_model, trained_on.checksum,
      to_string(here.dtype), limits.base_name, here.checksum, limits.remedy);
}

/// The pairs of a file by module; every tensor is one of them.
std::map<std::string, StoredPair> pairs_of(const io::SafetensorsFile& file, const AdapterConfig& config) {
  std::map<std::string, StoredPair> pairs;
  for (const io::SafetensorsEntry& entry : file.entries()) {
    std::string name = entry.name;
    if (!name.starts_with(kPeftPrefix))
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' does not begin with '{}', as those of an adapter do", file.path().string(), name,
           kPeftPrefix);
    name.erase(0, std::string_view(kPeftPrefix).size());
    const bool is_a = name.ends_with(".lora_A.weight"), is_b = name.ends_with(".lora_B.weight");
    if (name.find("lora_magnitude_vector") != std::string::npos)
      fail(ErrorCode::kNotImplemented, "{}: tensor '{}' belongs to DoRA, which this build does not have", file.path().string(), entry.name);
    if (!is_a && !is_b) {
      if (!config.modules_to_save.empty()) continue;
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is neither a lora_A nor a lora_B weight", file.path().string(), entry.name);
    }
    StoredPair& pair = pairs[module_of(module_of(name))];
    (is_a ? pair.a : pair.b) = &entry;
  }
  for (const auto& [module, pair] : pairs)
    if (pair.a == nullptr || pair.b == nullptr)
      fail(ErrorCode::kCorrupt, "{}: module '{}' has no {}", file.path().string(), module, pair.a == nullptr ? "lora_A" : "lora_B");
  return pairs;
}

/// Checks the shapes of a pair against the matrix it adapts. Its rank.
std::int64_t check_pair(const fs::path& file, const std::string& module, const StoredPair& pair, const TensorSpec& of,
                        const AdapterConfig& config, const PeftLimits& limits) {
  for (const io::SafetensorsEntry* entry : {pair.a, pair.b}) {
    if (entry->shape.size() != 2 || entry->shape[entry == pair.a ? 0 : 1] < 1)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' has shape {}, wanted a matrix", file.string(), entry->name, shape_text(*entry));
    if (entry->type != io::StoredType::kF32 && entry->type != io::StoredType::kBF16 && entry->type != io::StoredType::kF16)
      fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted F32, BF16 or F16", file.string(), entry->name,
           io::to_string(entry->type));
  }
  const std::int64_t rank = pair.a->shape[0];
  if (pair.a->shape[1] != of.shape[1]) fail_other_base(file, pair.a->name, fmt::format("[rank, {}]", of.shape[1]), shape_text(*pair.a));
  if (pair.b->shape[0] != of.shape[0]) fail_other_base(file, pair.b->name, fmt::format("[{}, rank]", of.shape[0]), shape_text(*pair.b));
  if (pair.b->shape[1] != rank)
    fail(ErrorCode::kCorrupt, "{}: lora_A of '{}' has rank {}, its lora_B {}", file.string(), module, rank, pair.b->shape[1]);
  if (const std::int64_t wanted = scale_of(config, module).rank; wanted != rank)
    fail(ErrorCode::kCorrupt, "{}: module '{}' has rank {}, {} says {}", file.string(), module, rank, kPeftConfig, wanted);
  if (rank > limits.max_rank)
    fail(ErrorCode::kInvalidArgument, "{}: module '{}' has rank {}, the largest that is served is {} (max_lora_rank)", file.string(),
         module, rank, limits.max_rank);
  return rank;
}

AdapterConfig parse_peft_config(std::string_view text, const std::string& subject) {
  boost::system::error_code bad;
  const json::value root = json::parse(text, bad);
  if (bad || !root.is_object()) fail(ErrorCode::kCorrupt, "{} is no JSON object", subject);
  const json::object& object = root.get_object();
  const ConfigReader reader(subject, object);
  reader.require_string("peft_type", "", "LORA");
  reader.require_string("bias", "none", "none");
  for (const auto& [key, what] : kRefused)
    if (const json::value* value = object.if_contains(key); value != nullptr && is_set(*value))
      fail(ErrorCode::kNotImplemented, "{}: the adapter uses {}, which this build does not have", subject, what);
  AdapterConfig config;
  config.rank = reader.integer("r", std::nullopt, 1, ops::kMaxLoraRank);
  config.alpha = reader.number("lora_alpha", std::nullopt, 0, 1e9);
  config.dropout = reader.number("lora_dropout", 0.0, 0, 1);
  config.rank_stabilized = reader.boolean("use_rslora", false);
  config.base_model = reader.string("base_model_name_or_path", "");
  config.target_modules = names_of(object, "target_modules", subject);
  config.modules_to_save = names_of(object, "modules_to_save", subject);
  config.rank_pattern = pattern_of<std::int64_t>(object, "rank_pattern", subject);
  config.alpha_pattern = pattern_of<double>(object, "alpha_pattern", subject);
  return config;
}

/// The two files within an image.
struct ImageParts {
  std::string_view config;
  std::span<const std::byte> tensors;
};

ImageParts parts_of(const PeftSource& source) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(source.image.data()), source.image.num_bytes());
  if (source.image.dtype() != DType::kU8 || bytes.size() < kImageLengthBytes)
    fail(ErrorCode::kCorrupt, "{}: wanted an adapter of at least {} bytes, found {} of {}", source.folder.string(), kImageLengthBytes,
         bytes.size(), to_string(source.image.dtype()));
  std::uint64_t length = 0;
  for (std::size_t i = kImageLengthBytes; i-- > 0;) length = (length << 8) | static_cast<std::uint64_t>(bytes[i]);
  if (length > kMaxAdapterConfigBytes || length > bytes.size() - kImageLengthBytes)
    fail(ErrorCode::kCorrupt, "{}: its {} is said to have {} bytes, at most {} of {} may be", source.folder.string(), kPeftConfig, length,
         kMaxAdapterConfigBytes, bytes.size());
  return {{reinterpret_cast<const char*>(bytes.data()) + kImageLengthBytes, static_cast<std::size_t>(length)},
          bytes.subspan(kImageLengthBytes + static_cast<std::size_t>(length))};
}

AdapterConfig config_in(const PeftSource& source) {
  if (!source.image.defined()) return load_peft_config(source.folder);
  return parse_peft_config(parts_of(source).config, (source.folder / kPeftConfig).string());
}

io::SafetensorsFile tensors_in(const PeftSource& source) {
  const fs::path path = source.folder / kPeftTensors;
  if (!source.image.defined()) return io::SafetensorsFile::open(path);
  return io::SafetensorsFile::read(path, parts_of(source).tensors, std::make_shared<Tensor>(source.image));
}

}  // namespace

AdapterConfig load_peft_config(const fs::path& folder) {
  const fs::path path = folder / kPeftConfig;
  std::error_code ec;
  if (!fs::exists(path, ec))
    fail(ErrorCode::kNotFound, "{}: there is no {}; an adapter is a folder with it and {}", folder.string(), kPeftConfig, kPeftTensors);
  return parse_peft_config(read_file(path, kMaxAdapterConfigBytes), path.string());
}

std::int64_t max_peft_image_bytes(const ModelConfig& config) {
  // The header of the tensors' file has some 200 bytes for each, and there is room for what else it may say.
  constexpr std::size_t kMaxTexts = std::size_t{64} << 20;
  return static_cast<std::int64_t>(most_adapter_bytes(config, ops::kMaxLoraRank, DType::kF32) + kMaxTexts);
}

BaseIdentity identity_of(ops::OpContext& ctx, std::span<const WeightSource> sources, DType dtype) {
  std::string all;
  std::vector<float> values;
  for (const WeightSource& source : sources) {
    values.resize(static_cast<std::size_t>(source.shape.num_elements()));
    source.read(0, values);
    if (source.is_exact) {  // hashed as it lies in memory
      const std::vector<float> whole = values;
      values.resize(whole.size() * static_cast<std::size_t>(kNumExactParts));
      split_exact(whole, values, source.name);
    }
    if (dtype == DType::kBF16)
      for (float& value : values) value = to_f32(to_bf16(value));
    const std::int64_t num_rows = source.is_exact ? static_cast<std::int64_t>(values.size()) : source.shape[0],
                       num_cols = num_rows > 0 ? static_cast<std::int64_t>(values.size()) / num_rows : 1;
    const Tensor tensor = Tensor::empty(ctx.runtime, {num_rows, num_cols}, DType::kF32);
    ctx.runtime->copy_from_host(tensor.data(), values.data(), values.size() * sizeof(float));
    const ops::HashedRows item{nullptr, tensor.view(), 0, num_rows, num_cols};
    std::uint64_t hash = 0;
    ops::hash_rows(ctx, {&hash, 1}, {&item, 1}, dtype);
    all.append(source.name).append(1, '\0').append(reinterpret_cast<const char*>(&hash), sizeof hash);
  }
  return {.dtype = dtype, .checksum = hash_bytes(std::string_view(all))};
}

std::string doubt_of_base(const AdapterConfig& adapter, const ModelConfig& model, const fs::path& folder, const std::string& name) {
  const fs::path named = adapter.base_model;
  if (named.empty()) return {};
  const auto last_of = [](const fs::path& path) { return (path / "").parent_path().filename(); };
  std::error_code ignored;
  if (fs::exists(named / "config.json", ignored)) {
    if (fs::equivalent(named, folder, ignored)) return {};
    try {
      check_same_model(model, load_model_config(named), named / "config.json");
    } catch (const Error& error) {
      return fmt::format("it says that it was made for {}, another model than {}: {}", named.string(), name, error.what());
    }
  }
  if (last_of(named) == last_of(folder) || last_of(named) == last_of(name)) return {};
  return fmt::format("it says that it was made for {}, and this is {}; its shapes fit", named.string(), name);
}

std::size_t StoredAdapter::num_bytes() const noexcept {
  std::size_t sum = 0;
  for (const std::vector<float>& block : blocks) sum += block.size() * sizeof(float);
  return sum;
}

StoredAdapterPtr read_peft_adapter(const ModelConfig& config, const PeftSource& source, DType compute, ThreadPool& pool,
                                   const PeftLimits& limits) {
  auto stored = std::make_shared<StoredAdapter>();
  stored->config = config_in(source);
  const AdapterConfig& adapter = stored->config;
  if (!adapter.modules_to_save.empty() && !limits.may_replace_modules)
    fail(ErrorCode::kInvalidArgument,
         "{}: the adapter replaces whole modules ({}), which cannot be served beside others: merge it into its base with prl convert",
         (source.folder / kPeftConfig).string(), fmt::join(adapter.modules_to_save, ", "));
  const io::SafetensorsFile file = tensors_in(source);
  stored->compute = compute;
  stored->base = base_of(file);
  const std::map<std::string, StoredPair> pairs = pairs_of(file, adapter);
  const TensorTablePtr of_model = make_tensor_table(config);
  std::map<std::string, AdapterScale> scales;
  std::vector<StoredTensor> all;
  for (const auto& [module, pair] : pairs) {
    const auto of = std::ranges::find(of_model->tensors(), module + ".weight", &TensorSpec::name);
    if (of == of_model->tensors().end() || !lora_b_of(of->slot))
      fail(ErrorCode::kInvalidArgument, "{}: module '{}' is none of this {} model that takes an adapter", file.path().string(), module,
           config.model_type);
    AdapterScale scale = scale_of(adapter, module);
    scale.rank = check_pair(file.path(), module, pair, *of, adapter, limits);
    scales[module] = scale;
    all.emplace_back(io::SafetensorsRef{&file, pair.a});
    all.emplace_back(io::SafetensorsRef{&file, pair.b});
  }
  if (pairs.empty()) fail(ErrorCode::kCorrupt, "{}: there is no lora_A in it", file.path().string());
  if (stored->base && limits.base) check_base(file.path(), *stored, limits);
  check_finite(all, compute, pool);
  stored->table = make_adapter_table(config, [&](const std::string& module) -> std::optional<AdapterScale> {
    const auto found = scales.find(module);
    return found == scales.end() ? std::nullopt : std::optional(found->second);
  });
  for (const BlockSpec& block : stored->table->blocks()) {
    std::vector<float>& values = stored->blocks.emplace_back(static_cast<std::size_t>(block.shape.num_elements()));
    std::span<float> left = values;
    for (const TensorSpec& spec : stored->table->tensors_of(block)) {
      const StoredPair& pair = pairs.at(module_of(module_of(spec.name)));
      const auto count = static_cast<std::size_t>(spec.num_elements());
      const std::vector<RowRun> runs = is_lora_a(block.kind) ? std::vector<RowRun>() : stored_rows(config, spec.slot);
      const io::SafetensorsRef ref{&file, is_lora_a(block.kind) ? pair.a : pair.b};
      (runs.empty() ? StoredTensor(ref) : StoredTensor::reordered(ref, runs, spec.shape[1])).read_f32(0, left.first(count));
      left = left.subspan(count);
    }
  }
  file.check_whole();
  return stored;
}

AdapterPtr pack_adapter(ops::OpContext& ctx, const ModelConfig& config, const StoredAdapter& stored, bool with_backward, Shard shard) {
  const auto pack = [&](const BlockRows& rows) {
    const auto index = static_cast<std::size_t>(&rows.block - stored.table->blocks().data());
    const std::int64_t num_cols = rows.block.shape[1];
    std::int64_t num_rows = 0;
    for (const RowRun& run : rows.runs) num_rows += run.count;
    const Tensor values = Tensor::empty(ctx.runtime, {num_rows, num_cols}, DType::kF32);
    auto* to = values.as<float>();
    for (const RowRun& run : rows.runs) {
      const std::int64_t count = run.count * num_cols;
      ctx.runtime->copy_from_host(to, stored.blocks[index].data() + run.first * num_cols, static_cast<std::size_t>(count) * sizeof(float));
      to += count;
    }
    return ops::pack_linear(ctx, values, {}, stored.compute, with_backward, ops::WeightUse::kAdapter);
  };
  return make_adapter(stored.config, config, stored.table, stored.compute, pack, shard);
}

AdapterPtr join_parts(std::span<const AdapterPtr> parts) {
  auto first = std::make_shared<Adapter>(*parts.front());
  first->others.assign(parts.begin() + 1, parts.end());
  return first;
}

AdapterPtr pack_adapter(std::span<ops::OpContext* const> devices, const ModelConfig& config, const StoredAdapter& stored) {
  if (devices.size() == 1) return pack_adapter(*devices.front(), config, stored);
  const int num = static_cast<int>(devices.size());
  std::vector<AdapterPtr> parts;
  for (int rank = 0; rank < num; ++rank)
    parts.push_back(pack_adapter(*devices[static_cast<std::size_t>(rank)], config, stored, false, {rank, num}));
  return join_parts(parts);
}

AdapterPtr load_peft_adapter(ops::OpContext& ctx, const ModelConfig& config, const PeftSource& source, DType dtype,
                             const PeftLimits& limits, bool with_backward) {
  return pack_adapter(ctx, config, *read_peft_adapter(config, source, dtype, *ctx.pool, limits), with_backward);
}

}  // namespace prl::nn
