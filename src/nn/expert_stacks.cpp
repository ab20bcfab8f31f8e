#include "nn/expert_stacks.hpp"

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

WeightSource stack_of(const std::string& name, std::vector<WeightSource> experts) {
  const std::int64_t rows = experts.front().shape[0], cols = experts.front().shape[1];
  const Shape shape{static_cast<std::int64_t>(experts.size()), cols, rows};
  const std::int64_t layer = experts.front().layer;
  auto reader = std::make_shared<StackReader>(std::move(experts), rows, cols);
  return {.name = name,
          .shape = shape,
          .read = [reader](std::int64_t first, std::span<float> out) { reader->read(first, out); },
          .layer = layer};
}

}  // namespace

std::string stack_name(const TensorSpec& spec) {
  if (spec.slot != Slot::kExpertPairs && spec.slot != Slot::kStackedDown) return {};
  return fmt::format("model.layers.{}.mlp.experts.{}", spec.layer, spec.slot == Slot::kExpertPairs ? "gate_up_proj" : "down_proj");
}

std::vector<WeightSource> stack_experts(const ModelConfig& config, std::vector<WeightSource> sources) {
  if (config.expert_names != ExpertNames::kStacked) return sources;
  const TensorTablePtr table = make_tensor_table(config);
  std::map<std::string, std::string, std::less<>> stack_of_tensor;
  for (const TensorSpec& spec : table->tensors())
    if (std::string name = stack_name(spec); !name.empty()) stack_of_tensor.emplace(spec.name, std::move(name));
  std::map<std::string, std::vector<WeightSource>, std::less<>> experts;
  for (const WeightSource& source : sources)
    if (const auto found = stack_of_tensor.find(source.name); found != stack_of_tensor.end()) experts[found->second].push_back(source);
  std::vector<WeightSource> out;
  for (WeightSource& source : sources) {
    const auto found = stack_of_tensor.find(source.name);
    if (found == stack_of_tensor.end()) {
      out.push_back(std::move(source));
      continue;
    }
    // In the place of the first of them.
    std::vector<WeightSource> of_stack = std::exchange(experts[found->second], {});
    if (of_stack.empty()) continue;
    PRL_CHECK(static_cast<std::int64_t>(of_stack.size()) == config.num_experts, "{} of {} experts in {}", of_stack.size(),
              config.num_experts, found->second);
    out.push_back(stack_of(found->second, std::move(of_stack)));
  }
  return out;
}

}  // namespace prl::nn
