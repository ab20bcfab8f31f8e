#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "config/loss_config.hpp"
#include "trainer/loss/loss_function.hpp"
#include "trainer/metric_pool.hpp"
#include "trainer/token_export.hpp"
#include "wire/training.hpp"

namespace prl::trainer {

/// The normalisers of one step: counts over all micro-batches of all ranks. A local count would weigh ranks with few tokens more.
struct LossCounts {
  std::int64_t rl_tokens = 0, ce_tokens = 0, ref_kl_tokens = 0;
  std::int64_t rl_sequences = 0;   ///< with at least one rl token
  std::int64_t micro_batches = 0;  ///< with at least one token in any component
  LossCounts& operator+=(const LossCounts& other) noexcept;
};
LossCounts count_losses(const wire::MicroBatch& batch) noexcept;

/// What each position must predict: the next token of its sequence where that token takes part in a loss or a metric, else -1
/// (the LM head then skips the position).
std::vector<std::int32_t> make_targets(const wire::MicroBatch& batch);

struct BatchLoss {
  double loss = 0;             ///< this row's share: added over all rows and ranks it is the loss of the step
  std::vector<float> dlogp_T;  ///< d loss / d logp at predicting positions, what TrainableModel::backward takes
};

struct LossHooks {
  std::function<void(const SequenceValues&)> on_sequence = {};  ///< hears what was found of each sequence's tokens; may be empty
  LossFunction custom = {};                                     ///< the loss of type custom; empty for other types
};

/// L_rl / N_rl + L_ce / N_ce + L_ref / N_ref for one row, N as in `counts` and at least 1 (spec 2.2).
///
/// logp_T, entropy_T  fp32 at predicting positions, [T]. Both are shifted by one inside each sequence, so that nothing is
///          ever predicted across a sequence border.
/// Metrics  per token mismatch_kl/{all,<env>} over the loss mask, entropy/{all,<env>} over the loss mask and the ce component,
///          and those of each component.
/// Errors   Error{kNonFinite} naming environment, token and values; Error{kInvalidArgument} as in the losses, and if a custom loss answers
///          for another number of sequences or tokens; what hooks.custom throws.
BatchLoss compute_batch_loss(const config::LossConfig& loss, const wire::MicroBatch& batch, std::span<const float> logp_T,
                             std::span<const float> entropy_T, const LossCounts& counts, MetricPool& metrics, const LossHooks& hooks = {});

}  // namespace prl::trainer
