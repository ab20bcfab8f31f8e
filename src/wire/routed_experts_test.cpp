#include "wire/routed_experts.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "base/error.hpp"

namespace prl::wire {
namespace {

RoutedExperts of(std::int64_t start, std::vector<std::uint16_t> ids) {
  return {.start = start, .num_layers = 1, .top_k = 2, .ids = std::move(ids)};
}

TEST(RoutedExperts, WhatComesBehindIsAppended) {
  RoutedExperts all;
  all.append(of(0, {1, 2, 3, 4}));
  all.append(of(1, {9, 9, 5, 6}));  // the first of these is known
  EXPECT_EQ(all, of(0, {1, 2, 3, 4, 5, 6}));
  all.append(of(0, {7, 7}));
  EXPECT_EQ(all.num_tokens(), 3);
  all.resize(4);
  EXPECT_EQ(all.ids, (std::vector<std::uint16_t>{1, 2, 3, 4, 5, 6, 0, 0}));
  EXPECT_TRUE(all.knows(2));
  EXPECT_FALSE(all.knows(3));
  all.resize(1);
  EXPECT_EQ(all, of(0, {1, 2}));
  RoutedExperts single{.start = 0, .num_layers = 2, .top_k = 1, .ids = {}};
  single.resize(1);
  EXPECT_EQ(single.ids, (std::vector<std::uint16_t>{RoutedExperts::kUnknown, RoutedExperts::kUnknown}));
  EXPECT_FALSE(single.knows(0));
  single.ids[1] = 0;
  EXPECT_TRUE(single.knows(0));
}

TEST(RoutedExperts, BytesComeBack) {
  for (const std::vector<std::uint16_t>& ids : {std::vector<std::uint16_t>{0, 255, 7, 8}, {1, 256, 65535, 0}}) {
    const ExpertBytes bytes = encode(of(0, ids));
    EXPECT_EQ(bytes.dtype, ids[1] == 255 ? "uint8" : "uint16");
    EXPECT_EQ(decode_experts("f", bytes.data, bytes.dtype, 2, 1, 2), of(0, ids));
  }
}

TEST(RoutedExperts, OtherBytesThanTheShapeSaysAreRefused) {
  const auto code = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  const std::string eight(8, '\1');
  EXPECT_EQ(code([&] { decode_experts("f", eight, "uint8", 3, 1, 2); }), ErrorCode::kCorrupt);
  EXPECT_EQ(code([&] { decode_experts("f", eight, "int32", 1, 1, 2); }), ErrorCode::kCorrupt);
  EXPECT_EQ(code([&] { decode_experts("f", eight, "uint8", -4, 1, -2); }), ErrorCode::kCorrupt);
  EXPECT_EQ(code([&] { decode_experts("f", "", "uint8", std::int64_t{1} << 62, 4, 4); }), ErrorCode::kCorrupt);
}

}  // namespace
}  // namespace prl::wire
