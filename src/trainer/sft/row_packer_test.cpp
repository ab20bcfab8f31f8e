#include "trainer/sft/row_packer.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

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
  RowPacker two(stream, 40, one.state().position);
  for (int r = 0; r < 20; ++r) EXPECT_EQ(one.next().input_ids, two.next().input_ids);
}

TEST(RowPacker, OnePassEndsWithTheEpoch) {
  RandomStream stream;
  RowPacker packer(stream, 64);
  std::int64_t num_samples = 0;
  while (const auto row = packer.next_until(stream.epoch_size())) num_samples += static_cast<std::int64_t>(row->sequence_lengths.size());
  EXPECT_EQ(num_samples, 40);
  EXPECT_EQ(packer.state().position, 50);
}

/// Samples of given lengths, over and over; length 0: the row is skipped.
class LengthStream final : public SampleStream {
 public:
  explicit LengthStream(std::vector<std::int64_t> lengths) : lengths_(std::move(lengths)) {}
  std::int64_t epoch_size() const noexcept override { return static_cast<std::int64_t>(lengths_.size()); }
  std::optional<SftSample> at(std::int64_t position, std::int64_t max_tokens) override {
    const auto n = static_cast<std::size_t>(std::min(lengths_[static_cast<std::size_t>(position % epoch_size())], max_tokens));
    if (n == 0) return std::nullopt;
    return SftSample{.ids = std::vector<std::int32_t>(n, static_cast<std::int32_t>(position + 1)), .mask = std::vector<std::uint8_t>(n, 1)};
  }

 private:
  std::vector<std::int64_t> lengths_;
};

/// What a row holds: "3:256 4:100+156 -:512" for the sample of position 3 with 256 tokens, that of 4 with 100 and as many that fill up,
/// and 512 more of those.
std::string contents(const wire::MicroBatch& row) {
  wire::check(row);
  std::string text;
  std::size_t first = 0;
  bool follows_sample = false;
  for (std::size_t s = 0; s < row.sequence_lengths.size(); ++s) {
    const auto n = static_cast<std::size_t>(row.sequence_lengths[s]);
    const bool is_sample = !row.env_names[s].empty();
    for (std::size_t i = first; i < first + n; ++i) {
      EXPECT_EQ(row.input_ids[i], is_sample ? row.input_ids[first] : 0);
      EXPECT_EQ(row.position_ids[i], is_sample ? static_cast<std::int32_t>(i - first) : 0);
      EXPECT_EQ(row.ce_weights[i], is_sample && i > first ? 1.0f : 0.0f);
    }
    if (is_sample)
      text += fmt::format("{}{}:{}", text.empty() ? "" : " ", row.input_ids[first] - 1, n);
    else
      text += fmt::format("{}{}", follows_sample ? "+" : " -:", n);
    follows_sample = is_sample;
    first += n;
  }
  return text;
}

TEST(StackPacker, FullBucketsMakeRows) {
  LengthStream stream({256, 100, 500, 2000, 300, 256, 1});
  StackPacker packer(stream, 1024);
  EXPECT_EQ(contents(packer.next()), "3:1024") << "a longer sample keeps its first tokens";
  EXPECT_EQ(contents(packer.next()), "2:500+12 4:300+212") << "two of half the length";
  EXPECT_EQ(contents(packer.next()), "0:256 1:100+156 5:256 6:1+255") << "four of a quarter, which is the shortest";
  EXPECT_EQ(packer.state().position, 7);
  EXPECT_TRUE(packer.state().pending.empty());
}

TEST(StackPacker, ABucketThatHasWaitedMakesARowWithWhatFits) {
  // The first sample waits while ten more go by, of which nine are of full rows.
  std::vector<std::int64_t> lengths{100, 400, 0, 0, 0, 0, 0, 0, 0, 0, 1024, 1024};
  LengthStream together(lengths);
  StackPacker packer(together, 1024);
  EXPECT_EQ(contents(packer.next()), "0:100+412 1:400+112") << "the longer bucket's sample fits beside it";
  EXPECT_EQ(packer.state().position, 10);
  EXPECT_EQ(contents(packer.next()), "10:1024");
  lengths[1] = 0;
  LengthStream alone(lengths);
  StackPacker lonely(alone, 1024);
  EXPECT_EQ(contents(lonely.next()), "0:100+156 -:256 -:256 -:256");
}

TEST(StackPacker, EverySampleIsInOneRowAndThePositionsAreTheWholeState) {
  std::vector<std::int64_t> lengths;
  Rng rng(5);
  for (int i = 0; i < 97; ++i) lengths.push_back(i % 11 == 3 ? 0 : 1 + static_cast<std::int64_t>(rng.next_below(700)));
  LengthStream stream(lengths);
  StackPacker packer(stream, 1024), resumed(stream, 1024);
  std::set<std::int64_t> seen;
  for (int r = 0; r < 200 || (packer.state().pending.empty() && r < 220); ++r) {
    resumed.seek(packer.state());
    const wire::MicroBatch row = packer.next();
    ASSERT_EQ(row.input_ids, resumed.next().input_ids) << r;
    ASSERT_EQ(row.input_ids.size(), 1024u);
    for (std::size_t s = 0, first = 0; s < row.sequence_lengths.size(); first += static_cast<std::size_t>(row.sequence_lengths[s++]))
      if (!row.env_names[s].empty()) {
        ASSERT_TRUE(seen.insert(row.input_ids[first] - 1).second);
      }
  }
  const PackerState state = packer.state();
  seen.insert(state.pending.begin(), state.pending.end());
  std::int64_t wanted = 0;
  for (std::int64_t p = 0; p < state.position; ++p) wanted += lengths[static_cast<std::size_t>(p % 97)] > 0;
  EXPECT_EQ(static_cast<std::int64_t>(seen.size()), wanted) << "each sample is in a row or waits for one";
  ASSERT_FALSE(state.pending.empty());
  EXPECT_LE(state.position - state.pending.front(), StackPacker::kPatience);
  // Another kind of packer trains on what waited before it goes on.
  RowPacker cat(stream, 1024);
  cat.seek(state);
  EXPECT_EQ(cat.next().input_ids.front(), state.pending.front() + 1);
}

TEST(StackPacker, OnePassHoldsWhatIsLeftToo) {
  LengthStream stream({100, 300, 700, 20});
  StackPacker packer(stream, 1024);
  std::vector<std::string> rows;
  while (const auto row = packer.next_until(4)) rows.push_back(contents(*row));
  EXPECT_THAT(rows, ::testing::ElementsAre("2:700+324", "0:100+156 3:20+236 -:256 -:256", "1:300+212 -:512"));
}

TEST(StackPacker, RowsAreMultiplesOfTheShortestBucket) {
  LengthStream stream({10});
  EXPECT_THROW(StackPacker(stream, 1000), Error);
  EXPECT_EQ(contents(StackPacker(stream, 768).next()).substr(0, 8), "0:10+758") << "384 is no multiple of 256";
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
