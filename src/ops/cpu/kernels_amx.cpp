#include "ops/cpu/kernels.hpp"

namespace prl::ops::cpu {

const GemmKernels& gemm_bf16_amx() { return *kernels_avx512().gemm_bf16; }

}  // namespace prl::ops::cpu
