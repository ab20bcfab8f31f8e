#pragma once

#include "ops/cuda/device.cuh"

namespace prl::ops::cuda {

__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + expf(-x)); }
/// In fewer instructions, to 2^-17 of itself where it is smallest and to 2^-21 elsewhere: for gradients, whose bits nothing else must have.
__device__ __forceinline__ float quick_sigmoid(float x) { return inverse(1.0f + power_of_two(-kLog2e * x)); }
/// An element of SwiGLU, from gate and up as they are stored.
__device__ __forceinline__ float gated(float gate, float up) { return gate * sigmoid(gate) * up; }
/// In place of gate and up their gradients, from that of the element.
__device__ __forceinline__ void gated_backward(float d, float& gate, float& up) {
  const float s = sigmoid(gate), silu = gate * s;
  gate = d * up * fmaf(silu, 1.0f - s, s);
  up = d * silu;
}

/// An element of ops::ClampedGate.
__device__ __forceinline__ float clamped_gated(float gate, float up, float alpha, float limit) {
  // Of a NaN the comparisons leave it as it is.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate * sigmoid(alpha * gate) * (up + 1.0f);
}
__device__ __forceinline__ void clamped_gated_backward(float d, float& gate, float& up, float alpha, float limit) {
  const bool has_gate = !(gate > limit), has_up = !(up > limit) && !(up < -limit);
  gate = has_gate ? gate : limit;
  up = up > limit ? limit : up < -limit ? -limit : up;
  const float s = sigmoid(alpha * gate), glu = gate * s;
  gate = has_gate ? d * (up + 1.0f) * (s * fmaf(alpha * gate, 1.0f - s, 1.0f)) : 0.0f;
  up = has_up ? d * glu : 0.0f;
}

}  // namespace prl::ops::cuda
