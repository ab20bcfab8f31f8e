#pragma once

#include <cstdint>

namespace prl::ops {

/// Shapes that drive the test of `linear` and its gradients, and ops_bench.
struct LinearCase {
  const char* name;
  std::int64_t T, N, K;
  bool bias;
};

/// Small, odd and just beside the edges of panels, slivers and depth blocks.
inline constexpr LinearCase kLinearCases[] = {
    {"one", 1, 1, 1, false},          {"row", 1, 96, 64, true},           {"odd", 3, 5, 7, true},      {"tail", 17, 33, 31, false},
    {"depth_edge", 5, 40, 256, true}, {"depth_over", 15, 64, 257, false}, {"wide", 29, 300, 48, true}, {"rows", 130, 47, 100, true},
};

/// SmolLM2-135M and Qwen3-0.6B: (N, K) of the products of one layer.
inline constexpr LinearCase kLinearBenchCases[] = {
    {"135M/qkv", 0, 960, 576, false},    {"135M/o", 0, 576, 576, false},     {"135M/gate_up", 0, 3072, 576, false},
    {"135M/down", 0, 576, 1536, false},  {"0.6B/qkv", 0, 4096, 1024, false}, {"0.6B/gate_up", 0, 6144, 1024, false},
    {"0.6B/down", 0, 1024, 3072, false},
};

}  // namespace prl::ops
