#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.hpp"

namespace prl {

/// values[i] = scale * the float of the i-th rng.next_normal(), several at a time. The same bits on every machine: no function of the
/// system's mathematics library, whose last bits vary between versions and processors, has a part in them.
void draw_normals(Rng& rng, std::span<float> values, float scale = 1.0f);
/// `count` of them.
std::vector<float> normal_draws(Rng& rng, std::int64_t count, float scale = 1.0f);

}  // namespace prl
