#include "monitor/format.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace prl::monitor {

std::string format_num(double value, int precision) {
  const double size = std::abs(value);
  if (size < 1e3) return value == std::floor(value) ? fmt::format("{:.0f}", value) : fmt::format("{:.{}f}", value, precision);
  if (size < 1e6) return fmt::format("{:.{}f}K", value / 1e3, precision);
  if (size < 1e9) return fmt::format("{:.{}f}M", value / 1e6, precision);
  return fmt::format("{:.{}f}B", value / 1e9, precision);
}

std::string format_time(double seconds) {
  if (seconds < 1) return fmt::format("{}ms", static_cast<std::int64_t>(seconds * 1000));
  const auto total = static_cast<std::int64_t>(seconds);
  const auto two = [](std::int64_t a, char a_unit, std::int64_t b, char b_unit) {
    return b == 0 ? fmt::format("{}{}", a, a_unit) : fmt::format("{}{} {}{}", a, a_unit, b, b_unit);
  };
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return two(total / 60, 'm', total % 60, 's');
  if (total < 86400) return two(total / 3600, 'h', total % 3600 / 60, 'm');
  return two(total / 86400, 'd', total % 86400 / 3600, 'h');
}

std::string format_duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::max(0.0, seconds) + 0.5);
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m{:02}s", total / 60, total % 60);
  return fmt::format("{}h{:02}m", total / 3600, total % 3600 / 60);
}

std::string format_gib(double gib) { return fmt::format("{:.1f} GiB", gib); }

}  // namespace prl::monitor
