#pragma once

namespace prl::ops::cuda {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
/// An element of SwiGLU, from gate and up as they are stored.
__device__ __forceinline__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

}  // namespace prl::ops::cuda
