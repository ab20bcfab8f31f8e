#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dashboard/line_reader.hpp"
#include "dashboard/member_scanner.hpp"

namespace prl::dashboard {

/// One metric of one role over the steps of a run: steps ascend, each once; of a step logged again the later row counts.
class Series {
 public:
  void add(std::int64_t step, double value);
  /// Sorts what came out of order. Readers call it before they look.
  void settle();
  std::size_t size() const noexcept { return steps_.size(); }
  std::span<const std::int64_t> steps() const noexcept { return steps_; }
  std::span<const double> values() const noexcept { return values_; }
  /// Drops every second point.
  void thin();

 private:
  std::vector<std::int64_t> steps_;
  std::vector<double> values_;
  bool is_settled_ = true;
};

/// Points of a chart: one per bucket of neighbouring steps.
struct Curve {
  std::vector<std::int64_t> steps;  ///< the last of the bucket
  std::vector<double> mean, min, max;
};
/// At most `max_points` buckets of the steps in [from, to].
Curve sample_curve(const Series& series, std::int64_t from, std::int64_t to, std::size_t max_points);

/// The rows of metrics.jsonl by role and key, read as the file grows. Memory is bounded: beyond `max_points` each series loses every
/// second point. One thread at a time.
class SeriesStore {
 public:
  struct Limits {
    std::size_t max_points = 4'000'000;
    std::size_t max_series = 8192;
    std::size_t max_row_bytes = 4 << 20;
    std::size_t max_kept_rows = 64;  ///< the newest ones as text, for readers that follow
  };
  struct Key {
    std::string role, name;
    auto operator<=>(const Key&) const = default;
  };
  struct KeptRow {
    std::uint64_t number = 0;  ///< of the row, from 1
    std::string text;          ///< as in the file, and valid JSON
  };

  explicit SeriesStore(std::filesystem::path path) : SeriesStore(std::move(path), Limits()) {}
  SeriesStore(std::filesystem::path path, Limits limits);
  /// As LineReader::read.
  bool read(std::uint64_t max_bytes);
  const std::filesystem::path& path() const noexcept { return reader_.path(); }

  const std::map<Key, Series>& all() const noexcept { return series_; }
  const Series* find(std::string_view role, std::string_view name) const;
  /// Unix time by step, per role.
  const std::map<std::string, Series>& times() const noexcept { return times_; }
  const std::deque<KeptRow>& kept_rows() const noexcept { return kept_; }
  std::uint64_t num_rows() const noexcept { return num_rows_; }
  std::uint64_t num_damaged() const noexcept { return num_damaged_; }
  std::size_t num_points() const noexcept { return num_points_; }
  /// Changes when the file was replaced or points were dropped: what was told before no longer holds.
  std::uint64_t generation() const noexcept { return generation_; }
  bool is_thinned() const noexcept { return num_thinned_ > 0; }
  bool has_too_many_keys() const noexcept { return has_too_many_keys_; }
  double last_time() const noexcept { return last_time_; }
  std::int64_t last_step() const noexcept { return last_step_; }

 private:
  void restart();
  void end_row(bool is_whole);
  void settle();
  void thin();

  LineReader reader_;
  const Limits limits_;
  MemberScanner scanner_;
  std::map<Key, Series> series_;
  std::map<std::string, Series> times_;
  std::deque<KeptRow> kept_;
  std::string row_text_;
  std::string row_role_;
  double row_step_ = -1, row_time_ = 0;
  std::vector<std::pair<std::string, double>> row_values_;
  std::uint64_t num_rows_ = 0, num_damaged_ = 0, generation_ = 1, num_thinned_ = 0;
  std::size_t num_points_ = 0;
  double last_time_ = 0;
  std::int64_t last_step_ = -1;
  bool has_too_many_keys_ = false;
};

}  // namespace prl::dashboard
