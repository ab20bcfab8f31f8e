#include "nn/masters.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/normal_draws.hpp"
#include "base/rng.hpp"
#include "base/thread_pool.hpp"

namespace prl::nn {
namespace {

/// Random numbers are drawn in runs of this many elements, each from a stream of its own, so that tensors fill in parallel and
/// the values do not depend on the number of threads.
constexpr std::int64_t kRandomRun = 1 << 16;

/// Of vectors: biases, sinks, exact parts, and norms that multiply by 1 + weight. Others are 1.
bool is_zero_at_first(const TensorSpec& spec, const ModelConfig& config) {
  return is_bias(spec.block) || spec.block == Block::kSinks || spec.is_exact() ||
         (config.norms_add_one && is_stream_or_head_norm(spec.block));
}

}  // namespace

Masters::Masters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table, ElementRanges held,
                 Allocate allocate)
    : config_(config), table_(std::move(table)), runtime_(std::move(runtime)), held_(std::move(held)), allocate_(std::move(allocate)) {
  if (!allocate_) allocate_ = [runtime = runtime_](std::int64_t n) { return Tensor::zeros(runtime, {n}, DType::kF32); };
  for (const TensorSpec& spec : table_->tensors())
    if (spec.trainable) named_.push_back({spec, {}, {}});
  values_ = allocate_(held_.count());
  cut_values();
}

std::vector<Tensor> Masters::cut(const Tensor& array, const ElementRanges& elements) const {
  std::vector<Tensor> parts;
  for (const BlockSpec& block : table_->blocks())
    parts.push_back(block.trainable && elements.contains(block.range())
                        ? array.slice(elements.place_of(block.offset), block.shape.num_elements()).reshaped(block.shape)
                        : Tensor());
  return parts;
}

void Masters::cut_values() {
  values_of_blocks_ = cut(values_, held_);
  for (NamedParameter& p : named_) p.value = held_.contains(p.range()) ? values_in(p.range()).reshaped(p.shape) : Tensor();
}

void Masters::hold(const ElementRanges& ranges) {
  if (ranges == held_) return;
  const Tensor values = allocate_(ranges.count());
  for (const ElementRange range : ranges.ranges())
    for (const ElementRange both : held_.within(range))
      values.runtime()->copy_within(values.as<float>() + ranges.place_of(both.begin), values_.as<float>() + held_.place_of(both.begin),
                                    static_cast<std::size_t>(both.count()) * sizeof(float));
  values_ = values;
  held_ = ranges;
  cut_values();
}

Tensor Masters::values_in(ElementRange range) const {
  PRL_CHECK(held_.contains(range), "masters [{}, {}) of a rank that holds {} others", range.begin, range.end, held_.count());
  return values_.slice(range.count() > 0 ? held_.place_of(range.begin) : 0, range.count());
}

void Masters::write_held(std::int64_t begin, std::span<const float> values) {
  for (const ElementRange part : held_.within({begin, begin + static_cast<std::int64_t>(values.size())}))
    values_.runtime()->copy_from_host(values_.as<float>() + held_.place_of(part.begin), values.data() + (part.begin - begin),
                                      static_cast<std::size_t>(part.count()) * sizeof(float));
}

const Tensor& Masters::all_values() const {
  PRL_CHECK(holds_all(), "all masters of a rank that holds {} of {}", held_.count(), table_->num_master_elements());
  return values_;
}

const Tensor& Masters::find(const std::vector<Tensor>& blocks, Block block, std::int64_t layer, std::int64_t expert) const {
  static const Tensor kUndefined;
  const std::size_t i = table_->find(block, layer, expert);
  return i < blocks.size() ? blocks[i] : kUndefined;
}

NamedParameter& Masters::at(const std::string& name) {
  const auto it = std::find_if(named_.begin(), named_.end(), [&](const NamedParameter& p) { return p.name == name; });
  if (it == named_.end()) fail(ErrorCode::kNotFound, "the {} model has no parameter '{}'", config_.model_type, name);
  return *it;
}

void Masters::init_random(std::uint64_t seed, float std_dev) {
  struct Run {
    std::size_t tensor;
    std::int64_t first;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < named_.size(); ++i)
    for (std::int64_t first = 0; !is_lora(named_[i].block) && first < named_[i].num_elements(); first += kRandomRun)
      if (const std::int64_t begin = named_[i].offset + first; !held_.within({begin, begin + kRandomRun}).empty())
        runs.push_back({i, first});
  ThreadPool pool;
  pool.parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t r) {
    const Run run = runs[static_cast<std::size_t>(r)];
    const NamedParameter& parameter = named_[run.tensor];
    const std::int64_t count = std::min(kRandomRun, parameter.num_elements() - run.first);
    std::vector<float> values(static_cast<std::size_t>(count));
    Rng rng(mix_seed(seed, run.tensor), static_cast<std::uint64_t>(run.first / kRandomRun));
    if (parameter.is_matrix() || parameter.block == Block::kSharedExpertGate)
      draw_normals(rng, values, std_dev);
    else if (parameter.block == Block::kLinearConv)  // as torch draws a convolution's: uniform in 1 / sqrt(taps)
      for (float& value : values) value = static_cast<float>((2.0 * rng.next_double() - 1.0) / std::sqrt(parameter.num_taps));
    else if (parameter.block == Block::kDecayRate)  // the log of rates that are uniform in (0, 16], as transformers draws them
      for (float& value : values) value = static_cast<float>(std::log(16.0 * (1.0 - rng.next_double())));
    else
      std::fill(values.begin(), values.end(), is_zero_at_first(parameter, config_) ? 0.0f : 1.0f);
    write_held(parameter.offset + run.first, values);
  });
}

}  // namespace prl::nn
