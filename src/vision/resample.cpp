#include "vision/resample.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace prl::vision {
namespace {

/// What each output along one side is a sum of: inputs [first, first + count) with integer weights of `precision` bits behind the point.
struct Axis {
  struct Tap {
    std::int64_t first = 0, count = 0;
  };
  std::vector<Tap> taps;
  std::vector<std::int16_t> weights;  ///< [outputs, most]
  std::int64_t most = 0;
  int precision = 0;
};

double cubic(double x) {
  constexpr double a = -0.5;
  x = std::abs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return 0.0;
}

Axis make_axis(std::int64_t from, std::int64_t to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to), support = scale >= 1.0 ? 2.0 * scale : 2.0;
  const double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
  Axis axis;
  axis.most = static_cast<std::int64_t>(std::ceil(support)) * 2 + 1;
  std::vector<double> weights(static_cast<std::size_t>(to * axis.most), 0.0);
  double greatest = 0;
  for (std::int64_t i = 0; i < to; ++i) {
    const double center = scale * (static_cast<double>(i) + 0.5);
    const std::int64_t first = std::max<std::int64_t>(static_cast<std::int64_t>(center - support + 0.5), 0);
    const std::int64_t count = std::min(std::min<std::int64_t>(static_cast<std::int64_t>(center + support + 0.5), from) - first, axis.most);
    double* const of = weights.data() + i * axis.most;
    double total = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      of[j] = cubic((static_cast<double>(j + first) - center + 0.5) * inverse);
      total += of[j];
    }
    for (std::int64_t j = 0; j < count; ++j) {
      if (total != 0.0) of[j] /= total;
      greatest = std::max(greatest, of[j]);
    }
    axis.taps.push_back({first, count});
  }
  // As many bits as the greatest weight leaves in 15.
  while (axis.precision < 22 && static_cast<int>(0.5 + greatest * (1 << (axis.precision + 1))) < (1 << 15)) ++axis.precision;
  for (const double w : weights) {
    const double scaled = w * (1 << axis.precision);
    axis.weights.push_back(static_cast<std::int16_t>(static_cast<int>(scaled < 0 ? scaled - 0.5 : scaled + 0.5)));
  }
  return axis;
}

std::uint8_t weigh(const Axis& axis, std::int64_t output, const std::uint8_t* in, std::int64_t step) {
  const Axis::Tap tap = axis.taps[static_cast<std::size_t>(output)];
  const std::int16_t* weights = axis.weights.data() + output * axis.most;
  std::int32_t sum = 1 << (axis.precision - 1);
  for (std::int64_t j = 0; j < tap.count; ++j) sum += weights[j] * static_cast<std::int32_t>(in[(tap.first + j) * step]);
  return static_cast<std::uint8_t>(std::clamp(sum >> axis.precision, 0, 255));
}

}  // namespace

Image resize_bicubic(const Image& image, std::int64_t width, std::int64_t height) {
  PRL_CHECK(width > 0 && height > 0 && image.width > 0 && image.height > 0, "an image of {} x {} to {} x {}", image.width, image.height,
            width, height);
  if (width == image.width && height == image.height) return image;
  Image across{.width = width, .height = image.height, .rgb = image.rgb};
  if (width != image.width) {
    const Axis axis = make_axis(image.width, width);
    across.rgb.resize(static_cast<std::size_t>(3 * width * image.height));
    for (std::int64_t y = 0; y < image.height; ++y)
      for (std::int64_t x = 0; x < width; ++x)
        for (std::int64_t c = 0; c < 3; ++c)
          across.rgb[static_cast<std::size_t>((y * width + x) * 3 + c)] = weigh(axis, x, image.rgb.data() + y * image.width * 3 + c, 3);
  }
  if (height == image.height) return across;
  const Axis axis = make_axis(image.height, height);
  Image out{.width = width, .height = height, .rgb = {}};
  out.rgb.resize(static_cast<std::size_t>(3 * width * height));
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < 3 * width; ++x)
      out.rgb[static_cast<std::size_t>(y * width * 3 + x)] = weigh(axis, y, across.rgb.data() + x, 3 * width);
  return out;
}

}  // namespace prl::vision
