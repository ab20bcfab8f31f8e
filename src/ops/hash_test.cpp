#include "ops/hash.hpp"

#include <bit>

#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class HashTest : public OpTest {};

/// The definition, element by element.
std::uint64_t expected(const std::vector<float>& values, std::int64_t cols, DType as) {
  const std::int64_t per_word = as == DType::kBF16 ? 4 : 2, words = (cols + per_word - 1) / per_word;
  const auto rows = static_cast<std::int64_t>(values.size()) / cols;
  std::uint64_t sum = 0;
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t k = 0; k < words; ++k) {
      std::uint64_t word = 0;
      for (std::int64_t j = 0; j < per_word && k * per_word + j < cols; ++j) {
        const float v = values[static_cast<std::size_t>(r * cols + k * per_word + j)];
        const std::uint64_t bits = as == DType::kBF16 ? to_bf16(v).bits : std::bit_cast<std::uint32_t>(v);
        word |= bits << (64 / per_word * j);
      }
      sum += hash_word(word, static_cast<std::uint64_t>(r * words + k));
    }
  return sum;
}

TEST_P(HashTest, FollowsItsDefinitionWhateverHoldsTheValues) {
  Session s(kind());
  for (const std::int64_t cols : {1, 3, 4, 8, 37, 264}) {
    const std::int64_t rows = 301, first = 7, count = 290;
    Tensor plain = s.random({rows, cols}, dtype(), static_cast<std::uint64_t>(cols));
    const LinearWeightPtr packed = pack_linear(s.ctx, plain, {}, dtype(), false);
    Tensor wide = s.poisoned({rows, cols}, DType::kF32);
    for (std::int64_t i = 0; i < plain.num_elements(); ++i) wide.as<float>()[i] = get(plain, i);
    const HashedRows items[] = {{.plain = plain, .first_row = first, .num_rows = count, .num_cols = cols},
                                {.packed = packed.get(), .first_row = first, .num_rows = count, .num_cols = cols},
                                {.plain = wide, .first_row = first, .num_rows = count, .num_cols = cols},
                                {.plain = plain, .first_row = first, .num_rows = 0, .num_cols = cols}};
    std::uint64_t hashes[4] = {1, 2, 3, 4};
    hash_rows(s.ctx, hashes, items, dtype());
    std::vector<float> v = values(plain);
    v = {v.begin() + first * cols, v.begin() + (first + count) * cols};
    const std::uint64_t want = expected(v, cols, dtype());
    EXPECT_EQ(hashes[0], want) << cols;
    EXPECT_EQ(hashes[1], want) << cols;
    EXPECT_EQ(hashes[2], want) << cols;
    EXPECT_EQ(hashes[3], 0u);
    // One bit anywhere, or two rows exchanged, show.
    std::swap(v[0], v[v.size() - 1]);
    EXPECT_NE(expected(v, cols, dtype()), want);
    Session::set(plain, first * cols + 5, get(plain, first * cols + 5) + 1.0f);
    hash_rows(s.ctx, std::span(hashes, 1), std::span(items, 1), dtype());
    EXPECT_NE(hashes[0], want);
  }
}

TEST_P(HashTest, RowsOutsideAreRefused) {
  Session s(kind());
  Tensor plain = s.random({4, 8}, dtype(), 1);
  std::uint64_t hash = 0;
  const HashedRows beyond{.plain = plain, .first_row = 3, .num_rows = 2, .num_cols = 8};
  EXPECT_THROW(hash_rows(s.ctx, {&hash, 1}, {&beyond, 1}, dtype()), Error);
}

PRL_OP_TEST_KINDS(HashTest);

}  // namespace
}  // namespace prl::ops
