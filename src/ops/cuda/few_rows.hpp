#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "ops/cuda/blas.hpp"

// Row-invariant products of few rows, out[M, N] = a[M, K] b[N, K]^T in bf16, as a step of decoding has them: what they cost is reading
// b. One block computes all of K for its tile, in steps of 16 with one fp32 sum an element: as the library's kernels without split-K
// do, so the bits are theirs (the tests compare them) and either may compute any product. In recorded work the blocks begin to read b
// while earlier kernels still run. Compute capability 9.0.

namespace prl::ops::cuda {

/// How a product of few rows is cut.
struct FewRowsTile {
  int rows = 8;     ///< of out per block: 8, 16, 32, 64 or 128
  int columns = 8;  ///< of out per block: a multiple of 8 up to 64
  int slots = 1;    ///< steps along K that are in shared memory at a time
};
/// The cut of a product that these kernels take; nothing where the library is as fast, or the product is another. A rule of the shape.
std::optional<FewRowsTile> few_rows_tile(const Product& p, const cudaDeviceProp& device);
/// `p` is not transposed on the left, transposed on the right, bf16 and 16-byte aligned in every row; N is a multiple of 4.
void few_rows_product(const OpContext& ctx, const Product& p, const FewRowsTile& tile);

}  // namespace prl::ops::cuda
