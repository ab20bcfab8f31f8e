#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.hpp"
#include "nn/decoder.hpp"

namespace prl::trainer {

/// Neighbouring ranks of the world that share rows: ranks [n * size, (n + 1) * size) for each n. Each holds a part of the tokens of a row,
/// and some of the heads of its attention. One thread.
class ContextGroup final : public nn::HeadExchange {
 public:
  /// Every rank of `world`, which must outlive this, calls it alike; `size` divides its size. PeerLost.
  ContextGroup(comm::Communicator& world, int size);

  int rank() const noexcept override { return group_->rank(); }
  int size() const noexcept override { return group_->size(); }
  /// PeerLost names ranks as the world counts them.
  void all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins) override;
  /// Everyone's values, as many of each, in the order of ranks.
  std::vector<float> gather(std::span<const float> mine);
  void abort(std::string_view reason) noexcept { group_->abort(reason); }
  /// Communicator::give_up_on; ranks as the world counts them.
  void give_up_on(const comm::PeerLost& lost) noexcept;

 private:
  template <typename Work>
  void work(const Work& what);

  int first_;  ///< of the group, in the world
  std::unique_ptr<comm::Communicator> group_;
};

/// How rows are cut: in `num_leaves` parts of equal length, whose gradients are added as a balanced tree, and of which each of
/// `num_ranks` holds as many. Both are powers of two. With one leaf a row is what it is.
struct RowCut {
  int num_leaves = 1, num_ranks = 1;
  int leaves_of_rank() const noexcept { return num_leaves / num_ranks; }
  /// Tokens after the row is filled up to a multiple of leaves.
  std::int64_t padded(std::int64_t num_tokens) const noexcept { return (num_tokens + num_leaves - 1) / num_leaves * num_leaves; }
};
/// Error{kInvalidArgument} naming model.cp or model.leaves_per_row if `ranks` that share a row do not divide its heads or leaves.
void check_row_cut(const nn::ModelConfig& model, const RowCut& cut);
/// Of the numbers of ranks that can share a row as `cut` says, the largest that divides `num_ranks`, all there are.
int fitting_context(const RowCut& cut, int num_ranks) noexcept;

}  // namespace prl::trainer
