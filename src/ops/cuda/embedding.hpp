#pragma once

#include <cstdint>

#include "ops/context.hpp"

namespace prl::ops::cuda {

/// Where each id of a list occurs first and last: device memory, [V] each.
struct Occurrences {
  std::int32_t *first, *last;
};
/// Factors of rows, `stride` floats from one to the next; none where null.
struct RowFactors {
  const float* factors = nullptr;
  std::int64_t stride = 1;
};
/// table_VH[ids_T[t]] += rows_TH[t] times its factor, in the order of t: the same bits whatever runs first. table fp32, rows bf16 or fp32,
/// ids int32; one outside the table is a fault of the device's and adds nothing.
void add_to_rows(OpContext& ctx, TensorView table_VH, ConstTensorView rows_TH, ConstTensorView ids_T, const Occurrences& room,
                 const RowFactors& factors = {});

}  // namespace prl::ops::cuda
