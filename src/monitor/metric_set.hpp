#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace prl::monitor {

/// What a metric is, written once by the module that logs it.
///
/// `name` is matched segment by segment ('/' separates): "*" stands for one segment, "**" for one or more (environment names
/// may hold slashes). With `has_stats` the name is logged as <name>/{mean,median,std,min,max} instead of by itself.
struct MetricInfo {
  std::string_view name;
  std::string_view unit;  ///< "nats", "tokens/s", "seconds", "1" for a plain number
  std::string_view meaning;
  bool has_stats = false;
};

/// The values of one step by full name. Ordered, so that every sink writes them in the same order.
using Metrics = std::map<std::string, double, std::less<>>;

/// The metrics a role may log.
class MetricSet {
 public:
  /// Adds declarations; the strings must outlive the set (they are literals).
  void declare(std::span<const MetricInfo> infos);
  /// The declaration that covers `name`, or nullptr.
  const MetricInfo* find(std::string_view name) const noexcept;
  /// The declared name with the smallest edit distance, for error messages; empty if nothing is declared.
  std::string_view nearest(std::string_view name) const;
  std::span<const MetricInfo> infos() const noexcept { return infos_; }

 private:
  std::vector<MetricInfo> infos_;
};

/// Statistics of pooled values: mean, median (the lower of the two middle ones), sample standard deviation (0 for one value), min, max.
struct Stats {
  double mean = 0, median = 0, std = 0, min = 0, max = 0;
};
/// `values` is not empty and is reordered. Sums run in the given order first, so the mean is repeatable.
Stats summarize(std::vector<double>& values);
/// metrics[<name>/mean], ... of `values`; nothing when empty.
void put_stats(Metrics& metrics, std::string_view name, std::vector<double> values);

}  // namespace prl::monitor
