#include "engine/kv/host_blocks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace prl::engine {
namespace {
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const BlockHash kHostRoot = root_hash({1, PolicyVersion{0}, {}, ""});

/// A block of two tokens, alone behind the root.
struct BlockContent {
  explicit BlockContent(std::int32_t first) : tokens{first, first + 1}, hash(chain_hash(kHostRoot, tokens)) {}
  std::vector<std::int32_t> tokens;
  BlockHash hash;
};

BlockCopies copies_of(const HostBlocks& host) {
  BlockCopies copies;
  host.list(copies);
  return copies;
}
void save_block(HostBlocks& host, std::int32_t device, const BlockContent& content) {
  host.save(BlockId{device}, content.hash, kHostRoot, content.tokens);
}
bool has_block(HostBlocks& host, const BlockContent& content) { return host.find(content.hash, kHostRoot, content.tokens).has_value(); }

TEST(HostBlocks, ABlockThatIsEvictedIsSavedOnce) {
  HostBlocks host(4, 2);
  BlockPool pool(1, 2, &host);
  const BlockContent first(10), second(20);
  const auto use = [&](const BlockContent& content) {
    std::vector<BlockLease> leases;
    ASSERT_TRUE(pool.try_take(1, leases));
    pool.publish(leases[0], content.hash, kHostRoot, content.tokens);
  };
  use(first);
  EXPECT_TRUE(copies_of(host).empty()) << "nothing was there before";
  use(second);
  EXPECT_THAT(copies_of(host).saves, SizeIs(1));
  host.carried_out();
  EXPECT_TRUE(has_block(host, first));
  EXPECT_FALSE(has_block(host, second));
  use(first);
  use(second);
  EXPECT_THAT(copies_of(host).saves, SizeIs(1)) << "the second; host memory has had the first";
  host.carried_out();
  EXPECT_TRUE(copies_of(host).empty());
  EXPECT_EQ(host.num_saved(), 2);
  pool.check_integrity();
  host.check_integrity();
}

TEST(HostBlocks, TheLeastRecentlyUsedIsDropped) {
  HostBlocks host(2, 2);
  const BlockContent first(10), second(20), third(30);
  save_block(host, 0, first);
  save_block(host, 1, second);
  host.carried_out();
  EXPECT_TRUE(has_block(host, first));  // which makes it the more recent one
  save_block(host, 2, third);
  host.carried_out();
  EXPECT_TRUE(has_block(host, first));
  EXPECT_FALSE(has_block(host, second));
  EXPECT_TRUE(has_block(host, third));
  host.check_integrity();
}

TEST(HostBlocks, WhatACollectedCopyNamesIsNotTakenForAnother) {
  HostBlocks host(2, 2);
  const BlockContent first(10), second(20), third(30);
  save_block(host, 0, first);
  host.carried_out();
  auto found = host.find(first.hash, kHostRoot, first.tokens);
  ASSERT_TRUE(found);
  const BlockId source = found->id();
  host.restore(std::move(*found), BlockId{7});
  save_block(host, 1, second);
  save_block(host, 2, third);  // both blocks are spoken for
  const BlockCopies copies = copies_of(host);
  EXPECT_THAT(copies.restores, ElementsAre(BlockCopy{BlockId{7}, source}));
  ASSERT_THAT(copies.saves, SizeIs(1));
  EXPECT_EQ(copies.saves[0].device, BlockId{1});
  EXPECT_NE(copies.saves[0].host, source);
  EXPECT_FALSE(has_block(host, third)) << "it is lost";
  host.check_integrity();
  EXPECT_TRUE(host.is_restoring(BlockId{7}));
  host.carried_out();
  EXPECT_FALSE(host.has_restores());
  EXPECT_EQ(host.num_restored(), 1);
  save_block(host, 2, third);
  EXPECT_TRUE(has_block(host, third)) << "the step behind it may overwrite what this one has read";
}

TEST(HostBlocks, ASaveMayBeRestoredByTheSameStep) {
  HostBlocks host(1, 2);
  const BlockContent content(10);
  save_block(host, 3, content);
  auto found = host.find(content.hash, kHostRoot, content.tokens);
  ASSERT_TRUE(found);
  host.restore(std::move(*found), BlockId{3});
  const BlockCopies copies = copies_of(host);
  EXPECT_EQ(copies.saves, copies.restores);
  host.check_integrity();
}

TEST(HostBlocks, CopiesThatFailedAreForgotten) {
  HostBlocks host(3, 2);
  const BlockContent kept(10), lost(20);
  save_block(host, 0, kept);
  host.carried_out();
  save_block(host, 1, lost);
  auto found = host.find(kept.hash, kHostRoot, kept.tokens);
  ASSERT_TRUE(found);
  host.restore(std::move(*found), BlockId{2});
  host.give_up();
  EXPECT_TRUE(copies_of(host).empty());
  EXPECT_TRUE(has_block(host, kept));
  EXPECT_FALSE(has_block(host, lost));
  EXPECT_EQ(host.num_saved(), 1);
  host.check_integrity();
}

TEST(HostBlocks, AResetForgetsBlocksAndKeepsCopies) {
  HostBlocks host(3, 2);
  const BlockContent first(10), second(20);
  save_block(host, 0, first);
  host.carried_out();
  auto found = host.find(first.hash, kHostRoot, first.tokens);
  ASSERT_TRUE(found);
  host.restore(std::move(*found), BlockId{4});
  save_block(host, 1, second);
  host.reset_cache();
  EXPECT_FALSE(has_block(host, first));
  EXPECT_FALSE(has_block(host, second));
  EXPECT_EQ(host.num_cached(), 0);
  EXPECT_THAT(copies_of(host).restores, SizeIs(1)) << "a sequence is there that counts on it";
  host.check_integrity();
  host.carried_out();
  host.check_integrity();
}

}  // namespace
}  // namespace prl::engine
