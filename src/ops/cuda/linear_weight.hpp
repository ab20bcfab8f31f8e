#pragma once

#include <optional>
#include <span>

#include "ops/cuda/blas.hpp"
#include "ops/cuda/input_codes.hpp"
#include "ops/linear.hpp"

namespace prl::ops::cuda {

/// A matrix [N, K] of 8 bits for products of 8-bit numbers: E4M3 codes, row-major, and a power of two for each row.
struct ProductCodes {
  const unsigned char* codes = nullptr;  ///< or null: products are of the values
  const float* factors = nullptr;
};

/// A weight as it is: row-major [N, K] in the compute dtype, which serves y = x W^T and dx = dy W alike. Where it is of 8 bits, codes lie
/// beside it, half as large, for products of few rows, or for all products of inputs of 8 bits.
class DenseWeight final : public LinearWeight {
 public:
  /// Keeps `w`, which is in the compute dtype.
  DenseWeight(OpContext& ctx, Tensor w, ConstTensorView bias_N, bool with_backward, WeightUse use = WeightUse::kMatrix,
              const CodeMemory& memory = {});
  std::size_t num_bytes() const noexcept override;
  void unpack_row(std::int64_t n, float* out_K) const override { unpack_rows(n, 1, out_K); }
  void unpack_rows(std::int64_t first, std::int64_t count, float* out) const override;
  void refill(OpContext& ctx, const Tensor& w, ConstTensorView bias) override;

  /// The values of w_NK once more where they are of 8 bits and kernels read such.
  EightBitCodes codes() const noexcept;
  /// The same for products of inputs that are codes too: a property of the device and the matrix's shape.
  ProductCodes product_codes() const noexcept;

  /// False: w_NK is undefined, and product_codes() stand for its values.
  bool has_values() const noexcept { return w_NK.defined(); }
  Device device() const noexcept { return (has_values() ? w_NK : codes_).runtime()->device(); }

  Tensor w_NK, bias_N;

 private:
  void round(OpContext& ctx);

  bool is_eight_bit_ = false;  ///< the values in w_NK are such
  Tensor codes_, factors_;     ///< perhaps undefined; of inputs that are rounded, ProductCodes
};
/// The values of [rows, K] codes, K a multiple of 16, in bf16.
void widen_codes(const OpContext& ctx, void* out, const ProductCodes& codes, std::int64_t rows, std::int64_t K);

/// `w` as this device packed it; a bug if another did.
const DenseWeight& dense(const OpContext& ctx, const LinearWeight& w);

/// How the matrices of experts lie, if they are all alike, without biases and equally far apart.
struct Stacked {
  const DenseWeight* first = nullptr;
  std::int64_t rows_apart = 0;  ///< a multiple of 8
};
std::optional<Stacked> stacked(const OpContext& ctx, std::span<const LinearWeight* const> weights);

/// The codes of matrices that round their inputs, which are all alike, without biases, and lie one behind another; nothing if one has none.
/// The codes are those of the first.
std::optional<ProductCodes> stacked_codes(const OpContext& ctx, std::span<const LinearWeight* const> weights);

/// Whether grouped_linear() takes so many rows of these matrices, which lie in aligned memory.
bool can_group(const OpContext& ctx, std::span<const LinearWeight* const> weights, std::int64_t num_rows);

/// The product of grouped_linear() of rows that are codes already, of weights that round their inputs; false, and nothing is done, unless
/// can_group() and rows of out are 16-byte aligned.
bool grouped_codes(OpContext& ctx, TensorView y_RN, const InputCodes& x_RK, std::span<const LinearWeight* const> weights,
                   ConstTensorView begin_P);

/// out[M, count] = x[M, K] W[first.., K]^T for outputs [first, first + count); no bias. The row-invariant product behind `linear`
/// and the LM head.
Product forward_product(const DenseWeight& w, const void* x, std::int64_t x_stride, std::int64_t M, std::int64_t first, std::int64_t count);
/// The product of `linear`: y = x W^T, with the weight's bias.
Product linear_product(const DenseWeight& w, TensorView y_TN, ConstTensorView x_TK);

}  // namespace prl::ops::cuda
