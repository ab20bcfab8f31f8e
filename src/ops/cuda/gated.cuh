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

/// GELU in its tanh form, x times the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3), and its slope.
struct Gelu {
  float value, slope;
  __device__ __forceinline__ explicit Gelu(float x) {
    // Beyond 16 the sigmoid is 0 or 1, and the cube of a large x would be no finite number. Of a NaN the comparisons leave it as it is.
    const float above = x < -16.0f ? -16.0f : x, near = above > 16.0f ? 16.0f : above, square = near * near;
    constexpr float kTwice = 1.59576912f, kCubic = 0.07135481f;  // 2 sqrt(2 / pi), and 0.044715 of it
    const float s = sigmoid(near * fmaf(kCubic, square, kTwice));
    value = above * s;
    slope = fmaf(near * s * (1.0f - s), fmaf(3.0f * kCubic, square, kTwice), s);
  }
};
/// An element of GEGLU, from gate and up as they are stored.
__device__ __forceinline__ float gelu_gated(float gate, float up) { return Gelu(gate).value * up; }
/// In place of gate and up their gradients, from that of the element.
__device__ __forceinline__ void gelu_gated_backward(float d, float& gate, float& up) {
  const Gelu gelu(gate);
  gate = d * up * gelu.slope;
  up = d * gelu.value;
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
