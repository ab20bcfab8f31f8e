#pragma once

#include "ops/cpu/gemm.hpp"
#include "ops/linear.hpp"

namespace prl::ops::cpu {

/// The products of this context's kind in `dtype`, of matrices that are used so.
const GemmKernels& gemm_for(const OpContext& ctx, DType dtype, WeightUse use = WeightUse::kMatrix);

/// A weight in panels for one CPU kind: W^T for y = x W^T, and W for dx = dy W if it is to be trained.
class PackedWeight final : public LinearWeight {
 public:
  PackedWeight(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias_N, DType compute, bool with_backward,
               WeightUse use = WeightUse::kMatrix);
  std::size_t num_bytes() const noexcept override;
  void unpack_row(std::int64_t n, float* out_K) const override;
  void refill(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N) override;

  const GemmKernels* gemm;
  const GemmKernels* backward_gemm;  ///< of panels of the compute dtype
  Tensor forward_panels, backward_panels, bias_N;

 private:
  void pack(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias);
};

/// `w` as this context's kind packed it; a bug if another did.
const PackedWeight& packed(const OpContext& ctx, const LinearWeight& w);
/// Outputs [first, first + count); first is a multiple of the panel width.
GemmRight forward_operand(const PackedWeight& w, std::int64_t first_output, std::int64_t count);
/// All inputs as columns, outputs from `first_output` on as depth.
GemmRight backward_operand(const PackedWeight& w, std::int64_t first_output);

/// dw_NK (+)= dy^T x in the dtype of `k`, whatever that of the operands, with weight_gradient_bytes of memory.
/// Unless it overwrites, the product is complete before it is added, for which that of many tokens has memory of its own.
std::size_t weight_gradient_bytes(const OpContext& ctx, const GemmKernels& k, std::int64_t T, std::int64_t N, std::int64_t K,
                                  bool accumulate);
void weight_gradient(OpContext& ctx, const GemmKernels& k, TensorView dw_NK, ConstTensorView dy_TN, ConstTensorView x_TK, bool accumulate,
                     char* memory);

/// out[m, n] = a[m, k] b with matmul_bytes of memory.
std::size_t matmul_bytes(const OpContext& ctx, std::int64_t m, std::int64_t k, std::int64_t n);
void matmul_with(OpContext& ctx, float* out, const float* a, const float* b, std::int64_t m, std::int64_t k, std::int64_t n,
                 bool transpose_b, char* memory);

}  // namespace prl::ops::cpu
