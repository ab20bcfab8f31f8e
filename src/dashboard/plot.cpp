#include "dashboard/plot.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <set>

#include "base/error.hpp"
#include "dashboard/png_chart.hpp"
#include "dashboard/run_view.hpp"
#include "dashboard/svg_chart.hpp"

namespace prl::dashboard {
namespace fs = std::filesystem;
namespace {

/// Points of a line: more than a picture has pixels.
constexpr std::size_t kMaxPoints = 4000;

[[noreturn]] void fail_unknown(const std::vector<std::unique_ptr<RunView>>& runs, const std::string& name) {
  std::set<std::string> near, means, all;
  for (const auto& run : runs)
    for (const auto& [key, series] : run->series_store().all()) {
      if (key.name.find(name.substr(name.find(':') + 1)) != std::string::npos) near.insert(key.name);
      if (key.name.ends_with("/mean") && key.name.find("/all/") != std::string::npos) means.insert(key.name);
      all.insert(key.name);
    }
  constexpr std::size_t kMaxNames = 12;
  const std::set<std::string>& shown = !near.empty() ? near : !means.empty() ? means : all;
  if (shown.empty()) fail(ErrorCode::kNotFound, "no run has the metric '{}': there are no steps yet", name);
  const std::vector<std::string> names(shown.begin(),
                                       std::next(shown.begin(), static_cast<std::ptrdiff_t>(std::min(shown.size(), kMaxNames))));
  fail(ErrorCode::kNotFound, "no run has the metric '{}'; there are, among others: {}", name, fmt::join(names, ", "));
}

void check_pixels(const std::vector<Chart>& charts) {
  constexpr std::int64_t kMaxPixels = 100'000'000;
  std::int64_t height = 0, width = 0;
  for (const Chart& chart : charts) {
    height += chart.height;
    width = std::max<std::int64_t>(width, chart.width);
  }
  if (width * height > kMaxPixels)
    fail(ErrorCode::kInvalidArgument, "out: a picture of {} x {} pixels is too large: lower width, height or the number of metrics", width,
         height);
}

}  // namespace

std::vector<SeriesStore::Key> find_metric(const SeriesStore& store, const std::string& name) {
  const std::size_t colon = name.find(':');
  const std::string role = colon == std::string::npos ? "" : name.substr(0, colon),
                    key = name.substr(colon == std::string::npos ? 0 : colon + 1);
  for (const std::string& wanted : {key, key + "/all/mean", key + "/mean", key + "/all"}) {
    std::vector<SeriesStore::Key> found;
    for (const auto& [known, series] : store.all())
      if (known.name == wanted && (role.empty() || known.role == role)) found.push_back(known);
    if (!found.empty()) return found;
  }
  return {};
}

std::string plot_runs(const std::vector<fs::path>& folders, const PlotOptions& options) {
  std::vector<std::unique_ptr<RunView>> runs;
  for (const fs::path& folder : folders) {
    runs.push_back(std::make_unique<RunView>(folder, folder.lexically_normal().string()));
    runs.back()->read_metrics();
  }
  std::vector<Chart> charts;
  for (const std::string& name : options.metrics) {
    Chart chart{.title = name, .has_log_scale = options.has_log_scale, .width = options.width, .height = options.height};
    for (const auto& run : runs) {
      const auto keys = find_metric(run->series_store(), name);
      for (const SeriesStore::Key& key : keys) {
        const Series& series = *run->series_store().find(key.role, key.name);
        Curve curve = sample_curve(series, options.from_step.value_or(0),
                                   options.to_step.value_or(std::numeric_limits<std::int64_t>::max()), kMaxPoints);
        if (runs.size() == 1) chart.title = key.name;
        std::string label = keys.size() > 1 ? fmt::format("{}: {}", run->name(), key.role) : run->name();
        chart.lines.push_back(
            {std::move(label), std::move(curve.steps), options.smoothing > 0 ? smooth(curve.mean, options.smoothing) : curve.mean});
      }
    }
    if (chart.lines.empty()) fail_unknown(runs, name);
    charts.push_back(std::move(chart));
  }
  if (!options.is_png) return svg_file(charts);
  check_pixels(charts);
  return to_png(draw_picture(charts));
}

}  // namespace prl::dashboard
