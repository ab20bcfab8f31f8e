#pragma once

#include <array>
#include <span>

#include "ops/context.hpp"
#include "ops/pointwise.hpp"

namespace prl::ops {

/// Keys per tile. Tiles start at absolute positions 0, 64, 128, ... of their sequence, in training, prefill and decode
/// alike, and are merged in that order: this is what makes the three agree bit for bit. A device may take several neighbours at once,
/// as long as it always takes the same ones.
inline constexpr int kAttentionTile = 64;
/// Keys per chunk. A chunk's tiles are merged from an empty state, then chunks are merged in order; so the chunks of one long
/// decode may be computed side by side and still add up as in training.
inline constexpr int kAttentionChunk = 1024;

/// Sizes of heads that every device has attention kernels for.
inline constexpr std::array<std::int64_t, 7> kHeadDims = {16, 32, 64, 80, 96, 128, 256};
bool is_head_dim(std::int64_t head_dim) noexcept;
/// Heads are rotated in a part of so many elements, or of a multiple, on every device.
inline constexpr std::int64_t kRotaryStep = 16;

/// Causal softmax attention over packed sequences, grouped-query.
///
/// Shapes    q [T, Hq, D], k and v [T, Hkv, D], out [T, Hq, D] (kF32 or kBF16, all alike; token rows may be strided by
///           the *_token_stride elements), lse_TH [T, Hq] fp32 (natural log; written for the backward pass),
///           cu_seqlens: num_sequences + 1 host int32, first 0, last T. Hq % Hkv == 0. D is one of kHeadDims.
/// Numerics  scores, softmax and sums in fp32; q, k, v enter as stored. The result of a query depends on its own q and the
///           k, v of the positions that it sees: 0..p of its sequence, or the last `window` of them.
///           Without v, and of one key head, the last V elements of a key are its value, and out is [T, Hq, V]; D and V are then multiples
///           of 16 (latent attention, ops/latent.hpp). This has no backward pass.
///           With sinks_H (fp32, [Hq]) each softmax has one logit more, that of its head, unscaled and without a value: it takes its
///           part of the weights, and lse includes it (GPT-OSS; Xiao et al. 2023, arXiv:2309.17453).
struct VarlenAttention {
  ConstTensorView q_THD, k_TKD, v_TKD;
  std::int64_t q_token_stride = 0, k_token_stride = 0, v_token_stride = 0;
  std::span<const std::int32_t> cu_seqlens;
  float scale = 1.0f;
  std::int64_t window = 0;       ///< keys that a query sees at most, its own included; 0: all
  ConstTensorView sinks_H = {};  ///< no data: none
};
void attention_varlen(OpContext& ctx, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args);
/// dq, dk, dv (same dtype and layout rules as q, k, v, overwritten; strides as for q, k, v of `args` unless contiguous).
void attention_varlen_backward(OpContext& ctx, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD, std::int64_t dq_token_stride,
                               std::int64_t dk_token_stride, std::int64_t dv_token_stride, ConstTensorView dout_THD,
                               ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args);

/// dsinks_H (fp32, [H]) += the gradients of sinks: -exp(sink - lse) * (dout . out), summed over tokens in an order that depends on their
/// number alone. out_THD and lse_TH are attention_varlen()'s, contiguous.
void attention_sinks_backward(OpContext& ctx, TensorView dsinks_H, ConstTensorView dout_THD, ConstTensorView out_THD,
                              ConstTensorView lse_TH, ConstTensorView sinks_H);

/// One layer of the paged cache: k and v as [num_blocks, Hkv, block_size, D]. block_size divides kAttentionTile or is a multiple of it.
/// How a block of one head is laid out inside is the device's own (the CPU keeps k as [D, block_size]): write with kv_write, copy
/// or move whole blocks only.
struct KvLayer {
  TensorView k;
  TensorView v;  ///< no data: the last elements of k's rows are v, as in VarlenAttention
};
/// Stores the k, v of each token at slot_T[t] = block * block_size + offset (int32, host; -1 skips the token); v_TKD only where the layer
/// has v.
void kv_write(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
              std::int64_t v_token_stride, std::span<const std::int32_t> slot_T);

/// Attention of new queries over cached keys (which already include the new ones).
///
/// Sequence s owns query rows [query_start[s], query_start[s+1]) at absolute positions context_len[s] - count + i, and its
/// blocks are block_table[s * max_blocks + j]. All arrays are host int32. Equal bit for bit to attention_varlen.
struct PagedAttention {
  ConstTensorView q_THD;
  std::int64_t q_token_stride = 0;
  KvLayer layer;
  std::span<const std::int32_t> query_start;  ///< num_sequences + 1
  std::span<const std::int32_t> context_len;  ///< num_sequences: tokens in cache, the new ones included
  std::span<const std::int32_t> block_table;  ///< num_sequences * max_blocks
  std::int32_t max_blocks = 0;
  float scale = 1.0f;
  std::int64_t window = 0;       ///< as in VarlenAttention
  ConstTensorView sinks_H = {};  ///< as in VarlenAttention
};
void attention_paged(OpContext& ctx, TensorView out_THD, const PagedAttention& args);

/// Index arrays of one new token per sequence, in device memory (int32), so that a step can be recorded once and replayed with other
/// values. Row s belongs to sequence s. Several rows may name the blocks of one sequence, with contexts of their own: its next tokens.
struct DecodeIndex {
  ConstTensorView slot_B;          ///< where the token's k and v go: block * block_size + offset; -1: there is no such sequence
  ConstTensorView context_len_B;   ///< tokens in cache, the new one included; 0: there is no such sequence
  ConstTensorView block_table_BM;  ///< blocks of the sequence
  bool has_next_tokens = false;    ///< whether they may: all keys and values must then be written before any are read
};
/// Whether this device can decode from a DecodeIndex. The functions below require it.
bool can_decode_by_index(const OpContext& ctx);
/// q_TE [T, Q] = rope(head_norm(q heads)), without the norm where there is none; k so treated and v into the cache at slot_T (int32,
/// device; -1 skips the token). Equal bit for bit to head_norm, rope and kv_write.
void norm_rope_to_cache(OpContext& ctx, TensorView q_TE, const KvLayer& layer, ConstTensorView slot_T, const HeadInputs& in);
/// Bytes of the plan that the layers of a step with one `window` share.
std::size_t decode_plan_bytes(OpContext& ctx, const DecodeIndex& index, std::int64_t block_size);
/// Divides a step's work into units on the device. `plan`: kU8, as large as decode_plan_bytes says. `q_BHD`: shape and dtype as of the
/// layers to come, no memory needed. `window` as in VarlenAttention, and in all layers that take the plan.
void plan_decode(OpContext& ctx, TensorView plan, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                 std::int64_t window = 0);
/// attention_paged of these tokens, bit for bit; rows of absent sequences are not written. Enqueues kernels only.
void attention_decode(OpContext& ctx, TensorView out_BHD, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                      ConstTensorView plan, float scale, std::int64_t window = 0, ConstTensorView sinks_H = {});

}  // namespace prl::ops
