#include "ops/logit_edits.hpp"

#include <algorithm>
#include <set>

#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

/// Edits of random rows, some of each kind, and what they make of the logits.
struct RandomEdits {
  RandomEdits(std::int64_t num_rows, std::int64_t vocab_size, std::size_t num_ids, std::uint64_t seed) : rng(seed), V(vocab_size) {
    for (std::int64_t i = 0; i < num_rows; ++i) drawn.push_back(token());
    for (std::int64_t i = 0; i < num_rows; ++i)
      if (i % 4 != 1) add(static_cast<std::int32_t>(i), num_ids);
  }

  std::int32_t token() { return static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(V))); }
  std::vector<std::int32_t> ids(std::size_t count) {
    std::set<std::int32_t> some;
    while (some.size() < count) some.insert(token());
    return {some.begin(), some.end()};
  }
  void add(std::int32_t i, std::size_t num_ids) {
    LogitEdits::Row row;
    row.row = i;
    if (i % 2 == 0) {
      for (const std::int32_t id : ids(num_ids / 2)) edits.biases.push_back({id, static_cast<float>(rng.next_normal())});
      row.num_biases = static_cast<std::int32_t>(num_ids / 2);
    }
    if (i % 3 != 0) {
      row.repetition = 1.3f, row.frequency = 0.3f, row.presence = -0.7f;
      row.drawn_row = i % 5 == 0 ? -1 : static_cast<std::int32_t>(rng.next_below(drawn.size()));
      auto seen = ids(num_ids);
      if (row.drawn_row >= 0 && i % 5 == 2 && std::ranges::find(seen, drawn_token(row)) == seen.end()) seen.front() = drawn_token(row);
      for (const std::int32_t id : seen) edits.seen.push_back({id, static_cast<std::int32_t>(rng.next_below(3))});
      row.num_seen = static_cast<std::int32_t>(num_ids);
    }
    if (i % 4 == 0) {
      edits.masked.push_back(token());
      row.num_masked = 1;
    }
    if (i % 7 == 3) {
      row.has_allowed = true;
      if (i % 2 == 0) row.not_allowed = -7.0f;
      for (std::int64_t w = 0; w < LogitEdits::words_per_row(V); ++w) edits.allowed.push_back(rng.next_u64());
    }
    edits.rows.push_back(row);
  }
  std::int32_t drawn_token(const LogitEdits::Row& row) const { return drawn[static_cast<std::size_t>(row.drawn_row)]; }

  void apply(std::vector<float>& logits_BV) const {
    auto bias = edits.biases.begin();
    auto seen = edits.seen.begin();
    auto masked = edits.masked.begin();
    auto word = edits.allowed.begin();
    for (const LogitEdits::Row& row : edits.rows) {
      float* const x = logits_BV.data() + row.row * V;
      for (int i = 0; i < row.num_biases; ++i, ++bias) x[bias->id] += bias->value;
      std::vector<LogitEdits::Seen> counts(seen, seen + row.num_seen);
      seen += row.num_seen;
      if (row.drawn_row >= 0) {
        const auto at = std::ranges::find(counts, drawn_token(row), &LogitEdits::Seen::id);
        if (at == counts.end())
          counts.push_back({drawn_token(row), 1});
        else
          ++at->count;
      }
      for (const auto& [id, count] : counts) {
        x[id] = x[id] > 0 ? x[id] / row.repetition : x[id] * row.repetition;
        if (count > 0) x[id] -= row.frequency * static_cast<float>(count) + row.presence;
      }
      for (int i = 0; i < row.num_masked; ++i) x[*masked++] = kMaskedLogit;
      if (!row.has_allowed) continue;
      for (std::int64_t id = 0; id < V; ++id)
        if ((word[id / 64] >> (id % 64) & 1) == 0) x[id] = row.not_allowed;
      word += LogitEdits::words_per_row(V);
    }
  }

  Rng rng;
  std::int64_t V;
  std::vector<std::int32_t> drawn;
  LogitEdits edits;
};

void check_edits(std::int64_t num_rows, std::int64_t vocab_size, std::size_t num_ids) {
  Session s(default_kind());
  const RandomEdits random(num_rows, vocab_size, num_ids, 3);
  const Tensor wide = s.random({num_rows, vocab_size + 5}, DType::kF32, 4);
  TensorView logits = wide.view();
  logits.shape = {num_rows, vocab_size};
  std::vector<float> wanted, beyond;
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const float* const row = logits.as<float>() + r * logits.row_stride;
    wanted.insert(wanted.end(), row, row + vocab_size);
    beyond.insert(beyond.end(), row + vocab_size, row + vocab_size + 5);
  }
  random.apply(wanted);
  edit_logits(s.ctx, logits, s.ints(random.drawn), random.edits);
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const float* const row = logits.as<float>() + r * logits.row_stride;
    ASSERT_TRUE(std::equal(row, row + vocab_size, wanted.begin() + r * vocab_size)) << "row " << r;
    ASSERT_TRUE(std::equal(row + vocab_size, row + vocab_size + 5, beyond.begin() + r * 5)) << "behind row " << r;
  }
}

TEST(LogitEdits, RowsOfAllKinds) { check_edits(40, 1025, 30); }
TEST(LogitEdits, AVocabularyOfOneWord) { check_edits(15, 64, 20); }
TEST(LogitEdits, MoreThanGoesToADeviceAtOnce) { check_edits(9, 120'001, 60'000); }

TEST(LogitEdits, NothingToEditAndWhatCannotBe) {
  Session s(default_kind());
  const Tensor logits = s.filled({2, 10}, DType::kF32, 1.0f);
  edit_logits(s.ctx, logits, {}, {});
  EXPECT_EQ(logits.as<float>()[3], 1.0f);
  const auto fails = [&](const LogitEdits& edits) { EXPECT_THROW(edit_logits(s.ctx, logits, {}, edits), Error); };
  fails({.rows = {{.row = 2}}});
  fails({.rows = {{.num_biases = 1}}});
  fails({.rows = {{.num_biases = 1}}, .biases = {{10, 1.0f}}});
  fails({.rows = {{.num_seen = 1}}, .seen = {{-1, 1}}});
  fails({.rows = {{.num_masked = 1}}, .masked = {10}});
  fails({.rows = {{.drawn_row = 0}}});
  fails({.rows = {{.has_allowed = true}}});
}

}  // namespace
}  // namespace prl::ops
