#pragma once

#include "ops/cuda/blas.hpp"

namespace prl::ops::cuda {

/// Any product with an a that is not transposed, without tensor cores, in one order of K: for fp32, whose library kernels add in
/// orders that depend on the number of rows, and for bf16 matrices whose rows are not 16-byte aligned.
void simple_product(const OpContext& ctx, const Product& p);

}  // namespace prl::ops::cuda
