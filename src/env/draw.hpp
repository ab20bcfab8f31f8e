#pragma once

#include <cstdint>

#include "base/rng.hpp"

// Draws that task generators share.

namespace prl::env {

/// Evenly from low to high, both included.
inline std::int64_t between(Rng& rng, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(high - low + 1)));
}
template <class List>
const char* pick(Rng& rng, const List& list) {
  return list[rng.next_below(list.size())];
}

}  // namespace prl::env
