#include "text/stop_tracker.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fmt/core.h>

#include <filesystem>

#include "text/tokenizer_builder.hpp"

namespace prl::text {
namespace {

/// A tokenizer of single bytes: a token per character of ASCII text.
class StopTrackerTest : public ::testing::Test {
 protected:
  StopTrackerTest() : folder_(make_folder()), ids_(write_byte_level_tokenizer(folder_)), tokenizer_(Tokenizer::load(folder_)) {}
  ~StopTrackerTest() override { std::filesystem::remove_all(folder_); }
  static std::filesystem::path make_folder() {
    const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl-stop-tracker-{}", ::getpid());
    std::filesystem::create_directories(folder);
    return folder;
  }
  /// The text, and the number of tokens that were taken.
  std::pair<std::string, std::size_t> run(StopTracker& tracker, std::string_view text) {
    const std::vector<std::int32_t> tokens = tokenizer_.encode(text);
    EXPECT_EQ(tokens.size(), text.size());
    std::string shown;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      shown += tracker.push(tokens[i]);
      if (tracker.has_stopped()) return {shown, i + 1};
    }
    return {shown + tracker.finish(), tokens.size()};
  }
  std::pair<std::string, std::size_t> run(StopTracker::Options options, std::string_view text) {
    StopTracker tracker(tokenizer_, std::move(options));
    return run(tracker, text);
  }

  std::filesystem::path folder_;
  ByteTokenizerIds ids_;
  Tokenizer tokenizer_;
};
using Result = std::pair<std::string, std::size_t>;

TEST_F(StopTrackerTest, EndsAtAStopStringAcrossTokens) {
  StopTracker tracker(tokenizer_, {.stop = {"END", "\n\n"}});
  EXPECT_TRUE(tracker.has_stop_strings());
  EXPECT_EQ(run(tracker, "one END two"), (Result{"one ", 7}));
  EXPECT_TRUE(tracker.has_stopped());
  EXPECT_EQ(tracker.stop_string(), "END");
  EXPECT_EQ(run({.stop = {"END"}, .include_stop = true}, "one END two"), (Result{"one END", 7}));
}

TEST_F(StopTrackerTest, GivesBackWhatOnlyLookedLikeAStop) {
  StopTracker tracker(tokenizer_, {.stop = {"END"}});
  EXPECT_EQ(run(tracker, "one EN"), (Result{"one EN", 6}));
  EXPECT_FALSE(tracker.has_stopped());
  EXPECT_EQ(run({.stop = {""}}, "a"), (Result{"a", 1}));
  EXPECT_FALSE(StopTracker(tokenizer_, {.stop = {""}}).has_stop_strings());
}

TEST_F(StopTrackerTest, TextOfTheFirstTokensNeitherEndsNorBeginsAStop) {
  EXPECT_EQ(run({.stop = {"ab"}}, "abcabx"), (Result{"", 2}));
  EXPECT_EQ(run({.stop = {"ab"}, .min_tokens = 1}, "abcabx"), (Result{"abc", 5})) << "its a came too early";
  EXPECT_EQ(run({.stop = {"ab"}, .min_tokens = 3}, "abcabx"), (Result{"abc", 5}));
  EXPECT_EQ(run({.stop = {"ab"}, .min_tokens = 4}, "abcabx"), (Result{"abcabx", 6}));
}

TEST_F(StopTrackerTest, SpecialTokensAreTextWhenAskedFor) {
  for (const bool skip : {true, false}) {
    StopTracker tracker(tokenizer_, {.skip_special_tokens = skip, .stop = {"<|im_end|>"}});
    EXPECT_EQ(tracker.push(ids_.im_end), "");
    EXPECT_EQ(tracker.has_stopped(), !skip);
  }
}

TEST_F(StopTrackerTest, ACutCharacterAtTheEndIsReplaced) {
  StopTracker tracker(tokenizer_, {.stop = {"\xEF\xBF\xBD"}});
  std::string shown;
  for (const std::int32_t id : tokenizer_.encode("\xC3\xA9")) {
    shown = tracker.push(id);
    EXPECT_EQ(shown, "");
    break;
  }
  EXPECT_EQ(tracker.finish(), "") << "U+FFFD is the stop string here";
  EXPECT_TRUE(tracker.has_stopped());
}

}  // namespace
}  // namespace prl::text
