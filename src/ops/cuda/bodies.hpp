#pragma once

#include "ops/op_table.hpp"

// The CUDA bodies that table.cpp puts into the op table. Contracts: the public headers of ops/. All of them only enqueue work on the
// context's stream, except those that return host values (sum_squares, chunk_squares, find_not_finite, finish_sample).

namespace prl::ops::cuda {

#define PRL_OP(op) decltype(ops::op) op;
PRL_FOR_EACH_OP(PRL_OP)
PRL_FOR_EACH_OPTIONAL_OP(PRL_OP)
#undef PRL_OP
double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs);
void finish_sample(std::span<SampleResult> out_B, PendingSamples& pending);
std::size_t decode_plan_bytes(OpContext& ctx, std::int64_t num_sequences, std::int64_t max_context);
bool norm_rope(OpContext& ctx, TensorView qk_TE, const HeadInputs& in);
bool norm_rope_backward(OpContext& ctx, TensorView dqkv_TE, TensorView dq_norm_D, TensorView dk_norm_D, TensorView dqk_TE,
                        const HeadInputs& in);

}  // namespace prl::ops::cuda
