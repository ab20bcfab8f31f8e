#include "nn/parameters.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "base/thread_pool.hpp"

namespace prl::nn {
namespace {

/// Random numbers are drawn in runs of this many elements, each from a stream of its own, so that tensors fill in parallel and
/// the values do not depend on the number of threads.
constexpr std::int64_t kRandomRun = 1 << 16;

}  // namespace

Parameters::Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table)
    : Parameters(std::move(runtime), config, table, {0, table->num_master_elements()}) {}

std::vector<GradSection> grad_sections(const TensorTable& table) {
  const std::vector<GradSection> whole{{GradSection::kRest, {0, table.num_master_elements()}}};
  // Ranges from one section to the next, in memory: vectors and what lies outside of layers, the layers, the head.
  std::vector<GradSection> sections{{GradSection::kRest, {0, 0}}};
  std::vector<const BlockSpec*> blocks;
  for (const BlockSpec& block : table.blocks())
    if (block.trainable && block.is_matrix()) blocks.push_back(&block);
  std::ranges::sort(blocks, {}, [](const BlockSpec* block) { return block->offset; });
  const auto section_of = [](const BlockSpec& block) {
    if (block.kind == Block::kLmHead) return GradSection::kHead;
    return block.layer < 0 ? GradSection::kRest : block.layer;
  };
  for (const BlockSpec* block : blocks) {
    if (is_lora(block->kind)) return whole;
    const std::int64_t layer = section_of(*block);
    if (layer == sections.back().layer) continue;
    if (std::ranges::count(sections, layer, &GradSection::layer) > 0) return whole;
    sections.back().range.end = block->offset;
    sections.push_back({layer, {block->offset, block->offset}});
  }
  sections.back().range.end = table.num_master_elements();
  // The memory of one layer serves all: their blocks must lie at the same places.
  std::vector<std::vector<std::int64_t>> layouts;
  for (const GradSection& section : sections) {
    if (section.layer < 0) continue;
    layouts.emplace_back();
    for (const BlockSpec* block : blocks)
      if (section.range.contains(block->range())) layouts.back().push_back(block->offset - section.range.begin);
    if (layouts.back() != layouts.front()) return whole;
  }
  if (layouts.empty()) return whole;
  // Backward: the head first, the rest last.
  std::ranges::sort(sections, {}, [](const GradSection& section) {
    constexpr std::int64_t kLast = std::int64_t{1} << 40;
    if (section.layer == GradSection::kHead) return -kLast;
    return section.layer == GradSection::kRest ? kLast : -section.layer;
  });
  return sections;
}

Parameters::Parameters(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, TensorTablePtr table, ElementRange held,
                       Allocate allocate)
    : config_(config), table_(std::move(table)), runtime_(std::move(runtime)), held_(held), allocate_(std::move(allocate)) {
  if (!allocate_) allocate_ = [runtime = runtime_](std::int64_t n) { return Tensor::zeros(runtime, {n}, DType::kF32); };
  sections_ = {{GradSection::kRest, {0, table_->num_master_elements()}}};
  for (const TensorSpec& spec : table_->tensors())
    if (spec.trainable) named_.push_back({spec, {}, {}});
  values_ = allocate_(held_.count());
  cut_values();
}

std::vector<Tensor> Parameters::cut(const Tensor& array, ElementRange range) const {
  std::vector<Tensor> parts;
  for (const BlockSpec& block : table_->blocks())
    parts.push_back(block.trainable && range.contains(block.range())
                        ? array.slice(block.offset - range.begin, block.shape.num_elements()).reshaped(block.shape)
                        : Tensor());
  return parts;
}

void Parameters::cut_values() {
  values_of_blocks_ = cut(values_, held_);
  for (NamedParameter& p : named_) p.value = held_.contains(p.range()) ? values_in(p.range()).reshaped(p.shape) : Tensor();
}

void Parameters::hold(ElementRange range) {
  if (range == held_) return;
  const Tensor values = allocate_(range.count());
  if (const ElementRange both = intersection(range, held_); both.count() > 0)
    values.runtime()->copy_within(values.as<float>() + (both.begin - range.begin), values_.as<float>() + (both.begin - held_.begin),
                                  static_cast<std::size_t>(both.count()) * sizeof(float));
  values_ = values;
  held_ = range;
  cut_values();
}

Tensor Parameters::values_in(ElementRange range) const {
  PRL_CHECK(held_.contains(range), "masters [{}, {}) of a rank that holds [{}, {})", range.begin, range.end, held_.begin, held_.end);
  return values_.slice(range.begin - held_.begin, range.count());
}

void Parameters::write_held(std::int64_t begin, std::span<const float> values) {
  const ElementRange part = intersection(held_, {begin, begin + static_cast<std::int64_t>(values.size())});
  if (part.count() > 0)
    values_.runtime()->copy_from_host(values_.as<float>() + (part.begin - held_.begin), values.data() + (part.begin - begin),
                                      static_cast<std::size_t>(part.count()) * sizeof(float));
}

const Tensor& Parameters::all_values() const {
  PRL_CHECK(holds_all(), "all masters of a rank that holds {} of {}", held_.count(), table_->num_master_elements());
  return values_;
}

const Tensor& Parameters::find(const std::vector<Tensor>& blocks, Block block, std::int64_t layer) const {
  static const Tensor kUndefined;
  const std::size_t i = table_->find(block, layer);
  return i < blocks.size() ? blocks[i] : kUndefined;
}

NamedParameter& Parameters::at(const std::string& name) {
  const auto it = std::find_if(named_.begin(), named_.end(), [&](const NamedParameter& p) { return p.name == name; });
  if (it == named_.end()) fail(ErrorCode::kNotFound, "the {} model has no parameter '{}'", config_.model_type, name);
  return *it;
}

const Tensor& Parameters::all_grads() const {
  PRL_CHECK(!divides_grads(), "all gradients where those of layers share their memory");
  static const Tensor kUndefined;
  return section_grads_.empty() ? kUndefined : section_grads_.front();
}

void Parameters::divide_grads(bool by_section) {
  if (by_section == divides_grads()) return;
  section_grads_.clear();
  grads_of_blocks_.clear();
  for (NamedParameter& p : named_) p.grad = {};
  sections_ = {{GradSection::kRest, {0, table_->num_master_elements()}}};
  if (by_section) sections_ = grad_sections(*table_);
  ensure_grads();
}

void Parameters::section_is_done(std::int64_t layer) const {
  if (!hook_ || !divides_grads()) return;
  const auto found = std::ranges::find(sections_, layer, &GradSection::layer);
  if (found != sections_.end()) hook_(static_cast<std::size_t>(found - sections_.begin()));
}

void Parameters::ensure_grads() {
  if (!section_grads_.empty()) return;
  std::int64_t longest = 0;
  for (const GradSection& section : sections_)
    if (section.layer >= 0) longest = std::max(longest, section.range.count());
  const Tensor of_layers = Tensor::zeros(runtime_, {longest}, DType::kF32);
  grads_of_blocks_.assign(table_->blocks().size(), Tensor());
  for (const GradSection& section : sections_) {
    const std::int64_t n = section.range.count();
    const Tensor memory = section.layer >= 0 ? of_layers.slice(0, n) : Tensor::zeros(runtime_, {n}, DType::kF32);
    section_grads_.push_back(memory);
    const std::vector<Tensor> of_section = cut(memory, section.range);
    for (std::size_t i = 0; i < of_section.size(); ++i)
      if (of_section[i].defined()) grads_of_blocks_[i] = of_section[i];
    for (NamedParameter& p : named_)
      if (section.range.contains(p.range())) p.grad = memory.slice(p.offset - section.range.begin, p.num_elements()).reshaped(p.shape);
  }
}

void Parameters::zero_grads() {
  ensure_grads();
  for (const Tensor& grads : section_grads_) runtime_->zero(grads.data(), grads.num_bytes());
  grads_are_fresh_ = false;
}

void Parameters::start_grads() {
  ensure_grads();
  // Backward passes only ever add to vectors, and to the embedding unless it is the head too.
  // They lie at the beginning of the section that comes last.
  runtime_->zero(section_grads_.back().data(), static_cast<std::size_t>(table_->num_vector_elements()) * sizeof(float));
  if (const Tensor& d_embedding = grad(Block::kEmbedding); d_embedding.defined() && !table_->has_tied_head())
    runtime_->zero(d_embedding.data(), d_embedding.num_bytes());
  grads_are_fresh_ = true;
}

void Parameters::settle_grads() {
  if (grads_are_fresh_) zero_grads();
}

void Parameters::init_random(std::uint64_t seed, float std_dev) {
  struct Run {
    std::size_t tensor;
    std::int64_t first;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < named_.size(); ++i)
    for (std::int64_t first = 0; !is_lora(named_[i].block) && first < named_[i].num_elements(); first += kRandomRun)
      if (const std::int64_t begin = named_[i].offset + first; intersection(held_, {begin, begin + kRandomRun}).count() > 0)
        runs.push_back({i, first});
  ThreadPool pool;
  pool.parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t r) {
    const Run run = runs[static_cast<std::size_t>(r)];
    const NamedParameter& parameter = named_[run.tensor];
    const std::int64_t count = std::min(kRandomRun, parameter.num_elements() - run.first);
    std::vector<float> values(static_cast<std::size_t>(count));
    if (parameter.is_matrix()) {
      Rng rng(mix_seed(seed, run.tensor), static_cast<std::uint64_t>(run.first / kRandomRun));
      for (float& value : values) value = static_cast<float>(rng.next_normal()) * std_dev;
    } else {
      std::fill(values.begin(), values.end(), is_bias(parameter.block) ? 0.0f : 1.0f);
    }
    write_held(parameter.offset + run.first, values);
  });
}

}  // namespace prl::nn
