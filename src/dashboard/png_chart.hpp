#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dashboard/svg_chart.hpp"

namespace prl::dashboard {

/// A picture of RGB pixels, 8 bits each, row by row from the top.
struct Picture {
  int width = 0, height = 0;
  std::vector<std::uint8_t> pixels;
};

/// Charts below each other, as svg_file() draws them; texts in an own font of ASCII characters, others become "?".
Picture draw_picture(const std::vector<Chart>& charts);
/// The picture as a PNG file.
std::string to_png(const Picture& picture);

}  // namespace prl::dashboard
