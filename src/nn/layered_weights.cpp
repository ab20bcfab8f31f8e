#include "nn/layered_weights.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "nn/exact_parts.hpp"
#include "nn/weight_blocks.hpp"

namespace prl::nn {
namespace {

bool is_layer(const GradSection& section) { return section.layer >= 0; }

/// share_linear() for one who alone holds the result.
std::shared_ptr<ops::LinearWeight> make_refillable(ops::OpContext& ctx, const Tensor& w, ConstTensorView bias,
                                                   ops::WeightUse use = ops::WeightUse::kMatrix) {
  return std::const_pointer_cast<ops::LinearWeight>(ops::share_linear(ctx, w, bias, true, use));
}

/// The matrices of a section, which is a layer or a part of it, in the order of the table.
std::vector<const BlockSpec*> matrices_of(const TensorTable& table, const GradSection& section) {
  std::vector<const BlockSpec*> matrices;
  for (const BlockSpec& spec : table.blocks())
    if (spec.is_matrix() && section.range.contains(spec.range())) matrices.push_back(&spec);
  return matrices;
}

/// Whether the matrices of two sections lie alike in them.
bool are_alike(const TensorTable& table, const GradSection& a, const GradSection& b) {
  return std::ranges::equal(matrices_of(table, a), matrices_of(table, b), [&](const BlockSpec* x, const BlockSpec* y) {
    return x->kind == y->kind && x->expert == y->expert && x->shape == y->shape && x->offset - a.range.begin == y->offset - b.range.begin;
  });
}

}  // namespace

bool LayeredWeights::can_hold(const TensorTable& table) { return std::ranges::any_of(grad_sections(table), is_layer); }

LayeredWeights::LayeredWeights(ops::OpContext& ctx, const ModelConfig& config, DType compute, std::optional<ExpertShare> share)
    : ctx_(ctx) {
  const TensorTablePtr table = make_tensor_table(config);
  if (!can_hold(*table))
    fail(ErrorCode::kNotImplemented,
         "model.reshard_after_forward: the matrices of a layer of this {} model do not lie together; they are not gathered one by one",
         config.model_type);
  for (const GradSection& section : grad_sections(*table, false, share.has_value()))
    (is_layer(section) ? layers_ : outside_).push_back(section);
  std::ranges::sort(layers_, {}, &GradSection::layer);
  weights_ = std::make_shared<Weights>();
  weights_->config = config;
  weights_->table = table;
  weights_->compute = compute;
  weights_->blocks.resize(table->blocks().size());
  set_rope_tables(*weights_, ctx.runtime, nullptr);
  // Weights that outlive this object would call what is gone: they are the policy's alone.
  weights_->layers = this;
  shared_ = weights_;
  for (const GradSection& section : outside_) outside_values_.push_back(Tensor::zeros(ctx.runtime, {section.range.count()}, compute));
  vectors_ = Tensor::zeros(ctx.runtime, {table->num_vector_elements()}, DType::kF32);
  make_outside();
  make_places();
  if (!share) return;
  weights_->experts = *share;
  make_experts(*table);
}

void LayeredWeights::make_experts(const TensorTable& table) {
  const std::int64_t num = weights_->config.num_experts;
  for (ExpertSection& section : expert_sections(table)) {
    const ElementRange own = section.part(weights_->experts.first(num), weights_->experts.count(num));
    const Tensor values = Tensor::zeros(ctx_.runtime, {own.count()}, weights_->compute);
    std::vector<Matrix>& matrices = experts_.emplace_back();
    for (const BlockSpec* spec : matrices_of(table, {.layer = section.layer, .range = own})) {
      const Tensor of_matrix = values.slice(spec->offset - own.begin, spec->shape.num_elements()).reshaped(spec->shape);
      matrices.push_back({spec->kind, spec->expert, make_refillable(ctx_, of_matrix, {}, use_of(*spec))});
      weights_->blocks[table.find(spec->kind, spec->layer, spec->expert)].packed = matrices.back().weight;
    }
    own_experts_.push_back({std::move(section), own, values});
  }
}

void LayeredWeights::pack_experts() {
  for (std::size_t i = 0; i < own_experts_.size(); ++i) {
    const OwnExperts& of = own_experts_[i];
    for (const Matrix& matrix : experts_[i]) {
      const BlockSpec& spec = weights_->table->blocks()[weights_->table->find(matrix.kind, of.section.layer, matrix.expert)];
      matrix.weight->refill(ctx_, of.values.slice(spec.offset - of.own.begin, spec.shape.num_elements()).reshaped(spec.shape), {});
    }
  }
}

Tensor LayeredWeights::values_of(const BlockSpec& block) const {
  for (std::size_t i = 0; i < outside_.size(); ++i)
    if (outside_[i].range.contains(block.range()))
      return outside_values_[i].slice(block.offset - outside_[i].range.begin, block.shape.num_elements()).reshaped(block.shape);
  fail(ErrorCode::kInternal, "a block of a layer is not outside of layers");
}

ConstTensorView LayeredWeights::bias(Block matrix, std::int64_t layer) const {
  const std::optional<Block> block = bias_of(matrix);
  if (!block) return {};
  const Tensor& found = weights_->vector(*block, layer);
  return found.defined() ? ConstTensorView(found.view()) : ConstTensorView{};
}

void LayeredWeights::make_outside() {
  const TensorTable& table = *weights_->table;
  for (std::size_t i = 0; i < table.blocks().size(); ++i) {
    const BlockSpec& spec = table.blocks()[i];
    Weights::PackedBlock& to = weights_->blocks[i];
    if (!spec.is_matrix())
      set_vector(ctx_, *weights_, i, vectors_.slice(spec.offset, spec.shape.num_elements()).reshaped(spec.shape));
    else if (spec.kind == Block::kEmbedding)
      to.plain = values_of(spec);
  }
  const std::size_t head = table.find(Block::kLmHead);
  PRL_CHECK(head != TensorTable::kNone, "a model without a head");
  head_ = make_refillable(ctx_, values_of(table.blocks()[head]), {});
  weights_->blocks[head].packed = head_;
}

void LayeredWeights::make_places() {
  const TensorTable& table = *weights_->table;
  std::int64_t longest = 0;
  for (const GradSection& section : layers_) longest = std::max(longest, section.range.count());
  places_.resize(static_cast<std::size_t>(std::min(kNumPlaces, num_layers())));
  for (Place& place : places_) place.values = Tensor::zeros(ctx_.runtime, {longest}, weights_->compute);
  for (std::int64_t layer = 0; layer < num_layers(); ++layer) {
    const GradSection& section = layer_section(layer);
    std::vector<Kind>& kinds = place_of(layer).kinds;
    auto kind =
        std::ranges::find_if(kinds, [&](const Kind& known) { return are_alike(table, section, layer_section(known.layers.front())); });
    if (kind == kinds.end()) {
      kind = kinds.insert(kinds.end(), Kind{});
      for (const BlockSpec* spec : matrices_of(table, section)) {
        const Tensor values =
            values_in_place(layer).slice(spec->offset - section.range.begin, spec->shape.num_elements()).reshaped(spec->shape);
        kind->matrices.push_back({spec->kind, spec->expert, make_refillable(ctx_, values, bias(spec->kind, layer), use_of(*spec))});
      }
    }
    kind->layers.push_back(layer);
    for (const Matrix& matrix : kind->matrices) weights_->blocks[table.find(matrix.kind, layer, matrix.expert)].packed = matrix.weight;
  }
}

Tensor LayeredWeights::values_in_place(std::int64_t layer) { return place_of(layer).values.slice(0, layer_section(layer).range.count()); }

const LayeredWeights::Kind& LayeredWeights::kind_of(std::int64_t layer) {
  for (const Kind& kind : place_of(layer).kinds)
    if (std::ranges::binary_search(kind.layers, layer)) return kind;
  fail(ErrorCode::kInternal, "layer {} has no place", layer);
}

void LayeredWeights::fetch_from(LayerFetch* fetch) {
  fetch_ = fetch;
  forget();
}

void LayeredWeights::forget() noexcept {
  under_way_ = -1;
  for (Place& place : places_) place.layer = -1;
}

void LayeredWeights::renew(PolicyVersion version) {
  PRL_CHECK(under_way_ < 0, "layer {} is on its way", under_way_);
  forget();
  weights_->version = version;
  for (std::size_t i = 0; i < outside_.size(); ++i)
    if (outside_[i].range.begin == 0 && vectors_.num_elements() > 0)
      ops::cast(ctx_, vectors_, outside_values_[i].slice(0, vectors_.num_elements()));
  const TensorTable& table = *weights_->table;
  for (std::size_t i = 0; i < table.blocks().size(); ++i)
    if (Weights::PackedBlock& block = weights_->blocks[i]; block.plus_one.defined()) set_vector(ctx_, *weights_, i, block.plain);
  head_->refill(ctx_, values_of(table.blocks()[table.find(Block::kLmHead)]), {});
  pack_experts();
}

void LayeredWeights::enter(std::int64_t layer, std::int64_t next) {
  if (fetch_ == nullptr) return;
  Place& place = place_of(layer);
  if (place.layer != layer) {
    if (under_way_ >= 0 && under_way_ != layer) {  // a pass that took another turn
      fetch_->join();
      under_way_ = -1;
    }
    if (under_way_ < 0) fetch_->start(layer, values_in_place(layer));
    under_way_ = -1;
    fetch_->join();
    for (const Matrix& matrix : kind_of(layer).matrices) {
      const BlockSpec& spec = weights_->table->blocks()[weights_->table->find(matrix.kind, layer, matrix.expert)];
      const std::int64_t at = spec.offset - layer_section(layer).range.begin;
      matrix.weight->refill(ctx_, place.values.slice(at, spec.shape.num_elements()).reshaped(spec.shape), bias(matrix.kind, layer));
    }
    place.layer = layer;
  }
  if (next < 0 || under_way_ == next) return;
  Place& other = place_of(next);
  if (other.layer == next || &other == &place) return;
  other.layer = -1;
  fetch_->start(next, values_in_place(next));
  under_way_ = next;
}

void LayeredWeights::for_each_section(const std::function<void(const GradSection&, const Tensor&)>& take) {
  for (std::size_t i = 0; i < outside_.size(); ++i) take(outside_[i], outside_values_[i]);
  for (std::int64_t layer = 0; layer < num_layers(); ++layer) {
    enter(layer, layer + 1 < num_layers() ? layer + 1 : -1);
    take(layer_section(layer), values_in_place(layer));
  }
  Tensor all;
  for (const OwnExperts& of : own_experts_) {
    PRL_CHECK(fetch_ != nullptr, "experts that nobody gathers");
    const ElementRange range = of.section.range();
    if (!all.defined() || all.num_elements() != range.count()) all = Tensor::empty(ctx_.runtime, {range.count()}, weights_->compute);
    fetch_->gather_experts(of.section.layer, of.values, all);
    take({.layer = of.section.layer, .range = range}, all);
  }
}

std::function<void(std::int64_t, std::span<float>)> flat_reader(const Tensor& values, std::int64_t begin) {
  return [values, begin](std::int64_t first, std::span<float> out) {
    const auto at = static_cast<std::size_t>(begin + first);
    if (values.dtype() == DType::kF32)
      std::copy_n(values.as<float>() + at, out.size(), out.begin());
    else
      std::transform(values.as<BFloat16>() + at, values.as<BFloat16>() + at + out.size(), out.begin(),
                     [](BFloat16 v) { return to_f32(v); });
  };
}

std::vector<WeightSource> copied_sources(LayeredWeights& layered, const std::vector<bool>& is_wanted) {
  const TensorTable& table = *layered.weights()->table;
  std::vector<WeightSource> sources = flat_sources(table, {});
  layered.for_each_section([&](const GradSection& section, const Tensor& values) {
    Tensor copy;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const TensorSpec& spec = table.tensors()[i];
      if ((!is_wanted.empty() && !is_wanted[i]) || !section.range.contains(spec.range())) continue;
      if (!copy.defined()) {
        copy = Tensor::empty(make_cpu_runtime(), values.shape(), values.dtype());
        values.runtime()->copy_to_host(copy.data(), values.data(), values.num_bytes());
      }
      sources[i] = stored_source(spec, flat_reader(copy, spec.offset - section.range.begin));
    }
  });
  return sources;
}

std::vector<WeightSource> flat_sources(const TensorTable& table, const Tensor& values) {
  std::vector<WeightSource> sources;
  for (const TensorSpec& spec : table.tensors())
    sources.push_back(stored_source(spec, values.defined() ? flat_reader(values, spec.offset) : nullptr));
  return sources;
}

}  // namespace prl::nn
