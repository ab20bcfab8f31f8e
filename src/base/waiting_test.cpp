#include "base/waiting.hpp"

#include <gtest/gtest.h>

#include "base/failure.hpp"

namespace prl {
namespace {

using namespace std::chrono_literals;

struct FakeTime {
  Waiting::Clock::time_point now{1h};
  std::function<Waiting::Clock::time_point()> clock() {
    return [this] { return now; };
  }
};

TEST(Waiting, SpeaksAfterTenSecondsAndThenLessAndLessOften) {
  FakeTime time;
  Waiting waiting({.who = "the orchestrator",
                   .what = "the trainer to take batch 7",
                   .limit = 1h,
                   .detail = [] { return "in files"; },
                   .now = time.clock()});
  std::vector<int> spoken;
  for (int second = 1; second <= 700; ++second) {
    time.now += 1s;
    if (waiting.due()) spoken.push_back(second);
  }
  EXPECT_EQ(spoken, (std::vector<int>{10, 20, 40, 80, 160, 320, 620}));
}

TEST(Waiting, TheLineSaysWhoWaitsForWhomHowLongAndUntilWhen) {
  FakeTime time;
  Waiting waiting({.who = "the orchestrator",
                   .what = "the trainer to take batch 7",
                   .limit = 10min,
                   .detail = [] { return "in files"; },
                   .now = time.clock()});
  EXPECT_FALSE(waiting.due());
  time.now += 12s;
  const std::string line = waiting.due().value_or("");
  EXPECT_NE(line.find("the orchestrator has been waiting for the trainer to take batch 7 since "), std::string::npos) << line;
  EXPECT_NE(line.find("(12 s)"), std::string::npos) << line;
  EXPECT_NE(line.find("(10 min more): in files"), std::string::npos) << line;
  EXPECT_FALSE(waiting.due()) << "the same line twice";
}

TEST(Waiting, ARoundThatTookLongIsOneLine) {
  FakeTime time;
  Waiting waiting({.who = "a", .what = "b", .limit = {}, .detail = {}, .now = time.clock()});
  time.now += 200s;
  EXPECT_TRUE(waiting.due());
  EXPECT_FALSE(waiting.due());
  time.now += 100s;
  EXPECT_FALSE(waiting.due());
  time.now += 20s;
  EXPECT_TRUE(waiting.due());
}

TEST(Waiting, ProgressAndAnotherTargetBeginAnew) {
  FakeTime time;
  Waiting waiting({.who = "a", .what = "b", .limit = 1min, .detail = {}, .now = time.clock()});
  time.now += 9s;
  waiting.restart();
  time.now += 9s;
  EXPECT_FALSE(waiting.due());
  waiting.expect("b", 1min);
  time.now += 2s;
  EXPECT_TRUE(waiting.due()) << "the same target must not begin anew";
  waiting.expect("c", 1min);
  EXPECT_EQ(waiting.waited(), 0s);
  time.now += 59s;
  EXPECT_FALSE(waiting.is_expired());
  time.now += 1s;
  EXPECT_TRUE(waiting.is_expired());
  try {
    waiting.fail_expired("is it running?");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDeadline);
    EXPECT_STREQ(error.what(), "a waited 60 s for c: is it running?");
  }
}

TEST(ErrorCodes, OneRuleSaysWhatIsTriedAgain) {
  for (const int status : {408, 429, 500, 502, 503, 504, 599}) EXPECT_TRUE(is_transient(error_code_of_status(status))) << status;
  for (const int status : {400, 401, 403, 404, 405, 409, 413, 421, 422, 501})
    EXPECT_FALSE(is_transient(error_code_of_status(status))) << status;
  for (const int status : {401, 403, 404, 405, 421}) EXPECT_TRUE(refuses_all(error_code_of_status(status))) << status;
  for (const int status : {400, 408, 413, 429, 500, 503}) EXPECT_FALSE(refuses_all(error_code_of_status(status))) << status;
  EXPECT_FALSE(is_transient(ErrorCode::kCancelled));
}

}  // namespace
}  // namespace prl
