#include "dashboard/chart_frame.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

namespace prl::dashboard {
namespace {

/// Eight colours that people with colour blindness tell apart (Okabe and Ito, 2008), the yellow darkened for a white ground.
constexpr unsigned kColors[] = {0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0x56b4e9, 0xb8860b, 0x444444, 0xa00000};

}  // namespace

int legend_height(const Chart& chart) { return chart.lines.size() > 1 ? static_cast<int>(chart.lines.size()) * kLegendRow : 0; }

LineStyle line_style(std::size_t number) {
  static const std::vector<double> kDashes[] = {{}, {7, 4}, {2, 3}, {9, 3, 2, 3}};
  const unsigned color = kColors[number % std::size(kColors)];
  return {static_cast<unsigned char>(color >> 16), static_cast<unsigned char>(color >> 8), static_cast<unsigned char>(color),
          kDashes[number % std::size(kDashes)]};
}

ChartFrame frame_of(const Chart& chart) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ChartFrame frame{.x_low = kInfinity, .x_high = -kInfinity, .y_low = kInfinity, .y_high = -kInfinity};
  frame.has_log_scale = chart.has_log_scale;
  for (const ChartLine& line : chart.lines)
    for (std::size_t i = 0; i < line.steps.size(); ++i) {
      if (!frame.can_show(line.values[i])) continue;
      const double v = chart.has_log_scale ? std::log10(line.values[i]) : line.values[i];
      const auto step = static_cast<double>(line.steps[i]);
      frame.x_low = std::min(frame.x_low, step);
      frame.x_high = std::max(frame.x_high, step);
      frame.y_low = std::min(frame.y_low, v);
      frame.y_high = std::max(frame.y_high, v);
    }
  if (frame.x_low > frame.x_high) frame.x_low = frame.y_low = 0, frame.x_high = frame.y_high = 1;
  if (frame.x_low == frame.x_high) frame.x_high = frame.x_low + 1;
  const double room = frame.y_high > frame.y_low ? 0.05 * (frame.y_high - frame.y_low) : std::max(1e-12, 0.05 * std::abs(frame.y_high));
  frame.y_low -= room;
  frame.y_high += room;
  frame.left = kChartLeft;
  frame.top = kChartTop;
  frame.width = std::max(10, chart.width - kChartLeft - kChartRight);
  frame.height = std::max(10, chart.height - kChartTop - kChartAxis - legend_height(chart));
  return frame;
}

}  // namespace prl::dashboard
