#pragma once

#include "ops/context.hpp"
#include "ops/cuda/launch.hpp"

// Inputs of products of 8-bit numbers (ops/eight_bit.hpp).

namespace prl::ops::cuda {

/// Rows of E4M3 numbers, `stride` bytes apart, a multiple of 16, and the power of two of each; NaN for a row with what is no finite number.
struct InputCodes {
  unsigned char* codes = nullptr;
  float* factors = nullptr;
  std::int64_t stride = 0;
};

/// Memory for codes of rows of K, a multiple of 16; of a single row as of two, since it is read with the next.
inline InputCodes take_codes(Carver& memory, std::int64_t num_rows, std::int64_t K) {
  const std::int64_t rows = num_rows < 2 ? 2 : num_rows;
  return {.codes = memory.take<unsigned char>(rows * K), .factors = memory.take<float>(rows), .stride = K};
}

/// x [M, K] in bf16 or fp32, K a multiple of 16, as codes. Waits for earlier kernels of recorded work.
void inputs_to_codes(const OpContext& ctx, const InputCodes& to, ConstTensorView x_MK);
/// The rows rows_R (int32) of x as codes. Lets the next kernel of recorded work begin only once earlier ones have ended.
void rows_to_codes(const OpContext& ctx, const InputCodes& to, ConstTensorView x_MK, const std::int32_t* rows_R, std::int64_t num_rows);
/// rms_norm(x, norm_K, eps) as codes, of rows of bf16 that are rounded so before; false, and nothing is done, for rows that the kernel of
/// rms_norm does not keep in registers.
bool norm_to_codes(OpContext& ctx, const InputCodes& to, ConstTensorView x_MK, ConstTensorView norm_K, float eps);
/// The values of such codes, in x's dtype: for devices and shapes without products of 8-bit numbers. `out` is not x.
void round_inputs(const OpContext& ctx, TensorView out_MK, ConstTensorView x_MK);

}  // namespace prl::ops::cuda
