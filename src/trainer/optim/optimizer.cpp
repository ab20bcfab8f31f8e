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
  const bool has_muon = std::holds_alternative<MuonConfig>(optim);
  std::vector<std::string> names;
  if (std::holds_alternative<SgdConfig>(optim))
    names = {"momentum_buffer"};
  else if (!std::holds_alternative<SignSgdConfig>(optim))
    names = {"exp_avg", "exp_avg_sq"};
  // As the parameters' values, the state lies in one array per kind.
  if (!has_muon)
    for (std::size_t i = 0; i < names.size(); ++i)
      flat_state_.push_back(Tensor::zeros(ctx.runtime, parameters.all_values().shape(), DType::kF32));
  for (nn::NamedParameter& p : parameters.named()) {
    PRL_CHECK(p.grad.defined(), "parameter {} has no gradient tensor", p.name);
    Slot slot;
    slot.parameter = &p;
    if (has_muon && takes_muon(p)) {
      slot.is_muon = true;
      slot.state.emplace_back("momentum", Tensor::zeros(ctx.runtime, p.value.shape(), DType::kF32));
    } else {
      for (std::size_t i = 0; i < names.size(); ++i)
        slot.state.emplace_back(names[i], has_muon ? Tensor::zeros(ctx.runtime, p.value.shape(), DType::kF32)
                                                   : flat_state_[i].slice(p.offset, p.value.num_elements()).reshaped(p.value.shape()));
    }
    slots_.push_back(std::move(slot));
  }
}

Optimizer::~Optimizer() = default;

void Optimizer::step(double lr, double grad_scale, const Tensor& rounded) {
  const auto rate = static_cast<float>(lr), factor = static_cast<float>(grad_scale);
  const auto adamw_args = [&](const auto& c) {
    return ops::AdamWArgs{.lr = rate,
                          .beta1 = static_cast<float>(c.betas1),
                          .beta2 = static_cast<float>(c.betas2),
                          .eps = kAdamEps,
                          .weight_decay = static_cast<float>(c.weight_decay),
                          .grad_scale = factor,
                          .step = num_steps_ + 1};
  };
  const Tensor& values = parameters_.all_values();
  const Tensor& grads = parameters_.all_grads();
  if (const auto* adamw = std::get_if<AdamWConfig>(&optim_)) {
    ops::adamw(ctx_, values, flat_state_[0], flat_state_[1], grads, adamw_args(*adamw), rounded.defined() ? rounded.view() : TensorView{});
    ++num_steps_;
    return;
  } else if (const auto* sgd = std::get_if<SgdConfig>(&optim_)) {
    ops::sgd(ctx_, values, flat_state_[0], grads,
             {.lr = rate,
              .momentum = static_cast<float>(sgd->momentum),
              .weight_decay = static_cast<float>(sgd->weight_decay),
              .grad_scale = factor,
              .nesterov = sgd->nesterov,
              .is_first_step = num_steps_ == 0});
  } else if (const auto* muon = std::get_if<MuonConfig>(&optim_)) {
    for (Slot& slot : slots_) {
      nn::NamedParameter& p = *slot.parameter;
      if (slot.is_muon)
        ops::muon(
            ctx_, p.value, slot.state[0].second, p.grad,
            {.lr = rate, .mu = static_cast<float>(muon->mu), .weight_decay = static_cast<float>(muon->weight_decay), .grad_scale = factor});
      else
        ops::adamw(ctx_, p.value, slot.state[0].second, slot.state[1].second, p.grad, adamw_args(*muon));
    }
  } else {
    // The sign does not change under scaling.
    ops::sign_sgd(ctx_, values, grads, rate, static_cast<float>(std::get<SignSgdConfig>(optim_).weight_decay));
  }
  ++num_steps_;
  if (rounded.defined()) ops::cast(ctx_, rounded, values);
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
  return std::sqrt(ops::sum_squares(ctx, parameters.all_grads()));
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
