#include "dashboard/terminal.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include "dashboard/log_view.hpp"
#include "dashboard/plot.hpp"
#include "text/utf8.hpp"

namespace prl::dashboard {
namespace {

constexpr std::size_t kNameColumns = 34, kValueColumns = 11, kMinCurveColumns = 8;
constexpr std::size_t kMaxWarnings = 6;
/// Steps whose pace gives the time that is left.
constexpr std::size_t kPaceSteps = 20;
constexpr std::string_view kBold = "\x1b[1m", kDim = "\x1b[2m", kYellow = "\x1b[33m", kPlain = "\x1b[0m";

/// The pipeline, below what people look at first.
constexpr const char* kPipelineMetrics[] = {"scheduler/inflight_rollouts", "scheduler/async_level", "scheduler/policy_version",
                                            "scheduler/cancelled_rollouts", "system/ckpt_disk_free_gib"};

/// The first `columns` characters of one line of text, none of which moves the cursor.
std::string cell(std::string_view bytes, std::size_t columns) {
  const std::string text = text::replace_invalid_utf8(bytes);
  std::string out;
  std::size_t used = 0;
  for (std::size_t at = 0; at < text.size() && used < columns; ++used) {
    const char32_t c = text::next_code_point(text, at);
    const bool is_control = c < 0x20 || (c >= 0x7f && c < 0xa0) || c == 0x2028 || c == 0x2029 || (c >= 0x202a && c <= 0x202e);
    text::append_code_point(out, is_control ? U'?' : c);
  }
  return out;
}

std::string padded(std::string_view text, std::size_t columns) {
  std::string out = cell(text, columns);
  out.append(columns - std::min(columns, text::count_code_points(out)), ' ');
  return out;
}

std::string number(double value) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const double size = std::abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return fmt::format("{:.2e}", value);
  if (size >= 1000 || value == std::floor(value)) return fmt::format("{:.0f}", value);
  return fmt::format("{:.4f}", value);
}

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::max(0.0, seconds) + 0.5);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{}m {:02}s", s / 60, s % 60);
  return fmt::format("{}h {:02}m", s / 3600, s / 60 % 60);
}

/// Seconds a step took lately, by the times of the role that has the newest one; 0 if that cannot be said.
double seconds_per_step(const SeriesStore& store) {
  const Series* newest = nullptr;
  for (const auto& [role, times] : store.times())
    if (times.size() > 1 && (newest == nullptr || times.steps().back() > newest->steps().back())) newest = &times;
  if (newest == nullptr) return 0;
  const std::size_t last = newest->size() - 1, first = last - std::min(last, kPaceSteps);
  const auto num_steps = static_cast<double>(newest->steps()[last] - newest->steps()[first]);
  const double seconds = newest->values()[last] - newest->values()[first];
  return num_steps > 0 && seconds > 0 ? seconds / num_steps : 0;
}

class Screen {
 public:
  explicit Screen(const TerminalOptions& options) : options_(options) {}

  bool is_full() const { return num_lines_ >= options_.rows; }
  void line(std::string_view text, std::string_view style = {}) {
    if (is_full()) return;
    ++num_lines_;
    const bool is_styled = options_.has_color && !style.empty();
    if (is_styled) out_ += style;
    out_ += cell(text, options_.columns);
    if (is_styled) out_ += kPlain;
    out_ += '\n';
  }
  std::string take() { return std::move(out_); }

 private:
  const TerminalOptions& options_;
  std::string out_;
  std::size_t num_lines_ = 0;
};

void draw_head(Screen& frame, const RunView& run, const TerminalOptions& options) {
  const SeriesStore& store = run.series_store();
  const RunView::Head head = run.head();
  const std::int64_t step = std::max<std::int64_t>(store.last_step(), 0);
  std::string line = fmt::format("{}  {}  step {}", run.name(), head.command.empty() ? "run" : head.command, step);
  const double pace = seconds_per_step(store);
  if (head.max_steps > 0) {
    const double share = std::min(1.0, static_cast<double>(step) / static_cast<double>(head.max_steps));
    line += fmt::format(" of {} ({:.0f}%)", head.max_steps, 100 * share);
    if (step >= head.max_steps)
      line += "  finished";
    else if (pace > 0)
      line += "  ETA " + duration(pace * static_cast<double>(head.max_steps - step));
  }
  if (pace > 0) line += fmt::format("  {:.2f} s a step", pace);
  if (options.now > 0 && store.last_time() > 0) line += "  updated " + duration(options.now - store.last_time()) + " ago";
  frame.line(line, kBold);
  if (store.num_damaged() > 0) frame.line(fmt::format("{} rows of the metrics are damaged", store.num_damaged()), kYellow);
}

void draw_metrics(Screen& frame, const SeriesStore& store, const TerminalOptions& options, std::span<const std::string> names,
                  std::set<SeriesStore::Key>& shown) {
  const std::size_t fixed = kNameColumns + 3 * (kValueColumns + 1) + 1;
  const std::size_t width = std::max(options.columns > fixed ? options.columns - fixed : 0, kMinCurveColumns);
  for (const std::string& name : names)
    for (const SeriesStore::Key& key : find_metric(store, name)) {
      if (frame.is_full() || !shown.insert(key).second) continue;
      const Curve curve = sample_curve(*store.find(key.role, key.name), 0, std::numeric_limits<std::int64_t>::max(), 4 * width);
      if (curve.mean.empty()) continue;
      const double low = *std::min_element(curve.min.begin(), curve.min.end()),
                   high = *std::max_element(curve.max.begin(), curve.max.end());
      const Series& series = *store.find(key.role, key.name);
      frame.line(fmt::format("{} {:>{}} {:>{}} {:>{}}  {}", padded(key.name + " (" + key.role + ")", kNameColumns),
                             number(series.values().back()), kValueColumns, number(low), kValueColumns, number(high), kValueColumns,
                             sparkline(curve.mean, width, options.has_unicode)));
    }
}

void draw_warnings(Screen& frame, const std::filesystem::path& folder) {
  std::vector<std::pair<std::string, LogLine>> found;
  for (const std::filesystem::path& file : list_newest_logs(folder / "logs")) {
    LogQuery query;
    query.min_level = 3;
    query.max_lines = kMaxWarnings;
    for (LogLine& line : read_log(folder / "logs" / file, query).lines) found.emplace_back(file.stem().string(), std::move(line));
  }
  if (found.empty()) return;
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.second.time < b.second.time; });
  frame.line("");
  frame.line("newest warnings and errors", kDim);
  for (std::size_t i = found.size() - std::min(found.size(), kMaxWarnings); i < found.size(); ++i) {
    const auto& [file, line] = found[i];
    frame.line(fmt::format("{} {} {}: {}", line.time, level_name(line.level), file, line.text), kYellow);
  }
}

}  // namespace

std::string sparkline(std::span<const double> values, std::size_t width, bool has_unicode) {
  static constexpr std::string_view kAscii = "_.-~=+*#";
  std::vector<double> means;
  const std::size_t count = std::min(values.size(), width);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = i * values.size() / count, end = (i + 1) * values.size() / count;
    double sum = 0;
    for (std::size_t k = begin; k < end; ++k) sum += values[k];
    means.push_back(sum / static_cast<double>(end - begin));
  }
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const double mean : means)
    if (std::isfinite(mean)) low = std::min(low, mean), high = std::max(high, mean);
  std::string out;
  for (const double mean : means) {
    if (!std::isfinite(mean)) {
      out += '!';
      continue;
    }
    const auto level = high > low ? static_cast<std::size_t>(std::min(7.0, (mean - low) / (high - low) * 8)) : std::size_t{3};
    if (has_unicode)
      text::append_code_point(out, static_cast<char32_t>(0x2581 + level));
    else
      out += kAscii[level];
  }
  return out;
}

std::string draw_run(const RunView& run, const TerminalOptions& options) {
  Screen frame(options);
  const SeriesStore& store = run.series_store();
  draw_head(frame, run, options);
  if (store.num_rows() == 0) {
    frame.line("no step has been recorded yet");
  } else {
    frame.line(fmt::format("{} {:>{}} {:>{}} {:>{}}  {}", padded("metric", kNameColumns), "newest", kValueColumns, "lowest", kValueColumns,
                           "highest", kValueColumns, "all steps"),
               kDim);
    std::set<SeriesStore::Key> shown;
    draw_metrics(frame, store, options, options.metrics, shown);
    const std::vector<std::string> first(std::begin(kFirstMetrics), std::end(kFirstMetrics));
    draw_metrics(frame, store, options, first, shown);
    const std::vector<std::string> pipeline(std::begin(kPipelineMetrics), std::end(kPipelineMetrics));
    draw_metrics(frame, store, options, pipeline, shown);
  }
  draw_warnings(frame, run.folder());
  return frame.take();
}

}  // namespace prl::dashboard
