#pragma once

#include <span>

#include "autograd/functions.hpp"
#include "ops/attention.hpp"
#include "ops/delta_rule.hpp"

namespace prl::autograd {

/// Sizes, norms and rotary table of one attention layer. Legend: T tokens, Q = Hq * D, K = Hkv * D.
struct AttentionParameter {
  std::int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  NormParameter q_norm, k_norm;  ///< per head; both or none (weight.data == nullptr)
  const ops::RopeTable* rope = nullptr;
  std::int64_t window = 0;  ///< keys that a query sees at most: ops::VarlenAttention
  ConstTensorView sinks_H = {};
  TensorView dsinks_H = {};      ///< added to; no data: nobody wants it
  float scale = 0;               ///< of scores; 0: 1 / sqrt(head_dim)
  bool gates_are_apart = false;  ///< of gated_attention: all queries come before all gates
  std::int64_t width() const noexcept { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

/// Ranks that hold neighbouring parts of the tokens of one row, all of them as many, and exchange heads for tokens around attention
/// (Ulysses: Jacobs et al. 2023).
class HeadExchange {
 public:
  virtual ~HeadExchange() = default;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// ins[r] goes to rank r and outs[r] comes from it; all are contiguous and of the same size.
  virtual void all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins) = 0;
};

/// Which keys a query sees. positions_T [T] int32 on the device; the rest host memory that outlives the tape.
struct AttentionIndex {
  ConstTensorView positions_T;
  std::span<const std::int32_t> cu_seqlens;      ///< packed sequences of the whole row, unless `paged`
  HeadExchange* exchange = nullptr;              ///< packed only: the tokens are this rank's part of the row
  const ops::PagedAttention* paged = nullptr;    ///< index arrays of the cache; query, layer, scale and window are filled in here
  const ops::KvLayer* kv_layer = nullptr;        ///< paged only
  std::span<const std::int32_t> slot_T;          ///< paged only
  ops::StateRows state_rows;                     ///< of layers of linear attention, paged or with `decode`
  const ops::StateLayer* state_layer = nullptr;  ///< the same
  const ops::DecodeIndex* decode = nullptr;      ///< new tokens with indices on the device; with kv_layer and plan
  ConstTensorView decode_plan, window_plan;      ///< of layers without a window and with one, which is the same in all that have one
};

/// From projections qkv [T, Q + 2K] (q heads, then k, then v) to the attention output [T, Q]: norms, rotation, keys and values into
/// the cache if paged, softmax(scale q k^T) v. Without norms q and k are rotated in place, so qkv's value changes.
/// Packed and paged results agree bit for bit, and so do those of ranks that share a row: each computes some of the heads for all tokens.
/// Only packed attention has a backward pass. A recomputing frame recomputes the normed and
/// rotated heads; without norms it must recompute qkv too, which is rotated in place.
Var self_attention(Frame& frame, const Var& qkv, const AttentionParameter& p, const AttentionIndex& index);

}  // namespace prl::autograd
