#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "monitor/metric_set.hpp"

namespace prl::trainer {

/// Values of one step by metric name, pooled over sequences and micro-batches before any statistic is taken.
class MetricPool {
 public:
  void add(std::string_view name, double value);
  /// The values of `name` in the order they came; empty if none.
  const std::vector<double>& values(std::string_view name) const;
  double mean(std::string_view name) const;
  /// <name>/{mean,median,std,min,max} of everything.
  void put_all(monitor::Metrics& metrics) const;
  void erase(std::string_view name);
  /// Appends the values of `other` to those of the same names.
  void add_all(const MetricPool& other);
  /// For another rank: bytes that decode() understands. Error{kCorrupt} if they are cut short.
  void encode(std::string& bytes) const;
  static MetricPool decode(std::string_view& bytes);

 private:
  std::map<std::string, std::vector<double>, std::less<>> values_;
};

}  // namespace prl::trainer
