#include "autograd/token_blocks.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tensor/tensor.hpp"

namespace prl::autograd {
namespace {

/// Values whose sum depends on the order in which they are added.
constexpr float kBlocks[] = {1.0f, 3e-8f, -1.0f, 4e-8f, 2.0f, 5e-8f, 6e-8f, -2.0f};

float total(int num_blocks, bool can_overwrite, bool accumulate, float before) {
  const auto runtime = make_cpu_runtime();
  ops::OpSession session(runtime, 1);
  Arena arena(runtime);
  const Tensor out = Tensor::zeros(runtime, {2, 3}, DType::kF32);
  out.as<float>()[5] = before;
  const TensorView outs[] = {out.view(), TensorView{}};
  std::int64_t next = 0;
  sum_over_blocks(session.context(), arena, {.outs = outs, .accumulate = accumulate, .can_overwrite = can_overwrite}, 2 * num_blocks,
                  num_blocks, [&](std::int64_t begin, std::int64_t count, std::span<const TensorView> to, bool adds) {
                    EXPECT_EQ(begin, next) << "blocks come in their order";
                    EXPECT_EQ(count, 2);
                    EXPECT_EQ(to[1].data, nullptr) << "what is not wanted is not formed";
                    next += count;
                    auto* values = to[0].as<float>();
                    const float value = kBlocks[begin / 2];
                    values[5] = adds ? values[5] + value : value;
                  });
  EXPECT_EQ(next, 2 * num_blocks);
  return out.as<float>()[5];
}

TEST(TokenBlocks, AreAddedAsABalancedTree) {
  const auto& b = kBlocks;
  const float left = (b[0] + b[1]) + (b[2] + b[3]), right = (b[4] + b[5]) + (b[6] + b[7]);
  float in_order = 0;
  for (const float value : b) in_order += value;
  ASSERT_NE(left + right, in_order);
  for (const bool can_overwrite : {false, true}) {
    EXPECT_EQ(total(8, can_overwrite, false, 77), left + right);
    EXPECT_EQ(total(4, can_overwrite, false, 77), left);
    EXPECT_EQ(total(8, can_overwrite, true, 0.5f), 0.5f + (left + right)) << "the sum comes to what was there";
    EXPECT_EQ(total(1, can_overwrite, true, 0.5f), 1.5f);
  }
}

}  // namespace
}  // namespace prl::autograd
