#include "router/sent_prefixes.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

namespace prl::router {
namespace {

std::string text_of(std::size_t num_parts, char first = 'a') {
  std::string text;
  for (std::size_t i = 0; i < num_parts; ++i) text += std::string(kPrefixBytes, static_cast<char>(first + static_cast<char>(i)));
  return text;
}

TEST(HashPrefixes, EqualHashesAreEqualBeginnings) {
  const PrefixHashes whole = hash_prefixes(text_of(4));
  ASSERT_EQ(whole.size(), 4u);
  EXPECT_EQ(hash_prefixes(text_of(4) + "more"), whole) << "what fills no part is left out";
  PrefixHashes longer = hash_prefixes(text_of(4) + text_of(1, 'x'));
  EXPECT_NE(longer.back(), hash_prefixes(text_of(1, 'x')).back()) << "a part stands for all before it";
  longer.pop_back();
  EXPECT_EQ(longer, whole);
  std::string other = text_of(4);
  other[kPrefixBytes] = '!';
  const PrefixHashes changed = hash_prefixes(other);
  EXPECT_EQ(changed[0], whole[0]);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_NE(changed[i], whole[i]) << i;
  EXPECT_NE(hash_prefixes(text_of(4), /*space=*/7)[0], whole[0]);
  EXPECT_EQ(hash_prefixes("short").size(), 1u);
  EXPECT_NE(hash_prefixes("short"), hash_prefixes("other"));
  EXPECT_TRUE(hash_prefixes("").empty());
  std::vector<std::int32_t> ids(40);
  std::iota(ids.begin(), ids.end(), 0);
  EXPECT_EQ(hash_prefixes(ids).size(), 2u) << "16 tokens each";
}

TEST(SentPrefixes, TheLongestIsFoundAndWhatWasUsedLongestAgoIsForgotten) {
  SentPrefixes sent(4 * kPrefixBytes);
  const PrefixHashes a = hash_prefixes(text_of(3)), b = hash_prefixes(text_of(1, 'p'));
  EXPECT_EQ(sent.longest(a), 0u);
  sent.add(a);
  EXPECT_EQ(sent.longest(a), 3u);
  EXPECT_EQ(sent.longest(hash_prefixes(text_of(6))), 3u);
  EXPECT_EQ(sent.longest(hash_prefixes(text_of(2))), 2u);
  sent.add(b);
  EXPECT_EQ(sent.num_bytes(), static_cast<std::int64_t>(4 * kPrefixBytes));
  sent.add(a);
  sent.add(hash_prefixes(text_of(1, 'q')));
  EXPECT_EQ(sent.longest(b), 0u) << "a was used again";
  EXPECT_EQ(sent.longest(a), 3u);
  sent.add(hash_prefixes(text_of(1, 'r')));
  sent.add(hash_prefixes(text_of(1, 's')));
  EXPECT_EQ(sent.longest(a), 1u) << "the end goes before the beginning";
  EXPECT_EQ(sent.num_bytes(), static_cast<std::int64_t>(4 * kPrefixBytes));
  sent.add(hash_prefixes(text_of(9)));
  EXPECT_EQ(sent.longest(hash_prefixes(text_of(9))), 4u) << "of a prompt that is too long the beginning";
  sent.clear();
  EXPECT_EQ(sent.longest(a), 0u);
  EXPECT_EQ(sent.num_bytes(), 0);
}

}  // namespace
}  // namespace prl::router
