#include "dashboard/series_store.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace prl::dashboard {

void Series::add(std::int64_t step, double value) {
  if (!steps_.empty() && step <= steps_.back()) {
    if (step == steps_.back() && is_settled_) {
      values_.back() = value;
      return;
    }
    is_settled_ = false;
  }
  steps_.push_back(step);
  values_.push_back(value);
}

void Series::settle() {
  if (is_settled_) return;
  std::vector<std::size_t> order(steps_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return steps_[a] < steps_[b]; });
  std::vector<std::int64_t> steps;
  std::vector<double> values;
  for (const std::size_t i : order) {
    if (!steps.empty() && steps.back() == steps_[i]) {
      values.back() = values_[i];
    } else {
      steps.push_back(steps_[i]);
      values.push_back(values_[i]);
    }
  }
  steps_ = std::move(steps);
  values_ = std::move(values);
  is_settled_ = true;
}

void Series::thin() {
  settle();
  std::size_t kept = 0;
  // From the end, so that the newest point stays.
  for (std::size_t i = (steps_.size() + 1) % 2; i < steps_.size(); i += 2, ++kept) {
    steps_[kept] = steps_[i];
    values_[kept] = values_[i];
  }
  steps_.resize(kept);
  values_.resize(kept);
  steps_.shrink_to_fit();
  values_.shrink_to_fit();
}

Curve sample_curve(const Series& series, std::int64_t from, std::int64_t to, std::size_t max_points) {
  const auto steps = series.steps();
  const auto begin = static_cast<std::size_t>(std::lower_bound(steps.begin(), steps.end(), from) - steps.begin());
  const auto end = static_cast<std::size_t>(std::upper_bound(steps.begin(), steps.end(), to) - steps.begin());
  Curve curve;
  if (begin >= end || max_points == 0) return curve;
  const std::size_t count = end - begin, buckets = std::min(count, max_points);
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    const std::size_t first = begin + bucket * count / buckets, last = begin + (bucket + 1) * count / buckets;
    double sum = 0, low = series.values()[first], high = low;
    for (std::size_t i = first; i < last; ++i) {
      const double value = series.values()[i];
      sum += value;
      low = std::min(low, value);
      high = std::max(high, value);
    }
    curve.steps.push_back(steps[last - 1]);
    curve.mean.push_back(sum / static_cast<double>(last - first));
    curve.min.push_back(low);
    curve.max.push_back(high);
  }
  return curve;
}

SeriesStore::SeriesStore(std::filesystem::path path, Limits limits)
    : reader_(std::move(path)), limits_(limits), scanner_([this](std::string_view section, std::string_view key, const Scalar& value) {
        if (!section.empty()) return;
        if (value.kind == Scalar::Kind::kText) {
          if (key == "role") row_role_ = value.text;
        } else if (value.kind == Scalar::Kind::kNumber && std::isfinite(value.number)) {
          if (key == "step")
            row_step_ = value.number;
          else if (key == "time")
            row_time_ = value.number;
          else
            row_values_.emplace_back(key, value.number);
        }
      }) {}

void SeriesStore::restart() {
  series_.clear();
  times_.clear();
  kept_.clear();
  num_rows_ = num_damaged_ = num_thinned_ = 0;
  num_points_ = 0;
  last_time_ = 0;
  last_step_ = -1;
  has_too_many_keys_ = false;
  ++generation_;
  end_row(false);
  num_damaged_ = 0;
}

/// Takes over the row that was scanned, or forgets it.
void SeriesStore::end_row(bool is_whole) {
  constexpr double kMaxStep = 9e15;  // whole numbers up to it are exact
  if (is_whole && row_step_ >= 0 && row_step_ <= kMaxStep && row_role_.size() < MemberScanner::kMaxText) {
    const auto step = static_cast<std::int64_t>(row_step_);
    for (const auto& [name, value] : row_values_) {
      auto found = series_.find({row_role_, name});
      if (found == series_.end()) {
        if (series_.size() >= limits_.max_series) {
          has_too_many_keys_ = true;
          continue;
        }
        found = series_.try_emplace({row_role_, name}).first;
      }
      found->second.add(step, value);
      ++num_points_;
    }
    if (times_.contains(row_role_) || times_.size() < limits_.max_series) times_[row_role_].add(step, row_time_);
    last_time_ = std::max(last_time_, row_time_);
    last_step_ = std::max(last_step_, step);
    kept_.push_back({++num_rows_, std::move(row_text_)});
    if (kept_.size() > limits_.max_kept_rows) kept_.pop_front();
  } else {
    ++num_damaged_;
  }
  row_text_.clear();
  row_role_.clear();
  row_values_.clear();
  row_step_ = -1;
  row_time_ = 0;
  scanner_.begin();
}

void SeriesStore::settle() {
  num_points_ = 0;
  for (auto& [key, series] : series_) {
    series.settle();
    num_points_ += series.size();
  }
  for (auto& [role, series] : times_) series.settle();
}

void SeriesStore::thin() {
  while (num_points_ > limits_.max_points) {
    for (auto& [key, series] : series_) series.thin();
    for (auto& [role, series] : times_) series.thin();
    const std::size_t before = num_points_;
    settle();
    ++num_thinned_;
    ++generation_;
    if (num_points_ == before) break;
  }
}

bool SeriesStore::read(std::uint64_t max_bytes) {
  scanner_.begin();
  LineReader::Sink sink;
  sink.restart = [this] { restart(); };
  sink.piece = [this](std::string_view piece) {
    if (row_text_.size() + piece.size() <= limits_.max_row_bytes) row_text_ += piece;
  };
  sink.end_line = [this](std::uint64_t, std::uint64_t num_bytes) {
    if (num_bytes == 0) return;
    const bool fits = num_bytes == row_text_.size();
    const bool is_whole = fits && scanner_.feed(row_text_) && scanner_.end();
    end_row(is_whole);
    // Between two rows, so that no call holds much more than the limit.
    if (num_points_ > limits_.max_points) {
      settle();
      thin();
    }
  };
  const bool has_more = reader_.read(sink, max_bytes);
  settle();
  return has_more;
}

const Series* SeriesStore::find(std::string_view role, std::string_view name) const {
  const auto found = series_.find({std::string(role), std::string(name)});
  return found == series_.end() ? nullptr : &found->second;
}

}  // namespace prl::dashboard
