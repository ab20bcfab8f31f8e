#include "engine/draft_source.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "base/rng.hpp"

namespace prl::engine {
namespace {
using ::testing::ElementsAre;
using Tokens = std::vector<std::int32_t>;

constexpr double kChance = 0.3;  ///< that a draft must have

DraftOptions drafts_of(std::int64_t num_tokens) {
  DraftOptions options;
  options.num_tokens = num_tokens;
  return options;
}

/// What is proposed with no regard to what came true.
Tokens guess(const DraftSource& source, DraftCursor cursor, std::int64_t count) {
  cursor.hit_rate = 1;
  DraftTokens tokens{};
  const std::int64_t num = source.num_useful(cursor, count, kChance);
  if (num > 0) source.propose(cursor, num, tokens);
  return {tokens.begin(), tokens.begin() + num};
}

void append(DraftSource& source, DraftCursor& cursor, const Tokens& tokens) {
  for (const std::int32_t token : tokens) source.append(cursor, token);
}

TEST(DraftTexts, FindsTheLongestRunWhereItWasLast) {
  const Tokens prompt = {1, 2, 3, 9, 2, 3, 8, 1, 2, 3};
  const DraftTexts texts(prompt, 2, 4);
  const auto match = texts.find(0);
  ASSERT_TRUE(match);
  EXPECT_EQ(match->length, 3) << "1 2 3 is longer than the later 2 3";
  EXPECT_EQ(match->next.position, 3u);
  EXPECT_FALSE(DraftTexts(Tokens{1, 2, 3, 4}, 2, 4).find(0));
  EXPECT_FALSE(DraftTexts(Tokens{5, 6, 7, 6}, 2, 4).find(0)) << "a run of one token is too short";
  EXPECT_TRUE(DraftTexts(Tokens{5, 6, 7, 6}, 1, 4).find(0));
  EXPECT_FALSE(DraftTexts(Tokens{}, 2, 4).find(0));
}

/// Against a search through all texts.
TEST(DraftTexts, FindsWhatASearchFinds) {
  constexpr std::int64_t kMin = 2, kMax = 5;
  Rng rng(3);
  const auto next = [&] { return static_cast<std::int32_t>(rng.next_below(4)); };
  Tokens prompt;
  for (int i = 0; i < 30; ++i) prompt.push_back(next());
  DraftTexts texts(prompt, kMin, kMax);
  std::vector<Tokens> known = {prompt};
  std::vector<std::pair<std::size_t, std::size_t>> order;  // of tokens, as they became known
  for (std::size_t p = 1; p < prompt.size(); ++p) order.emplace_back(0, p);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(texts.add_text(), known.size());
    known.emplace_back(prompt.end() - kMax, prompt.end());
  }
  for (int step = 0; step < 600; ++step) {
    const std::size_t text = 1 + rng.next_below(3);
    known[text].push_back(next());
    order.emplace_back(text, known[text].size() - 1);
    texts.append(static_cast<std::uint32_t>(text), known[text].back());
    std::optional<std::pair<std::size_t, std::size_t>> wanted;
    std::int64_t length = kMax;
    for (; length >= kMin && !wanted; --length)
      for (auto at = order.rbegin(); at != order.rend() && !wanted; ++at) {
        const Tokens& other = known[at->first];
        const auto n = static_cast<std::ptrdiff_t>(length), end = static_cast<std::ptrdiff_t>(at->second);
        if (end >= n && std::equal(known[text].end() - n, known[text].end(), other.begin() + end - n)) wanted = *at;
      }
    const auto found = texts.find(static_cast<std::uint32_t>(text));
    ASSERT_EQ(found.has_value(), wanted.has_value()) << step;
    if (!found) continue;
    EXPECT_EQ(found->length, length + 1) << step;
    EXPECT_EQ(std::pair(std::size_t{found->next.text}, std::size_t{found->next.position}), *wanted) << step;
  }
}

TEST(DraftTexts, WhatWasDroppedIsNotFound) {
  DraftTexts texts(Tokens{1, 2}, 2, 3);
  for (int round = 0; round < 50; ++round) {
    const std::uint32_t text = texts.add_text();
    EXPECT_EQ(text, 1u) << "numbers come back";
    for (std::int32_t i = 0; i < 20; ++i) texts.append(text, 100 * (round % 2) + i);
    texts.drop(text);
    EXPECT_EQ(texts.num_tokens(), 2);
    const std::uint32_t other = texts.add_text();
    texts.append(other, 5);
    texts.append(other, 6);
    EXPECT_FALSE(texts.find(other));
    texts.drop(other);
  }
}

TEST(DraftSource, ASequenceThatRepeatsItselfGoesOnWithItself) {
  DraftSource source(drafts_of(6));
  DraftCursor cursor;
  const Tokens prompt = {1, 2, 3, 4};
  source.open(cursor, {prompt});
  EXPECT_THAT(guess(source, cursor, 6), ElementsAre());
  append(source, cursor, {7, 8, 1, 2});
  EXPECT_THAT(guess(source, cursor, 6), ElementsAre(3, 4)) << "the prompt ends there";
  append(source, cursor, {9, 5, 9, 5});
  EXPECT_THAT(guess(source, cursor, 6), ElementsAre(9, 5, 9, 5, 9, 5)) << "what it is given goes on";
  EXPECT_THAT(guess(source, cursor, 3), ElementsAre(9, 5, 9));
  source.close(cursor);
  EXPECT_EQ(source.num_useful(cursor, 6, kChance), 0);
}

TEST(DraftSource, GuessesThatFailCostNoMoreThanAFewRows) {
  DraftSource source(drafts_of(8));
  DraftCursor cursor;
  source.open(cursor, {Tokens{1, 2, 3}});
  EXPECT_EQ(source.num_useful(cursor, 8, kChance), 0) << "nothing is known";
  append(source, cursor, {5, 6, 0, 5, 6});
  EXPECT_EQ(source.num_useful(cursor, 8, kChance), 1) << "the first guess is tried";
  std::int64_t num_rows = 0;
  for (std::int32_t i = 1; i < 100; ++i) {  // 5 6 is followed by another token each time
    num_rows += source.num_useful(cursor, 8, kChance);
    append(source, cursor, {i + 10, 5, 6});
  }
  EXPECT_GE(num_rows, 1);
  EXPECT_LE(num_rows, 6);
  EXPECT_EQ(source.num_useful(cursor, 8, kChance), 0);
  // They are watched all the same: as soon as they come true they are used again.
  append(source, cursor, {1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3});
  EXPECT_GT(source.num_useful(cursor, 8, kChance), 0);
  for (int i = 0; i < 12; ++i) append(source, cursor, {1, 2, 3});
  EXPECT_EQ(source.num_useful(cursor, 8, kChance), 8);
  EXPECT_EQ(source.num_useful(cursor, 3, kChance), 3) << "no more than there is room for";
  EXPECT_NEAR(source.expected_gain(cursor, 2), cursor.hit_rate * (1 + cursor.hit_rate), 1e-12);
}

TEST(DraftSource, OtherCompletionsOfThePromptAreFollowed) {
  DraftSource source(drafts_of(4));
  const Tokens prompt = {1, 2, 3};
  DraftCursor first, second, later;
  source.open(first, {prompt});
  source.open(second, {prompt});
  append(source, first, {10, 11, 12, 13, 14});
  EXPECT_THAT(guess(source, second, 4), ElementsAre()) << "what a text begins with was not known when it was opened";
  append(source, second, {10});
  EXPECT_THAT(guess(source, second, 4), ElementsAre(11, 12, 13, 14)) << "of one that runs";
  source.close(first);
  source.close(second);
  source.open(later, {prompt});
  EXPECT_THAT(guess(source, later, 2), ElementsAre(10)) << "the latest one that went on there";
  append(source, later, {10, 11});
  EXPECT_THAT(guess(source, later, 4), ElementsAre(12, 13, 14)) << "of one that has ended, up to its end";
  EXPECT_EQ(source.num_useful(later, 4, kChance, /*num_unknown=*/2), 1);
}

TEST(DraftSource, NobodySeesTextsOfOtherSaltsAdaptersAndPrompts) {
  DraftSource source(drafts_of(4));
  const Tokens prompt = {1, 2, 3}, other = {2, 2, 3};
  DraftCursor cursor;
  source.open(cursor, {prompt, 1, "mine"});
  append(source, cursor, {10, 11, 12});
  source.close(cursor);
  const auto first_guess = [&](const DraftScope& scope) {
    DraftCursor reader;
    source.open(reader, scope);
    source.append(reader, 10);
    const Tokens found = guess(source, reader, 4);
    source.close(reader);
    return found;
  };
  EXPECT_THAT(first_guess({prompt, 1, "yours"}), ElementsAre());
  EXPECT_THAT(first_guess({prompt, 1, ""}), ElementsAre());
  EXPECT_THAT(first_guess({prompt, 2, "mine"}), ElementsAre());
  EXPECT_THAT(first_guess({other, 1, "mine"}), ElementsAre());
  EXPECT_THAT(first_guess({prompt, 1, "mine", 7}), ElementsAre()) << "with other pictures it is another prompt";
  EXPECT_THAT(first_guess({prompt, 1, "mine"}), ElementsAre(11, 12));
  DraftOptions alone = drafts_of(4);
  alone.from_completions = false;
  DraftSource apart(alone);
  for (int i = 0; i < 2; ++i) {
    apart.open(cursor, {prompt});
    append(apart, cursor, {10});
    EXPECT_THAT(guess(apart, cursor, 4), ElementsAre());
    append(apart, cursor, {11, 12});
    apart.close(cursor);
    EXPECT_EQ(apart.num_stored_tokens(), 0);
  }
}

TEST(DraftSource, TheStoreForgetsWhatWasNotAskedForLongest) {
  DraftOptions options = drafts_of(4);
  options.max_stored_tokens = 60;
  DraftSource source(options);
  const auto run = [&](std::int32_t prompt, std::int32_t num_tokens) {
    DraftCursor cursor;
    source.open(cursor, {Tokens{prompt, 2}});
    source.append(cursor, 10);
    const bool was_known = !guess(source, cursor, 1).empty();
    for (std::int32_t i = 1; i < num_tokens; ++i) source.append(cursor, 10 + i);
    source.close(cursor);
    return was_known;
  };
  EXPECT_FALSE(run(1, 15));  // 2 tokens of the prompt, and 2 + 15 of a text that begins with them
  EXPECT_FALSE(run(2, 15));
  EXPECT_FALSE(run(3, 15));
  EXPECT_EQ(source.num_stored_tokens(), 57);
  EXPECT_TRUE(run(1, 2)) << "asked for lately; the other two are older";
  EXPECT_EQ(source.num_stored_tokens(), 42);
  EXPECT_FALSE(run(2, 1));
  EXPECT_TRUE(run(1, 1));
  EXPECT_LE(source.num_stored_tokens(), 60);
  DraftCursor open;
  source.open(open, {Tokens{7, 2}});
  for (std::int32_t i = 0; i < 100; ++i) source.append(open, i);
  EXPECT_FALSE(run(8, 3)) << "all that has ended makes room for what runs";
  EXPECT_EQ(source.num_useful(open, 4, kChance), 0);
  source.close(open);
  EXPECT_EQ(source.num_stored_tokens(), 0) << "larger than the store by itself";
}

TEST(DraftSource, OfOnePromptAFewEpochsAreKept) {
  DraftSource source(drafts_of(4));
  for (int i = 0; i < 1000; ++i) {
    DraftCursor cursor;
    source.open(cursor, {Tokens{1, 2}});
    append(source, cursor, {i, i, i, i});
    source.close(cursor);
  }
  EXPECT_LE(source.num_stored_tokens(), 64 * 6 + 2);
}

}  // namespace
}  // namespace prl::engine
