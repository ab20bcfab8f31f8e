#include "wire/packing.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "wire/checks.hpp"

namespace prl::wire {
namespace {

/// A sample whose advantages carry its number, so that it can be found again in the rows.
TrainingSample make_sample(Rng& rng, int number, std::size_t length) {
  TrainingSample s;
  s.env_name = fmt::format("env{}", number % 3);
  for (std::size_t i = 0; i < length; ++i) {
    s.token_ids.push_back(static_cast<std::int32_t>(10 + rng.next_below(1000)));
    s.mask.push_back(i > 0 && (i == length - 1 || rng.next_below(2) == 1));
    s.logprobs.push_back(-static_cast<float>(rng.next_double()));
    s.temperatures.push_back(1.0f);
    s.advantages.push_back(static_cast<float>(number + 1));
  }
  if (number % 4 == 1) s.rl_weights.assign(length, 0.5f);
  if (number % 5 == 2) {
    s.ce_weights.assign(length, 0.1f);
    s.ce_weights[0] = 0;
  }
  if (number % 7 == 3) s.ref_logprobs.assign(length, -1.5f);
  if (!s.rl_weights.empty()) s.rl_weights[0] = 0;
  return s;
}

TEST(Packing, FirstFitDecreasing) {
  const std::vector<std::int64_t> lengths{4, 8, 1, 4, 2, 1};
  const auto bins = first_fit_decreasing(lengths, 10);
  const std::vector<std::vector<std::size_t>> wanted{{1, 4}, {0, 3, 2, 5}};
  EXPECT_EQ(bins, wanted);
}

TEST(Packing, BalancedPartitionHasEqualCounts) {
  const std::vector<double> costs{8, 7, 6, 5, 4, 1};
  const auto ranks = balanced_partition(costs, 2);
  double sums[2] = {0, 0};
  for (int r = 0; r < 2; ++r) {
    ASSERT_EQ(ranks[static_cast<std::size_t>(r)].size(), 3u);
    for (const std::size_t i : ranks[static_cast<std::size_t>(r)]) sums[r] += costs[i];
  }
  EXPECT_LE(std::max(sums[0], sums[1]), 16.0);
}

// Whatever the samples, ranks and padding: nothing lost, nothing twice, nothing too long, equal work.
TEST(Packing, Invariants) {
  Rng rng(5);
  for (int round = 0; round < 300; ++round) {
    PackOptions options;
    options.seq_len = static_cast<std::int64_t>(8 + rng.next_below(60));
    options.num_ranks = static_cast<std::int64_t>(1 + rng.next_below(5));
    options.pad_to_multiple_of = std::int64_t{1} << rng.next_below(3);
    options.seq_len = options.seq_len / options.pad_to_multiple_of * options.pad_to_multiple_of;
    if (rng.next_below(2) == 1) options.cost = {1.0, 0.01};
    std::vector<TrainingSample> samples;
    const int count = static_cast<int>(1 + rng.next_below(40));
    for (int i = 0; i < count; ++i)
      samples.push_back(make_sample(rng, i, 2 + rng.next_below(static_cast<std::uint64_t>(options.seq_len) + 10)));
    LossTokenCounts wanted;
    for (const TrainingSample& s : samples) {
      const auto n = std::min(s.token_ids.size(), static_cast<std::size_t>(options.seq_len));
      for (std::size_t i = 0; i < n; ++i) {
        wanted.rl += s.mask[i] != 0 && (s.rl_weights.empty() || s.rl_weights[i] != 0);
        wanted.ce += !s.ce_weights.empty() && s.ce_weights[i] != 0;
      }
    }

    const auto ranks = pack(samples, options);
    ASSERT_EQ(static_cast<std::int64_t>(ranks.size()), options.num_ranks);
    LossTokenCounts counts;
    std::map<int, int> seen;
    for (const auto& rank : ranks) {
      ASSERT_EQ(rank.size(), ranks[0].size());
      for (const MicroBatch& row : rank) {
        check(row);
        ASSERT_LE(static_cast<std::int64_t>(row.input_ids.size()), options.seq_len);
        ASSERT_EQ(static_cast<std::int64_t>(row.input_ids.size()) % options.pad_to_multiple_of, 0);
        counts += count_loss_tokens(row);
        if (!has_loss(row)) continue;  // a fill row
        std::size_t begin = 0;
        for (std::size_t s = 0; s < row.sequence_lengths.size(); ++s) {
          const int number = static_cast<int>(row.advantages[begin]) - 1;
          const TrainingSample& sample = samples[static_cast<std::size_t>(number)];
          ++seen[number];
          ASSERT_EQ(row.env_names[s], sample.env_name);
          const auto n = std::min(sample.token_ids.size(), static_cast<std::size_t>(options.seq_len));
          const auto length = static_cast<std::size_t>(row.sequence_lengths[s]);
          ASSERT_TRUE(length == n || (s + 1 == row.sequence_lengths.size() && length > n));
          for (std::size_t i = 0; i < n; ++i) {
            ASSERT_EQ(row.input_ids[begin + i], sample.token_ids[i]);
            ASSERT_EQ(row.loss_mask[begin + i], sample.mask[i]);
            ASSERT_EQ(row.inference_logprobs[begin + i], sample.logprobs[i]);
            ASSERT_EQ(row.position_ids[begin + i], static_cast<std::int32_t>(i));
            if (!row.rl_weights.empty()) {
              ASSERT_EQ(row.rl_weights[begin + i], sample.rl_weights.empty() ? 1.0f : sample.rl_weights[i]);
            }
            if (!row.ce_weights.empty()) {
              ASSERT_EQ(row.ce_weights[begin + i], sample.ce_weights.empty() ? 0.0f : sample.ce_weights[i]);
            }
          }
          for (std::size_t i = n; i < length; ++i) {
            ASSERT_EQ(row.input_ids[begin + i], 1);
            ASSERT_EQ(row.loss_mask[begin + i], 0);
            ASSERT_EQ(row.position_ids[begin + i], static_cast<std::int32_t>(i - n));
          }
          begin += length;
        }
      }
    }
    EXPECT_EQ(counts.rl, wanted.rl);
    EXPECT_EQ(counts.ce, wanted.ce);
    ASSERT_EQ(static_cast<int>(seen.size()), count);
    for (const auto& [number, times] : seen) ASSERT_EQ(times, 1) << "sample " << number;
  }
}

TEST(Packing, ExpertsFollowTheirTokens) {
  Rng rng(9);
  std::vector<TrainingSample> samples;
  for (int i = 0; i < 5; ++i) {
    TrainingSample& sample = samples.emplace_back(make_sample(rng, i, static_cast<std::size_t>(3 + 2 * i)));
    if (i == 2) continue;  // does not say
    sample.routed_experts = {.start = 0, .num_layers = 2, .top_k = 2, .ids = {}};
    for (const std::int32_t id : sample.token_ids)
      for (const int k : {1, 2, 3, 4}) sample.routed_experts.ids.push_back(static_cast<std::uint16_t>(id % 50 + k));
  }
  for (const auto& rank : pack(samples, {.seq_len = 8, .num_ranks = 2, .pad_to_multiple_of = 4}))
    for (const MicroBatch& row : rank) {
      if (row.routed_experts.empty()) {
        EXPECT_EQ(row.env_names, std::vector<std::string>{samples[2].env_name}) << "a row of one that does not say";
        continue;
      }
      ASSERT_EQ(row.routed_experts.num_tokens(), static_cast<std::int64_t>(row.input_ids.size())) << row.env_names[0];
      std::size_t first = 0;
      for (std::size_t s = 0; s < row.sequence_lengths.size(); ++s) {
        for (std::size_t p = 0; p < static_cast<std::size_t>(row.sequence_lengths[s]); ++p) {
          const std::uint16_t* ids = &row.routed_experts.ids[4 * (first + p)];
          const bool is_known = ids[3] != 0;
          for (const std::uint16_t k : {0, 1, 2, 3}) EXPECT_EQ(ids[k], is_known ? row.input_ids[first + p] % 50 + k + 1 : 0);
          EXPECT_TRUE(is_known || row.loss_mask[first + p] == 0 || row.sequence_lengths[s] == 7 || row.sequence_lengths[s] == 8);
        }
        first += static_cast<std::size_t>(row.sequence_lengths[s]);
      }
    }
  samples[1].routed_experts.top_k = 1;
  samples[1].routed_experts.num_layers = 4;
  EXPECT_THROW(pack(samples, {.seq_len = 64}), Error) << "of two models";
}

TEST(Packing, FewSamplesSpreadOverRanks) {
  Rng rng(1);
  std::vector<TrainingSample> samples;
  for (int i = 0; i < 3; ++i) samples.push_back(make_sample(rng, i, 4));
  PackOptions options{.seq_len = 100, .num_ranks = 4};
  const auto ranks = pack(samples, options);
  int num_real = 0;
  for (const auto& rank : ranks) {
    ASSERT_EQ(rank.size(), 1u);
    num_real += has_loss(rank[0]);
  }
  EXPECT_EQ(num_real, 3) << "the bin is split over ranks and one masked copy fills up";
}

TEST(Packing, MissingAdvantagesNameTheEnvironment) {
  Rng rng(1);
  TrainingSample sample = make_sample(rng, 0, 4);
  sample.advantages.clear();
  try {
    pack({sample}, {});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("env0"));
  }
  std::ranges::fill(sample.mask, std::uint8_t{0});
  const auto ranks = pack({sample}, {});
  EXPECT_EQ(ranks[0][0].advantages, std::vector<float>(4, 0.0f));
}

TEST(Packing, NothingGivesEmptyRanks) {
  const auto ranks = pack({}, {.num_ranks = 3});
  ASSERT_EQ(ranks.size(), 3u);
  EXPECT_TRUE(ranks[0].empty());
}

}  // namespace
}  // namespace prl::wire
