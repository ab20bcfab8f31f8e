#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "autograd/arena.hpp"
#include "ops/context.hpp"

namespace prl::autograd {

/// Gradients of parameters, each a sum over tokens: fp32, contiguous. data == nullptr skips one.
struct TokenSum {
  std::span<const TensorView> outs;
  bool accumulate = true;      ///< add to what `outs` hold
  bool can_overwrite = false;  ///< whether the op overwrites if it is told to; else it adds, and fresh memory is zeroed for it
};

/// Forms them over `num_blocks` blocks of as many tokens each, and adds the blocks as a balanced binary tree: ((b0 + b1) + (b2 + b3)). So
/// ranks that share a row hold subtrees, whose sums are added by whoever owns the parameters, and the bits depend on the number of blocks
/// alone. `num_blocks` is a power of two that divides `num_tokens`. `form` is told which tokens, where, and whether to add.
using FormBlock = std::function<void(std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool accumulate)>;
void sum_over_blocks(ops::OpContext& ctx, Arena& arena, const TokenSum& sum, std::int64_t num_tokens, int num_blocks,
                     const FormBlock& form);

/// Elements [begin, begin + count) of a vector.
ConstTensorView part_of_vector(ConstTensorView vector, std::int64_t begin, std::int64_t count);

}  // namespace prl::autograd
