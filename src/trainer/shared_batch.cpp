#include "trainer/shared_batch.hpp"

#include <array>
#include <string>

#include "base/error.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

Supply share_batch(comm::Communicator& group, Supply supply, std::optional<rollouts::RankBatch>& batch) {
  if (group.size() == 1) return supply;
  const comm::Call call{.what = "samples of the next step"};
  std::string bytes;
  if (group.rank() == 0 && supply == Supply::kBatch) {
    PRL_CHECK(batch.has_value(), "a batch without rows");
    wire::TrainingBatch whole{.step = batch->step, .ranks = {}};
    whole.ranks.push_back(std::move(batch->micro_batches));
    bytes = wire::encode(whole);
    batch->micro_batches = std::move(whole.ranks.front());
  }
  std::array<std::int64_t, 2> head{static_cast<std::int64_t>(supply), static_cast<std::int64_t>(bytes.size())};
  group.broadcast(TensorView{head.data(), {2}, DType::kI64, {}, 2}, 0, call);
  supply = static_cast<Supply>(head[0]);
  if (supply != Supply::kBatch) return supply;
  bytes.resize(static_cast<std::size_t>(head[1]));
  group.broadcast(TensorView{bytes.data(), {head[1]}, DType::kU8, {}, head[1]}, 0, call);
  if (group.rank() == 0) return supply;
  wire::TrainingBatch whole = wire::decode_training_batch(bytes);
  if (whole.ranks.size() != 1) fail(ErrorCode::kCorrupt, "[trainer] samples for {} ranks came from rank 0, wanted 1", whole.ranks.size());
  batch = rollouts::RankBatch{.step = whole.step, .micro_batches = std::move(whole.ranks.front())};
  return supply;
}

}  // namespace prl::trainer
