#pragma once

#include "ops/context.hpp"

// Sums that several bodies need. All of them in an order that depends on the sizes alone.

namespace prl::ops::cuda {

/// total[c] += sum over rows of partial[rows, cols].
void add_rows(OpContext& ctx, float* total, const float* partial, std::int64_t rows, std::int64_t cols);

/// *total (device) = sum of squares of x[n], through sum_squares_floats(n) floats of scratch.
std::int64_t sum_squares_floats(std::int64_t n);
void sum_squares_to(OpContext& ctx, double* total, float* scratch, const float* x, std::int64_t n);

}  // namespace prl::ops::cuda
