#pragma once

#include <chrono>
#include <cstdint>

namespace prl {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

/// Seconds of the steady clock.
inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
inline std::chrono::milliseconds to_ms(double seconds) { return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

}  // namespace prl
