#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace prl::dashboard {

struct ChartLine {
  std::string name;
  std::vector<std::int64_t> steps;  ///< ascending
  std::vector<double> values;       ///< one per step
};
struct Chart {
  std::string title;
  std::vector<ChartLine> lines = {};
  bool has_log_scale = false;  ///< values of 0 and below are left out
  int width = 960, height = 420;
};

/// The chart as an <svg> element, `top` pixels down in the one around it. Lines differ in colour and in dashes.
std::string draw_chart(const Chart& chart, int top = 0);
/// Charts below each other as a file.
std::string svg_file(const std::vector<Chart>& charts);

/// Debiased exponential mean: each value is the weighted mean of those up to it, weight `smoothing` per step back.
std::vector<double> smooth(const std::vector<double>& values, double smoothing);
/// Round numbers that divide [low, high] into about `count` parts.
std::vector<double> nice_ticks(double low, double high, int count);
/// Text safe in HTML and SVG, content and quoted attributes; control characters and ill-formed UTF-8 become U+FFFD.
std::string escape_markup(std::string_view text);

}  // namespace prl::dashboard
