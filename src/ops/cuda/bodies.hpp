#pragma once

#include "ops/op_table.hpp"

// The CUDA bodies that table.cpp puts into the op table. Contracts: the public headers of ops/. All of them only queue work on the
// context's stream, except those that return host values (sum_squares, finish_sample).

namespace prl::ops::cuda {

LinearWeightPtr pack_linear(OpContext& ctx, ConstTensorView w_NK, ConstTensorView bias_N, DType compute, bool with_backward);
LinearWeightPtr share_linear(OpContext& ctx, const Tensor& w_NK, ConstTensorView bias_N, bool with_backward);
void hash_rows(OpContext& ctx, std::span<std::uint64_t> out, std::span<const HashedRows> items, DType as);
void linear(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearWeight* next);
bool linear_fused(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, const LinearWeight& w, const LinearFusion& fusion);
void linear_backward_input(OpContext& ctx, TensorView dx_TK, ConstTensorView dy_TN, const LinearWeight& w, bool accumulate);
void linear_backward_weight(OpContext& ctx, TensorView dw_NK, TensorView db_N, ConstTensorView dy_TN, ConstTensorView x_TK,
                            bool accumulate);
void matmul_f32(OpContext& ctx, TensorView out_MN, ConstTensorView a_MK, ConstTensorView b, bool transpose_b);

void attention_varlen(OpContext& ctx, TensorView out_THD, TensorView lse_TH, const VarlenAttention& args);
void attention_varlen_backward(OpContext& ctx, TensorView dq_THD, TensorView dk_TKD, TensorView dv_TKD, std::int64_t dq_token_stride,
                               std::int64_t dk_token_stride, std::int64_t dv_token_stride, ConstTensorView dout_THD,
                               ConstTensorView out_THD, ConstTensorView lse_TH, const VarlenAttention& args);
void kv_write(OpContext& ctx, const KvLayer& layer, ConstTensorView k_TKD, std::int64_t k_token_stride, ConstTensorView v_TKD,
              std::int64_t v_token_stride, std::span<const std::int32_t> slot_T);
void attention_paged(OpContext& ctx, TensorView out_THD, const PagedAttention& args);
std::size_t decode_plan_bytes(OpContext& ctx, std::int64_t num_sequences, std::int64_t max_context);
void plan_decode(OpContext& ctx, TensorView plan, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index);
void attention_decode(OpContext& ctx, TensorView out_BHD, ConstTensorView q_BHD, const KvLayer& layer, const DecodeIndex& index,
                      ConstTensorView plan, float scale);
bool attention_decode_fused(OpContext& ctx, TensorView out_BHD, const HeadInputs& in, const KvLayer& layer, const DecodeIndex& index,
                            ConstTensorView plan, float scale);

void lm_head_logprob(OpContext& ctx, TensorView logp_T, TensorView entropy_T, TensorView lse_T, ConstTensorView h_TH, const LinearWeight& w,
                     std::span<const std::int32_t> targets_T, std::span<const float> temperatures_T, TensorView kept_RB);
void lm_head_logprob_backward(OpContext& ctx, TensorView dh_TH, TensorView dw_VH, ConstTensorView dlogp_T, ConstTensorView lse_T,
                              ConstTensorView h_TH, const LinearWeight& w, std::span<const std::int32_t> targets_T,
                              std::span<const float> temperatures_T, bool accumulate, ConstTensorView kept_RB);
void edit_logits(OpContext& ctx, TensorView logits_BV, ConstTensorView drawn_B, const LogitEdits& edits);
void begin_sample(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView logits_BV,
                  std::span<const SampleRow> rows_B);
bool begin_sample_head(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView h_BH, const LinearWeight& lm_head,
                       std::span<const SampleRow> rows_B);
void finish_sample(std::span<SampleResult> out_B, PendingSamples& pending);

void embedding(OpContext& ctx, TensorView out_TH, ConstTensorView table_VH, const TokenIds& ids);
void embedding_backward(OpContext& ctx, TensorView dtable_VH, ConstTensorView dout_TH, ConstTensorView ids_T);
void rms_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, float eps);
void add_rms_norm(OpContext& ctx, TensorView y_RC, TensorView sum_RC, ConstTensorView x_RC, ConstTensorView residual_RC,
                  ConstTensorView w_C, float eps);
void rms_norm_backward(OpContext& ctx, TensorView dx_RC, TensorView dw_C, ConstTensorView dy_RC, ConstTensorView x_RC, ConstTensorView w_C,
                       float eps, bool accumulate);
void head_norm(OpContext& ctx, TensorView y_THD, std::int64_t y_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride,
               ConstTensorView w_D, float eps);
void head_norm_backward(OpContext& ctx, TensorView dx_THD, std::int64_t dx_token_stride, TensorView dw_D, ConstTensorView dy_THD,
                        std::int64_t dy_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride, ConstTensorView w_D, float eps);
void add(OpContext& ctx, TensorView out, ConstTensorView a, ConstTensorView b);
void swiglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F);
void swiglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F);
void rope(OpContext& ctx, TensorView x_THD, std::int64_t token_stride, ConstTensorView positions_T, const RopeTable& table, bool inverse);
bool norm_rope(OpContext& ctx, TensorView qk_TE, const HeadInputs& in);
bool norm_rope_backward(OpContext& ctx, TensorView dqkv_TE, TensorView dq_norm_D, TensorView dk_norm_D, TensorView dqk_TE,
                        const HeadInputs& in);
void norm_rope_to_cache(OpContext& ctx, TensorView q_TE, const KvLayer& layer, ConstTensorView slot_T, const HeadInputs& in);
void cast(OpContext& ctx, TensorView out, ConstTensorView x);
double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs);
void scale(OpContext& ctx, TensorView x, float factor);

void adamw(OpContext& ctx, TensorView param, TensorView m, TensorView v, ConstTensorView grad, const AdamWArgs& args, TensorView rounded);
void sgd(OpContext& ctx, TensorView param, TensorView buffer, ConstTensorView grad, const SgdArgs& args);
void sign_sgd(OpContext& ctx, TensorView param, ConstTensorView grad, float lr, float weight_decay);
void muon(OpContext& ctx, TensorView param_NK, TensorView momentum_NK, ConstTensorView grad_NK, const MuonArgs& args);

}  // namespace prl::ops::cuda
