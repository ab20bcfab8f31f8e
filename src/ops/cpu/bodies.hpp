#pragma once

#include "ops/op_table.hpp"

// The CPU bodies that table.cpp puts into the op table. Contracts: the public headers of ops/.

namespace prl::ops::cpu {

#define PRL_OP(op) decltype(ops::op) op;
PRL_FOR_EACH_OP(PRL_OP)
#undef PRL_OP
double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs);
void finish_sample(std::span<SampleResult> out_B, PendingSamples& pending);

}  // namespace prl::ops::cpu
