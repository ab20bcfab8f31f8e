#include "trainer/mtp_training.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/rng.hpp"
#include "nn/mtp_head.hpp"

namespace prl::trainer {
namespace {

constexpr std::uint64_t kSeedOfHead = 0x6d7470;

config::OptimConfig adamw_of(const MtpTrainingOptions& options) {
  config::AdamWConfig adamw;
  adamw.lr = options.lr;
  adamw.weight_decay = 0;
  return adamw;
}

std::vector<io::NamedTensor> masters_of_head(const nn::Parameters& parameters) {
  std::vector<io::NamedTensor> tensors;
  for (const nn::NamedParameter& p : parameters.named()) tensors.push_back({p.name, p.value});
  return tensors;
}

}  // namespace

MtpTraining::MtpTraining(ops::OpContext& ctx, const nn::ModelConfig& model, const MtpTrainingOptions& options, std::uint64_t seed)
    : ctx_(ctx), options_(options), parameters_(std::make_unique<nn::Parameters>(ctx.runtime, nn::mtp_head_config(model))) {
  if (model.mtp->folder.empty()) {
    parameters_->init_random(mix_seed(seed, kSeedOfHead));
    log::info("a new head for multi-token prediction, of {} parameters, is trained beside the policy",
              parameters_->table()->num_trainable());
  } else {
    nn::load_parameters(*parameters_, model.mtp->folder);
  }
  parameters_->ensure_grads();
  parameters_->zero_grads();
  model_ = std::make_unique<nn::TrainableModel>(ctx_, *parameters_, nn::ActivationCheckpointing{});
  optimizer_ = std::make_unique<Optimizer>(ctx_, *parameters_, adamw_of(options_));
}

nn::WeightsPtr MtpTraining::weights_of(const nn::Weights& model) const {
  return nn::make_mtp_head(ctx_, *parameters_, model, /*with_backward=*/true);
}

void MtpTraining::start_step() {
  parameters_->zero_grads();
  num_tokens_ = 0;
  loss_ = 0;
}

void MtpTraining::read_row(const wire::MicroBatch& row, std::span<const std::int32_t> targets_T) {
  row_.ids.assign(row.input_ids.size(), 0);
  row_.positions.assign(row.position_ids.begin(), row.position_ids.end());
  row_.targets.assign(row.input_ids.size(), -1);
  row_.cu_seqlens.assign(1, 0);
  row_.num_targets = 0;
  std::size_t begin = 0;
  for (const std::int32_t length : row.sequence_lengths) {
    const std::size_t end = begin + static_cast<std::size_t>(length);
    for (std::size_t p = begin; p + 1 < end; ++p) {
      row_.ids[p] = row.input_ids[p + 1];
      row_.targets[p] = targets_T[p + 1];
      row_.num_targets += row_.targets[p] >= 0 ? 1 : 0;
    }
    begin = end;
    row_.cu_seqlens.push_back(static_cast<std::int32_t>(end));
  }
}

void MtpTraining::add_row(const nn::WeightsPtr& model, ConstTensorView hidden_TH) {
  PRL_CHECK(model->mtp != nullptr, "a head is trained that the weights do not have");
  if (row_.num_targets == 0) return;
  nn::PackedBatch batch{row_.ids, row_.positions, row_.cu_seqlens};
  batch.hidden_TH = hidden_TH;
  const std::vector<float> ones(row_.ids.size(), 1.0f);
  const nn::TokenStats stats = model_->forward(model->mtp, batch, row_.targets, ones);
  // Of the sum; who steps knows how many there are.
  std::vector<float> dlogp(row_.ids.size(), 0.0f);
  for (std::size_t p = 0; p < dlogp.size(); ++p) {
    if (row_.targets[p] < 0) continue;
    dlogp[p] = -1.0f;
    loss_ -= static_cast<double>(stats.logp_T[p]);
  }
  model_->backward(dlogp);
  num_tokens_ += row_.num_targets;
}

MtpTraining::StepResult MtpTraining::step() {
  StepResult result{.num_tokens = num_tokens_};
  if (num_tokens_ == 0) return result;
  const auto count = static_cast<double>(num_tokens_);
  result.loss = loss_ / count;
  result.grad_norm = global_grad_norm(ctx_, *parameters_) / count;
  if (!std::isfinite(result.grad_norm) || !std::isfinite(result.loss)) {
    log::warning("the head for multi-token prediction stays as it is: its loss is {}, the norm of its gradient {}; lower model.mtp.lr",
                 result.loss, result.grad_norm);
    return result;
  }
  optimizer_->step(options_.lr, clip_scale(result.grad_norm, options_.max_norm) / count);
  return result;
}

MtpTraining::State MtpTraining::state(bool copies) const {
  State state;
  if (copies) {
    const Tensor& from = parameters_->all_values();
    auto copy = std::make_shared<nn::Parameters>(from.runtime(), parameters_->config(), parameters_->table());
    from.runtime()->copy_within(copy->all_values().data(), from.data(), from.num_bytes());
    state.owned = copy;
  }
  state.masters = masters_of_head(copies ? *state.owned : *parameters_);
  state.optimizer = copies ? optimizer_->copy_state() : optimizer_->state();
  return state;
}

bool MtpTraining::load(const std::filesystem::path& folder, std::int64_t num_steps, bool has_optimizer) {
  if (!std::filesystem::exists(folder / kMtpMastersFile)) return false;
  io::load_tensors(folder / kMtpMastersFile, masters_of_head(*parameters_));
  if (!has_optimizer) return true;
  io::load_tensors(folder / kMtpOptimizerFile, optimizer_->state());
  optimizer_->restore_num_steps(num_steps);
  return true;
}

}  // namespace prl::trainer
