#pragma once

#include "ops/attention.hpp"

// The bodies of attention with the choice of kernels left to the caller; bodies.hpp has those that choose.

namespace prl::ops::cuda {

/// Kernels for bf16. A process uses one family: they differ in last bits.
enum class AttentionFamily {
  kHopper,  ///< compute capability 9.0: warpgroup products, tensor copies
  kPlain,   ///< from 8.0 on
};
/// kHopper where the device and this build have it, unless PRL_CUDA_ATTENTION=plain.
AttentionFamily chosen_attention_family(const OpContext& ctx);

void attention_varlen(OpContext& ctx, AttentionFamily family, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args);
void attention_paged(OpContext& ctx, AttentionFamily family, TensorView out_THD, const PagedAttention& args);
void attention_varlen_backward(OpContext& ctx, AttentionFamily family, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD,
                               std::int64_t dq_token_stride, std::int64_t dk_token_stride, std::int64_t dv_token_stride,
                               ConstTensorView dout_THD, ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args);

/// Attention of one new token per sequence with all arrays in device memory, so that a graph can hold it.
struct DecodeAttention {
  ConstTensorView q_THD;  ///< row s belongs to sequence s
  std::int64_t q_token_stride = 0;
  KvLayer layer;
  const std::int32_t* context_len = nullptr;  ///< [num_sequences], device: tokens in cache, the new one included; 0: no such sequence
  const std::int32_t* block_table = nullptr;  ///< [num_sequences, max_blocks], device
  std::int32_t num_sequences = 0;
  std::int32_t max_blocks = 0;
  float scale = 1.0f;
  std::int64_t window = 0;       ///< as in VarlenAttention, and as planned
  const float* sinks = nullptr;  ///< [Hq], device: VarlenAttention::sinks_H
};
/// Bytes of device memory for the plan of a step: see plan_decode.
std::size_t decode_plan_bytes(std::int32_t num_sequences, std::int64_t max_context);
/// Cuts a step's work into units, on the device, for all its layers: reads context_len and fills `plan`
/// (decode_plan_bytes(num_sequences, max_blocks * block_size), 256-byte aligned). Dtype and head size as of the layers to come.
void plan_decode(OpContext& ctx, AttentionFamily family, void* plan, const DecodeAttention& args);
/// Attention of one layer, as planned. Rows of absent sequences are left alone. Equal bit for bit to attention_paged. Queues kernels
/// only; the workspace must hold what it asks for before a graph records it.
void attention_decode(OpContext& ctx, AttentionFamily family, TensorView out_THD, const void* plan, const DecodeAttention& args);

/// kv_write with slots in device memory; those outside the cache must be negative.
void kv_write_at(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
                 std::int64_t v_token_stride, const std::int32_t* slot_T);

}  // namespace prl::ops::cuda
