#include "tools/extract_adapter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread_pool.hpp"
#include "io/safetensors.hpp"
#include "nn/peft.hpp"
#include "nn/stored_layout.hpp"
#include "nn/stored_weights.hpp"
#include "tools/low_rank.hpp"

namespace prl::tools {
namespace fs = std::filesystem;
namespace {

/// A difference that rounding to bf16 on one side explains.
constexpr float kRounding = 0.0079f;
constexpr std::size_t kMostNamed = 8;

struct Stored {
  io::SafetensorsFolder files;
  std::vector<nn::StoredTensor> tensors;  ///< as in the table

  Stored(const fs::path& folder, const nn::ModelConfig& config, const nn::TensorTable& table)
      : files(io::SafetensorsFolder::open(folder)), tensors(nn::match_stored_weights(files, config, table)) {}
  std::vector<float> read(std::size_t index) const {
    std::vector<float> out(static_cast<std::size_t>(tensors[index].num_elements()));
    tensors[index].read_f32(0, out);
    return out;
  }
};

bool takes_adapter(const nn::TensorSpec& spec) {
  return std::ranges::find(nn::kAdaptedBlocks, spec.block) != nn::kAdaptedBlocks.end() && spec.is_matrix() && nn::lora_b_of(spec.slot);
}

bool is_rounding(std::span<const float> a, std::span<const float> b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::abs(a[i] - b[i]) > kRounding * std::max(std::abs(a[i]), std::abs(b[i]))) return false;
  return true;
}

nn::WeightSource source_of(std::string name, Shape shape, std::vector<float> values) {
  auto shared = std::make_shared<const std::vector<float>>(std::move(values));
  return {std::move(name), shape,
          [shared](std::int64_t first, std::span<float> out) { std::copy_n(shared->begin() + first, out.size(), out.begin()); }};
}

}  // namespace

ExtractResult extract_adapter(const ExtractOptions& options) {
  const nn::ModelConfig config = nn::load_model_config(options.merged), base_config = nn::load_model_config(options.base);
  const nn::TensorTablePtr table = nn::make_tensor_table(config), base_table = nn::make_tensor_table(base_config);
  if (table->tensors().size() != base_table->tensors().size())
    fail(ErrorCode::kInvalidArgument, "{} has {} tensors, {} has {}: they are not the same model", options.merged.string(),
         table->tensors().size(), options.base.string(), base_table->tensors().size());
  const Stored merged(options.merged, config, *table), base(options.base, base_config, *base_table);
  const std::vector<fs::path> inputs{options.merged, options.base};
  nn::check_output_folder(options.output_dir, options.overwrite, inputs);
  ThreadPool pool(0);
  nn::AdapterConfig adapter;
  adapter.rank = options.rank;
  adapter.alpha = static_cast<double>(options.rank);
  adapter.base_model = options.base.string();
  std::vector<nn::WeightSource> sources;
  std::vector<std::string> others;
  double norm2 = 0, residual2 = 0;
  for (std::size_t i = 0; i < table->tensors().size(); ++i) {
    const nn::TensorSpec& spec = table->tensors()[i];
    if (const nn::TensorSpec& other = base_table->tensors()[i]; other.name != spec.name || other.shape != spec.shape)
      fail(ErrorCode::kInvalidArgument, "{}: tensor {} is {} of another shape in {}", options.merged.string(), spec.name, other.name,
           options.base.string());
    std::vector<float> difference = merged.read(i);
    const std::vector<float> before = base.read(i);
    if (std::ranges::equal(difference, before)) continue;
    if (!takes_adapter(spec)) {
      if (!is_rounding(difference, before)) others.push_back(spec.name);
      continue;
    }
    for (std::size_t k = 0; k < difference.size(); ++k) difference[k] -= before[k];
    LowRank part = best_low_rank(difference, spec.shape[0], spec.shape[1], options.rank, pool);
    norm2 += part.norm2;
    residual2 += part.residual2;
    const std::string module = nn::module_of(spec.name), name = std::string(nn::kPeftPrefix) + module;
    log::info("{}: {:.2f}% of the difference is left", module, 100 * std::sqrt(part.residual2 / part.norm2));
    if (part.rank != options.rank) adapter.rank_pattern.emplace_back(module, part.rank);
    if (part.rank != options.rank) adapter.alpha_pattern.emplace_back(module, static_cast<double>(part.rank));
    sources.push_back(source_of(name + ".lora_A.weight", {part.rank, spec.shape[1]}, std::move(part.a)));
    sources.push_back(nn::reordered_source(source_of(name + ".lora_B.weight", {spec.shape[0], part.rank}, std::move(part.b)),
                                           nn::stored_rows(config, spec.slot)));
    adapter.target_modules.push_back(module);
  }
  if (!others.empty()) {
    const std::size_t num_named = std::min(kMostNamed, others.size());
    fail(ErrorCode::kInvalidArgument, "{} differs from {} in {}{}, which an adapter of attention and MLP cannot hold",
         options.merged.string(), options.base.string(),
         fmt::join(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(num_named), ", "),
         others.size() > num_named ? fmt::format(" and {} more", others.size() - num_named) : "");
  }
  if (sources.empty())
    fail(ErrorCode::kInvalidArgument, "{} and {} hold the same weights: there is no adapter between them", options.merged.string(),
         options.base.string());
  nn::make_model_folder(
      options.output_dir, [&](const fs::path& temporary) { nn::save_peft_files(adapter, sources, options.dtype, temporary); },
      options.overwrite);
  return {static_cast<std::int64_t>(adapter.target_modules.size()), std::sqrt(residual2 / norm2)};
}

}  // namespace prl::tools
