#include "dashboard/svg_chart.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "io/json_text.hpp"

namespace prl::dashboard {
namespace {

constexpr int kLeft = 70, kRight = 20, kTop = 34, kAxis = 26, kLegendRow = 18;
/// Eight colours that people with colour blindness tell apart (Okabe and Ito, 2008), the yellow darkened for a white ground.
constexpr const char* kColors[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#444444", "#a00000"};
constexpr const char* kDashes[] = {"", "7 4", "2 3", "9 3 2 3"};

/// What is drawn: a range of steps and of values, and how they lie on the picture.
struct Frame {
  double x_low = 0, x_high = 1, y_low = 0, y_high = 1;
  double left = 0, top = 0, width = 1, height = 1;
  bool has_log_scale = false;
  double x(double step) const { return left + (step - x_low) / (x_high - x_low) * width; }
  double y(double value) const {
    const double v = has_log_scale ? std::log10(value) : value;
    return top + height - (v - y_low) / (y_high - y_low) * height;
  }
  bool can_show(double value) const { return std::isfinite(value) && (!has_log_scale || value > 0); }
};

Frame frame_of(const Chart& chart, int legend_height) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Frame frame{.x_low = kInfinity, .x_high = -kInfinity, .y_low = kInfinity, .y_high = -kInfinity};
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
  frame.left = kLeft;
  frame.top = kTop;
  frame.width = std::max(10, chart.width - kLeft - kRight);
  frame.height = std::max(10, chart.height - kTop - kAxis - legend_height);
  return frame;
}

void draw_axes(std::string& out, const Frame& f) {
  const auto to = std::back_inserter(out);
  for (const double tick : nice_ticks(f.y_low, f.y_high, 5)) {
    const double y = f.top + f.height - (tick - f.y_low) / (f.y_high - f.y_low) * f.height;
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

void draw_line(std::string& out, const ChartLine& line, const Frame& f, std::size_t number) {
  const auto to = std::back_inserter(out);
  const char* const color = kColors[number % std::size(kColors)];
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
                 path, color, num_points == 1 ? 6 : 2);
  if (const char* const dashes = kDashes[number % std::size(kDashes)]; *dashes != '\0')
    fmt::format_to(to, " stroke-dasharray=\"{}\"", dashes);
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
  const int legend_height = chart.lines.size() > 1 ? static_cast<int>(chart.lines.size()) * kLegendRow : 0;
  const Frame frame = frame_of(chart, legend_height);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" y=\"{}\" width=\"{}\" height=\"{}\" viewBox=\"0 0 {} {}\" role=\"img\" "
      "font-family=\"system-ui,sans-serif\"><title>{}</title><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>",
      top, chart.width, chart.height, chart.width, chart.height, escape_markup(chart.title));
  fmt::format_to(std::back_inserter(out), "<text x=\"{}\" y=\"22\" font-size=\"15\" fill=\"#111\">{}</text>", kLeft,
                 escape_markup(chart.title));
  draw_axes(out, frame);
  for (std::size_t i = 0; i < chart.lines.size(); ++i) {
    draw_line(out, chart.lines[i], frame, i);
    if (legend_height == 0) continue;
    const int y = chart.height - legend_height + static_cast<int>(i) * kLegendRow + 8;
    fmt::format_to(std::back_inserter(out),
                   "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"{}\" stroke-width=\"2.5\" stroke-dasharray=\"{}\"/>", kLeft, y,
                   kLeft + 34, y, kColors[i % std::size(kColors)], kDashes[i % std::size(kDashes)]);
    fmt::format_to(std::back_inserter(out), "<text x=\"{}\" y=\"{}\" font-size=\"12\" fill=\"#222\">{}</text>", kLeft + 42, y + 4,
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
