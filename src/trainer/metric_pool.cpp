#include "trainer/metric_pool.hpp"

namespace prl::trainer {

void MetricPool::add(std::string_view name, double value) {
  auto it = values_.find(name);
  if (it == values_.end()) it = values_.emplace(std::string(name), std::vector<double>{}).first;
  it->second.push_back(value);
}

const std::vector<double>& MetricPool::values(std::string_view name) const {
  static const std::vector<double> none;
  const auto it = values_.find(name);
  return it == values_.end() ? none : it->second;
}

double MetricPool::mean(std::string_view name) const {
  const auto& all = values(name);
  double sum = 0;
  for (const double v : all) sum += v;
  return all.empty() ? 0 : sum / static_cast<double>(all.size());
}

void MetricPool::erase(std::string_view name) {
  if (const auto it = values_.find(name); it != values_.end()) values_.erase(it);
}

void MetricPool::put_all(monitor::Metrics& metrics) const {
  for (const auto& [name, all] : values_) monitor::put_stats(metrics, name, all);
}

}  // namespace prl::trainer
