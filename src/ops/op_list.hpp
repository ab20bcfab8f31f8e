#pragma once

#include "ops/attention.hpp"
#include "ops/delta_rule.hpp"
#include "ops/experts.hpp"
#include "ops/fused.hpp"
#include "ops/hash.hpp"
#include "ops/latent.hpp"
#include "ops/lm_head.hpp"
#include "ops/logit_edits.hpp"
#include "ops/lora.hpp"
#include "ops/optimizer.hpp"
#include "ops/pointwise.hpp"
#include "ops/vision.hpp"

// Each op is declared once, in its public header. Its entry in OpTable, the declarations of its bodies and the tables that hold them follow
// from its line here.

/// Ops that every device has. PRL_OP(name): ops::name.
#define PRL_FOR_EACH_OP(PRL_OP)     \
  PRL_OP(pack_linear)               \
  PRL_OP(share_linear)              \
  PRL_OP(linear)                    \
  PRL_OP(linear_backward_input)     \
  PRL_OP(linear_backward_weight)    \
  PRL_OP(add_lora)                  \
  PRL_OP(lora_backward)             \
  PRL_OP(dropout)                   \
  PRL_OP(hash_rows)                 \
  PRL_OP(matmul_f32)                \
  PRL_OP(attention_varlen)          \
  PRL_OP(attention_varlen_backward) \
  PRL_OP(attention_sinks_backward)  \
  PRL_OP(kv_write)                  \
  PRL_OP(attention_paged)           \
  PRL_OP(lm_head_logprob)           \
  PRL_OP(lm_head_logprob_backward)  \
  PRL_OP(edit_logits)               \
  PRL_OP(begin_sample)              \
  PRL_OP(embedding)                 \
  PRL_OP(store_rows)                \
  PRL_OP(embedding_backward)        \
  PRL_OP(rms_norm)                  \
  PRL_OP(add_rms_norm)              \
  PRL_OP(rms_norm_backward)         \
  PRL_OP(head_norm)                 \
  PRL_OP(head_norm_backward)        \
  PRL_OP(add)                       \
  PRL_OP(swiglu)                    \
  PRL_OP(swiglu_backward)           \
  PRL_OP(geglu)                     \
  PRL_OP(geglu_backward)            \
  PRL_OP(squared_relu)              \
  PRL_OP(squared_relu_backward)     \
  PRL_OP(rope)                      \
  PRL_OP(layer_norm)                \
  PRL_OP(gelu)                      \
  PRL_OP(attention_full)            \
  PRL_OP(gather_rope_rows)          \
  PRL_OP(route)                     \
  PRL_OP(route_backward)            \
  PRL_OP(route_by_score)            \
  PRL_OP(route_by_score_backward)   \
  PRL_OP(log_route)                 \
  PRL_OP(place_rows)                \
  PRL_OP(swiglu_rows)               \
  PRL_OP(swiglu_rows_backward)      \
  PRL_OP(sum_rows)                  \
  PRL_OP(row_gates)                 \
  PRL_OP(row_gates_backward)        \
  PRL_OP(causal_conv)               \
  PRL_OP(causal_conv_backward)      \
  PRL_OP(delta_rule)                \
  PRL_OP(delta_rule_backward)       \
  PRL_OP(gated_head_norm)           \
  PRL_OP(gated_head_norm_backward)  \
  PRL_OP(gated_group_norm)          \
  PRL_OP(gated_group_norm_backward) \
  PRL_OP(drop_gates)                \
  PRL_OP(drop_gates_backward)       \
  PRL_OP(gate_heads)                \
  PRL_OP(gate_heads_backward)       \
  PRL_OP(latent_heads)              \
  PRL_OP(latent_heads_backward)     \
  PRL_OP(narrow_heads)              \
  PRL_OP(narrow_heads_backward)     \
  PRL_OP(latent_queries)            \
  PRL_OP(latent_values)             \
  PRL_OP(clamped_swiglu)            \
  PRL_OP(clamped_swiglu_backward)   \
  PRL_OP(add_expert_biases)         \
  PRL_OP(expert_biases_backward)    \
  PRL_OP(add_bias_dots)             \
  PRL_OP(cast)                      \
  PRL_OP(chunk_squares)             \
  PRL_OP(find_not_finite)           \
  PRL_OP(scale)                     \
  PRL_OP(adamw)                     \
  PRL_OP(sgd)                       \
  PRL_OP(sign_sgd)                  \
  PRL_OP(muon)

/// Ops that not every device has: attention and adapters from indices in its own memory, and fused forms of ops above.
#define PRL_FOR_EACH_OPTIONAL_OP(PRL_OP) \
  PRL_OP(linear_fused)                   \
  PRL_OP(take_code_memory)               \
  PRL_OP(grouped_linear)                 \
  PRL_OP(grouped_linear_backward_input)  \
  PRL_OP(grouped_linear_backward_weight) \
  PRL_OP(can_mix_experts)                \
  PRL_OP(mix_experts)                    \
  PRL_OP(add_grouped_lora)               \
  PRL_OP(grouped_lora_backward)          \
  PRL_OP(write_lora_entry)               \
  PRL_OP(add_lora_indexed)               \
  PRL_OP(linear_lora)                    \
  PRL_OP(plan_decode)                    \
  PRL_OP(attention_decode)               \
  PRL_OP(attention_decode_fused)         \
  PRL_OP(begin_sample_head)              \
  PRL_OP(latent_queries_to_cache)        \
  PRL_OP(norm_rope_to_cache)
