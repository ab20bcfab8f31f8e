#pragma once

#include <optional>

#include "monitor/metric_set.hpp"
#include "net/asio.hpp"
#include "orchestrator/concurrency.hpp"

namespace prl::orchestrator {

/// What the engines' load was over a step, from readings about a second apart. One thread.
class LoadWindow {
 public:
  static constexpr int kPollSeconds = 1;
  void add(const EnginePressure& pressure, net::TimePoint now);
  /// inference/all/...: means and maxima of the readings since the last call, or of the last reading where a step was shorter than their
  /// distance. Rates are between the first and the last of them. Nothing before the first reading.
  void take(monitor::Metrics& metrics);

 private:
  struct Gauge {
    double sum = 0, max = 0;
    void add(double value);
  };
  struct Reading {
    EnginePressure pressure;
    net::TimePoint at;
  };
  Gauge running_, waiting_, kv_usage_;
  int num_readings_ = 0;
  std::optional<Reading> first_, last_;  ///< `first_`: the last one of the window before
};

}  // namespace prl::orchestrator
