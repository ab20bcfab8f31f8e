#include "router/router.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace prl::router {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TicketId submit(Router& router, const std::string& session, std::int64_t num_prompt_tokens = 10, std::int64_t max_new_tokens = 10) {
  const auto ticket = router.submit({.session = session, .num_prompt_tokens = num_prompt_tokens, .max_new_tokens = max_new_tokens});
  if (!ticket) throw std::runtime_error("the queue is full");
  return *ticket;
}

/// Engines of a plan, in its order.
std::vector<std::int64_t> engines_of(const std::vector<Assignment>& plan) {
  std::vector<std::int64_t> engines;
  for (const Assignment& assignment : plan) engines.push_back(assignment.engine.value);
  return engines;
}

TEST(Router, NewSessionsGoWhereTheFewestTokensAreUnderWay) {
  Router router;
  for (int i = 0; i < 3; ++i) router.add_engine({.max_requests = 8}, true);
  submit(router, "long", 1000, 0);
  submit(router, "middle", 300, 0);
  submit(router, "short", 100, 0);
  submit(router, "next", 100, 0);
  submit(router, "last", 50, 0);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0, 1, 2, 2, 2));
  EXPECT_EQ(router.load(EngineId{2}).num_tokens, 250);
  EXPECT_EQ(router.load(EngineId{2}).num_requests, 3);
}

TEST(Router, LaterTurnsReturnToTheirPrefixWhileItsEngineHasRoom) {
  Router router;
  router.add_engine({.max_requests = 2}, true);
  router.add_engine({.max_requests = 2}, true);
  const TicketId first = submit(router, "a", 500, 100);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0));
  router.finish(first, 50);
  submit(router, "b", 5, 5);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0)) << "ties go to the first engine";
  submit(router, "a", 600, 100);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0)) << "the prefix counts for more than the load";
  submit(router, "a", 600, 100);
  const auto plan = router.plan();
  EXPECT_THAT(engines_of(plan), ElementsAre(1)) << "its engine is full and the other has room";
  EXPECT_TRUE(plan.front().has_moved);
  EXPECT_EQ(router.counts().num_at_home, 1);
  EXPECT_EQ(router.counts().num_moved, 1);
}

TEST(Router, ARequestThatFailedOnAnEngineGoesToAnotherWhileOneHasRoom) {
  Router router;
  const EngineId sick = router.add_engine({.max_requests = 4}, true);
  const EngineId well = router.add_engine({.max_requests = 1}, true);
  const auto repeat = [&](const std::string& session) {
    return *router.submit({.session = session, .is_replay = true, .failed_on = sick});
  };
  const TicketId first = repeat("");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1)) << "although the first engine has as little to do";
  const TicketId second = repeat("");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0)) << "rather there than to wait";
  router.finish(first, 1);
  router.finish(second, 1);
  // Its session has its prefix there again, since another of its requests went there meanwhile.
  const TicketId other = submit(router, "a");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0));
  router.finish(other, 1);
  repeat("a");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1));
  EXPECT_EQ(router.load(well).num_requests, 1);
}

TEST(Router, EnginesTakeTurnsWhateverTheirLoadIfThatIsWanted) {
  Router router({.spread = Spread::kTurns});
  const EngineId first = router.add_engine({.max_requests = 8}, true);
  const EngineId second = router.add_engine({.max_requests = 1}, true);
  const EngineId third = router.add_engine({.max_requests = 8}, false);
  submit(router, "a", 1000);
  const TicketId on_second = submit(router, "a", 10);
  submit(router, "a", 10);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0, 1, 0)) << "sessions have no engine, and one that is not ready no turn";
  submit(router, "a");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0)) << "the second is full";
  router.finish(on_second, 1);
  router.set_ready(third, true);
  for (int i = 0; i < 3; ++i) submit(router, "b", 1);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1, 2, 0));
  EXPECT_EQ(router.counts().num_at_home, 0);
  ASSERT_TRUE(router.submit({.session = "b", .is_replay = true, .failed_on = third}));
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0)) << "the second is full, the third failed it";
  EXPECT_EQ(router.load(first).num_requests, 5);
  EXPECT_EQ(router.load(second).num_requests, 1);
}

std::vector<std::int64_t> drawn_engines(std::uint64_t seed, int count) {
  Router router({.spread = Spread::kRandom, .seed = seed});
  for (int i = 0; i < 4; ++i) router.add_engine({.max_requests = i == 1 ? 1 : 8}, i != 2);
  submit(router, "");
  while (router.load(EngineId{1}).num_requests == 0) {
    router.plan();
    submit(router, "");
  }
  std::vector<std::int64_t> engines;
  for (int i = 0; i < count; ++i) {
    const auto plan = router.plan();
    for (const Assignment& assignment : plan) {
      engines.push_back(assignment.engine.value);
      router.finish(assignment.ticket, 1);
    }
    submit(router, "same");
  }
  return engines;
}

TEST(Router, EnginesAreDrawnEvenlyFromThoseWithRoomAndAgainInTheSameOrder) {
  const auto engines = drawn_engines(1, 4000);
  ASSERT_THAT(engines, SizeIs(::testing::Ge(3990u)));
  const auto count = [&](std::int64_t engine) { return std::count(engines.begin(), engines.end(), engine); };
  EXPECT_EQ(count(1), 0) << "full";
  EXPECT_EQ(count(2), 0) << "not ready";
  EXPECT_NEAR(static_cast<double>(count(0)), 2000, 160) << "five standard deviations";
  EXPECT_EQ(drawn_engines(1, 4000), engines);
  EXPECT_NE(drawn_engines(2, 4000), engines);
}

TEST(Router, OfTwoDrawnEnginesTheLessBusyGetsTheRequest) {
  Router router({.spread = Spread::kTwoChoices});
  const EngineId busy = router.add_engine({}, true);
  const EngineId other = router.add_engine({}, false);
  for (int i = 0; i < 3; ++i) submit(router, "a");
  ASSERT_THAT(engines_of(router.plan()), ElementsAre(0, 0, 0));
  router.set_ready(other, true);
  submit(router, "a");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1)) << "both are drawn";
  const EngineId third = router.add_engine({}, true);
  std::vector<std::int64_t> taken;
  for (int i = 0; i < 64; ++i) {
    submit(router, "a");
    for (const Assignment& assignment : router.plan()) {
      taken.push_back(assignment.engine.value);
      router.finish(assignment.ticket, 1);
    }
  }
  EXPECT_THAT(taken, ::testing::Not(::testing::Contains(busy.value))) << "whichever was drawn beside it is less busy";
  EXPECT_THAT(taken, ::testing::AllOf(::testing::Contains(other.value), ::testing::Contains(third.value)));
  ASSERT_TRUE(router.submit({.session = "a", .is_replay = true, .failed_on = third}));
  EXPECT_THAT(router.plan().front().engine, ::testing::Ne(third)) << "it failed the request";
}

/// A prompt of so many parts of a conversation.
PrefixHashes prompt(std::uint64_t conversation, std::size_t num_parts) {
  PrefixHashes parts;
  for (std::size_t i = 0; i < num_parts; ++i) parts.push_back(1000 * conversation + i);
  return parts;
}

class PrefixRouterTest : public ::testing::Test {
 protected:
  explicit PrefixRouterTest(PrefixSpread prefixes = {.threshold = 0.5, .max_difference = 4, .max_ratio = 2})
      : router_({.spread = Spread::kPrefixes, .prefixes = prefixes}) {
    for (int i = 0; i < 3; ++i) router_.add_engine({.max_requests = 8}, true);
  }
  Assignment send(PrefixHashes parts, const std::string& session = {}, std::optional<EngineId> failed_on = {}) {
    if (!router_.submit({.session = session, .prefixes = std::move(parts), .is_replay = failed_on.has_value(), .failed_on = failed_on}))
      throw std::runtime_error("the queue is full");
    const auto plan = router_.plan();
    if (plan.size() != 1) throw std::runtime_error("the request waits");
    return plan.front();
  }
  std::int64_t engine_for(PrefixHashes parts, const std::string& session = {}) {
    const Assignment assignment = send(std::move(parts), session);
    router_.finish(assignment.ticket, 1);
    return assignment.engine.value;
  }
  Router router_;
};

TEST_F(PrefixRouterTest, TheEngineWithTheLongestPrefixOrElseTheOneThatWasSentLeast) {
  EXPECT_EQ(engine_for(prompt(1, 10)), 0);
  EXPECT_EQ(engine_for(prompt(2, 4)), 1);
  EXPECT_EQ(engine_for(prompt(3, 6)), 2);
  EXPECT_EQ(engine_for(prompt(1, 12)), 0) << "ten parts of twelve";
  EXPECT_EQ(engine_for(prompt(2, 8)), 1) << "half is not more than half: the smallest tree, which happens to be there";
  EXPECT_EQ(engine_for(prompt(4, 1)), 2);
  EXPECT_EQ(router_.load(EngineId{2}).num_sent_bytes, static_cast<std::int64_t>(7 * kPrefixBytes));
  EXPECT_EQ(engine_for(prompt(1, 24)), 2) << "half of it is on the first, and the third was sent least";
  EXPECT_EQ(engine_for(prompt(1, 12)), 0) << "both were sent all: the first of equals";
  EXPECT_EQ(engine_for(prompt(1, 24)), 2) << "the longest";
  EXPECT_EQ(engine_for({}), 1) << "no prompt, such as /tokenize";
}

TEST_F(PrefixRouterTest, ASessionsEngineCountsWherePromptsDoNotTell) {
  EXPECT_EQ(engine_for(prompt(1, 4), "a"), 0);
  EXPECT_EQ(engine_for(prompt(1, 20), "a"), 0) << "a long reply lies between: its cache is there";
  EXPECT_EQ(engine_for(prompt(9, 40)), 1);
  router_.forget_prefixes(EngineId{0});
  EXPECT_EQ(router_.load(EngineId{0}).num_sent_bytes, 0);
  EXPECT_EQ(engine_for(prompt(1, 20), "a"), 0);
  // Rollouts of one prompt: each goes on where it was.
  for (const std::string session : {"x", "y"}) {
    const EngineId engine{session == "x" ? 1 : 2};
    for (int i = 0; i < 3; ++i) router_.set_ready(EngineId{i}, i == engine.value);
    EXPECT_EQ(engine_for(prompt(5, 8), session), engine.value);
    router_.set_ready(EngineId{1}, true);
  }
  router_.set_ready(EngineId{0}, true);
  EXPECT_EQ(engine_for(prompt(5, 8), "y"), 2);
}

TEST_F(PrefixRouterTest, WhereEnginesDifferTooMuchTheLeastBusyGetsTheNext) {
  std::vector<std::int64_t> engines;
  for (int i = 0; i < 7; ++i) engines.push_back(send(prompt(1, 10)).engine.value);
  EXPECT_THAT(engines, ElementsAre(0, 0, 0, 0, 0, 1, 2)) << "five and none differ by more than four, five and one do not, but one has none";
  EXPECT_EQ(send(prompt(1, 10)).engine.value, 1) << "three engines have it: of these the least busy";
}

TEST_F(PrefixRouterTest, FullLostAndFailingEnginesAreLeftOut) {
  EXPECT_EQ(engine_for(prompt(1, 10)), 0);
  EXPECT_EQ(send(prompt(1, 10), "", EngineId{0}).engine.value, 1) << "it failed the request there";
  router_.set_limits(EngineId{0}, {.max_requests = 1});
  EXPECT_EQ(send(prompt(1, 10), "").engine.value, 0);
  const Assignment moved = send(prompt(1, 10));
  EXPECT_EQ(moved.engine.value, 1) << "it is full, and another that has the prefix is half empty";
  EXPECT_EQ(router_.num_waiting(), 0u);
  router_.set_ready(EngineId{1}, false);
  EXPECT_EQ(router_.load(EngineId{1}).num_sent_bytes, 0) << "its cache is gone";
  router_.set_ready(EngineId{1}, true);
  EXPECT_EQ(engine_for(prompt(2, 3)), 2) << "neither was sent anything since, and it is the less busy";
  EXPECT_EQ(engine_for(prompt(3, 3)), 1);
}

class SmallTreesTest : public PrefixRouterTest {
 protected:
  SmallTreesTest() : PrefixRouterTest({.max_bytes = 16 * kPrefixBytes}) {}
};

TEST_F(SmallTreesTest, TreesAreBounded) {
  for (std::uint64_t i = 0; i < 100; ++i) engine_for(prompt(i, 10));
  for (int i = 0; i < 3; ++i) EXPECT_LE(router_.load(EngineId{i}).num_sent_bytes, static_cast<std::int64_t>(16 * kPrefixBytes));
}

TEST(Router, WhatFitsNowhereWaitsAndGoesHomeFirst) {
  Router router;
  router.add_engine({.max_requests = 1}, true);
  router.add_engine({.max_requests = 1}, true);
  const TicketId a = submit(router, "a");
  const TicketId b = submit(router, "b");
  ASSERT_THAT(router.plan(), SizeIs(2));
  const TicketId next_a = submit(router, "a");
  const TicketId next_b = submit(router, "b");
  EXPECT_THAT(router.plan(), IsEmpty());
  EXPECT_EQ(router.num_waiting(), 2u);
  router.finish(b, 10);
  const auto plan = router.plan();
  ASSERT_THAT(plan, SizeIs(1));
  EXPECT_EQ(plan.front().ticket, next_b) << "although the other came before: its prefix is here";
  router.cancel(next_a);
  EXPECT_EQ(router.num_waiting(), 0u);
  router.finish(a, 10);
  EXPECT_THAT(router.plan(), IsEmpty());
}

TEST(Router, ASessionWaitsForItsPrefixUnlessTheLineIsLongOrAnotherEngineIsHalfEmpty) {
  Router router;
  const EngineId home = router.add_engine({.max_requests = 4}, true);
  const EngineId other = router.add_engine({.max_requests = 4}, false);
  for (int i = 0; i < 4; ++i) submit(router, "a");
  ASSERT_THAT(router.plan(), SizeIs(4));
  router.set_ready(other, true);
  const TicketId first = submit(router, "b"), second = submit(router, "c");
  ASSERT_THAT(engines_of(router.plan()), ElementsAre(1, 1));
  for (int i = 0; i < 2; ++i) submit(router, "a");
  EXPECT_THAT(router.plan(), IsEmpty()) << "the other engine has room but is half full";
  submit(router, "a");
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1)) << "three wait where four run";
  router.finish(first, 1);
  EXPECT_THAT(router.plan(), IsEmpty());
  router.finish(second, 1);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1)) << "half empty: one moves, and it is half full again";
  EXPECT_EQ(router.load(home).num_requests, 4);
  EXPECT_EQ(router.num_waiting(), 1u);
}

TEST(Router, AnEngineWithRoomTakesTheCheapestThatWaits) {
  Router router;
  for (int i = 0; i < 3; ++i) router.add_engine({.max_requests = 1}, true);
  const TicketId a = submit(router, "a"), b = submit(router, "b");
  const TicketId c = submit(router, "c");
  ASSERT_THAT(router.plan(), SizeIs(3));
  submit(router, "a", 900);
  const TicketId cheap = submit(router, "b", 30);
  router.finish(c, 1);
  const auto plan = router.plan();
  ASSERT_THAT(plan, SizeIs(1));
  EXPECT_EQ(plan.front().ticket, cheap);
  EXPECT_EQ(plan.front().engine.value, 2);
  router.finish(a, 1);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0));
  router.finish(b, 1);
}

TEST(Router, TokensInTheCacheLimitAnEngine) {
  Router router;
  router.add_engine({.max_tokens = 100}, true);
  router.add_engine({.max_tokens = 100}, true);
  submit(router, "", 500, 10);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0)) << "more than there is, but an engine without work refuses nothing";
  submit(router, "", 60, 20);
  submit(router, "", 30, 0);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(1)) << "80 of 100: the next one waits";
}

TEST(Router, CompletionsTeachHowLongTheNextWillBe) {
  Router router;
  router.add_engine({.max_tokens = 100}, true);
  router.add_engine({.max_tokens = 100}, true);
  const TicketId first = submit(router, "", 10, 10000);
  router.plan();
  router.finish(first, 20);
  for (int i = 0; i < 6; ++i) submit(router, "", 10, 10000);
  EXPECT_THAT(engines_of(router.plan()), ElementsAre(0, 1, 0, 1, 0, 1)) << "31 tokens each";
  EXPECT_EQ(router.load(EngineId{0}).num_tokens, 93);
}

TEST(Router, ALostEnginesRequestsGoElsewhereAndFirst) {
  Router router;
  const EngineId lost = router.add_engine({.max_requests = 1}, true);
  router.add_engine({.max_requests = 1}, true);
  const TicketId a = submit(router, "a"), b = submit(router, "b");
  ASSERT_THAT(router.plan(), SizeIs(2));
  submit(router, "a");
  submit(router, "c");
  router.set_ready(lost, false);
  router.cancel(a);
  const auto replay = router.submit({.session = "a", .num_prompt_tokens = 10, .max_new_tokens = 10, .is_replay = true});
  ASSERT_TRUE(replay);
  EXPECT_THAT(router.plan(), IsEmpty()) << "the other engine is full";
  router.finish(b, 1);
  const auto plan = router.plan();
  ASSERT_THAT(plan, SizeIs(1));
  EXPECT_EQ(plan.front().ticket, *replay);
  EXPECT_FALSE(plan.front().has_moved) << "its prefix is lost, it has not moved away from it";
  router.remove_engine(lost);
  // Alone, the other takes all that is there.
  EXPECT_THAT(router.plan(), SizeIs(2));
}

TEST(Router, LimitsHold) {
  Router router({.max_waiting = 2, .max_sessions = 2});
  const EngineId only = router.add_engine({.max_requests = 1}, false);
  EXPECT_FALSE(router.has_ready_engine());
  submit(router, "a");
  submit(router, "b");
  EXPECT_FALSE(router.submit({.session = "c"}).has_value());
  EXPECT_THAT(router.plan(), IsEmpty());
  router.set_ready(only, true);
  EXPECT_THAT(router.plan(), SizeIs(2));
  submit(router, "c");
  router.plan();
  const EngineId other = router.add_engine({.max_requests = 9}, true);
  submit(router, "a");
  EXPECT_EQ(router.plan().front().engine, other) << "the session used longest ago was forgotten";
}

TEST(RouterDeathTest, ATicketEndsOnce) {
  Router router;
  router.add_engine({}, true);
  const TicketId ticket = submit(router, "a");
  router.plan();
  router.finish(ticket, 1);
  EXPECT_DEATH(router.cancel(ticket), "ended twice");
}

}  // namespace
}  // namespace prl::router
