#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "autograd/experts.hpp"
#include "nn/weights.hpp"

namespace prl::nn {

/// Ranks that divide the experts of each layer.
using ExpertRanks = autograd::ExpertRanks;

/// Gives the matrices of one layer, of which others hold parts.
class LayerFetch {
 public:
  virtual ~LayerFetch() = default;
  /// All values of `layer` go to `to` [count], in the order of the masters, beside what the caller does until join(). What is queued so
  /// far still finds there what was there.
  virtual void start(std::int64_t layer, const Tensor& to) = 0;
  /// Work that is queued from now on finds them there. One is under way at a time. Errors of who fetches.
  virtual void join() = 0;
  /// All values of the experts of `layer` go to `to` [count], of which each rank has its own, `own`. Queued, or done.
  virtual void gather_experts(std::int64_t layer, const Tensor& own, const Tensor& to) = 0;
};

/// Weights of which two layers' matrices are there at a time; vectors, embedding and head always. The places hold layers of even and of
/// odd numbers, so that one comes while its neighbour is computed with. Where ranks divide the experts, those of this rank are there
/// always, and a layer's matrices are its others.
///
/// Memory    what lies outside of layers and this rank's experts once, and two of the largest layers; on CPUs, whose weights are packed,
///           each of these twice, and the second time once for each kind of layer.
/// Ranks     who share layers make the same calls in the same order, of passes too.
/// One thread.
class LayeredWeights final : public LayerSource {
 public:
  /// All zero. `share`: of the experts; nullopt: they are matrices of their layers like the others. Error{kNotImplemented} if the matrices
  /// of a layer of `config` do not lie together.
  LayeredWeights(ops::OpContext& ctx, const ModelConfig& config, DType compute, std::optional<ExpertShare> share = {});
  LayeredWeights(const LayeredWeights&) = delete;
  LayeredWeights& operator=(const LayeredWeights&) = delete;
  static bool can_hold(const TensorTable& table);

  /// The same object for all versions.
  const WeightsPtr& weights() const noexcept { return shared_; }
  /// Sections of the array of masters: of the layers, and those that are always here.
  const GradSection& layer_section(std::int64_t layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  std::span<const GradSection> outside() const noexcept { return outside_; }
  /// [count] in the compute dtype: where values of outside()[i] are written before renew().
  const Tensor& outside_values(std::size_t i) const { return outside_values_[i]; }

  /// This rank's experts of each layer that has some, [count] in the compute dtype each: written before renew(). Empty where experts are
  /// not divided.
  struct OwnExperts {
    ExpertSection section;
    ElementRange own;
    Tensor values;
  };
  std::span<const OwnExperts> own_experts() const noexcept { return own_experts_; }
  /// Packs them, as renew() does.
  void pack_experts();
  /// How this rank meets those that have the other experts, from now on; borrowed. nullptr: nobody is there.
  void meet_experts(ExpertRanks* ranks) noexcept { weights_->expert_ranks = ranks; }

  /// Whom to ask for layers from now on; borrowed. nullptr: nobody, the matrices are what they are.
  void fetch_from(LayerFetch* fetch);
  /// What lies outside of layers was written, and layers are other ones: the weights are `version` from now on.
  void renew(PolicyVersion version);
  /// After an error: layers that were here or under way are not.
  void forget() noexcept;

  void enter(std::int64_t layer, std::int64_t next) override;
  std::int64_t num_layers() const noexcept { return static_cast<std::int64_t>(layers_.size()); }

  /// Calls `take` with each section and its values, one after the other; they stay until the next call.
  void for_each_section(const std::function<void(const GradSection&, const Tensor&)>& take);

 private:
  struct Matrix {
    Block kind;
    std::int64_t expert;
    std::shared_ptr<ops::LinearWeight> weight;
  };
  /// The layers that come to a place and whose matrices lie alike in it.
  struct Kind {
    std::vector<std::int64_t> layers;
    std::vector<Matrix> matrices;  ///< made of the place's values
  };
  struct Place {
    Tensor values;  ///< of a layer, and room for the longest
    std::vector<Kind> kinds;
    std::int64_t layer = -1;  ///< that is there
  };
  static constexpr std::int64_t kNumPlaces = 2;
  Place& place_of(std::int64_t layer) { return places_[static_cast<std::size_t>(layer % kNumPlaces)]; }
  /// Of the layer, which is there or is to come.
  Tensor values_in_place(std::int64_t layer);
  const Kind& kind_of(std::int64_t layer);
  Tensor values_of(const BlockSpec& block) const;
  ConstTensorView bias(Block matrix, std::int64_t layer) const;
  void make_places();
  void make_outside();
  void make_experts(const TensorTable& table);

  ops::OpContext& ctx_;
  std::vector<GradSection> layers_, outside_;
  std::shared_ptr<Weights> weights_;
  WeightsPtr shared_;
  std::vector<Tensor> outside_values_;
  Tensor vectors_;  ///< fp32
  std::shared_ptr<ops::LinearWeight> head_;
  std::vector<Place> places_;
  std::vector<OwnExperts> own_experts_;
  std::vector<std::vector<Matrix>> experts_;  ///< of own_experts_
  LayerFetch* fetch_ = nullptr;
  std::int64_t under_way_ = -1;  ///< the layer that is being fetched
};

/// What a WeightSource reads of a tensor that begins at element `begin` of `values`, which lie in host memory.
std::function<void(std::int64_t first, std::span<float> out)> flat_reader(const Tensor& values, std::int64_t begin);
/// The tensors of a model of which `values` [num_master_elements] are all values in the order of the masters, in host memory. Undefined:
/// tensors that nothing reads yet.
std::vector<WeightSource> flat_sources(const TensorTable& table, const Tensor& values);
/// The same of layers that are brought, from copies in host memory of the tensors that `is_wanted` names; empty: of all. Who shares layers
/// calls it as for_each_section().
std::vector<WeightSource> copied_sources(LayeredWeights& layered, const std::vector<bool>& is_wanted = {});

}  // namespace prl::nn
