#include "monitor/metric_set.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace prl::monitor {

namespace {

constexpr std::array<std::string_view, 5> kStatNames{"mean", "median", "std", "min", "max"};

std::string_view take_segment(std::string_view& rest) {
  const auto slash = rest.find('/');
  const std::string_view segment = rest.substr(0, slash);
  rest = slash == std::string_view::npos ? std::string_view{} : rest.substr(slash + 1);
  return segment;
}

bool matches(std::string_view pattern, std::string_view name) noexcept {
  while (!pattern.empty()) {
    const std::string_view wanted = take_segment(pattern);
    if (wanted == "**") {
      // One or more segments: try every split.
      std::string_view rest = name;
      while (!rest.empty()) {
        if (take_segment(rest).empty()) return false;
        if (pattern.empty() ? rest.empty() : matches(pattern, rest)) return true;
      }
      return false;
    }
    if (name.empty()) return false;
    const std::string_view found = take_segment(name);
    if (found.empty() || (wanted != "*" && wanted != found)) return false;
  }
  return name.empty();
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t up = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      diagonal = up;
    }
  }
  return row[b.size()];
}

}  // namespace

void MetricSet::declare(std::span<const MetricInfo> infos) { infos_.insert(infos_.end(), infos.begin(), infos.end()); }

const MetricInfo* MetricSet::find(std::string_view name) const noexcept {
  const auto slash = name.rfind('/');
  const bool ends_in_stat = slash != std::string_view::npos && std::ranges::find(kStatNames, name.substr(slash + 1)) != kStatNames.end();
  for (const MetricInfo& info : infos_) {
    if (info.has_stats) {
      if (ends_in_stat && matches(info.name, name.substr(0, slash))) return &info;
    } else if (matches(info.name, name)) {
      return &info;
    }
  }
  return nullptr;
}

std::string_view MetricSet::nearest(std::string_view name) const {
  std::string_view best;
  std::size_t best_distance = std::numeric_limits<std::size_t>::max();
  for (const MetricInfo& info : infos_) {
    const std::size_t distance = edit_distance(name, info.name);
    if (distance < best_distance) {
      best_distance = distance;
      best = info.name;
    }
  }
  return best;
}

Stats summarize(std::vector<double>& values) {
  Stats stats;
  const double count = static_cast<double>(values.size());
  double sum = 0;
  for (const double v : values) sum += v;
  stats.mean = sum / count;
  if (values.size() > 1) {
    double squares = 0;
    for (const double v : values) squares += (v - stats.mean) * (v - stats.mean);
    stats.std = std::sqrt(squares / (count - 1));
  }
  const auto [low, high] = std::ranges::minmax_element(values);
  stats.min = *low;
  stats.max = *high;
  // A NaN has no place in an order; nth_element needs one.
  if (std::ranges::any_of(values, [](double v) { return std::isnan(v); })) {
    stats.median = stats.min = stats.max = std::numeric_limits<double>::quiet_NaN();
    return stats;
  }
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  stats.median = *middle;
  return stats;
}

void put_stats(Metrics& metrics, std::string_view name, std::vector<double> values) {
  if (values.empty()) return;
  const Stats stats = summarize(values);
  const std::string prefix = std::string(name) + "/";
  metrics[prefix + "mean"] = stats.mean;
  metrics[prefix + "median"] = stats.median;
  metrics[prefix + "std"] = stats.std;
  metrics[prefix + "min"] = stats.min;
  metrics[prefix + "max"] = stats.max;
}

}  // namespace prl::monitor
