#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/error.hpp"
#include "ops/attention.hpp"
#include "ops/cpu/eight_panels.hpp"
#include "ops/cpu/kernels.hpp"
#include "ops/cpu/simd/avx2.hpp"

#define PRL_SIMD_AVX2
#define PRL_SIMD_NAME "avx2"

// The bodies are written once against Vec and compiled here for this instruction set.
#include "ops/cpu/impl/all.hpp"

namespace prl::ops::cpu {

const Kernels& kernels_avx2() { return PRL_SIMD::kKernels; }

}  // namespace prl::ops::cpu
