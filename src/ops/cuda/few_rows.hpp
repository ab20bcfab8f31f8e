#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "ops/cuda/blas.hpp"
#include "ops/lora.hpp"

// Row-invariant products of few rows, out[M, N] = a[M, K] b[N, K]^T in bf16, as a step of decoding has them: what they cost is reading
// b. One block computes all of K for its tile, in steps of 16 with one fp32 sum an element: as the library's kernels without split-K
// do, so the bits are theirs (the tests compare them) and either may compute any product. In recorded work the blocks begin to read b
// while earlier kernels still run. Compute capability 9.0.

namespace prl::ops::cuda {

/// How a product of few rows is cut.
struct FewRowsTile {
  int rows = 8;        ///< of out per block: 8, 16, 32, 64 or 128
  int columns = 8;     ///< of out per block: a multiple of 8 up to 64
  int slots = 1;       ///< steps along K that are in shared memory at a time
  int ranks = 0;       ///< rows of an adapter's A that a block has room for
  int code_slots = 0;  ///< steps whose weights are in shared memory as codes at a time; 0: they are not read as Product::b_codes
};
/// Rows that one expert's matrix is multiplied with: [first, first + count) of the product's rows.
struct alignas(16) RowTile {
  std::int32_t expert, first, count, unused;  ///< count 0: the block has nothing to do
};
/// A product of which b is another for each expert: p.b is that of the first, and p.N its columns.
struct RowsOfExperts {
  /// [num_tiles] in device memory, at least one of which is not empty. In recorded work a kernel that lets the next begin only after it has
  /// waited stands between the one that makes them and these products.
  const RowTile* tiles = nullptr;
  std::int64_t num_tiles = 0;
  std::int64_t num_experts = 0, rows_apart = 0;  ///< rows of p.b_stride from one matrix to the next; multiples of 8
  const float* factors = nullptr;                ///< [M]: what swiglu's results are multiplied by, once rounded; or null
};
/// Neighbouring steps that the kernel does as well; the bits are those of the ops one after another. `p.out` is bf16 then.
struct FewRowsFusion {
  const float* norm = nullptr;  ///< [K]: a is rms_norm(p.a, norm, eps), for up to kMaxNormRows rows of up to kMaxNormColumns
  float eps = 0;
  const void* residual = nullptr;  ///< bf16 [M, N]: is added to the product as stored, and the sum is what is stored
  std::int64_t residual_stride = 0;
  bool swiglu = false;  ///< b is rows of gate, then as many of up, in multiples of 8; out is [M, N / 2]
  /// Device memory that becomes 1 once p.a is there, for a kernel queued next that reads p.a beside this one: it finds kBesideBytes of
  /// shared memory left on each multiprocessor. Not with a norm.
  std::int32_t* rows_are_there = nullptr;
  const RowsOfExperts* experts = nullptr;  ///< with nothing else but swiglu; p.M is the number of rows of a, of which tiles name some
  const LoraIndex* lora = nullptr;         ///< with `single`, which is added to the product before anything else
  bool is_any() const noexcept { return norm != nullptr || residual != nullptr || swiglu; }
};
/// Every block norms its rows again, and holds all of K: right for the few rows that a kernel of their own would only delay.
constexpr std::int64_t kMaxNormRows = 16, kMaxNormColumns = 1024;

constexpr int kBesideBytes = 16 * 1024;

/// Where there are codes, they are read by products of so few rows, which are bound by reading weights.
constexpr std::int64_t kMaxEightBitRows = 32;

/// Beyond these the library was as fast; more than 128 rows were measured before tiles were stored whole, and where K is larger only the
/// last of them.
constexpr std::int64_t kMaxFewRows = 256;
constexpr std::int64_t max_few_rows_outputs(std::int64_t rows, std::int64_t K) {
  if (rows <= 64 || (rows <= 128 && K <= 3072)) return 128 * 6144;
  return K <= 3072 ? 128 * 4096 : 64 * 6144;
}

/// The cut of a product that these kernels take; nothing where the library is as fast, or the product is another. A rule of the shape.
std::optional<FewRowsTile> few_rows_tile(const Product& p, const cudaDeviceProp& device, const FewRowsFusion& fusion = {});
/// The same, nothing where rows would not have the bits that they have in other products: what run_few_rows() takes. What p.a points to may
/// be written later.
std::optional<FewRowsTile> find_few_rows_tile(const OpContext& ctx, const Product& p, const FewRowsFusion& fusion);
/// The same for rows of experts in tiles of `rows`, 8, 16, 32, 64 or 128.
std::optional<FewRowsTile> expert_rows_tile(const Product& p, const cudaDeviceProp& device, const RowsOfExperts& experts, int rows,
                                            bool swiglu);
/// `p` is not transposed on the left, transposed on the right, bf16 or codes and 16-byte aligned in every row, as is the residual; N is a
/// multiple of 4. Codes: K is a multiple of 128, out is bf16. With swiglu tile.columns counts columns of gate and of up, a multiple of 16.
void few_rows_product(const OpContext& ctx, const Product& p, const FewRowsTile& tile, const FewRowsFusion& fusion = {});

}  // namespace prl::ops::cuda
