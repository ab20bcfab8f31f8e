#include "engine/kv/block_pool.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/rng.hpp"

namespace prl::engine {
namespace {

const BlockHash kRoot = root_hash({1, PolicyVersion{0}, {}, ""});

std::vector<std::int32_t> block_of(std::int32_t first, std::int64_t size) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < size; ++i) tokens.push_back(first + static_cast<std::int32_t>(i));
  return tokens;
}

TEST(BlockPool, TakesAllOrNothing) {
  BlockPool pool(3, 4);
  std::vector<BlockLease> leases;
  ASSERT_TRUE(pool.try_take(2, leases));
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_FALSE(pool.try_take(2, leases));
  EXPECT_EQ(leases.size(), 2u);
  EXPECT_EQ(pool.num_free(), 1);
  ASSERT_TRUE(pool.try_take(1, leases));
  pool.check_integrity();
  release_tail_first(leases);
  EXPECT_EQ(pool.num_free(), 3);
  pool.check_integrity();
}

TEST(BlockPool, LeaseMovesAndShares) {
  BlockPool pool(2, 1);
  std::vector<BlockLease> leases;
  ASSERT_TRUE(pool.try_take(1, leases));
  BlockLease moved = std::move(leases[0]);
  const BlockId id = moved.id();
  EXPECT_EQ(pool.ref_count(id), 1);
  {
    const BlockLease second = moved.share();
    EXPECT_EQ(second.id(), id);
    EXPECT_EQ(pool.ref_count(id), 2);
  }
  EXPECT_EQ(pool.ref_count(id), 1);
  moved = BlockLease();
  EXPECT_EQ(pool.ref_count(id), 0);
  EXPECT_EQ(pool.num_free(), 2);
  pool.check_integrity();
}

TEST(BlockPool, FindsPublishedBlocksUntilTheyAreEvicted) {
  BlockPool pool(2, 4);
  const auto tokens = block_of(10, 4);
  const BlockHash hash = chain_hash(kRoot, tokens);
  BlockId id;
  {
    std::vector<BlockLease> leases;
    ASSERT_TRUE(pool.try_take(1, leases));
    id = leases[0].id();
    EXPECT_FALSE(pool.find(hash, kRoot, tokens));
    pool.publish(leases[0], hash, kRoot, tokens);
  }
  EXPECT_EQ(pool.num_free(), 2);
  {
    const auto found = pool.find(hash, kRoot, tokens);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->id(), id);
    EXPECT_EQ(pool.num_free(), 1);
  }
  // The other block has no hash and goes first; taking both evicts the cached one.
  std::vector<BlockLease> leases;
  ASSERT_TRUE(pool.try_take(1, leases));
  EXPECT_NE(leases[0].id(), id);
  EXPECT_EQ(pool.num_cached(), 1);
  ASSERT_TRUE(pool.try_take(1, leases));
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT_FALSE(pool.find(hash, kRoot, tokens));
  pool.check_integrity();
}

TEST(BlockPool, AHashMatchWithOtherTokensOrParentIsNoHit) {
  BlockPool pool(2, 4);
  const auto tokens = block_of(10, 4);
  const BlockHash hash = chain_hash(kRoot, tokens);
  std::vector<BlockLease> leases;
  ASSERT_TRUE(pool.try_take(1, leases));
  pool.publish(leases[0], hash, kRoot, tokens);
  EXPECT_FALSE(pool.find(hash, kRoot, block_of(11, 4)));
  EXPECT_FALSE(pool.find(hash, BlockHash{kRoot.value + 1}, tokens));
  EXPECT_TRUE(pool.find(hash, kRoot, tokens));
}

TEST(BlockPool, EvictsTheTailOfASequenceBeforeItsPrefix) {
  BlockPool pool(3, 2);
  std::vector<BlockHash> hashes;
  {
    std::vector<BlockLease> leases;
    ASSERT_TRUE(pool.try_take(3, leases));
    BlockHash parent = kRoot;
    for (std::int32_t i = 0; i < 3; ++i) {
      const auto tokens = block_of(10 * i, 2);
      hashes.push_back(chain_hash(parent, tokens));
      pool.publish(leases[static_cast<std::size_t>(i)], hashes.back(), parent, tokens);
      parent = hashes.back();
    }
    release_tail_first(leases);
  }
  std::vector<BlockLease> leases;
  ASSERT_TRUE(pool.try_take(1, leases));
  EXPECT_TRUE(pool.find(hashes[0], kRoot, block_of(0, 2)));
  EXPECT_TRUE(pool.find(hashes[1], hashes[0], block_of(10, 2)));
  EXPECT_FALSE(pool.find(hashes[2], hashes[1], block_of(20, 2)));
}

TEST(BlockPool, RootDependsOnAllOfTheKey) {
  std::set<BlockHash> roots;
  for (const std::uint64_t epoch : {1, 2})
    for (const std::int64_t version : {0, 1})
      for (const std::uint64_t adapter : {0, 1, 2})
        for (const std::int64_t adapter_version : {0, 1})
          for (const char* salt : {"", "a", "b"})
            roots.insert(root_hash({epoch, PolicyVersion{version}, {adapter, PolicyVersion{adapter_version}}, salt}));
  EXPECT_EQ(roots.size(), 72u);
}

TEST(BlockPool, ResetForgetsHashesAndKeepsReferences) {
  BlockPool pool(2, 2);
  const auto tokens = block_of(1, 2);
  const BlockHash hash = chain_hash(kRoot, tokens);
  std::vector<BlockLease> leases;
  ASSERT_TRUE(pool.try_take(1, leases));
  pool.publish(leases[0], hash, kRoot, tokens);
  pool.reset_cache();
  EXPECT_FALSE(pool.find(hash, kRoot, tokens));
  EXPECT_EQ(pool.ref_count(leases[0].id()), 1);
  pool.check_integrity();
}

// Random takes, shares, publishes and releases against a model that keeps the hash table as a std::map.
TEST(BlockPool, RandomOperationsKeepTheInvariants) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(seed);
    BlockPool pool(1 + static_cast<std::int64_t>(rng.next_below(40)), 2);
    std::vector<BlockLease> held;
    std::map<std::int32_t, std::int32_t> refs;
    std::int32_t next_token = 0;
    for (int i = 0; i < 600; ++i) {
      const auto choice = rng.next_below(5);
      if (choice <= 1) {
        const auto n = static_cast<std::int64_t>(rng.next_below(4));
        const std::size_t before = held.size();
        const bool has_room = n <= pool.num_free();
        ASSERT_EQ(pool.try_take(n, held), has_room);
        for (std::size_t j = before; j < held.size(); ++j) {
          ++refs[held[j].id().value];
          const auto tokens = block_of(next_token++, 2);
          if (rng.next_below(2) == 0) pool.publish(held[j], chain_hash(kRoot, tokens), kRoot, tokens);
        }
      } else if (choice == 2 && !held.empty()) {
        held.push_back(held[rng.next_below(held.size())].share());
        ++refs[held.back().id().value];
      } else if (choice == 3 && next_token > 0) {
        const auto tokens = block_of(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(next_token))), 2);
        if (auto found = pool.find(chain_hash(kRoot, tokens), kRoot, tokens)) {
          ++refs[found->id().value];
          held.push_back(std::move(*found));
        }
      } else if (!held.empty()) {
        const auto index = rng.next_below(held.size());
        std::swap(held[index], held.back());
        --refs[held.back().id().value];
        held.pop_back();
      }
      pool.check_integrity();
      for (const auto& [id, count] : refs) ASSERT_EQ(pool.ref_count(BlockId{id}), count);
    }
  }
}

}  // namespace
}  // namespace prl::engine
