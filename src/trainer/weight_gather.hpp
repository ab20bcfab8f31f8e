#pragma once

#include <memory>
#include <vector>

#include "nn/late_weights.hpp"
#include "trainer/member_group.hpp"
#include "trainer/shard_plan.hpp"

namespace prl::trainer {

/// New weights, of which each rank of a copy of the state has a part: gathered whole, section by section in the order of a forward pass,
/// beside what the ranks do meanwhile, in a group of their own. One thread.
class WeightGather {
 public:
  /// Every rank of `world` calls it; `members` are those of its copy, in the plan's order. Everything is borrowed. PeerLost. A loss that is
  /// noticed later ends `world` too.
  WeightGather(comm::Communicator& world, std::vector<int> members, const ShardPlan& plan);
  WeightGather(const WeightGather&) = delete;
  WeightGather& operator=(const WeightGather&) = delete;

  /// `rounded` [num_master_elements] has this rank's own values; those of the others come into it. What was started before must have
  /// arrived. Waiting for what is returned throws PeerLost, with ranks as the world counts them, also once this is gone, which waits for
  /// what is still under way.
  nn::LateValues start(const Tensor& rounded);
  MemberGroup& group() noexcept { return group_; }

 private:
  MemberGroup group_;
  const ShardPlan& plan_;
  std::shared_ptr<std::vector<std::unique_ptr<comm::Started>>> under_way_;  ///< a section each, until it was joined
};

}  // namespace prl::trainer
