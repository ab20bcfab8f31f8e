#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "config/python_function_config.hpp"
#include "config/schema.hpp"

/// Policy losses by name. r is the ratio of trainer to sampler probability of a token, rho its logarithm, A the advantage.
namespace prl::config {

enum class RatioLevel { kToken, kSequence };
std::span<const EnumEntry> enum_entries(RatioLevel);

/// DPPO with a KL term (prime-rl's default): tokens whose probability moved too far in the wrong direction are dropped.
struct DefaultLossConfig {
  static constexpr std::string_view kType = "default";
  double dppo_mask_high = 0.2;
  double dppo_mask_low = 0.2;
  double adv_tau = 1.0;
  double kl_tau = 1e-3;
  template <class V>
  void visit(V& v) {
    v.field("dppo_mask_high", dppo_mask_high, "With A > 0, drop a token whose probability rose by more than this", {.min = 0});
    v.field("dppo_mask_low", dppo_mask_low, "With A <= 0, drop a token whose probability fell by more than this", {.min = 0});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

struct IpoLossConfig {
  static constexpr std::string_view kType = "ipo";
  double ipo_threshold = 0.1;
  double adv_tau = 1.0;
  double kl_tau = 1e-3;
  template <class V>
  void visit(V& v) {
    v.field("ipo_threshold", ipo_threshold, "Drop a token whose probability moved by more than this, either way", {.min = 0});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

/// Token loss -min(r, clip_ratio) A, differentiated through r.
struct GrpoLossConfig {
  static constexpr std::string_view kType = "grpo";
  double clip_ratio = 8.0;
  double adv_tau = 1.0;
  double kl_tau = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("clip_ratio", clip_ratio, "Largest ratio", {.min = 0, .is_open_min = true});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

/// One ratio per sequence, exp of the mean rho, with a straight-through gradient to each token.
struct GspoLossConfig {
  static constexpr std::string_view kType = "gspo";
  double clip_ratio = 8.0;
  double max_log_ratio = 10.0;
  RatioLevel normalization = RatioLevel::kToken;
  double adv_tau = 1.0;
  double kl_tau = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("clip_ratio", clip_ratio, "Largest ratio", {.min = 0, .is_open_min = true});
    v.field("max_log_ratio", max_log_ratio, "Largest log-ratio before the exponential", {.min = 0, .is_open_min = true});
    v.field("normalization", normalization, "Divide by the number of tokens or of sequences");
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

/// The grpo token loss on advantages with the length-weighted baseline of OPO.
struct OpoLossConfig {
  static constexpr std::string_view kType = "opo";
  double clip_ratio = 8.0;
  double adv_tau = 1.0;
  double kl_tau = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("clip_ratio", clip_ratio, "Largest ratio", {.min = 0, .is_open_min = true});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

/// The grpo token loss on advantages with the leave-one-out baseline of RLOO.
struct RlooLossConfig {
  static constexpr std::string_view kType = "rloo";
  double clip_ratio = 8.0;
  double adv_tau = 1.0;
  double kl_tau = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("clip_ratio", clip_ratio, "Largest ratio", {.min = 0, .is_open_min = true});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

/// Token loss -stopgrad(clip(r)) A log p: the ratio is a weight, every token keeps its gradient.
struct CispoLossConfig {
  static constexpr std::string_view kType = "cispo";
  double clip_ratio_low = 0.0;
  double clip_ratio_high = 8.0;
  double adv_tau = 1.0;
  double kl_tau = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("clip_ratio_low", clip_ratio_low, "Smallest weight", {.min = 0});
    v.field("clip_ratio_high", clip_ratio_high, "Largest weight", {.min = 0, .is_open_min = true});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho squared, over all tokens", {.min = 0});
  }
};

/// Token loss -min(r, clip_ratio) A over all tokens of the batch, without entropy and KL terms.
struct AipoLossConfig {
  static constexpr std::string_view kType = "aipo";
  double clip_ratio = 8.0;
  double adv_tau = 1.0;
  template <class V>
  void visit(V& v) {
    v.field("clip_ratio", clip_ratio, "Largest ratio, delta", {.min = 0, .is_open_min = true});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
  }
};

/// The masked loss with a detached coefficient that configurations with token_mask_* keys ask for.
struct MaskedLossConfig {
  static constexpr std::string_view kType = "masked";
  RatioLevel ratio_type = RatioLevel::kToken;
  double token_mask_low = 0.125;
  double token_mask_high = 8.0;
  double sequence_clip_high = 10.0;
  double geo_mask_low = 0.1;
  double geo_mask_high = 10.0;
  double sequence_mask_low = 0.0;
  double sequence_mask_high = 100.0;
  double adv_tau = 1.0;
  double teacher_tau = 0.0;
  double kl_tau = 0.0;
  template <class V>
  void visit(V& v) {
    v.field("ratio_type", ratio_type, "Ratio in the coefficient: of the token or of its sequence");
    v.field("token_mask_low", token_mask_low, "Drop tokens with a smaller ratio", {.min = 0});
    v.field("token_mask_high", token_mask_high, "Drop tokens with a larger ratio", {.min = 0});
    v.field("sequence_clip_high", sequence_clip_high, "Largest ratio of a sequence", {.min = 0});
    v.field("geo_mask_low", geo_mask_low, "Drop sequences with a smaller geometric mean ratio", {.min = 0});
    v.field("geo_mask_high", geo_mask_high, "Drop sequences with a larger geometric mean ratio", {.min = 0});
    v.field("sequence_mask_low", sequence_mask_low, "Drop sequences that hold a token with a smaller ratio", {.min = 0});
    v.field("sequence_mask_high", sequence_mask_high, "Drop sequences that hold a token with a larger ratio", {.min = 0});
    v.field("adv_tau", adv_tau, "Weight of the advantage term", {.min = 0});
    v.field("teacher_tau", teacher_tau, "Weight of the teacher's log-ratio", {.min = 0});
    v.field("kl_tau", kl_tau, "Weight of rho in the coefficient", {.min = 0});
  }
};

/// A Python function, asked for the loss of each packed row and its gradient.
struct CustomLossConfig : PythonFunctionConfig {
  static constexpr std::string_view kType = "custom";
  template <class V>
  void visit(V& v) {
    visit_function(v, "Python function, module.name: it gets the log-probabilities of a sequence, returns loss and metrics",
                   "Interpreter or virtual environment that runs the function; with torch there it gets tensors");
  }
};

using LossConfig = std::variant<DefaultLossConfig, IpoLossConfig, GrpoLossConfig, GspoLossConfig, OpoLossConfig, RlooLossConfig,
                                CispoLossConfig, AipoLossConfig, MaskedLossConfig, CustomLossConfig>;

}  // namespace prl::config
