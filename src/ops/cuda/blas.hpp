#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/context.hpp"

namespace prl::ops::cuda {

struct FewRowsFusion;

/// A matrix [N, K] whose values are of 8 bits (ops/eight_bit.hpp), as codes in the order of few_rows_eight.cuh; N is a multiple of 16 and K
/// one of 64.
struct EightBitCodes {
  const void* codes = nullptr;             ///< [N * K] bytes, or null
  const std::uint16_t* factors = nullptr;  ///< [N] code_factor()
};

/// out[M, N] (+)= a[M, K] b[K, N] (+ bias[N]), row-major, sums in fp32.
struct Product {
  std::int64_t M = 0, N = 0, K = 0;
  const void* a = nullptr;  ///< [M, K], or [K, M] if transpose_a
  const void* b = nullptr;  ///< [K, N], or [N, K] if transpose_b
  void* out = nullptr;
  std::int64_t a_stride = 0, b_stride = 0, out_stride = 0;  ///< elements from row to row
  bool transpose_a = false, transpose_b = false;
  DType in_dtype = DType::kF32, out_dtype = DType::kF32;
  bool accumulate = false;
  const float* bias = nullptr;
  /// With kU8 of `in_dtype`: a and b are codes of E4M3, b is transposed, and rows of both have factors, [M] and [N]: of each 128 inputs the
  /// products are summed by the tensor cores, in order by 32, and those sums in fp32. N and K are multiples of 16.
  const float *a_factors = nullptr, *b_factors = nullptr;
  EightBitCodes b_codes;  ///< of a transposed b; kernels of few rows read them in place of b, whose values they are
  /// True: K may be cut into parts that are added in a fixed order, so that the result depends on M and N, too. False: a row of
  /// out is one sequence of operations that depends on its row of a and on b alone; a must not be transposed then.
  bool may_split = false;
};

/// Matrix products. One per op context; plans are kept by shape.
///
/// bf16 goes to cuBLASLt. With split-K off all kernels of its Hopper family give a row the same bits, whatever the number of rows,
/// tile or cluster (measured over 12 shapes, 13 numbers of rows and up to 1,188 configurations of each; the tests repeat a part of
/// it). So kernels are restricted to the family that the library picks for many rows, and the first product of a size class
/// (OpContext::may_measure) measures which of them is the fastest; that choice changes the speed alone. Kernels of ours with the same bits
/// compute few rows (few_rows.hpp). Where rows are not 16-byte aligned, and for fp32, whose library kernels do depend on the number of
/// rows, a simple kernel of ours takes over. fp32 is fp32 throughout, never TF32.
///
/// Codes of 8 bits go there too: without fast accumulation all of its kernels sum as `Product` says (14 shapes, up to 22 numbers of rows).
class Blas {
 public:
  /// Error{kUnavailable} saying where libcublasLt was looked for.
  explicit Blas(std::shared_ptr<DeviceRuntime> runtime);
  ~Blas();
  /// Error{kNotImplemented} if there is no kernel for it.
  void run(const OpContext& ctx, const Product& p);
  /// False for combinations of types and bias that the library cannot do.
  bool can_run(const Product& p);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether rows of this product have the bits that the library's kernels for many rows give them, and kernels of ours with the same order
/// of sums.
bool has_librarys_bits(const OpContext& ctx, const Product& p);
/// A product of few rows with its neighbours by the kernels of few_rows.hpp. False, and nothing is done, where they do not take it.
bool run_few_rows(const OpContext& ctx, const Product& p, const FewRowsFusion& fusion);

/// What OpContext::library points to.
struct Library {
  explicit Library(const std::shared_ptr<DeviceRuntime>& runtime) : blas(runtime) {}
  Blas blas;
  std::vector<std::int32_t> index;  ///< host scratch of the LM head
};
inline Blas& blas_of(const OpContext& ctx) { return static_cast<Library*>(ctx.library)->blas; }

}  // namespace prl::ops::cuda
