#include "dashboard/svg_chart.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "dashboard/chart_frame.hpp"
#include "io/json_text.hpp"

namespace prl::dashboard {
namespace {

std::string hex_of(const LineStyle& style) { return fmt::format("#{:02x}{:02x}{:02x}", style.red, style.green, style.blue); }

void draw_axes(std::string& out, const ChartFrame& f) {
  const auto to = std::back_inserter(out);
  for (const double tick : nice_ticks(f.y_low, f.y_high, 5)) {
    const double y = f.y_of_scaled(tick);
    fmt::format_to(to, "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>", f.left, y, f.left + f.width, y);
    fmt::format_to(to, "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\" font-size=\"11\" fill=\"#444\">{:.4g}</text>", f.left - 6,
                   y + 4, f.has_log_scale ? std::pow(10.0, tick) : tick);
  }
  for (const double tick : nice_ticks(f.x_low, f.x_high, 8)) {
    if (tick != std::floor(tick)) continue;  // steps are whole
    fmt::format_to(to, "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\" font-size=\"11\" fill=\"#444\">{:.0f}</text>", f.x(tick),
                   f.top + f.height + 16, tick);
  }
  fmt::format_to(to, "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" stroke=\"#999\"/>", f.left, f.top,
                 f.width, f.height);
}

void draw_line(std::string& out, const ChartLine& line, const ChartFrame& f, std::size_t number) {
  const auto to = std::back_inserter(out);
  const LineStyle style = line_style(number);
  std::size_t num_points = 0;
  std::string path;
  bool is_open = false;
  for (std::size_t i = 0; i < line.steps.size(); ++i) {
    if (!f.can_show(line.values[i])) {
      is_open = false;
      continue;
    }
    fmt::format_to(std::back_inserter(path), "{}{:.1f} {:.1f}", is_open ? "L" : "M", f.x(static_cast<double>(line.steps[i])),
                   f.y(line.values[i]));
    is_open = true;
    ++num_points;
  }
  if (num_points == 1) path += "h.1";  // one point: a dot, by the round cap
  fmt::format_to(to, "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\" stroke-linecap=\"round\"",
                 path, hex_of(style), num_points == 1 ? 6 : 2);
  if (!style.dashes.empty()) fmt::format_to(to, " stroke-dasharray=\"{}\"", fmt::join(style.dashes, " "));
  out += "/>";
}

}  // namespace

std::string escape_markup(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: {
        const auto byte = static_cast<unsigned char>(c);
        const bool is_control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f;
        if (is_control)
          out += "\xEF\xBF\xBD";
        else
          out += c;
      }
    }
  }
  if (io::is_utf8(out)) return out;
  std::string clean;
  for (std::size_t i = 0; i < out.size();) {
    const auto lead = static_cast<unsigned char>(out[i]);
    const std::size_t size = lead < 0x80 ? 1 : lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (io::is_utf8(std::string_view(out).substr(i, size))) {
      clean += std::string_view(out).substr(i, size);
      i += size;
    } else {
      clean += "\xEF\xBF\xBD";
      ++i;
    }
  }
  return clean;
}

std::vector<double> smooth(const std::vector<double>& values, double smoothing) {
  std::vector<double> out;
  double sum = 0, weight = 0;
  for (const double value : values) {
    sum = smoothing * sum + value;
    weight = smoothing * weight + 1;
    out.push_back(sum / weight);
  }
  return out;
}

std::vector<double> nice_ticks(double low, double high, int count) {
  std::vector<double> ticks;
  if (!(high > low) || !std::isfinite(high - low) || count < 1) return ticks;
  const double rough = (high - low) / count, power = std::pow(10.0, std::floor(std::log10(rough)));
  double width = power;
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    width = factor * power;
    if (width >= rough) break;
  }
  for (double at = std::ceil(low / width); at * width <= high && ticks.size() < 100; ++at) ticks.push_back(at * width);
  return ticks;
}

std::string draw_chart(const Chart& chart, int top) {
  const int legend = legend_height(chart);
  const ChartFrame frame = frame_of(chart);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" y=\"{}\" width=\"{}\" height=\"{}\" viewBox=\"0 0 {} {}\" role=\"img\" "
      "font-family=\"system-ui,sans-serif\"><title>{}</title><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>",
      top, chart.width, chart.height, chart.width, chart.height, escape_markup(chart.title));
  fmt::format_to(std::back_inserter(out), "<text x=\"{}\" y=\"22\" font-size=\"15\" fill=\"#111\">{}</text>", kChartLeft,
                 escape_markup(chart.title));
  draw_axes(out, frame);
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    draw_line(out, chart.lines[i], frame, i);
    if (legend == 0) continue;
    const int y = chart.height - legend + static_cast<int>(i) * kLegendRow + 8;
    fmt::format_to(std::back_inserter(out),
                   "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{}\" stroke-width=\"2.5\" stroke-dasharray=\"{}\"/>", kChartLeft,
                   y, kChartLeft + 34, y, hex_of(line_style(i)), fmt::join(line_style(i).dashes, " "));
    fmt::format_to(std::back_inserter(out), "<text x=\"{}\" y=\"{}\" font-size=\"12\" fill=\"#222\">{}</text>", kChartLeft + 42, y + 4,
                   escape_markup(chart.lines[i].name));
  }
  return out + "</svg>";
}

std::string svg_file(const std::vector<Chart>& charts) {
  int width = 1, height = 0;
  std::string inside;
  for (const Chart& chart : charts) {
    inside += draw_chart(chart, height) + "\n";
    width = std::max(width, chart.width);
    height += chart.height;
  }
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 "
      "{0} "
      "{1}\">\n{2}</svg>\n",
      width, std::max(height, 1), inside);
}

}  // namespace prl::dashboard
