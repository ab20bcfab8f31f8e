#pragma once

#include <cmath>

#include "dashboard/svg_chart.hpp"

/// What pictures of a chart have in common, whatever they are drawn with.
namespace prl::dashboard {

inline constexpr int kChartLeft = 70, kChartRight = 20, kChartTop = 34, kChartAxis = 26, kLegendRow = 18;

/// A range of steps and of values, and how they lie on the picture, in pixels.
struct ChartFrame {
  double x_low = 0, x_high = 1, y_low = 0, y_high = 1;  ///< y: logarithms to base 10 with has_log_scale
  double left = 0, top = 0, width = 1, height = 1;
  bool has_log_scale = false;
  double x(double step) const { return left + (step - x_low) / (x_high - x_low) * width; }
  double y_of_scaled(double value) const { return top + height - (value - y_low) / (y_high - y_low) * height; }
  double y(double value) const { return y_of_scaled(has_log_scale ? std::log10(value) : value); }
  bool can_show(double value) const { return std::isfinite(value) && (!has_log_scale || value > 0); }
};

/// Below the axis, for a line per curve where there are several.
int legend_height(const Chart& chart);
ChartFrame frame_of(const Chart& chart);

/// Colour and dashes of curve `number`: lengths of line and gap in turn, empty for a full line.
struct LineStyle {
  unsigned char red = 0, green = 0, blue = 0;
  std::vector<double> dashes;
};
LineStyle line_style(std::size_t number);

}  // namespace prl::dashboard
