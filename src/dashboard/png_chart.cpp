#include "dashboard/png_chart.hpp"

#include <fmt/core.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "dashboard/chart_frame.hpp"

namespace prl::dashboard {
namespace {

/// Characters 0x20 to 0x7e as five columns of eight rows, the lowest bit on top; the eighth row is for descenders.
constexpr std::uint8_t kGlyphs[95][5] = {
    {0x00, 0x00, 0x00, 0x00, 0x00}, {0x00, 0x00, 0x5f, 0x00, 0x00}, {0x00, 0x07, 0x00, 0x07, 0x00}, {0x14, 0x7f, 0x14, 0x7f, 0x14},
    {0x24, 0x2a, 0x7f, 0x2a, 0x12}, {0x23, 0x13, 0x08, 0x64, 0x62}, {0x36, 0x49, 0x56, 0x20, 0x50}, {0x00, 0x08, 0x07, 0x03, 0x00},
    {0x00, 0x1c, 0x22, 0x41, 0x00}, {0x00, 0x41, 0x22, 0x1c, 0x00}, {0x2a, 0x1c, 0x7f, 0x1c, 0x2a}, {0x08, 0x08, 0x3e, 0x08, 0x08},
    {0x00, 0x80, 0x70, 0x30, 0x00}, {0x08, 0x08, 0x08, 0x08, 0x08}, {0x00, 0x00, 0x60, 0x60, 0x00}, {0x20, 0x10, 0x08, 0x04, 0x02},
    {0x3e, 0x51, 0x49, 0x45, 0x3e}, {0x00, 0x42, 0x7f, 0x40, 0x00}, {0x72, 0x49, 0x49, 0x49, 0x46}, {0x21, 0x41, 0x49, 0x4d, 0x33},
    {0x18, 0x14, 0x12, 0x7f, 0x10}, {0x27, 0x45, 0x45, 0x45, 0x39}, {0x3c, 0x4a, 0x49, 0x49, 0x31}, {0x41, 0x21, 0x11, 0x09, 0x07},
    {0x36, 0x49, 0x49, 0x49, 0x36}, {0x46, 0x49, 0x49, 0x29, 0x1e}, {0x00, 0x00, 0x14, 0x00, 0x00}, {0x00, 0x40, 0x34, 0x00, 0x00},
    {0x00, 0x08, 0x14, 0x22, 0x41}, {0x14, 0x14, 0x14, 0x14, 0x14}, {0x00, 0x41, 0x22, 0x14, 0x08}, {0x02, 0x01, 0x59, 0x09, 0x06},
    {0x3e, 0x41, 0x5d, 0x59, 0x4e}, {0x7c, 0x12, 0x11, 0x12, 0x7c}, {0x7f, 0x49, 0x49, 0x49, 0x36}, {0x3e, 0x41, 0x41, 0x41, 0x22},
    {0x7f, 0x41, 0x41, 0x41, 0x3e}, {0x7f, 0x49, 0x49, 0x49, 0x41}, {0x7f, 0x09, 0x09, 0x09, 0x01}, {0x3e, 0x41, 0x41, 0x51, 0x73},
    {0x7f, 0x08, 0x08, 0x08, 0x7f}, {0x00, 0x41, 0x7f, 0x41, 0x00}, {0x20, 0x40, 0x41, 0x3f, 0x01}, {0x7f, 0x08, 0x14, 0x22, 0x41},
    {0x7f, 0x40, 0x40, 0x40, 0x40}, {0x7f, 0x02, 0x1c, 0x02, 0x7f}, {0x7f, 0x04, 0x08, 0x10, 0x7f}, {0x3e, 0x41, 0x41, 0x41, 0x3e},
    {0x7f, 0x09, 0x09, 0x09, 0x06}, {0x3e, 0x41, 0x51, 0x21, 0x5e}, {0x7f, 0x09, 0x19, 0x29, 0x46}, {0x26, 0x49, 0x49, 0x49, 0x32},
    {0x03, 0x01, 0x7f, 0x01, 0x03}, {0x3f, 0x40, 0x40, 0x40, 0x3f}, {0x1f, 0x20, 0x40, 0x20, 0x1f}, {0x3f, 0x40, 0x38, 0x40, 0x3f},
    {0x63, 0x14, 0x08, 0x14, 0x63}, {0x03, 0x04, 0x78, 0x04, 0x03}, {0x61, 0x59, 0x49, 0x4d, 0x43}, {0x00, 0x7f, 0x41, 0x41, 0x41},
    {0x02, 0x04, 0x08, 0x10, 0x20}, {0x00, 0x41, 0x41, 0x41, 0x7f}, {0x04, 0x02, 0x01, 0x02, 0x04}, {0x40, 0x40, 0x40, 0x40, 0x40},
    {0x00, 0x03, 0x07, 0x08, 0x00}, {0x20, 0x54, 0x54, 0x78, 0x40}, {0x7f, 0x28, 0x44, 0x44, 0x38}, {0x38, 0x44, 0x44, 0x44, 0x28},
    {0x38, 0x44, 0x44, 0x28, 0x7f}, {0x38, 0x54, 0x54, 0x54, 0x18}, {0x00, 0x08, 0x7e, 0x09, 0x02}, {0x18, 0xa4, 0xa4, 0x9c, 0x78},
    {0x7f, 0x08, 0x04, 0x04, 0x78}, {0x00, 0x44, 0x7d, 0x40, 0x00}, {0x20, 0x40, 0x40, 0x3d, 0x00}, {0x7f, 0x10, 0x28, 0x44, 0x00},
    {0x00, 0x41, 0x7f, 0x40, 0x00}, {0x7c, 0x04, 0x78, 0x04, 0x78}, {0x7c, 0x08, 0x04, 0x04, 0x78}, {0x38, 0x44, 0x44, 0x44, 0x38},
    {0xfc, 0x18, 0x24, 0x24, 0x18}, {0x18, 0x24, 0x24, 0x18, 0xfc}, {0x7c, 0x08, 0x04, 0x04, 0x08}, {0x48, 0x54, 0x54, 0x54, 0x24},
    {0x04, 0x04, 0x3f, 0x44, 0x24}, {0x3c, 0x40, 0x40, 0x20, 0x7c}, {0x1c, 0x20, 0x40, 0x20, 0x1c}, {0x3c, 0x40, 0x30, 0x40, 0x3c},
    {0x44, 0x28, 0x10, 0x28, 0x44}, {0x4c, 0x90, 0x90, 0x90, 0x7c}, {0x44, 0x64, 0x54, 0x4c, 0x44}, {0x00, 0x08, 0x36, 0x41, 0x00},
    {0x00, 0x00, 0x77, 0x00, 0x00}, {0x00, 0x41, 0x36, 0x08, 0x00}, {0x02, 0x01, 0x02, 0x04, 0x02}};
constexpr int kGlyphColumns = 5, kGlyphRows = 8, kGlyphWidth = 6;
constexpr double kTickSize = 1.35, kLegendSize = 1.5, kTitleSize = 1.9;  ///< pixels per dot of a glyph

struct Rgb {
  double red = 0, green = 0, blue = 0;
};

struct Point {
  double x = 0, y = 0;
};

enum class Anchor { kBegin, kMiddle, kEnd };

/// Draws into a picture with soft edges: a pixel takes as much of a colour as the shape covers of it.
class Canvas {
 public:
  Canvas(int width, int height) {
    picture_.width = width;
    picture_.height = height;
    picture_.pixels.assign(static_cast<std::size_t>(width) * static_cast<std::size_t>(height) * 3, 255);
    coverage_.assign(static_cast<std::size_t>(width) * static_cast<std::size_t>(height), 0.0f);
  }
  Picture take() { return std::move(picture_); }

  void rectangle(double left, double top, double right, double bottom, Rgb color) {
    for (int y = std::max(0, static_cast<int>(top)); y < std::min(picture_.height, static_cast<int>(std::ceil(bottom))); ++y)
      for (int x = std::max(0, static_cast<int>(left)); x < std::min(picture_.width, static_cast<int>(std::ceil(right))); ++x)
        mix(x, y, color, overlap(left, right, x) * overlap(top, bottom, y));
  }

  void text(Point at, std::string_view text, double size, Rgb color, Anchor anchor = Anchor::kBegin) {
    const double width = static_cast<double>(text.size()) * kGlyphWidth * size;
    double left = at.x - (anchor == Anchor::kMiddle ? width / 2 : anchor == Anchor::kEnd ? width : 0);
    const double top = at.y - (kGlyphRows - 1) * size;  // y is the base line, as in SVG
    for (const char c : text) {
      const auto& glyph = kGlyphs[c >= 0x20 && c < 0x7f ? c - 0x20 : '?' - 0x20];
      for (int column = 0; column < kGlyphColumns; ++column)
        for (int row = 0; row < kGlyphRows; ++row)
          if ((glyph[column] >> row & 1) != 0)
            rectangle(left + column * size, top + row * size, left + (column + 1) * size, top + (row + 1) * size, color);
      left += kGlyphWidth * size;
    }
  }

  /// A line through the points, with round ends and joints. Where it crosses itself it is no darker.
  void polyline(const std::vector<Point>& points, double width, Rgb color, const std::vector<double>& dashes = {}) {
    if (points.size() == 1) cover(points[0], points[0], width);
    Dashes pen(dashes);
    for (std::size_t i = 1; i < points.size(); ++i) {
      const Point a = points[i - 1], b = points[i];
      const double length = std::hypot(b.x - a.x, b.y - a.y);
      for (double done = 0; done < length;) {
        const double step = std::min(length - done, pen.left());
        const auto at = [&](double distance) {
          const double t = distance / length;
          return Point{a.x + t * (b.x - a.x), a.y + t * (b.y - a.y)};
        };
        if (pen.is_down()) cover(at(done), at(done + step), width);
        pen.advance(step);
        done += step;
      }
    }
    paint(color);
  }

 private:
  class Dashes {
   public:
    explicit Dashes(const std::vector<double>& lengths) : lengths_(lengths), left_(lengths.empty() ? HUGE_VAL : lengths[0]) {}
    double left() const { return left_; }
    bool is_down() const { return at_ % 2 == 0; }
    void advance(double distance) {
      left_ -= distance;
      if (left_ > 1e-9) return;
      at_ = (at_ + 1) % lengths_.size();
      left_ = lengths_[at_];
    }

   private:
    const std::vector<double>& lengths_;
    std::size_t at_ = 0;
    double left_;
  };

  static double overlap(double low, double high, int pixel) {
    return std::max(0.0, std::min(high, pixel + 1.0) - std::max(low, static_cast<double>(pixel)));
  }
  std::size_t index(int x, int y) const {
    return static_cast<std::size_t>(y) * static_cast<std::size_t>(picture_.width) + static_cast<std::size_t>(x);
  }
  void mix(int x, int y, Rgb color, double part) {
    std::uint8_t* const pixel = &picture_.pixels[3 * index(x, y)];
    const double values[] = {color.red, color.green, color.blue};
    for (int i = 0; i < 3; ++i) pixel[i] = static_cast<std::uint8_t>(std::lround(pixel[i] + part * (values[i] - pixel[i])));
  }

  /// Notes how much of each pixel a thick line from a to b covers.
  void cover(Point a, Point b, double width) {
    const double reach = width / 2 + 1, dx = b.x - a.x, dy = b.y - a.y, square = dx * dx + dy * dy;
    const int top = std::max(0, static_cast<int>(std::min(a.y, b.y) - reach));
    const int bottom = std::min(picture_.height - 1, static_cast<int>(std::max(a.y, b.y) + reach));
    const int left = std::max(0, static_cast<int>(std::min(a.x, b.x) - reach));
    const int right = std::min(picture_.width - 1, static_cast<int>(std::max(a.x, b.x) + reach));
    for (int y = top; y <= bottom; ++y)
      for (int x = left; x <= right; ++x) {
        const double px = x + 0.5 - a.x, py = y + 0.5 - a.y;
        const double t = square > 0 ? std::clamp((px * dx + py * dy) / square, 0.0, 1.0) : 0;
        const double part = std::clamp(width / 2 + 0.5 - std::hypot(px - t * dx, py - t * dy), 0.0, 1.0);
        float& known = coverage_[index(x, y)];
        if (known == 0 && part > 0) touched_.push_back({x, y});
        known = std::max(known, static_cast<float>(part));
      }
  }
  void paint(Rgb color) {
    for (const auto& [x, y] : touched_) mix(x, y, color, std::exchange(coverage_[index(x, y)], 0.0f));
    touched_.clear();
  }

  Picture picture_;
  std::vector<float> coverage_;  ///< of the line being drawn
  std::vector<std::pair<int, int>> touched_;
};

constexpr Rgb kInk{17, 17, 17}, kFaint{68, 68, 68}, kGrid{221, 221, 221}, kBorder{153, 153, 153};

Rgb rgb_of(const LineStyle& style) {
  return {static_cast<double>(style.red), static_cast<double>(style.green), static_cast<double>(style.blue)};
}

void draw_axes(Canvas& canvas, const ChartFrame& f) {
  const double right = f.left + f.width, bottom = f.top + f.height;
  for (const double tick : nice_ticks(f.y_low, f.y_high, 5)) {
    const double y = f.y_of_scaled(tick);
    canvas.rectangle(f.left, y - 0.5, right, y + 0.5, kGrid);
    canvas.text({f.left - 6, y + 4}, fmt::format("{:.4g}", f.has_log_scale ? std::pow(10.0, tick) : tick), kTickSize, kFaint, Anchor::kEnd);
  }
  for (const double tick : nice_ticks(f.x_low, f.x_high, 8))
    if (tick == std::floor(tick)) canvas.text({f.x(tick), bottom + 16}, fmt::format("{:.0f}", tick), kTickSize, kFaint, Anchor::kMiddle);
  canvas.rectangle(f.left, f.top, right, f.top + 1, kBorder);
  canvas.rectangle(f.left, bottom - 1, right, bottom, kBorder);
  canvas.rectangle(f.left, f.top, f.left + 1, bottom, kBorder);
  canvas.rectangle(right - 1, f.top, right, bottom, kBorder);
}

void draw_line(Canvas& canvas, const ChartLine& line, const ChartFrame& f, const LineStyle& style) {
  std::vector<Point> points;
  const auto draw = [&] {
    if (!points.empty()) canvas.polyline(points, points.size() == 1 ? 6 : 2, rgb_of(style), style.dashes);
    points.clear();
  };
  for (std::size_t i = 0; i < line.steps.size(); ++i) {
    if (f.can_show(line.values[i]))
      points.push_back({f.x(static_cast<double>(line.steps[i])), f.y(line.values[i])});
    else
      draw();
  }
  draw();
}

void put_u32(std::string& out, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 0xff);
}

void put_chunk(std::string& out, std::string_view type, const std::string& data) {
  put_u32(out, static_cast<std::uint32_t>(data.size()));
  const std::string body = std::string(type) + data;
  out += body;
  put_u32(out, static_cast<std::uint32_t>(::crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()))));
}

}  // namespace

Picture draw_picture(const std::vector<Chart>& charts) {
  int width = 1, height = 0;
  for (const Chart& chart : charts) {
    width = std::max(width, chart.width);
    height += chart.height;
  }
  Canvas canvas(width, std::max(height, 1));
  int top = 0;
  for (const Chart& chart : charts) {
    ChartFrame frame = frame_of(chart);
    frame.top += top;
    canvas.text({static_cast<double>(kChartLeft), top + 22.0}, chart.title, kTitleSize, kInk);
    draw_axes(canvas, frame);
    for (std::size_t i = 0; i < chart.lines.size(); ++i) {
      const LineStyle style = line_style(i);
      draw_line(canvas, chart.lines[i], frame, style);
      if (legend_height(chart) == 0) continue;
      const double y = top + chart.height - legend_height(chart) + static_cast<double>(i) * kLegendRow + 8;
      canvas.polyline({{kChartLeft, y}, {kChartLeft + 34, y}}, 2.5, rgb_of(style), style.dashes);
      canvas.text({kChartLeft + 42, y + 4}, chart.lines[i].name, kLegendSize, kInk);
    }
    top += chart.height;
  }
  return canvas.take();
}

std::string to_png(const Picture& picture) {
  std::string rows;
  const std::size_t row_bytes = static_cast<std::size_t>(picture.width) * 3;
  for (int y = 0; y < picture.height; ++y) {
    rows += '\0';  // no filter
    rows.append(reinterpret_cast<const char*>(picture.pixels.data()) + static_cast<std::size_t>(y) * row_bytes, row_bytes);
  }
  uLongf size = ::compressBound(static_cast<uLong>(rows.size()));
  std::string packed(size, '\0');
  if (::compress2(reinterpret_cast<Bytef*>(packed.data()), &size, reinterpret_cast<const Bytef*>(rows.data()),
                  static_cast<uLong>(rows.size()), Z_BEST_COMPRESSION) != Z_OK)
    fail(ErrorCode::kInternal, "a picture of {} x {} pixels cannot be compressed", picture.width, picture.height);
  packed.resize(size);
  std::string head;
  put_u32(head, static_cast<std::uint32_t>(picture.width));
  put_u32(head, static_cast<std::uint32_t>(picture.height));
  head += {8, 2, 0, 0, 0};  // bits of a channel, RGB, deflate, filters of rows, not interlaced
  std::string out = "\x89PNG\r\n\x1a\n";
  put_chunk(out, "IHDR", head);
  put_chunk(out, "IDAT", packed);
  put_chunk(out, "IEND", "");
  return out;
}

}  // namespace prl::dashboard
