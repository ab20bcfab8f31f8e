#include "trainer/metric_pool.hpp"

#include <cstring>

#include "base/error.hpp"

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

void MetricPool::add_all(const MetricPool& other) {
  for (const auto& [name, values] : other.values_) {
    std::vector<double>& mine = values_[name];
    mine.insert(mine.end(), values.begin(), values.end());
  }
}

namespace {

void put_count(std::string& bytes, std::uint64_t count) { bytes.append(reinterpret_cast<const char*>(&count), sizeof count); }

std::string_view take(std::string_view& bytes, std::uint64_t count) {
  if (count > bytes.size()) fail(ErrorCode::kCorrupt, "[trainer] metrics of another rank end {} bytes early", count - bytes.size());
  const std::string_view part = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return part;
}

std::uint64_t take_count(std::string_view& bytes) {
  std::uint64_t count = 0;
  std::memcpy(&count, take(bytes, sizeof count).data(), sizeof count);
  return count;
}

}  // namespace

void MetricPool::encode(std::string& bytes) const {
  put_count(bytes, values_.size());
  for (const auto& [name, values] : values_) {
    put_count(bytes, name.size());
    bytes += name;
    put_count(bytes, values.size());
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double));
  }
}

MetricPool MetricPool::decode(std::string_view& bytes) {
  MetricPool pool;
  for (std::uint64_t n = take_count(bytes); n > 0; --n) {
    const std::string name(take(bytes, take_count(bytes)));
    const std::uint64_t count = take_count(bytes);
    const std::string_view values = take(bytes, count <= bytes.size() / sizeof(double) ? count * sizeof(double) : bytes.size() + 1);
    std::vector<double>& mine = pool.values_[name];
    mine.resize(count);
    if (count > 0) std::memcpy(mine.data(), values.data(), values.size());
  }
  return pool;
}

}  // namespace prl::trainer
