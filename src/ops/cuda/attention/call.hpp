#pragma once

#include <cuda_bf16.h>

#include "ops/cuda/attention/bodies.hpp"
#include "ops/cuda/attention/hopper.hpp"
#include "ops/cuda/attention/merge.hpp"
#include "ops/cuda/attention/plain.hpp"
#include "ops/cuda/attention/units.hpp"

// A forward call of attention, dense or paged, put into the parameters of each family of kernels.

namespace prl::ops::cuda {

struct ForwardCall {
  std::int64_t num_tokens, num_q_heads, num_kv_heads, head_dim, value_dim;
  const void *q, *k, *v;
  std::int64_t q_stride, k_stride, v_stride;  ///< dense only, the last two
  void* out;
  float* lse;
  float scale;
  std::int32_t window;
  bool paged;
  std::int64_t num_blocks, block_size;
  const std::int32_t* block_table;  ///< device
  const float* sinks;               ///< [num_q_heads], device, or nullptr
  bool values_are_in_keys() const noexcept { return v == nullptr; }
  /// The family that has kernels for these heads.
  AttentionFamily family_of(AttentionFamily wanted) const noexcept {
    const bool is_full = value_dim == kMaxLatent && head_dim - value_dim == kMaxLatentRotary;
    return values_are_in_keys() && !is_full ? AttentionFamily::kPlain : wanted;
  }
};
/// Error{kShape} where a row does not start at a multiple of 16 bytes, Error{kInvalidArgument} where scale is not positive.
ForwardCall call_of(TensorView out_THD, TensorView lse_TH, const VarlenAttention& args);
/// The block table is the caller's to set, and so are sinks.
ForwardCall call_of(TensorView out_THD, ConstTensorView q_THD, std::int64_t q_token_stride, const KvLayer& layer, float scale,
                    std::int64_t window);
/// VarlenAttention::window as kernels have it.
std::int32_t window_of(std::int64_t window);
void check_rows(const char* what, const void* data, std::int64_t token_stride, DType dtype);

hopper::ForwardParams hopper_params(const ForwardCall& call, const RowPacking& packing);
void launch_hopper(const hopper::ForwardParams& p, const ForwardCall& call, bool split, std::int64_t num_items, int num_multiprocessors,
                   cudaStream_t stream);
/// The maps of keys and values become those that hopper::launch_decode takes.
void launch_decode(const hopper::ForwardParams& p, const ForwardCall& call, std::int64_t num_items, int num_multiprocessors,
                   cudaStream_t stream);
template <typename T>
PlainForward<T> plain_params(const ForwardCall& call, const RowPacking& packing);
MergeParams merge_params(const ForwardCall& call, const RowPacking& packing);

constexpr float kLog2Of_e = 1.44269504088896341f;

}  // namespace prl::ops::cuda
