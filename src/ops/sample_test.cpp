#include <map>
#include <numeric>
#include <set>

#include "ops/lm_head.hpp"
#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::Pair;

struct SampleTest : ::testing::Test {
  Session s{default_kind()};

  SampleResult draw(const std::vector<float>& logits, const SampleRow& row) {
    Tensor t = s.poisoned({1, static_cast<std::int64_t>(logits.size())}, DType::kF32);
    std::copy(logits.begin(), logits.end(), t.as<float>());
    SampleResult out;
    sample(s.ctx, {&out, 1}, t, {&row, 1});
    return out;
  }
  std::map<std::int32_t, int> draws(const std::vector<float>& logits, SampleRow row, int count) {
    Tensor t = s.poisoned({count, static_cast<std::int64_t>(logits.size())}, DType::kF32);
    std::vector<SampleRow> rows;
    for (int i = 0; i < count; ++i) {
      std::copy(logits.begin(), logits.end(), t.as<float>() + static_cast<std::size_t>(i) * logits.size());
      row.position = static_cast<std::uint64_t>(i);
      rows.push_back(row);
    }
    std::vector<SampleResult> out(static_cast<std::size_t>(count));
    sample(s.ctx, out, t, rows);
    std::map<std::int32_t, int> histogram;
    for (const SampleResult& r : out) ++histogram[r.token];
    return histogram;
  }
};

const float kNone = -std::numeric_limits<float>::infinity();

TEST_F(SampleTest, GreedyTakesTheFirstOfEquals) {
  const auto r = draw({1.0f, 3.0f, 3.0f, 0.0f}, {.temperature = 0.0f, .num_top_logprobs = 3});
  EXPECT_EQ(r.token, 1);
  const double lse = std::log(std::exp(1.0) + 2 * std::exp(3.0) + 1.0);
  EXPECT_NEAR(r.logprob, 3.0 - lse, 1e-6);
  ASSERT_EQ(r.top_logprobs.size(), 3u);
  EXPECT_EQ(r.top_logprobs[0].first, 1);
  EXPECT_EQ(r.top_logprobs[1].first, 2);
  EXPECT_EQ(r.top_logprobs[2].first, 0);
  EXPECT_NEAR(r.top_logprobs[2].second, 1.0 - lse, 1e-6);
}

TEST_F(SampleTest, FrequenciesFollowTheDistribution) {
  const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f), kNone};
  const auto h = draws(logits, {.seed = 5}, 8000);
  EXPECT_NEAR(h.at(0) / 8000.0, 1.0 / 8, 0.015);
  EXPECT_NEAR(h.at(1) / 8000.0, 2.0 / 8, 0.02);
  EXPECT_NEAR(h.at(2) / 8000.0, 5.0 / 8, 0.02);
  EXPECT_EQ(h.count(3), 0u);
  const auto hot = draws({0.0f, 1.0f}, {.temperature = 2.0f, .seed = 6}, 8000);
  EXPECT_NEAR(hot.at(1) / 8000.0, std::exp(0.5) / (1 + std::exp(0.5)), 0.02);
}

TEST_F(SampleTest, TopKKeepsExactlyKAndRenormalises) {
  const std::vector<float> logits = {0.0f, 1.0f, 1.0f, 1.0f, -1.0f};
  const auto h = draws(logits, {.top_k = 2, .seed = 3}, 500);
  EXPECT_EQ(h.size(), 2u);  // ties go to the lower index
  EXPECT_EQ(h.count(1), 1u);
  EXPECT_EQ(h.count(2), 1u);
  const auto r = draw(logits, {.top_k = 2, .seed = 3, .num_top_logprobs = 4});
  EXPECT_NEAR(r.logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(r.top_logprobs.size(), 2u);
}

TEST_F(SampleTest, TopPKeepsTheSmallestSetThatReachesIt) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.5f), std::log(0.25f), std::log(0.15f)};
  EXPECT_EQ(draws(logits, {.top_p = 0.49f}, 300).size(), 1u);
  EXPECT_EQ(draws(logits, {.top_p = 0.6f}, 300).size(), 2u);
  EXPECT_EQ(draws(logits, {.top_p = 0.89f}, 300).size(), 3u);
  EXPECT_EQ(draws(logits, {.top_p = 0.0001f}, 10).begin()->first, 1);
  const auto r = draw(logits, {.top_p = 0.6f, .seed = 1});
  EXPECT_NEAR(r.logprob, std::log((r.token == 1 ? 0.5 : 0.25) / 0.75), 1e-5);
}

TEST_F(SampleTest, TopPOverAWideFlatDistribution) {
  std::vector<float> logits(5000, 0.0f);
  logits[4321] = 0.5f;
  const auto r = draw(logits, {.top_p = 0.5f, .seed = 9, .num_top_logprobs = 2});
  EXPECT_LE(r.token == 4321 ? 0 : r.token, 2500);  // half of the mass, lowest indices first
  EXPECT_EQ(r.top_logprobs[0].first, 4321);
  EXPECT_EQ(r.top_logprobs[1].first, 0);
  double kept = 0;
  for (const auto& [token, logprob] : draw(logits, {.top_p = 0.5f, .seed = 9, .num_top_logprobs = 5000}).top_logprobs)
    kept += std::exp(static_cast<double>(logprob));
  EXPECT_NEAR(kept, 1.0, 1e-4);
}

TEST_F(SampleTest, MinPIsRelativeToTheBest) {
  const std::vector<float> logits = {0.0f, std::log(0.5f), std::log(0.1f), std::log(0.04f)};
  EXPECT_EQ(draws(logits, {.min_p = 0.3f}, 500).size(), 2u);
  EXPECT_EQ(draws(logits, {.min_p = 0.05f}, 2000).size(), 3u);
  EXPECT_EQ(draws(logits, {.min_p = 1.0f}, 50).size(), 1u);
}

TEST_F(SampleTest, NamedTokensAreToldUnderTheDistributionThatIsDrawnFrom) {
  constexpr std::int64_t kVocab = 3000;
  Tensor logits = s.random({4, kVocab}, DType::kF32, 6, 2.0f);
  logits.as<float>()[3 * kVocab + 7] = kNone;
  const std::vector<std::int32_t> few = {2999}, many = {7, 0, 1500, 7};
  const std::vector<SampleRow> rows = {{.temperature = 0.0f, .named_ids = many},
                                       {.top_k = 40, .seed = 3, .num_top_logprobs = kVocab, .named_ids = many},
                                       {.seed = 4, .num_top_logprobs = 2},
                                       {.temperature = 0.7f, .seed = 5, .num_top_logprobs = kVocab, .named_ids = few}};
  std::vector<SampleResult> out(rows.size());
  sample(s.ctx, out, logits, rows);
  for (std::size_t b = 0; b < rows.size(); ++b) ASSERT_EQ(out[b].named_logprobs.size(), rows[b].named_ids.size()) << b;
  SampleResult greedy;
  sample(s.ctx, {&greedy, 1}, logits.slice(0, 1), std::vector<SampleRow>{{.temperature = 0.0f, .num_top_logprobs = kVocab}});
  out[0].top_logprobs = greedy.top_logprobs;
  for (const std::size_t b : {0u, 1u, 3u}) {
    const std::map<std::int32_t, float> all(out[b].top_logprobs.begin(), out[b].top_logprobs.end());
    for (std::size_t k = 0; k < rows[b].named_ids.size(); ++k) {
      const auto at = all.find(rows[b].named_ids[k]);
      EXPECT_EQ(out[b].named_logprobs[k], at != all.end() ? at->second : kNone) << b << " " << k;
    }
  }
  EXPECT_EQ(out[1].named_logprobs[0], out[1].named_logprobs[3]);
  const std::vector<std::int32_t> banned = {7, 8}, outside = {static_cast<std::int32_t>(kVocab)};
  SampleRow row{.named_ids = banned};
  SampleResult last;
  sample(s.ctx, {&last, 1}, logits.slice(3, 1), {&row, 1});
  EXPECT_EQ(last.named_logprobs[0], kNone);
  EXPECT_TRUE(std::isfinite(last.named_logprobs[1]));
  row.named_ids = outside;
  EXPECT_THROW(sample(s.ctx, {&last, 1}, logits.slice(3, 1), {&row, 1}), Error);
}

TEST_F(SampleTest, AWideFilterChangesNothing) {
  Tensor logits = s.random({1, 3000}, DType::kF32, 4, 2.0f);
  SampleResult plain, filtered;
  const SampleRow all{.seed = 8, .position = 2}, wide{.top_k = 3000, .seed = 8, .position = 2};
  sample(s.ctx, {&plain, 1}, logits, {&all, 1});
  sample(s.ctx, {&filtered, 1}, logits, {&wide, 1});
  const float lse = logits.as<float>()[plain.token] - plain.logprob;
  EXPECT_NEAR(filtered.logprob, logits.as<float>()[filtered.token] - lse, 1e-5);
}

TEST_F(SampleTest, DrawsDependOnSeedAndPositionOnly) {
  Tensor logits = s.random({6, 2500}, DType::kF32, 4);
  std::vector<SampleRow> rows;
  for (std::uint64_t i = 0; i < 6; ++i) rows.push_back({.top_p = i % 2 == 0 ? 1.0f : 0.9f, .seed = 100 + i, .position = 17 * i});
  std::vector<SampleResult> together(6);
  sample(s.ctx, together, logits, rows);
  Session other(default_kind(), 1);
  for (std::int64_t i = 0; i < 6; ++i) {
    SampleResult alone;
    sample(other.ctx, {&alone, 1}, logits.slice(i, 1), {&rows[static_cast<std::size_t>(i)], 1});
    EXPECT_EQ(alone.token, together[static_cast<std::size_t>(i)].token);
    EXPECT_EQ(alone.logprob, together[static_cast<std::size_t>(i)].logprob);
  }
  std::set<std::int32_t> tokens;
  for (std::uint64_t p = 0; p < 20; ++p) tokens.insert(draw(std::vector<float>(1000, 0.0f), {.seed = 1, .position = p}).token);
  EXPECT_GT(tokens.size(), 15u);
}

/// How rows reach a device depends on their number.
TEST_F(SampleTest, ARowOfManyIsDrawnAsAlone) {
  for (const std::int64_t count : {31, 33, 512, 513}) {
    const Tensor logits = s.random({count, 300}, DType::kF32, 4);
    std::vector<SampleRow> rows(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows[i] = {.temperature = 0.5f + static_cast<float>(i % 7) / 7.0f, .seed = 100 + i, .position = 17 * i};
    std::vector<SampleResult> together(rows.size());
    sample(s.ctx, together, logits, rows);
    for (std::int64_t i = 0; i < count; i += 8) {
      const auto at = static_cast<std::size_t>(i);
      SampleResult alone;
      sample(s.ctx, {&alone, 1}, logits.slice(i, 1), {&rows[at], 1});
      EXPECT_EQ(alone.token, together[at].token) << "row " << i << " of " << count;
      EXPECT_EQ(alone.logprob, together[at].logprob) << "row " << i << " of " << count;
    }
  }
}

TEST_F(SampleTest, TwoDrawsMayBeUnderWayAndLeaveTheirTokensOnTheDevice) {
  const Tensor first = s.random({6, 2500}, DType::kF32, 4), second = s.random({3, 2500}, DType::kF32, 5);
  std::vector<SampleRow> rows;
  for (std::uint64_t i = 0; i < 6; ++i) rows.push_back({.temperature = i == 1 ? 0.0f : 1.0f, .seed = 7 + i, .position = i});
  rows[2].top_k = 40;
  rows[4].num_top_logprobs = 3;
  std::vector<SampleResult> want(6), got(6);
  sample(s.ctx, want, first, rows);
  PendingSamples a, b;
  Tensor drawn = s.ints(std::vector<std::int32_t>(8, -7)), drawn_later = s.ints(std::vector<std::int32_t>(3, -7));
  begin_sample(s.ctx, a, drawn, first, rows);
  begin_sample(s.ctx, b, drawn_later, second, std::span(rows).first(3));
  EXPECT_THROW(finish_sample(s.ctx, got, b), Error) << "as many rows as were begun";
  finish_sample(s.ctx, got, a);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(got[i].token, want[i].token);
    EXPECT_EQ(got[i].logprob, want[i].logprob);
    EXPECT_EQ(got[i].top_logprobs, want[i].top_logprobs);
    EXPECT_EQ(drawn.as<std::int32_t>()[i], want[i].token);
  }
  EXPECT_EQ(drawn.as<std::int32_t>()[6], -7);
  got.resize(3);
  finish_sample(s.ctx, got, b);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(drawn_later.as<std::int32_t>()[i], got[i].token);
}

TEST_F(SampleTest, BannedTokensAreNeverReportedAndAllBannedIsNoNumber) {
  const auto r = draw({kNone, 1.0f, kNone}, {.num_top_logprobs = 3});
  EXPECT_EQ(r.token, 1);
  EXPECT_EQ(r.logprob, 0.0f);
  ASSERT_GE(r.top_logprobs.size(), 1u);
  EXPECT_EQ(r.top_logprobs[0].first, 1);
  for (std::size_t i = 1; i < r.top_logprobs.size(); ++i) EXPECT_TRUE(std::isfinite(r.top_logprobs[i].second));
  for (const auto& logits : {std::vector{kNone, kNone}, {1.0f, std::numeric_limits<float>::quiet_NaN()}})
    for (const SampleRow& row : {SampleRow{}, {.temperature = 0.0f}, {.top_k = 1}, {.num_top_logprobs = 2}}) {
      const auto nothing = draw(logits, row);
      EXPECT_TRUE(std::isnan(nothing.logprob));
      EXPECT_EQ(nothing.token, 0);
      EXPECT_TRUE(nothing.top_logprobs.empty());
    }
  EXPECT_THROW(draw({1.0f, 2.0f}, {.top_p = 0.0f}), Error);
  EXPECT_THROW(draw({1.0f, 2.0f}, {.temperature = -1.0f}), Error);
}

}  // namespace
}  // namespace prl::ops
