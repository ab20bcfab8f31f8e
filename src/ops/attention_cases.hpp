#pragma once

#include <cstdint>
#include <vector>

namespace prl::ops {

/// Shapes that drive the tests of attention, its gradient and its paged form.
struct AttentionCase {
  const char* name;
  std::int64_t Hq, Hkv, D;
  std::vector<std::int32_t> lengths;
  std::int64_t window = 0;
  bool has_sinks = false;
};

inline const std::vector<AttentionCase> kAttentionCases = {
    {"tiny", 1, 1, 16, {1, 2}},
    {"edges", 2, 1, 32, {63, 64, 65}},
    {"smollm", 9, 3, 64, {70, 5}},
    {"d80", 2, 2, 80, {130}},
    {"d96", 4, 2, 96, {33, 0, 20}},
    {"qwen", 4, 2, 128, {100}},
    {"d256", 2, 1, 256, {66}},
    {"many_heads_one_kv", 15, 1, 16, {40, 1}},
    {"own_key", 2, 1, 32, {70}, 1},
    {"short_window", 6, 2, 64, {200, 3, 40}, 5},
    {"tile", 2, 1, 16, {300}, 64},
    {"window", 2, 1, 128, {270, 129}, 130},
    {"d80w", 2, 2, 80, {150}, 37},
    {"wide", 2, 1, 256, {200}, 70},
    {"all", 2, 1, 64, {130}, 130},
    {"sinks", 4, 2, 64, {130, 3, 70}, 0, true},
    {"sinks_window", 6, 2, 32, {150}, 20, true},
    {"sinks_d128", 8, 1, 128, {90, 1}, 33, true},
};

}  // namespace prl::ops
