#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"

namespace prl::tools {

/// The best approximation of a matrix [rows, cols] by b [rows, rank] times a [rank, cols], with the singular values shared out to both.
struct LowRank {
  std::int64_t rank = 0;
  std::vector<float> b, a;
  double norm2 = 0;      ///< sum of the squares of the matrix
  double residual2 = 0;  ///< and of what is left of it
};

/// By a randomised range finder with power iterations (Halko, Martinsson and Tropp, 2011), in fp64 and always with the same draws. A matrix
/// of that rank or a lower one comes back whole, but for rounding.
LowRank best_low_rank(std::span<const float> matrix, std::int64_t rows, std::int64_t cols, std::int64_t rank, ThreadPool& pool);

}  // namespace prl::tools
