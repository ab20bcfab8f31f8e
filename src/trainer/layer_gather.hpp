#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "nn/element_ranges.hpp"
#include "nn/layered_weights.hpp"
#include "trainer/member_group.hpp"
#include "trainer/policy.hpp"
#include "trainer/shard_plan.hpp"

namespace prl::trainer {

/// Layers' weights in the compute dtype, divided among the ranks of one copy of the state as their masters are, or would be; all ranks get
/// them from each other, layer by layer, by an all-to-all in a group of their own, beside what their other groups do. One thread.
class LayerGather final : public nn::LayerFetch {
 public:
  /// Every rank of `world` calls it; `members` are those of its copy, in the plan's order. Everything is borrowed. PeerLost. A loss that is
  /// noticed later ends `world` too.
  LayerGather(comm::Communicator& world, std::vector<int> members, const ShardPlan& plan, nn::LayeredWeights& weights);
  ~LayerGather() override;
  LayerGather(const LayerGather&) = delete;
  LayerGather& operator=(const LayerGather&) = delete;

  /// New weights, of the masters that this rank holds and the others do: what lies outside of layers is gathered, layers when they are
  /// wanted. Policy::refresh() comes next. PeerLost.
  void take_masters(Policy& policy);
  /// Of layers alone, for weights that all ranks had at first, or that are a base which nobody trains.
  void keep_masters(Policy& policy);
  /// Waits for what is under way and forgets it, after an error.
  void settle() noexcept;
  MemberGroup& group() noexcept { return group_; }

  /// PeerLost names ranks as the world counts them.
  void start(std::int64_t layer, const Tensor& to) override;
  void join() override;
  void gather_experts(std::int64_t layer, const Tensor& own, const Tensor& to) override;

 private:
  /// Where this rank's own values of `range`, elements of layers alone, are kept.
  Tensor own_values(ElementRange range) const;
  /// Of section `i` of what lies outside of layers.
  Tensor own_outside(std::size_t i) const;

  MemberGroup group_;
  const ShardPlan& plan_;
  nn::LayeredWeights& weights_;
  nn::ElementRanges own_;
  Tensor values_;  ///< of own_
  std::unique_ptr<comm::Started> under_way_;
};

}  // namespace prl::trainer
