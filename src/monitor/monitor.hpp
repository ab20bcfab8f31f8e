#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "monitor/metric_set.hpp"

namespace prl::monitor {

/// Where metrics go. Called by one thread at a time (Monitor holds a lock).
class Sink {
 public:
  virtual ~Sink() = default;
  /// One step's metrics; `unix_time` in seconds. A sink that fails warns and goes on: no failure of a sink stops training.
  virtual void write(std::int64_t step, double unix_time, const Metrics& metrics) = 0;
  /// Nothing follows. Idempotent.
  virtual void finish() {}
};

/// Fans one stream of declared metrics out to sinks. Any thread.
class Monitor {
 public:
  explicit Monitor(MetricSet declared) : declared_(std::move(declared)) {}
  void add_sink(std::unique_ptr<Sink> sink);
  /// Error{kInternal} naming the first metric nobody declared and the nearest name that is.
  void log(std::int64_t step, const Metrics& metrics);
  void finish();
  const MetricSet& declared() const noexcept { return declared_; }

 private:
  const MetricSet declared_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Sink>> sinks_;
};

}  // namespace prl::monitor
