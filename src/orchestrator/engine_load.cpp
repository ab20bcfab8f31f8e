#include "orchestrator/engine_load.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace prl::orchestrator {

void LoadWindow::Gauge::add(double value) {
  sum += value;
  max = std::max(max, value);
}

void LoadWindow::add(const EnginePressure& pressure, net::TimePoint now) {
  running_.add(pressure.num_running);
  waiting_.add(pressure.num_waiting);
  kv_usage_.add(pressure.kv_usage);
  ++num_readings_;
  last_ = {pressure, now};
  if (!first_) first_ = last_;
}

void LoadWindow::take(monitor::Metrics& metrics) {
  if (!last_) return;
  const EnginePressure& now = last_->pressure;
  const std::pair<const char*, std::pair<Gauge*, double>> gauges[] = {{"num_requests_running", {&running_, now.num_running}},
                                                                      {"num_requests_waiting", {&waiting_, now.num_waiting}},
                                                                      {"kv_cache_usage", {&kv_usage_, now.kv_usage}}};
  for (const auto& [name, gauge] : gauges) {
    const std::string key = std::string("inference/all/") + name;
    metrics[key + "/mean"] = num_readings_ > 0 ? gauge.first->sum / num_readings_ : gauge.second;
    metrics[key + "/max"] = num_readings_ > 0 ? gauge.first->max : gauge.second;
    *gauge.first = {};
  }
  num_readings_ = 0;
  const EnginePressure& before = first_->pressure;
  // Counters of an engine that was started again begin anew.
  const auto grown = [](double from, double to) { return to >= from ? to - from : to; };
  const double queries = grown(before.num_prefix_queries, now.num_prefix_queries);
  if (queries > 0)
    metrics["inference/all/prefix_cache_hit_rate"] = std::min(1.0, grown(before.num_prefix_hits, now.num_prefix_hits) / queries);
  if (const double drafts = grown(before.num_draft_tokens, now.num_draft_tokens); drafts > 0)
    metrics["inference/all/draft_acceptance_rate"] = std::min(1.0, grown(before.num_accepted_tokens, now.num_accepted_tokens) / drafts);
  metrics["inference/all/num_preemptions"] = grown(before.num_preemptions, now.num_preemptions);
  if (const double seconds = std::chrono::duration<double>(last_->at - first_->at).count(); seconds > 0)
    metrics["inference/all/generation_tokens:rate"] = grown(before.num_generation_tokens, now.num_generation_tokens) / seconds;
  first_ = last_;
}

}  // namespace prl::orchestrator
