#include "trainer/optim/optimizer.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "ops/optimizer.hpp"
#include "ops/pointwise.hpp"

namespace prl::trainer {

namespace {

using config::AdamWConfig;
using config::MuonConfig;
using config::SgdConfig;
using config::SignSgdConfig;

/// The library default of the optimizers that this behaviour comes from.
constexpr float kAdamEps = 1e-8f;

bool takes_muon(const nn::NamedParameter& p) {
  return p.value.shape().num_dims() >= 2 && p.name.find("lm_head") == std::string::npos && p.name.find("embed_tokens") == std::string::npos;
}

/// Elements counted by one worker at a time.
constexpr std::int64_t kPiece = 1 << 20;

}  // namespace

/// State of one parameter: names and tensors, empty for stateless optimizers.
struct Optimizer::Slot {
  nn::NamedParameter* parameter = nullptr;
  bool is_muon = false;
  std::vector<std::pair<std::string, Tensor>> state;
};

double base_lr(const config::OptimConfig& optim) {
  return std::visit([](const auto& c) { return c.lr; }, optim);
}

std::optional<double> max_grad_norm(const config::OptimConfig& optim) {
  return std::visit([](const auto& c) { return c.max_norm; }, optim);
}

Optimizer::Optimizer(ops::OpContext& ctx, nn::Parameters& parameters, const config::OptimConfig& optim)
    : ctx_(ctx), parameters_(parameters), optim_(optim) {
  for (nn::NamedParameter& p : parameters.named()) {
    PRL_CHECK(p.grad.defined(), "parameter {} has no gradient tensor", p.name);
    Slot slot;
    slot.parameter = &p;
    const auto add = [&](const char* name) { slot.state.emplace_back(name, Tensor::zeros(ctx.runtime, p.value.shape(), DType::kF32)); };
    if (std::holds_alternative<SgdConfig>(optim)) {
      add("momentum_buffer");
    } else if (std::holds_alternative<MuonConfig>(optim) && takes_muon(p)) {
      slot.is_muon = true;
      add("momentum");
    } else if (!std::holds_alternative<SignSgdConfig>(optim)) {
      add("exp_avg");
      add("exp_avg_sq");
    }
    slots_.push_back(std::move(slot));
  }
}

Optimizer::~Optimizer() = default;

void Optimizer::step_one(Slot& slot, double lr, float grad_scale) {
  nn::NamedParameter& p = *slot.parameter;
  const auto rate = static_cast<float>(lr);
  const auto adamw = [&](const auto& c) {
    ops::adamw(ctx_, p.value, slot.state[0].second, slot.state[1].second, p.grad,
               {.lr = rate,
                .beta1 = static_cast<float>(c.betas1),
                .beta2 = static_cast<float>(c.betas2),
                .eps = kAdamEps,
                .weight_decay = static_cast<float>(c.weight_decay),
                .grad_scale = grad_scale,
                .step = num_steps_ + 1});
  };
  if (const auto* adamw_config = std::get_if<AdamWConfig>(&optim_)) {
    adamw(*adamw_config);
  } else if (const auto* sgd = std::get_if<SgdConfig>(&optim_)) {
    ops::sgd(ctx_, p.value, slot.state[0].second, p.grad,
             {.lr = rate,
              .momentum = static_cast<float>(sgd->momentum),
              .weight_decay = static_cast<float>(sgd->weight_decay),
              .grad_scale = grad_scale,
              .nesterov = sgd->nesterov,
              .is_first_step = num_steps_ == 0});
  } else if (const auto* muon = std::get_if<MuonConfig>(&optim_)) {
    if (slot.is_muon)
      ops::muon(ctx_, p.value, slot.state[0].second, p.grad,
                {.lr = rate,
                 .mu = static_cast<float>(muon->mu),
                 .weight_decay = static_cast<float>(muon->weight_decay),
                 .grad_scale = grad_scale});
    else
      adamw(*muon);
  } else {
    // The sign does not change under scaling.
    ops::sign_sgd(ctx_, p.value, p.grad, rate, static_cast<float>(std::get<SignSgdConfig>(optim_).weight_decay));
  }
}

void Optimizer::step(double lr, double grad_scale) {
  for (Slot& slot : slots_) step_one(slot, lr, static_cast<float>(grad_scale));
  ++num_steps_;
}

std::vector<io::NamedTensor> Optimizer::state() const {
  std::vector<io::NamedTensor> all;
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.state) all.push_back({slot.parameter->name + "." + name, tensor});
  return all;
}

std::vector<io::NamedTensor> Optimizer::copy_state() const {
  std::vector<io::NamedTensor> all = state();
  for (io::NamedTensor& named : all) named.tensor = named.tensor.clone();
  return all;
}

std::string_view Optimizer::type_name() const {
  return std::visit([](const auto& c) { return c.kType; }, optim_);
}

std::size_t Optimizer::state_bytes() const noexcept {
  std::size_t sum = 0;
  for (const Slot& slot : slots_)
    for (const auto& [name, tensor] : slot.state) sum += tensor.num_bytes();
  return sum;
}

double global_grad_norm(ops::OpContext& ctx, const nn::Parameters& parameters) {
  std::vector<ConstTensorView> grads;
  for (const nn::NamedParameter& p : parameters.named()) grads.emplace_back(p.grad);
  return std::sqrt(ops::sum_squares(ctx, grads));
}

std::optional<double> zero_grad_ratio(ops::OpContext& ctx, const nn::Parameters& parameters) {
  if (ctx.runtime->device().kind != DeviceKind::kCpu || ctx.pool == nullptr) return std::nullopt;
  std::int64_t num_zeros = 0, total = 0;
  std::vector<std::int64_t> counts;
  for (const nn::NamedParameter& p : parameters.named()) {
    const std::int64_t n = p.grad.num_elements(), num_pieces = (n + kPiece - 1) / kPiece;
    const float* values = p.grad.as<float>();
    counts.assign(static_cast<std::size_t>(num_pieces), 0);
    ctx.pool->parallel_for(num_pieces, [&](std::int64_t piece) {
      const std::int64_t end = std::min(n, (piece + 1) * kPiece);
      counts[static_cast<std::size_t>(piece)] = std::count(values + piece * kPiece, values + end, 0.0f);
    });
    for (const std::int64_t c : counts) num_zeros += c;
    total += n;
  }
  return total == 0 ? 0 : static_cast<double>(num_zeros) / static_cast<double>(total);
}

double clip_scale(double norm, std::optional<double> max_norm) { return max_norm ? std::min(1.0, *max_norm / (norm + 1e-6)) : 1.0; }

}  // namespace prl::trainer
