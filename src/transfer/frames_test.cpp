#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"
#include "transfer/frames.hpp"

namespace prl::transfer {
namespace {

using ::testing::HasSubstr;

Ask some_ask() {
  Ask ask;
  ask.identity = {
      .version = PolicyVersion{7}, .checksum = 0xfeedull, .adapter = "alpha", .adapter_version = PolicyVersion{3}, .adapter_hash = 9};
  ask.prompt = {.tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9}, .images = {{.first = 2, .hash = {11, 12}}}, .cache_salt = "salt"};
  ask.first = 1;
  ask.max_blocks = 3;
  return ask;
}

ErrorCode code_of_decoding(const std::string& body) {
  try {
    (void)decode_ask(body);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(Frames, AQuestionIsReadAsItWasWritten) {
  const Ask ask = some_ask();
  const std::string body = encode(ask);
  const Ask read = decode_ask(body);
  EXPECT_EQ(read.identity, ask.identity);
  EXPECT_EQ(read.prompt.tokens, ask.prompt.tokens);
  EXPECT_EQ(read.prompt.cache_salt, ask.prompt.cache_salt);
  ASSERT_EQ(read.prompt.images.size(), 1u);
  EXPECT_EQ(read.prompt.images[0].first, 2);
  EXPECT_EQ(read.prompt.images[0].hash, ask.prompt.images[0].hash);
  EXPECT_EQ(read.first, 1);
  EXPECT_EQ(read.max_blocks, 3);
}

TEST(Frames, ATruncatedQuestionIsCorruptAtEveryLength) {
  const std::string body = encode(some_ask());
  for (std::size_t length = 0; length < body.size(); ++length)
    EXPECT_EQ(code_of_decoding(body.substr(0, length)), ErrorCode::kCorrupt) << length;
  EXPECT_EQ(code_of_decoding(body + "x"), ErrorCode::kCorrupt);
}

TEST(Frames, CountsHaveLimits) {
  Ask ask = some_ask();
  ask.max_blocks = 0;
  EXPECT_EQ(code_of_decoding(encode(ask)), ErrorCode::kCorrupt);
  ask = some_ask();
  ask.first = -1;
  EXPECT_EQ(code_of_decoding(encode(ask)), ErrorCode::kCorrupt);
  ask = some_ask();
  ask.prompt.cache_salt.assign(kMaxTextBytes + 1, 's');
  EXPECT_EQ(code_of_decoding(encode(ask)), ErrorCode::kCorrupt);
}

TEST(Frames, ASeedDependsOnAllThatABlockDependsOn) {
  const auto seed = [](const Ask& ask) { return place_seeds(ask, 2, 1).front(); };
  const std::uint64_t own = seed(some_ask());
  std::vector<Ask> others(7, some_ask());
  others[0].identity.version = PolicyVersion{8};
  others[1].identity.checksum += 1;
  others[2].identity.adapter = "beta";
  others[3].identity.adapter_hash += 1;
  others[4].prompt.cache_salt = "pepper";
  others[5].prompt.tokens[0] = 100;  // of the block before
  others[6].first = 2;
  for (std::size_t i = 0; i < others.size(); ++i) EXPECT_NE(seed(others[i]), own) << i;
  EXPECT_EQ(place_seeds(some_ask(), 2, 3).size(), 3u);
  Ask from_zero = some_ask();
  from_zero.first = 0;
  EXPECT_EQ(place_seeds(from_zero, 2, 2)[1], own) << "a block's seed depends on where the question begins";
}

TEST(Frames, KeyedHashIsThatOfTheStandard) {
  // RFC 4231, test cases 2 and 6.
  EXPECT_EQ(keyed_hash("Jefe", "what do ya want for nothing?"), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(keyed_hash(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_TRUE(is_same("abc", "abc"));
  EXPECT_FALSE(is_same("abc", "abd"));
  EXPECT_FALSE(is_same("abc", "ab"));
  EXPECT_NE(make_nonce(), make_nonce());
}

}  // namespace
}  // namespace prl::transfer
