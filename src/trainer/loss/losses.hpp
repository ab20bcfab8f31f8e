#pragma once

#include <span>

#include "config/loss_config.hpp"
#include "trainer/loss/token_streams.hpp"
#include "trainer/metric_pool.hpp"

namespace prl::trainer {

/// What the sum of a policy loss is divided by, over all rows and ranks of the step.
enum class LossDivisor { kTokens, kSequences, kMicroBatches };
LossDivisor divisor_of(const config::LossConfig& loss) noexcept;

/// Whether the sequence has tokens in the rl component.
bool has_rl(const TokenStreams& s) noexcept;

// Each function returns the SUM of a component's loss over one sequence and adds its derivative with respect to each
// logp[i] to dlogp[i]. A sequence without members gives 0 and touches nothing. Arithmetic in fp64. No division by global
// counts here. With lt, li, A, m, w as in TokenStreams; rho = lt - li, r = exp(rho), d = exp(lt) - exp(li).

/// The policy-gradient component under a named loss (prime-rl behaviour, spec 2.2 and 2.3):
///   default  w (-keep A r + kl rho^2), keep = not (A > 0 ? d > high : d < -low); A = 0 uses the low side; the rho term acts
///            on dropped tokens too
///   ipo      the same with keep = |d| <= threshold
///   grpo     w (-min(r, clip) A + kl rho^2); opo and rloo are the same on other advantages; aipo without the rho term
///   gspo     one ratio exp(min(mean rho, max_log_ratio)) per sequence, straight-through gradient to each token, clipped
///   cispo    -w stopgrad(clip(r)) A lt + w kl rho^2
///   masked   -stopgrad(ratio (A' - kl rho)) lt with token, sequence and geometric-mean masks
/// Not for custom, which is asked for whole rows (batch_loss.hpp).
double rl_loss(const config::LossConfig& loss, const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics);

/// Distillation towards reference log-probabilities: w (-keep g r + 1e-3 rho^2), g = stopgrad(lref - lt),
/// keep = not (A > 0 ? d > 0.2 : d < -0.2). Ignores the loss mask, and uses the sign of advantages alone (training_mode opd of
/// May 2026; the newest form has no advantages, which are then 0). Error{kInvalidArgument} without reference log-probabilities.
double ref_kl_loss(const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics);

/// Cross entropy -w lt. Ignores the loss mask.
double ce_loss(const TokenStreams& s, std::span<double> dlogp, MetricPool& metrics);

}  // namespace prl::trainer
