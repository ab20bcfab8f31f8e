#include "comm/nccl/nccl_peers.hpp"

#include <gtest/gtest.h>

#include "comm/store.hpp"

namespace prl::comm {
namespace {

using std::chrono::milliseconds;

/// What rank 0 of four finds when it has waited in vain. No GPU is needed to ask.
class NcclPeersTest : public ::testing::Test {
 protected:
  CommOptions options_of(int rank) const { return {.rank = rank, .size = 4, .store = store_, .group = "world"}; }
  void say(int rank, const char* what, const char* text) {
    const CommOptions options = options_of(rank);
    NcclPeers(options).say(what, text);
  }
  PeerLost roll() {
    const CommOptions options = options_of(0);
    return NcclPeers(options).call_the_roll("nothing came", "barrier 8 (end of step 5)", "barrier 7", std::chrono::steady_clock::now());
  }
  std::shared_ptr<Store> store_ = make_memory_store();
};

TEST_F(NcclPeersTest, WhoGaveUpIsTheLossWhoeverElseIsSilent) {
  say(1, "left", "row 7 is not finite");
  const auto started = std::chrono::steady_clock::now();
  const PeerLost lost = roll();
  EXPECT_EQ(lost.ranks(), std::vector<int>{1});
  EXPECT_TRUE(lost.gave_up());
  EXPECT_NE(std::string(lost.what()).find("rank 1 gave up: row 7"), std::string::npos) << lost.what();
  EXPECT_LT(std::chrono::steady_clock::now() - started, kRollCall) << "nothing is waited for";
}

TEST_F(NcclPeersTest, WhoDoesNotSayThatItWaitsIsLost) {
  say(1, "waits", "barrier 8");
  say(3, "waits", "barrier 8");
  const PeerLost lost = roll();
  EXPECT_EQ(lost.ranks(), std::vector<int>{2});
  EXPECT_FALSE(lost.gave_up());
  for (const char* part : {"barrier 8 (end of step 5)", "last completed: barrier 7", "do not say that they wait: [2]"})
    EXPECT_NE(std::string(lost.what()).find(part), std::string::npos) << part << " is not in " << lost.what();
}

TEST_F(NcclPeersTest, NobodyIsLostWhereAllWait) {
  for (const int rank : {1, 2, 3}) say(rank, "waits", "barrier 8");
  EXPECT_TRUE(roll().ranks().empty());
}

}  // namespace
}  // namespace prl::comm
