#pragma once

#include <string>

namespace prl::monitor {

/// 950 -> "950", 12340 -> "12.34K", then M and B; below 1,000 whole numbers have no decimals. The sign is kept (spec 8.2).
std::string format_num(double value, int precision = 2);
/// "123ms", "12s", "5m 3s", "2h 5m", "1d 3h"; a second part of zero is left out (spec 8.2).
std::string format_time(double seconds);
/// "45s", "1m20s", "2h05m": how long something will take, in one word.
std::string format_duration(double seconds);
/// "11.7 GiB".
std::string format_gib(double gib);

}  // namespace prl::monitor
