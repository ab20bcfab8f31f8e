#include "router/router.hpp"

#include <gmock/gmock.h>

#include <stdexcept>

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
  EXPECT_FALSE(router.has_engine(lost));
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
