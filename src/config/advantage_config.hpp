#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/python_function_config.hpp"

/// From rewards to what is trained: advantages, pools of tasks by difficulty, and filters of rollouts.
namespace prl::config {

enum class AdvantageType { kGrpo, kRloo, kOpo, kMaxRl, kReward, kRae, kEcho, kHierarchicalGrpo, kCustom };
std::span<const EnumEntry> enum_entries(AdvantageType);

/// Among the best rollouts of a group, shorter ones are worth more.
struct TokensLengthPenalty {
  static constexpr std::string_view kType = "tokens";
  double completion_weight = 1.0;
  double tool_response_weight = 1.0;
  template <class V>
  void visit(V& v) {
    v.field("completion_weight", completion_weight, "Cost of a generated token", {.min = 0});
    v.field("tool_response_weight", tool_response_weight, "Cost of a token of a tool's reply", {.min = 0});
  }
};
struct TurnsLengthPenalty {
  static constexpr std::string_view kType = "turns";
  template <class V>
  void visit(V&) {}
};
struct LinearLengthPenalty {
  static constexpr std::string_view kType = "linear";
  double num_output_tokens_weight = 0.25;
  double num_input_tokens_weight = 0.1;
  double num_turns_weight = 0.1;
  template <class V>
  void visit(V& v) {
    v.field("num_output_tokens_weight", num_output_tokens_weight, "Weight of the generated length", {.min = 0});
    v.field("num_input_tokens_weight", num_input_tokens_weight, "Weight of the read length", {.min = 0});
    v.field("num_turns_weight", num_turns_weight, "Weight of the number of turns", {.min = 0});
  }
};
using LengthPenalty = std::variant<TokensLengthPenalty, TurnsLengthPenalty, LinearLengthPenalty>;

/// How much the words of one role are learnt.
struct EchoRoleConfig {
  double alpha = 0.1;
  template <class V>
  void visit(V& v) {
    v.field("alpha", alpha, "Weight of a token in the cross entropy", {.min = 0, .is_open_min = true});
  }
};
/// Whose words are learnt besides the policy's own.
struct EchoRolesConfig {
  std::optional<EchoRoleConfig> system;
  std::optional<EchoRoleConfig> user;
  std::optional<EchoRoleConfig> assistant;
  std::optional<EchoRoleConfig> tool;
  template <class V>
  void visit(V& v) {
    v.field("system", system, "System messages");
    v.field("user", user, "Messages of users");
    v.field("assistant", assistant, "Assistant messages that the policy did not write");
    v.field("tool", tool, "Results of tools");
  }
};

/// Which of those words are learnt, token by token.
struct EchoFilterConfig : PythonFunctionConfig {
  template <class V>
  void visit(V& v) {
    visit_function(
        v, "Python function, module.name: it gets a rollout with its branches, returns a list of booleans for each of them, one per token");
  }
};

struct AdvantageConfig : PythonFunctionConfig {
  AdvantageType type = AdvantageType::kGrpo;
  std::optional<LengthPenalty> length_penalty;
  double decay = 0.95;
  std::optional<EchoRolesConfig> roles;
  std::optional<EchoFilterConfig> filter;
  std::vector<std::string> episode_agents;
  template <class V>
  void visit(V& v) {
    v.field("type", type, "How rewards become advantages; docs/specification.md 3.8 has each, custom is a Python function");
    v.field("length_penalty", length_penalty, "Prefer shorter rollouts; with grpo and echo");
    v.field("decay", decay, "Of type rae: what the running average of rewards keeps at each rollout", {.min = 0, .max = 1});
    v.field("roles", roles, "Of type echo: whose words after the first reply are learnt too; tool alone if not set");
    v.field("filter", filter, "Of type echo: which tokens of those words are learnt, by a Python function; all if not set");
    v.field("episode_agents", episode_agents,
            "Of type hierarchical_grpo: agents compared within their episode; others are with their namesakes of the whole group");
    visit_function(v, "Python function of type custom, module.name: it gets the group's rollouts, returns their advantages");
  }
};

/// Pools of tasks by difficulty.
struct BufferConfig {
  std::optional<std::int64_t> seed;
  std::optional<std::vector<double>> env_ratios;
  std::optional<double> easy_threshold;
  std::optional<double> hard_threshold;
  double easy_fraction = 0.0;
  double hard_fraction = 0.0;
  bool online_difficulty_filtering = false;
  std::vector<std::string> hash_keys = {"env_name", "prompt"};
  bool skip_verification = false;
  template <class V>
  void visit(V& v) {
    v.field("seed", seed, "Seed of the choice of tasks; the orchestrator's if not set");
    v.field("env_ratios", env_ratios, "Shares of the environments, in their order", {.min = 0, .is_open_min = true});
    v.field("easy_threshold", easy_threshold, "A task whose mean reward reaches this is not drawn again");
    v.field("hard_threshold", hard_threshold, "A task whose mean reward is at most this is not drawn again");
    v.field("easy_fraction", easy_fraction, "Part of the easy tasks that returns when a run resumes", {.min = 0, .max = 1});
    v.field("hard_fraction", hard_fraction, "Part of the hard tasks that returns when a run resumes", {.min = 0, .max = 1});
    v.field("online_difficulty_filtering", online_difficulty_filtering, "Drop groups whose rewards are all 0 or all 1, and draw others");
    v.field("hash_keys", hash_keys, "Fields that identify a task across a resume", {.status = inert("tasks are known by their number")});
    v.field("skip_verification", skip_verification, "Do not score; all rewards are 0");
  }
};

struct GibberishFilter {
  static constexpr std::string_view kType = "gibberish";
  bool enforce = false;
  int token_id_threshold = 100000;
  double logprob_offset = 2.0;
  template <class V>
  void visit(V& v) {
    v.field("enforce", enforce, "Drop what is found, instead of only counting it");
    v.field("token_id_threshold", token_id_threshold, "Tokens with a larger id are suspicious", {.min = 0});
    v.field("logprob_offset", logprob_offset, "and so are log-probabilities this far below uniform");
  }
};
struct RepetitionFilter {
  static constexpr std::string_view kType = "repetition";
  bool enforce = false;
  int window = 3000;
  double prob_threshold = 0.99;
  template <class V>
  void visit(V& v) {
    v.field("enforce", enforce, "Drop what is found, instead of only counting it");
    v.field("window", window, "Tokens in a row", {.unit = "tokens", .min = 1});
    v.field("prob_threshold", prob_threshold, "that all have at least this probability", {.min = 0, .max = 1});
  }
};
struct ZeroAdvantageFilter {
  static constexpr std::string_view kType = "zero_advantage";
  bool enforce = true;
  template <class V>
  void visit(V& v) {
    v.field("enforce", enforce, "Drop what is found, instead of only counting it");
  }
};
struct CustomFilter : PythonFunctionConfig {
  static constexpr std::string_view kType = "custom";
  bool enforce = true;
  template <class V>
  void visit(V& v) {
    visit_function(v, "Python function, module.name: it gets the group's rollouts, returns true for those it finds");
    v.field("enforce", enforce, "Drop what is found, instead of only counting it");
  }
};
using RolloutFilter = std::variant<ZeroAdvantageFilter, GibberishFilter, RepetitionFilter, CustomFilter>;

/// Rewards of a group by a Python function, in place of the environment's.
struct CustomRewardConfig : PythonFunctionConfig {
  template <class V>
  void visit(V& v) {
    visit_function(v, "Python function, module.name: it gets the group's rollouts, returns their rewards");
  }
};

}  // namespace prl::config
