#include "eval/outcome.hpp"
#include "text/json_python.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace prl::eval {

namespace json = boost::json;

namespace {

double number_or(const json::object& row, const char* key, double fallback) {
  const json::value* value = row.if_contains(key);
  return value != nullptr ? text::as_double(*value).value_or(fallback) : fallback;
}

}  // namespace

Outcome outcome_of(const env::Episode& episode) {
  Outcome outcome;
  outcome.reward = episode.reward;
  outcome.metrics = episode.metrics;
  outcome.completion_len = static_cast<double>(episode.num_completion_tokens());
  outcome.num_turns = static_cast<double>(episode.num_turns());
  outcome.num_input_tokens = static_cast<double>(episode.num_input_tokens());
  outcome.is_truncated = episode.is_truncated;
  outcome.has_error = episode.error.has_value();
  if (const auto version = episode.version_start()) outcome.version_start = version->value;
  if (const auto version = episode.version_end()) outcome.version_end = version->value;
  return outcome;
}

Outcome outcome_of_row(const json::object& row) {
  Outcome outcome;
  outcome.reward = number_or(row, "reward", 0);
  outcome.completion_len = number_or(row, "completion_len", 0);
  outcome.num_turns = number_or(row, "num_turns", 0);
  if (const json::value* usage = row.if_contains("token_usage"); usage != nullptr && usage->is_object()) {
    outcome.num_input_tokens = number_or(usage->get_object(), "input_tokens", 0);
    if (!row.contains("completion_len")) outcome.completion_len = number_or(usage->get_object(), "output_tokens", 0);
  }
  if (const json::value* value = row.if_contains("is_truncated")) outcome.is_truncated = value->is_bool() && value->get_bool();
  if (const json::value* value = row.if_contains("error")) outcome.has_error = !value->is_null();
  if (const json::value* policy = row.if_contains("policy"); policy != nullptr && policy->is_object()) {
    outcome.version_start = static_cast<std::int64_t>(number_or(policy->get_object(), "start", -1));
    outcome.version_end = static_cast<std::int64_t>(number_or(policy->get_object(), "end", -1));
  }
  if (const json::value* value = row.if_contains("metrics"); value != nullptr && value->is_object())
    for (const auto& metric : value->get_object())
      if (const auto number = text::as_double(metric.value())) outcome.metrics[std::string(metric.key())] = *number;
  return outcome;
}

double pass_at_k(std::int64_t n, std::int64_t c, std::int64_t k) {
  if (n - c < k) return 1.0;
  double all_wrong = 1.0;
  for (std::int64_t i = n - c + 1; i <= n; ++i) all_wrong *= 1.0 - static_cast<double>(k) / static_cast<double>(i);
  return 1.0 - all_wrong;
}

double pass_all_k(std::int64_t n, std::int64_t c, std::int64_t k) {
  double all_right = 1.0;
  for (std::int64_t i = 0; i < k; ++i) all_right *= static_cast<double>(c - i) / static_cast<double>(n - i);
  return std::max(0.0, all_right);
}

EvalResult summarize(const Outcomes& outcomes, std::int64_t rollouts_per_example) {
  EvalResult result;
  result.rollouts_per_example = rollouts_per_example;
  if (outcomes.empty()) return result;
  const double count = static_cast<double>(outcomes.size());
  double squares = 0;
  std::map<std::string, std::int64_t> num_values;
  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> per_example;  // rollouts, right ones
  bool is_binary = true;
  result.completion_len_min = outcomes.begin()->second.completion_len;
  for (const auto& [id, outcome] : outcomes) {
    result.avg_reward += outcome.reward / count;
    result.completion_len_mean += outcome.completion_len / count;
    result.completion_len_min = std::min(result.completion_len_min, outcome.completion_len);
    result.completion_len_max = std::max(result.completion_len_max, outcome.completion_len);
    result.input_tokens_mean += outcome.num_input_tokens / count;
    result.truncated_mean += (outcome.is_truncated ? 1.0 : 0.0) / count;
    result.error_mean += (outcome.has_error ? 1.0 : 0.0) / count;
    result.num_turns_mean += outcome.num_turns / count;
    is_binary = is_binary && (outcome.reward == 0.0 || outcome.reward == 1.0);
    auto& [num_rollouts, num_right] = per_example[id.first];
    ++num_rollouts;
    num_right += outcome.reward >= kPassThreshold ? 1 : 0;
    for (const auto& [name, value] : outcome.metrics) {
      result.avg_metrics[name] += value;
      ++num_values[name];
    }
    if (outcome.version_start >= 0)
      result.policy_version_min =
          result.policy_version_min < 0 ? outcome.version_start : std::min(result.policy_version_min, outcome.version_start);
    result.policy_version_max = std::max(result.policy_version_max, outcome.version_end);
  }
  result.num_examples = static_cast<std::int64_t>(per_example.size());
  for (const auto& [id, outcome] : outcomes) squares += std::pow(outcome.completion_len - result.completion_len_mean, 2);
  result.completion_len_std = outcomes.size() > 1 ? std::sqrt(squares / (count - 1)) : 0.0;
  for (auto& [name, value] : result.avg_metrics) value /= static_cast<double>(num_values[name]);
  for (std::int64_t k = 1; k <= rollouts_per_example; k *= 2) {
    double any = 0;
    double all = 0;
    double num_examples = 0;
    for (const auto& [example, tally] : per_example) {
      const auto [num_rollouts, num_right] = tally;
      if (num_rollouts < k) continue;  // an example that was not played in full says nothing about k
      any += pass_at_k(num_rollouts, num_right, k);
      all += pass_all_k(num_rollouts, num_right, k);
      ++num_examples;
    }
    if (num_examples == 0) break;
    result.threshold_pass_at_k[k] = any / num_examples;
    result.threshold_pass_all_k[k] = all / num_examples;
  }
  if (is_binary) result.pass_at_k = result.threshold_pass_at_k;
  return result;
}

std::string console_line(const EvalResult& r) {
  std::string passes;
  for (const auto& [k, value] : r.pass_at_k) passes += fmt::format(", Pass@{}: {:.4f}", k, value);
  return fmt::format(
      "Evaluated {} in {:.2f}s (Avg@{}={:.4f}{}, Completion Length: {:.2f} (±{:.2f}, ∈[{:.2f}, {:.2f}]), Truncated: {:.1f}%)", r.env_name,
      r.seconds, r.rollouts_per_example, r.avg_reward, passes, r.completion_len_mean, r.completion_len_std, r.completion_len_min,
      r.completion_len_max, r.truncated_mean * 100);
}

}  // namespace prl::eval
