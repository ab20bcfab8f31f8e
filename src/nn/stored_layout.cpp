#include "nn/stored_layout.hpp"

#include "nn/mtp_head.hpp"
#include "nn/vision_tower.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "base/error.hpp"

namespace prl::nn {
namespace {

/// Reads the transposes of several matrices [rows, cols], one after the other.
class StackReader {
 public:
  StackReader(std::vector<WeightSource> experts, std::int64_t rows, std::int64_t cols)
      : experts_(std::move(experts)), rows_(rows), cols_(cols) {}

  void read(std::int64_t first, std::span<float> out) {
    for (std::size_t done = 0; done < out.size();) {
      const std::int64_t at = first + static_cast<std::int64_t>(done), expert = at / (rows_ * cols_), within = at % (rows_ * cols_);
      load(expert);
      const std::size_t count = std::min(out.size() - done, static_cast<std::size_t>(rows_ * cols_ - within));
      std::copy_n(transpose_.begin() + within, count, out.begin() + static_cast<std::ptrdiff_t>(done));
      done += count;
    }
  }

 private:
  void load(std::int64_t expert) {
    if (expert == loaded_) return;
    std::vector<float> matrix(static_cast<std::size_t>(rows_ * cols_));
    experts_[static_cast<std::size_t>(expert)].read(0, matrix);
    transpose_.resize(matrix.size());
    constexpr std::int64_t kTile = 32;  // rows and columns that share their cache lines
    for (std::int64_t row = 0; row < rows_; row += kTile)
      for (std::int64_t col = 0; col < cols_; ++col)
        for (std::int64_t r = row; r < std::min(row + kTile, rows_); ++r)
          transpose_[static_cast<std::size_t>(col * rows_ + r)] = matrix[static_cast<std::size_t>(r * cols_ + col)];
    loaded_ = expert;
  }

  std::vector<WeightSource> experts_;
  std::int64_t rows_, cols_, loaded_ = -1;
  std::vector<float> transpose_;
};

/// In one tensor the transposes of all.
WeightSource transposed_stack(std::string name, std::vector<WeightSource> experts) {
  const std::int64_t rows = experts.front().shape[0], cols = experts.front().shape[1];
  const Shape shape{static_cast<std::int64_t>(experts.size()), cols, rows};
  const std::int64_t layer = experts.front().layer;
  auto reader = std::make_shared<StackReader>(std::move(experts), rows, cols);
  return {.name = std::move(name),
          .shape = shape,
          .read = [reader](std::int64_t first, std::span<float> out) { reader->read(first, out); },
          .layer = layer};
}

/// In one tensor the rows of all, an expert's one or two matrices together.
WeightSource stack_of_rows(std::string name, std::vector<WeightSource> parts, std::int64_t num_experts) {
  const std::int64_t rows = parts.front().shape[0], cols = parts.front().shape[1], of_part = rows * cols;
  const Shape shape{num_experts, static_cast<std::int64_t>(parts.size()) / num_experts * rows, cols};
  const std::int64_t layer = parts.front().layer;
  return {.name = std::move(name),
          .shape = shape,
          .read =
              [parts = std::move(parts), of_part](std::int64_t first, std::span<float> out) {
                while (!out.empty()) {
                  const auto count = std::min(out.size(), static_cast<std::size_t>(of_part - first % of_part));
                  parts[static_cast<std::size_t>(first / of_part)].read(first % of_part, out.first(count));
                  first += static_cast<std::int64_t>(count);
                  out = out.subspan(count);
                }
              },
          .layer = layer};
}

/// Sources of one stack in place of those of its parts.
std::vector<WeightSource> stacked(const ModelConfig& config, const TensorTable& table, std::vector<WeightSource> sources) {
  std::map<std::string, std::string, std::less<>> stack_of_tensor;
  for (const TensorSpec& spec : table.tensors())
    if (std::string name = stack_name(spec, config.expert_names); !name.empty()) stack_of_tensor.emplace(spec.name, std::move(name));
  if (stack_of_tensor.empty()) return sources;
  std::map<std::string, std::vector<WeightSource>, std::less<>> parts;
  for (const WeightSource& source : sources)
    if (const auto found = stack_of_tensor.find(source.name); found != stack_of_tensor.end()) parts[found->second].push_back(source);
  std::vector<WeightSource> out;
  for (WeightSource& source : sources) {
    const auto found = stack_of_tensor.find(source.name);
    if (found == stack_of_tensor.end()) {
      out.push_back(std::move(source));
      continue;
    }
    // In the place of the first of them.
    std::vector<WeightSource> of_stack = std::exchange(parts[found->second], {});
    if (of_stack.empty()) continue;
    PRL_CHECK(static_cast<std::int64_t>(of_stack.size()) % config.num_experts == 0, "{} matrices of {} experts in {}", of_stack.size(),
              config.num_experts, found->second);
    out.push_back(config.expert_names == ExpertNames::kStacked ? transposed_stack(found->second, std::move(of_stack))
                                                               : stack_of_rows(found->second, std::move(of_stack), config.num_experts));
  }
  return out;
}

}  // namespace

std::string stack_name(const TensorSpec& spec, ExpertNames names) {
  if (names != ExpertNames::kStacked && names != ExpertNames::kStackedRows) return {};
  constexpr std::string_view kExperts = ".experts.";
  const std::size_t at = spec.name.find(kExperts);
  if (at == std::string::npos) return {};
  const std::string of_layer = spec.name.substr(0, at + kExperts.size());
  switch (spec.slot) {
    case Slot::kExpertPairs:
    case Slot::kExpertGate:
    case Slot::kExpertUp: return of_layer + "gate_up_proj";
    case Slot::kStackedDown:
    case Slot::kExpertDown: return of_layer + "down_proj";
    default: return {};
  }
}

std::vector<RowRun> stored_rows(const ModelConfig& config, Slot slot) {
  const LinearAttention& c = config.linear;
  std::vector<RowRun> runs;
  if (slot != Slot::kLinearQkvz && slot != Slot::kLinearBa) return runs;
  const std::int64_t heads = c.num_value_heads / c.num_key_heads, keys = c.num_key_heads * c.key_dim;
  for (std::int64_t g = 0; g < c.num_key_heads; ++g) {
    if (slot == Slot::kLinearBa) {
      for (const std::int64_t begin : {std::int64_t{0}, c.num_value_heads}) runs.push_back({begin + g * heads, heads});
      continue;
    }
    for (const std::int64_t begin : {std::int64_t{0}, keys}) runs.push_back({begin + g * c.key_dim, c.key_dim});
    const std::int64_t values = heads * c.value_dim;
    for (const std::int64_t begin : {2 * keys, 2 * keys + c.value_width()}) runs.push_back({begin + g * values, values});
  }
  return runs;
}

WeightSource reordered_source(WeightSource source, std::vector<RowRun> runs) {
  if (runs.empty()) return source;
  source.read = [runs = std::move(runs), cols = source.shape[1], read = std::move(source.read)](std::int64_t first, std::span<float> out) {
    std::int64_t before = 0;  // elements of the runs that have passed
    for (const RowRun& run : runs) {
      const std::int64_t within = first - before, of_run = run.count * cols;
      before += of_run;
      if (within >= of_run) continue;
      const auto count = std::min(out.size(), static_cast<std::size_t>(of_run - within));
      read(run.first * cols + within, out.first(count));
      out = out.subspan(count);
      if (out.empty()) return;
      first = before;
    }
  };
  return source;
}

namespace {

std::vector<WeightSource> rows_in_file_order(const ModelConfig& config, std::vector<WeightSource> sources) {
  const bool has_stacks = config.expert_names == ExpertNames::kStacked || config.expert_names == ExpertNames::kStackedRows;
  if (!has_stacks && !config.linear.fuses_projections) return sources;
  const TensorTablePtr table = make_tensor_table(config);
  std::map<std::string_view, std::vector<RowRun>> order;
  for (const TensorSpec& spec : table->tensors())
    if (std::vector<RowRun> runs = stored_rows(config, spec.slot); !runs.empty()) order.emplace(spec.name, std::move(runs));
  for (WeightSource& source : sources)
    if (const auto found = order.find(source.name); found != order.end()) source = reordered_source(std::move(source), found->second);
  return stacked(config, *table, std::move(sources));
}

}  // namespace

std::vector<WeightSource> stored_sources(const ModelConfig& config, std::vector<WeightSource> sources) {
  std::vector<WeightSource> out = rows_in_file_order(config, std::move(sources));
  constexpr std::string_view kModel = "model.";
  for (WeightSource& source : out)
    if (config.vision && source.name.starts_with(kModel)) source.name = "model.language_model." + source.name.substr(kModel.size());
  // A head that was trained is among them already.
  ModelConfig rest = config;
  if (std::ranges::any_of(out, [&](const WeightSource& source) { return is_of_mtp_head(source.name, config); })) rest.mtp.reset();
  for (WeightSource& source : other_sources(rest)) out.push_back(std::move(source));
  return out;
}

std::vector<WeightSource> other_sources(const ModelConfig& config) {
  std::vector<WeightSource> out;
  if (config.vision) out = tower_sources(*config.vision);
  if (config.mtp)
    for (WeightSource& source : mtp_sources(config)) out.push_back(std::move(source));
  return out;
}

}  // namespace prl::nn
