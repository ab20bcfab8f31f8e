#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>

#include "config/schema.hpp"

/// Optimizers and learning-rate schedules (formulas: the optimizer section of the trainer's documentation).
namespace prl::config {

struct AdamWConfig {
  static constexpr std::string_view kType = "adamw";
  double lr = 1e-6;
  double weight_decay = 0.01;
  std::optional<double> max_norm = 1.0;
  double betas1 = 0.9;
  double betas2 = 0.999;
  template <class V>
  void visit(V& v) {
    v.field("lr", lr, "Peak learning rate", {.min = 0});
    v.field("weight_decay", weight_decay, "Decoupled decay, of every parameter", {.min = 0});
    v.field("max_norm", max_norm, "Gradients are scaled to at most this L2 norm; None for no clipping", {.min = 0, .is_open_min = true});
    v.field("betas1", betas1, "Decay of the first moment", {.min = 0, .max = 1});
    v.field("betas2", betas2, "Decay of the second moment", {.min = 0, .max = 1});
  }
};

struct SgdConfig {
  static constexpr std::string_view kType = "sgd";
  double lr = 1e-6;
  double weight_decay = 0.01;
  std::optional<double> max_norm = 1.0;
  bool nesterov = true;
  double momentum = 0.9;
  template <class V>
  void visit(V& v) {
    v.field("lr", lr, "Peak learning rate", {.min = 0});
    v.field("weight_decay", weight_decay, "L2 penalty, added to the gradient", {.min = 0});
    v.field("max_norm", max_norm, "Gradients are scaled to at most this L2 norm; None for no clipping", {.min = 0, .is_open_min = true});
    v.field("nesterov", nesterov, "Look-ahead momentum");
    v.field("momentum", momentum, "Decay of the velocity", {.min = 0, .max = 1});
  }
};

struct MuonConfig {
  static constexpr std::string_view kType = "muon";
  double lr = 1e-6;
  double weight_decay = 0.01;
  std::optional<double> max_norm = 1.0;
  double mu = 0.95;
  double betas1 = 0.9;
  double betas2 = 0.95;
  template <class V>
  void visit(V& v) {
    v.field("lr", lr, "Peak learning rate", {.min = 0});
    v.field("weight_decay", weight_decay, "Decoupled decay, of every parameter", {.min = 0});
    v.field("max_norm", max_norm, "Gradients are scaled to at most this L2 norm; None for no clipping", {.min = 0, .is_open_min = true});
    v.field("mu", mu, "Momentum of the matrices", {.min = 0, .max = 1});
    v.field("betas1", betas1, "First AdamW decay of the parameters that are no matrices", {.min = 0, .max = 1});
    v.field("betas2", betas2, "Second AdamW decay of the parameters that are no matrices", {.min = 0, .max = 1});
  }
};

struct SignSgdConfig {
  static constexpr std::string_view kType = "sign_sgd";
  double lr = 1e-6;
  double weight_decay = 0.01;
  std::optional<double> max_norm = 1.0;
  template <class V>
  void visit(V& v) {
    v.field("lr", lr, "Peak learning rate", {.min = 0});
    v.field("weight_decay", weight_decay, "Decoupled decay, of every parameter", {.min = 0});
    v.field("max_norm", max_norm, "Gradients are scaled to at most this L2 norm; None for no clipping", {.min = 0, .is_open_min = true});
  }
};

using OptimConfig = std::variant<AdamWConfig, SgdConfig, MuonConfig, SignSgdConfig>;

struct ConstantScheduler {
  static constexpr std::string_view kType = "constant";
  template <class V>
  void visit(V&) {}
};

/// Warm-up, stable, decay.
struct LinearScheduler {
  static constexpr std::string_view kType = "linear";
  int warmup_steps = 10;
  int decay_steps = 10;
  double min_lr = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("warmup_steps", warmup_steps, "Steps of the rise to lr", {.unit = "steps", .min = 0});
    v.field("decay_steps", decay_steps, "Steps of the fall to min_lr, which end at max_steps", {.unit = "steps", .min = 0});
    v.field("min_lr", min_lr, "Learning rate at both ends", {.min = 0});
  }
};

struct CosineScheduler {
  static constexpr std::string_view kType = "cosine";
  int warmup_steps = 10;
  double min_lr = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("warmup_steps", warmup_steps, "Steps of the rise to lr", {.unit = "steps", .min = 0});
    v.field("min_lr", min_lr, "Learning rate at max_steps", {.min = 0});
  }
};

using SchedulerConfig = std::variant<ConstantScheduler, LinearScheduler, CosineScheduler>;

}  // namespace prl::config
