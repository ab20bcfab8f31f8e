#include "trainer/sft/row_packer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "wire/checks.hpp"

namespace prl::trainer {
namespace {

/// Samples of random length; every fifth row has no target.
class RandomStream final : public SampleStream {
 public:
  std::int64_t epoch_size() const noexcept override { return 50; }
  std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) override {
    if (position % 5 == 4) return std::nullopt;
    Rng rng(static_cast<std::uint64_t>(position));
    SftSample sample;
    const auto n = std::min<std::uint64_t>(2 + rng.next_below(30), static_cast<std::uint64_t>(max_tokens));
    for (std::uint64_t i = 0; i < n; ++i) {
      sample.ids.push_back(static_cast<std::int32_t>(position));
      sample.mask.push_back(i == 0 || rng.next_below(2) == 1);
    }
    return sample;
  }
};

TEST(RowPacker, RowsHoldEverySampleOnceAndInOrder) {
  RandomStream stream;
  RowPacker packer(stream, 40);
  std::int64_t expected = 0;
  for (int r = 0; r < 100; ++r) {
    const wire::MicroBatch row = packer.next();
    wire::check(row);
    ASSERT_LE(row.input_ids.size(), 40u);
    std::size_t first = 0;
    for (const std::int32_t n : row.sequence_lengths) {
      while (expected % 5 == 4) ++expected;
      const SftSample sample = *stream.at(expected, 40);
      ASSERT_EQ(static_cast<std::size_t>(n), sample.ids.size());
      for (std::size_t i = 0; i < sample.ids.size(); ++i) {
        ASSERT_EQ(row.input_ids[first + i], sample.ids[i]);
        ASSERT_EQ(row.position_ids[first + i], static_cast<std::int32_t>(i));
        ASSERT_EQ(row.ce_weights[first + i], i > 0 && sample.mask[i] != 0 ? 1.0f : 0.0f);
        ASSERT_EQ(row.loss_mask[first + i], 0);
      }
      first += sample.ids.size();
      ++expected;
    }
  }
}

// A packer that starts at a saved position makes the rows that would have come next.
TEST(RowPacker, PositionIsTheWholeState) {
  RandomStream stream;
  RowPacker one(stream, 40);
  for (int r = 0; r < 7; ++r) one.next();
  RowPacker two(stream, 40, one.position());
  for (int r = 0; r < 20; ++r) EXPECT_EQ(one.next().input_ids, two.next().input_ids);
}

TEST(RowPacker, OnePassEndsWithTheEpoch) {
  RandomStream stream;
  RowPacker packer(stream, 64);
  std::int64_t num_samples = 0;
  while (const auto row = packer.next_until(stream.epoch_size())) num_samples += static_cast<std::int64_t>(row->sequence_lengths.size());
  EXPECT_EQ(num_samples, 40);
  EXPECT_EQ(packer.position(), 50);
}

class EmptyStream final : public SampleStream {
 public:
  std::int64_t epoch_size() const noexcept override { return 3; }
  std::optional<SftSample> at(std::int64_t, std::int64_t) override { return std::nullopt; }
};

TEST(RowPacker, DataWithoutTargetsIsAnError) {
  EmptyStream stream;
  RowPacker packer(stream, 16);
  EXPECT_THROW(packer.next(), Error);
  EXPECT_THROW(RowPacker(stream, 1), Error);
}

}  // namespace
}  // namespace prl::trainer
