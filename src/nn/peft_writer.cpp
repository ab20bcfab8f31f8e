#include <fmt/core.h>

#include <algorithm>
#include <boost/json.hpp>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "nn/exact_parts.hpp"
#include "nn/models/config_reader.hpp"
#include "nn/peft.hpp"
#include "nn/stored_layout.hpp"

namespace prl::nn {
namespace fs = std::filesystem;
namespace json = boost::json;
namespace {

/// Rows of a packed matrix, one after the other.
std::vector<float> unpacked(const ops::LinearWeight& weight, std::int64_t first_row, std::int64_t num_rows) {
  std::vector<float> out(static_cast<std::size_t>(num_rows * weight.num_inputs()));
  weight.unpack_rows(first_row, num_rows, out.data());
  return out;
}

WeightSource source_of(std::string name, Shape shape, std::shared_ptr<const std::vector<float>> values) {
  return {std::move(name), shape,
          [values](std::int64_t first, std::span<float> out) { std::copy_n(values->begin() + first, out.size(), out.begin()); }};
}

/// The rows of a tensor as the base model has them.
void read_base(const Weights& weights, const TensorSpec& spec, std::size_t block, std::int64_t first, std::span<float> out) {
  const Weights::PackedBlock& from = weights.blocks[block];
  const std::int64_t cols = spec.is_matrix() ? spec.shape[1] : 1, row = spec.first_row + first / cols;
  const auto rows = static_cast<std::int64_t>(out.size()) / cols;
  if (!from.plain.defined()) {
    from.packed->unpack_rows(row, rows, out.data());
    return;
  }
  DeviceRuntime& runtime = *from.plain.runtime();
  if (from.plain.dtype() == DType::kF32) {
    runtime.copy_to_host(out.data(), from.plain.as<float>() + row * cols, out.size_bytes());
    return;
  }
  std::vector<BFloat16> low(out.size());
  runtime.copy_to_host(low.data(), from.plain.as<BFloat16>() + row * cols, low.size() * sizeof(BFloat16));
  std::ranges::transform(low, out.begin(), [](BFloat16 v) { return to_f32(v); });
}

/// The part of an adapter that a tensor of the model has; nullptr for none.
struct FoundPart {
  const ops::LoraWeight* weight = nullptr;
  const ops::LoraPart* part = nullptr;
};
FoundPart part_of(const Weights& weights, const TensorSpec& spec) {
  if (weights.adapter == nullptr || !spec.is_matrix()) return {};
  const ops::LoraWeight* weight = weights.adapter->find(spec.block, spec.layer, spec.expert);
  if (weight == nullptr) return {};
  for (const ops::LoraPart& part : weight->parts)
    if (part.first_output == spec.first_row) return {weight, &part};
  return {};
}

/// out[n, k] += scale * sum_r B[n, r] A[r, k], in order of r, for the rows of B that are given.
void add_product(std::span<float> out, std::span<const float> b, std::span<const float> a, std::size_t rank, float scale) {
  std::vector<float> sum(a.size() / rank);
  for (std::size_t row = 0; row < out.size() / sum.size(); ++row) {
    std::ranges::fill(sum, 0.0f);
    for (std::size_t r = 0; r < rank; ++r)
      for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += b[row * rank + r] * a[r * sum.size() + k];
    for (std::size_t k = 0; k < sum.size(); ++k) out[row * sum.size() + k] += scale * sum[k];
  }
}

void add_product(const FoundPart& found, std::int64_t first_row, std::int64_t cols, std::span<float> out) {
  const std::vector<float> a = unpacked(*found.weight->a, found.part->first_rank, found.part->rank),
                           b = unpacked(*found.part->b, first_row, static_cast<std::int64_t>(out.size()) / cols);
  add_product(out, b, a, static_cast<std::size_t>(found.part->rank), found.part->scale);
}

/// The values of a tensor of an adapter; empty if it has none of that name.
std::span<const float> values_of(const StoredAdapter& adapter, const std::string& name) {
  const auto spec = std::ranges::find(adapter.table->tensors(), name, &TensorSpec::name);
  if (spec == adapter.table->tensors().end()) return {};
  const std::vector<float>& block = adapter.blocks[adapter.table->find(spec->block, spec->layer, spec->expert)];
  return std::span(block).subspan(static_cast<std::size_t>(spec->first_row * spec->shape[1]),
                                  static_cast<std::size_t>(spec->num_elements()));
}

std::string kind_of(const std::string& module) { return module.substr(module.rfind('.') + 1); }

/// Names of adapted modules as PEFT matches them: the last component where all modules of the model that have it are adapted, else whole
/// names; those of experts one by one.
std::vector<std::string> targets_of(const Weights& weights) {
  const Adapter& adapter = *weights.adapter;
  std::map<std::string, std::vector<std::string>> by_kind;
  std::map<std::string, std::size_t> in_model;
  std::set<std::string> of_experts;
  for (const TensorSpec& spec : weights.table->tensors())
    if (spec.is_matrix()) ++in_model[kind_of(module_of(spec.name))];
  for (const TensorSpec& spec : adapter.table->tensors())
    if (is_lora_a(spec.block)) {
      const std::string module = module_of(module_of(spec.name));
      by_kind[kind_of(module)].push_back(module);
      if (spec.expert >= 0) of_experts.insert(kind_of(module));
    }
  std::vector<std::string> out;
  for (const auto& [kind, modules] : by_kind) {
    if (modules.size() == in_model[kind] && !of_experts.contains(kind))
      out.push_back(kind);
    else
      out.insert(out.end(), modules.begin(), modules.end());
  }
  std::ranges::sort(out);
  return out;
}

/// Names of modules that are trained whole as PEFT matches them, by any end of a module's name ("norm" is "q_norm" too): the last
/// component where all modules of the model that end so are, else whole names.
std::vector<std::string> saved_modules(const TensorTable& model, const TensorTable& trained) {
  std::set<std::string> all, saved, out;
  for (const TensorSpec& spec : model.tensors()) all.insert(module_of(spec.name));
  for (const TensorSpec& spec : trained.tensors())
    if (!is_lora(spec.block)) saved.insert(module_of(spec.name));
  for (const std::string& module : saved) {
    const std::string kind = kind_of(module);
    const bool has_others = std::ranges::any_of(all, [&](const std::string& m) { return m.ends_with(kind) && !saved.contains(m); });
    out.insert(has_others ? module : kind);
  }
  return {out.begin(), out.end()};
}

json::object peft_config_json(const AdapterConfig& c, const std::vector<std::string>& saved) {
  json::object ranks, alphas;
  for (const auto& [pattern, rank] : c.rank_pattern) ranks[pattern] = rank;
  for (const auto& [pattern, alpha] : c.alpha_pattern) alphas[pattern] = alpha;
  json::object out{{"peft_type", "LORA"},
                   {"task_type", "CAUSAL_LM"},
                   {"base_model_name_or_path", c.base_model},
                   {"r", c.rank},
                   {"lora_alpha", c.alpha},
                   {"lora_dropout", c.dropout},
                   {"bias", "none"},
                   {"target_modules", json::value_from(c.target_modules)},
                   {"modules_to_save", saved.empty() ? json::value(nullptr) : json::value_from(saved)},
                   {"rank_pattern", ranks},
                   {"alpha_pattern", alphas},
                   {"use_rslora", c.rank_stabilized},
                   {"use_dora", false},
                   {"fan_in_fan_out", false},
                   {"init_lora_weights", true},
                   {"inference_mode", true}};
  if (c.alpha == static_cast<double>(static_cast<std::int64_t>(c.alpha))) out["lora_alpha"] = static_cast<std::int64_t>(c.alpha);
  return out;
}

/// The adapter's tensors, and the modules that are trained whole, under PEFT's names.
std::vector<WeightSource> peft_sources(const Weights& weights, const TensorTable& trained) {
  std::vector<WeightSource> sources;
  std::set<std::string_view> saved;
  for (const TensorSpec& spec : trained.tensors())
    if (!is_lora(spec.block)) saved.insert(spec.name);
  for (const TensorSpec& spec : weights.table->tensors()) {
    if (const FoundPart found = part_of(weights, spec); found.part != nullptr) {
      const std::string name = std::string(kPeftPrefix) + module_of(spec.name);
      const ops::LoraPart& part = *found.part;
      sources.push_back(source_of(name + ".lora_A.weight", {part.rank, found.weight->a->num_inputs()},
                                  std::make_shared<std::vector<float>>(unpacked(*found.weight->a, part.first_rank, part.rank))));
      sources.push_back(reordered_source(source_of(name + ".lora_B.weight", {part.num_outputs, part.rank},
                                                   std::make_shared<std::vector<float>>(unpacked(*part.b, 0, part.num_outputs))),
                                         stored_rows(weights.config, spec.slot)));
    }
    if (!saved.contains(spec.name)) continue;
    auto values = std::make_shared<std::vector<float>>(static_cast<std::size_t>(spec.num_elements()));
    read_base(weights, spec, weights.table->find(spec.block, spec.layer, spec.expert), 0, *values);
    sources.push_back(reordered_source(source_of(std::string(kPeftPrefix) + spec.name, spec.stored_shape(), values),
                                       stored_rows(weights.config, spec.slot)));
  }
  return sources;
}

/// An adapter as its files say it.
struct WrittenAdapter {
  AdapterConfig config;
  std::vector<WeightSource> sources;
  std::optional<BaseIdentity> base;
};

WrittenAdapter written_adapter(const Weights& weights, const TensorTable& trained) {
  PRL_CHECK(weights.adapter != nullptr, "weights without an adapter");
  AdapterConfig config = weights.adapter->config;
  config.target_modules = targets_of(weights);
  config.modules_to_save = saved_modules(*weights.table, trained);
  std::optional<BaseIdentity> base;
  if (weights.base_checksum != nullptr) base = {.dtype = weights.compute, .checksum = weights.base_checksum->combined};
  return {std::move(config), peft_sources(weights, trained), base};
}

WeightFileOptions file_options(DType dtype, const std::optional<BaseIdentity>& base) {
  WeightFileOptions options{.dtype = dtype, .max_shard_bytes = std::numeric_limits<std::uint64_t>::max(), .stem = "adapter_model"};
  if (base) options.metadata[kBaseKey] = fmt::format("{}:{:016x}", to_string(base->dtype), base->checksum);
  return options;
}

}  // namespace

void save_peft_adapter(const Weights& weights, const TensorTable& trained, const fs::path& folder) {
  const WrittenAdapter adapter = written_adapter(weights, trained);
  save_peft_files(adapter.config, adapter.sources, weights.adapter->dtype, folder, adapter.base);
}

Tensor peft_image(const Weights& weights, const TensorTable& trained) {
  const WrittenAdapter adapter = written_adapter(weights, trained);
  const std::string config = pretty_json(peft_config_json(adapter.config, adapter.config.modules_to_save));
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < sizeof(std::uint64_t); ++i) bytes.push_back(static_cast<std::byte>(config.size() >> (8 * i)));
  const auto text = std::as_bytes(std::span(config));
  bytes.insert(bytes.end(), text.begin(), text.end());
  write_weight_image(bytes, adapter.sources, file_options(weights.adapter->dtype, adapter.base));
  const Tensor image = Tensor::empty(make_cpu_runtime(), {static_cast<std::int64_t>(bytes.size())}, DType::kU8);
  std::memcpy(image.data(), bytes.data(), bytes.size());
  return image;
}

void save_peft_files(const AdapterConfig& config, std::span<const WeightSource> sources, DType dtype, const fs::path& folder,
                     const std::optional<BaseIdentity>& base) {
  write_weight_files(folder, sources, file_options(dtype, base));
  write_file_atomic(folder / kPeftConfig, pretty_json(peft_config_json(config, config.modules_to_save)));
}

WeightSource merged_source(WeightSource base, const StoredAdapterPtr& adapter) {
  const std::string module = module_of(base.name);
  const std::span<const float> a = values_of(*adapter, module + ".lora_A.weight"), b = values_of(*adapter, module + ".lora_B.weight");
  if (a.empty() || !base.name.ends_with(".weight")) return base;
  const AdapterScale scale = scale_of(adapter->config, module);
  const auto rank = static_cast<std::size_t>(scale.rank);
  WeightSource merged = base;
  merged.read = [adapter, a, b, rank, scale = scale.scale, cols = base.shape[1], read = std::move(base.read)](std::int64_t first,
                                                                                                              std::span<float> out) {
    read(first, out);
    add_product(out, b.subspan(static_cast<std::size_t>(first / cols) * rank), a, rank, scale);
  };
  return merged;
}

std::vector<WeightSource> merged_sources(const WeightsPtr& weights, std::vector<WeightSource> base) {
  const std::span<const TensorSpec> tensors = weights->table->tensors();
  PRL_CHECK(base.size() == tensors.size(), "{} sources of {} tensors", base.size(), tensors.size());
  for (std::size_t i = 0; i < base.size(); ++i) {
    const FoundPart found = part_of(*weights, tensors[i]);
    if (found.part == nullptr || !base[i].read) continue;
    base[i].read = [weights, found, cols = tensors[i].shape[1], read = std::move(base[i].read)](std::int64_t first, std::span<float> out) {
      read(first, out);
      add_product(found, first / cols, cols, out);
    };
  }
  return base;
}

std::vector<WeightSource> merged_sources(const WeightsPtr& weights) {
  PRL_CHECK(weights->layers == nullptr, "weights of which not all layers are there");
  std::vector<WeightSource> sources;
  for (const TensorSpec& spec : weights->table->tensors()) {
    const std::size_t block = weights->table->find(spec.block, spec.layer, spec.expert);
    sources.push_back(stored_source(
        spec, [weights, spec, block](std::int64_t first, std::span<float> out) { read_base(*weights, spec, block, first, out); }));
  }
  return merged_sources(weights, std::move(sources));
}

void save_merged(const WeightsPtr& weights, const fs::path& folder, DType dtype, const Companions& companions,
                 std::uint64_t max_shard_bytes) {
  save_model_folder(weights->config, merged_sources(weights), folder, dtype, companions, max_shard_bytes);
}

}  // namespace prl::nn
