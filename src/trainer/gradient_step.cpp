#include "trainer/gradient_step.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <set>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/units.hpp"

namespace prl::trainer {

namespace {

std::set<std::string> environments(std::span<const wire::MicroBatch> rows) {
  std::set<std::string> names;
  for (const wire::MicroBatch& row : rows) names.insert(row.env_names.begin(), row.env_names.end());
  return names;
}

}  // namespace

GradientStep::GradientStep(Policy& policy, GradientStepOptions options)
    : policy_(policy),
      options_(std::move(options)),
      optimizer_(policy.context(), policy.parameters(), options_.optim, options_.optimizer_memory),
      schedule_(options_.scheduler, base_lr(options_.optim), options_.max_steps),
      watch_(policy.context().runtime->make_stopwatch()) {}

void GradientStep::restart_schedule(std::int64_t num_done) {
  std::optional<std::int64_t> remaining;
  if (options_.max_steps) remaining = std::max<std::int64_t>(*options_.max_steps - num_done, 1);
  schedule_ = LrSchedule(options_.scheduler, base_lr(options_.optim), remaining);
  num_scheduled_ = 0;
}

GradientStepResult GradientStep::run(std::span<const wire::MicroBatch> rows, PolicyVersion version) {
  GradientStepResult result;
  LossCounts counts;
  for (const wire::MicroBatch& row : rows) counts += count_losses(row);
  policy_.parameters().start_grads();

  // The device is not waited for between the two parts: it forms the gradient's norm right behind them.
  const std::uint64_t started = watch_->mark();
  std::int64_t row_idx = 0;
  for (const wire::MicroBatch& row : rows) {
    result.num_tokens += static_cast<std::int64_t>(row.input_ids.size());
    // A row that takes part in no loss only exists to keep ranks in step.
    if (const LossCounts own = count_losses(row); own.micro_batches == 0) continue;
    const nn::TokenStats stats = policy_.forward(row, make_targets(row));
    BatchLoss loss;
    try {
      loss = compute_batch_loss(options_.loss, row, stats.logp_T, stats.entropy_T, counts, result.pool);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kNonFinite || !options_.skip_non_finite_rows) throw;
      log::warning("micro-batch {} is left out: {}", row_idx, error.what());
      ++result.num_non_finite_rows;
      ++row_idx;
      continue;
    }
    policy_.backward(loss.dlogp_T);
    result.loss += loss.loss;
    result.pool.add("loss", loss.loss);
    log::debug("Micro Step {}/{} | Loss {:.4f}", row_idx, rows.size(), loss.loss);
    ++row_idx;
  }
  policy_.parameters().settle_grads();
  const std::uint64_t has_gradient = watch_->mark();
  if (result.num_non_finite_rows > 0 && result.pool.values("loss").empty())
    fail(ErrorCode::kNonFinite,
         "[trainer] every one of {} micro-batches has a loss that is not finite: the weights have diverged; lower optim.lr or set "
         "optim.max_norm",
         result.num_non_finite_rows);

  const std::optional<double> max_norm = max_grad_norm(options_.optim);
  const double norm = global_grad_norm(policy_.context(), policy_.parameters());
  if (!std::isfinite(norm))
    fail(ErrorCode::kNonFinite,
         "[trainer] the gradient norm is {} with a loss of {} over environments [{}]: the weights have diverged; lower optim.lr or set "
         "optim.max_norm",
         norm, result.loss, fmt::join(environments(rows), ", "));
  if (max_norm) result.grad_norm = norm;
  result.zero_grad_ratio = zero_grad_ratio(policy_.context(), policy_.parameters());
  result.lr_used = schedule_.at(num_scheduled_);
  const Tensor rounded = policy_.room_for_weights();
  optimizer_.step(result.lr_used, clip_scale(norm, max_norm), rounded);
  result.lr_next = schedule_.at(++num_scheduled_);
  policy_.refresh(version, rounded);
  const std::uint64_t done = watch_->mark();
  policy_.context().runtime->synchronize();
  result.forward_backward_s = watch_->seconds(started, has_gradient);
  result.optimizer_s = watch_->seconds(has_gradient, done);
  return result;
}

}  // namespace prl::trainer
