#pragma once

#include "ops/cuda/device.cuh"

namespace prl::ops::cuda {

__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + expf(-x)); }
/// An element of SwiGLU, from gate and up as they are stored.
__device__ __forceinline__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }
/// In place of gate and up their gradients, from that of the element.
__device__ __forceinline__ void gated_backward(float d, float& gate, float& up) {
  const float s = sigmoid(gate), silu = gate * s;
  gate = d * up * fmaf(silu, 1.0f - s, s);
  up = d * silu;
}

}  // namespace prl::ops::cuda
