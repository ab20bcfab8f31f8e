#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/context.hpp"

namespace prl::ops::cuda {

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
  /// True: K may be cut into parts that are added in a fixed order, so that the result depends on M and N, too. False: a row of
  /// out is one sequence of operations that depends on its row of a and on b alone.
  bool may_split = false;
};

/// Matrix products by cuBLASLt, which is opened when the first one is made. fp32 products are fp32 throughout (no TF32).
/// One per op context; plans are kept by shape.
class Blas {
 public:
  /// Error{kUnavailable} saying where libcublasLt was looked for.
  explicit Blas(std::shared_ptr<DeviceRuntime> runtime);
  ~Blas();
  /// Error{kNotImplemented} if the library has no kernel for it.
  void run(const OpContext& ctx, const Product& p);
  /// False for combinations of types and bias that the library cannot do.
  bool can_run(const Product& p);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What OpContext::library points to.
struct Library {
  explicit Library(const std::shared_ptr<DeviceRuntime>& runtime) : blas(runtime) {}
  Blas blas;
  std::vector<std::int32_t> index;  ///< host scratch of the LM head
};
inline Blas& blas_of(const OpContext& ctx) { return static_cast<Library*>(ctx.library)->blas; }

}  // namespace prl::ops::cuda
