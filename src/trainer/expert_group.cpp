#include "trainer/expert_group.hpp"

#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "ops/experts.hpp"

namespace prl::trainer {

namespace {

std::vector<int> all_ranks(const comm::Communicator& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

class StartedTrip final : public nn::ExpertRanks::Trip {
 public:
  StartedTrip(MemberGroup& group, std::unique_ptr<comm::Started> started) : group_(group), started_(std::move(started)) {}
  void join() override {
    group_.among([&] { started_->join(); });
  }

 private:
  MemberGroup& group_;
  std::unique_ptr<comm::Started> started_;
};

}  // namespace

ExpertGroup::ExpertGroup(comm::Communicator& world, nn::LayeredWeights& weights)
    : group_(world, all_ranks(world), "experts", "divide experts"), weights_(weights) {
  weights_.meet_experts(this);
}

ExpertGroup::~ExpertGroup() { weights_.meet_experts(nullptr); }

void ExpertGroup::all_gather(TensorView out_RN, ConstTensorView mine_N) {
  group_.among([&] { group_->all_gather(out_RN, mine_N, {.what = "how many tokens experts have"}); });
}

std::unique_ptr<ExpertGroup::Trip> ExpertGroup::start_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins) {
  std::unique_ptr<comm::Started> started;
  group_.among([&] { started = group_->start_all_to_all(outs, ins, {.what = "tokens and their experts"}); });
  return std::make_unique<StartedTrip>(group_, std::move(started));
}

std::vector<std::string> ExpertGroup::gather_bytes(std::string_view mine) {
  std::vector<std::string> all;
  group_.among([&] { all = group_->gather_bytes(mine, {.what = "checksums of experts"}); });
  return all;
}

void check_experts_divide(const nn::ModelConfig& model, int num_ranks) {
  if (model.num_experts == 0)
    fail(ErrorCode::kInvalidArgument, "model.ep: a {} model has no experts; leave it out, or use 1", model.model_type);
  if (model.clamped_swiglu)
    fail(ErrorCode::kNotImplemented, "model.ep: experts with biases, as this {} model has, are not divided among ranks; use 1",
         model.model_type);
  if (model.has_squared_relu_mlps)
    fail(ErrorCode::kNotImplemented, "model.ep: experts without gates, as this {} model has, are not divided among ranks; use 1",
         model.model_type);
  if (model.num_experts < num_ranks)
    fail(ErrorCode::kInvalidArgument, "model.ep: {} ranks cannot divide {} experts; use fewer trainer ranks, or 1", num_ranks,
         model.num_experts);
  if (num_ranks * (model.num_experts / num_ranks + 1) > ops::kMaxExperts)
    fail(ErrorCode::kNotImplemented, "model.ep: {} experts of {} ranks are more groups than the {} that kernels take", model.num_experts,
         num_ranks, ops::kMaxExperts);
}

}  // namespace prl::trainer
