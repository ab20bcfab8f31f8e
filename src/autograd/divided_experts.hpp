#pragma once

#include "autograd/experts.hpp"

namespace prl::autograd {

/// experts() where ranks divide them: a row travels to the rank of each of its experts, and what these compute travels back (Lepikhin et
/// al. 2020, GShard). The bits of one rank that has all experts. Each rank computes the rows that come, however many they are.
///
/// Rows travel in two parts, those of the first half of each rank's experts and of the second, so that one part is computed while the other
/// is on its way, and the gradients of weights are formed while those of x travel back.
///
/// Memory    beside what experts() takes: the rows of this rank's tokens as they travel, [T * K, H] in a forward pass and twice in a
///           backward pass, and there the rows of x [N, H] beside those of the gradient.
Var divided_experts(Frame& frame, const Var& x_TH, const ExpertsParameter& p, TensorView out, bool is_block_output);

}  // namespace prl::autograd
