#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.hpp"
#include "nn/layered_weights.hpp"
#include "trainer/member_group.hpp"

namespace prl::trainer {

/// All ranks of the world, which divide the experts of each layer, in a group of their own beside what their other groups do. One thread.
class ExpertGroup final : public nn::ExpertRanks {
 public:
  /// Every rank of `world`, which must outlive this, calls it. `weights`, borrowed, meet the other ranks by it. PeerLost; a loss that is
  /// noticed later ends `world` too.
  ExpertGroup(comm::Communicator& world, nn::LayeredWeights& weights);
  ~ExpertGroup() override;
  ExpertGroup(const ExpertGroup&) = delete;
  ExpertGroup& operator=(const ExpertGroup&) = delete;

  int rank() const noexcept override { return group_->rank(); }
  int size() const noexcept override { return group_->size(); }
  void all_gather(TensorView out_RN, ConstTensorView mine_N) override;
  std::unique_ptr<Trip> start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins) override;
  std::vector<std::string> gather_bytes(std::string_view mine) override;
  Leaves leaves() const override { return leaves_; }

  /// Of the rows that are trained on from now on.
  void count(Leaves leaves) noexcept { leaves_ = leaves; }
  MemberGroup& group() noexcept { return group_; }

 private:
  MemberGroup group_;
  nn::LayeredWeights& weights_;
  Leaves leaves_;
};

/// Error{kInvalidArgument}, {kNotImplemented} naming model.ep if `num_ranks` cannot divide the experts of `model`.
void check_experts_divide(const nn::ModelConfig& model, int num_ranks);

}  // namespace prl::trainer
