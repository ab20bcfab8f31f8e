// Vocabularies of ranks (tiktoken.model).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/temp_folder.hpp"
#include "text/detail/rank_file.hpp"
#include "text/test_support.hpp"
#include "text/tokenizer.hpp"

namespace prl::text {
namespace {

using test::fixture_json;
using test::fixture_text;
using test::ids_of;
using test::str;
using ::testing::HasSubstr;

const std::string kRanks = "tiktoken/tiktoken.model", kConfig = "tiktoken/tokenizer_config.json";

void expect_corrupt(const std::string& ranks, ErrorCode code, const char* said, const std::string& config = fixture_text(kConfig)) {
  try {
    (void)detail::tokenizer_json_of_ranks(ranks, config, "m");
    ADD_FAILURE() << said;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_THAT(error.what(), HasSubstr(said));
  }
}

// Replays what the Python package `tiktoken` gave for the same ranks.
TEST(RankFile, IdsAreThoseOfTiktoken) {
  const prl::testing::TempFolder folder;
  write_file_atomic(folder.path() / "tiktoken.model", fixture_text(kRanks));
  write_file_atomic(folder.path() / "tokenizer_config.json", fixture_text(kConfig));
  EXPECT_TRUE(has_tokenizer(folder.path()));
  const Tokenizer tokenizer = Tokenizer::load(folder.path());
  const auto cases = fixture_json("tiktoken/cases.json");
  ASSERT_GT(cases.as_array().size(), 60u);
  for (const auto& entry : cases.as_array()) {
    const std::string text = str(entry.at(0));
    const std::vector<std::int32_t> ids = tokenizer.encode(text, {.add_special_tokens = false, .allow_special = false});
    EXPECT_EQ(ids, ids_of(entry.at(1))) << text;
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

TEST(RankFile, TokensBehindTheRanksAreNamedOrReserved) {
  const Tokenizer tokenizer =
      Tokenizer::parse(detail::tokenizer_json_of_ranks(fixture_text(kRanks), fixture_text(kConfig), "m"), fixture_text(kConfig));
  const std::vector<std::int32_t> ids = tokenizer.encode("a<|im_end|>b", {.add_special_tokens = false});
  ASSERT_EQ(ids.size(), 3u);
  const std::vector<std::int32_t> unnamed{ids[1] + 2};
  EXPECT_EQ(tokenizer.decode(unnamed, false), "<|reserved_token_" + std::to_string(ids[1] + 2) + "|>");
  EXPECT_EQ(tokenizer.decode(ids, false), "a<|im_end|>b");
  EXPECT_EQ(tokenizer.decode(ids), "ab");
}

TEST(RankFile, DamageIsNamedWithItsLine) {
  const std::string ranks = fixture_text(kRanks);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = ranks;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  expect_corrupt(with("AA== 0\n", "AA==\n"), ErrorCode::kCorrupt, "line 1");
  expect_corrupt(with("AQ== 1\n", "AQ== 7\n"), ErrorCode::kCorrupt, "line 2");
  expect_corrupt(with("AQ== 1\n", "A!== 1\n"), ErrorCode::kCorrupt, "line 2");
  expect_corrupt(with("AQ== 1\n", "AA== 1\n"), ErrorCode::kCorrupt, "tokens 0 and 1 are the same");
  expect_corrupt(with("AQ== 1\n", " 1\n"), ErrorCode::kCorrupt, "a token of 1 to");
  expect_corrupt("AA== 0\n", ErrorCode::kCorrupt, "no token of the single byte 1");
  expect_corrupt(ranks, ErrorCode::kCorrupt, "tokenizer_config.json", "");
  expect_corrupt(ranks, ErrorCode::kNotImplemented, "tokenizer_class is 'QWenTokenizer'", R"({"tokenizer_class": "QWenTokenizer"})");
}

}  // namespace
}  // namespace prl::text
