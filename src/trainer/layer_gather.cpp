#include "trainer/layer_gather.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::trainer {

namespace {

nn::ElementRanges own_of_layers(const ShardPlan& plan, int rank, const nn::LayeredWeights& weights) {
  std::vector<ElementRange> parts;
  for (std::int64_t layer = 0; layer < weights.num_layers(); ++layer) parts.push_back(plan.part(rank, weights.layer_section(layer).range));
  std::ranges::sort(parts, {}, &ElementRange::begin);
  return nn::ElementRanges(parts);
}

}  // namespace

LayerGather::LayerGather(comm::Communicator& world, std::vector<int> members, const ShardPlan& plan, nn::LayeredWeights& weights)
    : group_(world, std::move(members), "layers", "share layers"),
      plan_(plan),
      weights_(weights),
      own_(own_of_layers(plan, group_->rank(), weights)),
      values_(Tensor::zeros(weights.outside_values(0).runtime(), {own_.count()}, weights.weights()->compute)) {
  weights_.fetch_from(this);
}

LayerGather::~LayerGather() {
  settle();
  weights_.fetch_from(nullptr);
}

void LayerGather::settle() noexcept {
  under_way_.reset();
  weights_.forget();
}

Tensor LayerGather::own_values(ElementRange range) const {
  PRL_CHECK(own_.contains(range), "elements [{}, {}) of layers that another rank owns", range.begin, range.end);
  return values_.slice(range.count() > 0 ? own_.place_of(range.begin) : 0, range.count());
}

void LayerGather::start(std::int64_t layer, const Tensor& to) {
  PRL_CHECK(under_way_ == nullptr, "two layers at a time");
  const ElementRange range = weights_.layer_section(layer).range;
  const TensorView own = own_values(plan_.part(group_->rank(), range)).view();
  std::vector<TensorView> outs;
  for (int r = 0; r < group_->size(); ++r) {
    const ElementRange part = plan_.part(r, range);
    outs.push_back(to.slice(part.count() > 0 ? part.begin - range.begin : 0, part.count()).view());
  }
  const std::vector<ConstTensorView> ins(outs.size(), own);
  const std::string what = fmt::format("weights of layer {}", layer);
  group_.among([&] { under_way_ = group_->start_all_to_all(outs, ins, {.what = what}); });
}

void LayerGather::join() {
  PRL_CHECK(under_way_ != nullptr, "no layer is under way");
  const std::unique_ptr<comm::Started> started = std::exchange(under_way_, nullptr);
  group_.among([&] { started->join(); });
}

Tensor LayerGather::own_outside(std::size_t i) const {
  const ElementRange range = weights_.outside()[i].range, own = plan_.part(group_->rank(), range);
  return weights_.outside_values(i).slice(own.count() > 0 ? own.begin - range.begin : 0, own.count());
}

void LayerGather::keep_masters(Policy& policy) {
  for (std::int64_t layer = 0; layer < weights_.num_layers(); ++layer) {
    const ElementRange own = plan_.part(group_->rank(), weights_.layer_section(layer).range);
    policy.write_layer(own, own_values(own));
  }
  for (const nn::LayeredWeights::OwnExperts& of : weights_.own_experts()) policy.round(of.own, of.values);
}

void LayerGather::gather_experts(std::int64_t layer, const Tensor& own, const Tensor& to) {
  PRL_CHECK(under_way_ == nullptr, "experts while a layer is under way");
  const auto of = std::ranges::find(weights_.own_experts(), layer, [](const auto& experts) { return experts.section.layer; });
  PRL_CHECK(of != weights_.own_experts().end(), "layer {} has no experts", layer);
  std::vector<std::int64_t> counts;
  for (int r = 0; r < group_->size(); ++r) counts.push_back(plan_.part(r, of->section.range()).count());
  group_.among([&] { group_->all_gather(to.view(), counts, own.view(), {.what = fmt::format("experts of layer {}", layer)}); });
}

void LayerGather::take_masters(Policy& policy) {
  keep_masters(policy);
  for (std::size_t i = 0; i < weights_.outside().size(); ++i) {
    const ElementRange range = weights_.outside()[i].range;
    policy.round(plan_.part(group_->rank(), range), own_outside(i));
    std::vector<std::int64_t> counts;
    for (int r = 0; r < group_->size(); ++r) counts.push_back(plan_.part(r, range).count());
    const TensorView all = weights_.outside_values(i).view(), own = own_outside(i).view();
    group_.among([&] { group_->all_gather(all, counts, own, {.what = "new weights outside of layers"}); });
  }
  // Where they were only queued a rank may be lost until now.
  group_.among([&] { group_->settle({.what = "new weights outside of layers"}); });
}

}  // namespace prl::trainer
