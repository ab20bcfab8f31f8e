#pragma once

#include "ops/cuda/device.cuh"

namespace prl::ops::cuda {

__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + expf(-x)); }
/// An element of SwiGLU, from gate and up as they are stored.
__device__ __forceinline__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

}  // namespace prl::ops::cuda
