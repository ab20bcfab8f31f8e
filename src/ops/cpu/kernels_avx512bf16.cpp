#include "ops/cpu/kernels.hpp"

namespace prl::ops::cpu {

const GemmKernels& gemm_bf16_avx512bf16() { return *kernels_avx512().gemm_bf16; }

}  // namespace prl::ops::cpu
