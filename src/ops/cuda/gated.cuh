#pragma once

namespace prl::ops::cuda {

__device__ __forceinline__ float sigmoid(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + expf(-x)));
  return y;
}
/// An element of SwiGLU, from gate and up as they are stored.
__device__ __forceinline__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

}  // namespace prl::ops::cuda
