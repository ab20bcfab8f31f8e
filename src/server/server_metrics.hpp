#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.hpp"
#include "transfer/kv_gate.hpp"
#include "wire/generate.hpp"

namespace prl::server {

/// Cumulative histogram in the Prometheus sense. Not synchronised.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds) : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void observe(double value, std::uint64_t count = 1);
  /// Appends "<name>_bucket{...,le=...}", "_sum", "_count" lines.
  void write(std::string& out, std::string_view name, std::string_view labels) const;

 private:
  std::vector<double> bounds_;
  std::vector<std::uint64_t> counts_;  // per bucket, not cumulated; the last is above all bounds
  double sum_ = 0;
  std::uint64_t num_values_ = 0;
};

/// One choice that has ended. Times that are not known (it never ran) are not counted.
struct FinishedChoice {
  using Duration = std::chrono::steady_clock::duration;
  Duration since_arrival{};
  std::optional<Duration> queue;    ///< arrival to the first step
  std::optional<Duration> prefill;  ///< first step to first token
  std::optional<Duration> decode;   ///< first to last token
  std::int64_t num_prompt_tokens = 0, num_output_tokens = 0, max_tokens = 0;
};

/// What the server measures itself, and the page of /metrics in the names of vLLM. Any thread.
class ServerMetrics {
 public:
  using Duration = std::chrono::steady_clock::duration;
  ServerMetrics();
  void observe_first_token(Duration since_arrival);
  /// `num_gaps` pauses of `gap` each (their mean) between tokens of one request.
  void observe_token_gaps(Duration gap, std::int64_t num_gaps);
  void observe_finished(const FinishedChoice& choice);
  /// A prompt with its `n` choices, of which the longest has `num_output_tokens`.
  void observe_prompt(std::int64_t n, std::int64_t num_output_tokens);
  void count_http(int status);

  /// Prometheus text format 0.0.4. `model` becomes the label model_name.
  /// `kv`: of an engine that exchanges blocks with others.
  std::string render(const engine::EngineStats& stats, std::string_view model, std::size_t num_connections,
                     const std::optional<transfer::KvGateStats>& kv = {}) const;

 private:
  mutable std::mutex mutex_;
  Histogram first_token_;
  Histogram token_gap_;
  Histogram latency_;
  Histogram prompt_tokens_;
  Histogram output_tokens_;
  Histogram queue_, prefill_, decode_, inference_;
  Histogram mean_gap_;
  Histogram params_n_, params_max_tokens_;
  Histogram longest_output_;
  std::map<int, std::uint64_t> http_by_status_;
};

}  // namespace prl::server
