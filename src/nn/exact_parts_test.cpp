#include "nn/exact_parts.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace prl::nn {
namespace {

std::vector<float> joined(const std::vector<float>& parts) {
  const std::size_t n = parts.size() / 3;
  std::vector<float> out(n);
  const std::span<const float> all(parts);
  join_exact(all.subspan(0, n), all.subspan(n, n), all.subspan(2 * n, n), out);
  return out;
}

TEST(ExactParts, HoldAllBitsInBfloat16) {
  std::vector<float> values{0.0f, -0.0f, 1.0f, -1.0f, 0.1f, 1.0f + 0x1.0p-23f, 2.0f - 0x1.0p-23f, 0x1.0p-100f, 1e30f, -3.4e37f};
  Rng rng(3);
  for (int i = 0; i < 100'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(rng.next_below(std::uint64_t{1} << 32));
    // Any mantissa; exponents that leave room for the last part.
    values.push_back(std::bit_cast<float>((bits & 0x807fffffu) | (30u + (bits >> 23) % 200u) << 23));
  }
  std::vector<float> parts(values.size() * 3);
  split_exact(values, parts, "test");
  for (const float part : parts) ASSERT_EQ(to_f32(to_bf16(part)), part);
  const std::vector<float> got = joined(parts);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(got[i]), std::bit_cast<std::uint32_t>(values[i])) << values[i];
}

TEST(ExactParts, WhatTheyCannotHoldIsRefused) {
  for (const float value : {std::numeric_limits<float>::denorm_min(), 0x1.000002p-126f, std::numeric_limits<float>::max()}) {
    std::vector<float> parts(6);
    try {
      split_exact(std::vector<float>{1.0f, value}, parts, "the bias");
      FAIL() << value;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("the bias: element 1"));
    }
  }
}

TEST(ExactParts, FilesHaveTheSum) {
  const TensorSpec spec{.name = "bias", .shape = {9}, .block = Block::kRouterBias, .num_parts = 3};
  const std::vector<float> values{0.1f, -0.7f, 3.3e-5f};
  std::vector<float> parts(9);
  split_exact(values, parts, "test");
  const WeightSource source =
      stored_source(spec, [&](std::int64_t first, std::span<float> out) { std::copy_n(parts.begin() + first, out.size(), out.begin()); });
  EXPECT_TRUE(source.is_exact);
  EXPECT_EQ(source.shape, Shape{3});
  std::vector<float> all(3), last(1);
  source.read(0, all);
  source.read(2, last);
  EXPECT_EQ(all, values);
  EXPECT_EQ(last[0], values[2]);
}

}  // namespace
}  // namespace prl::nn
