#include "env/rollout_attempt.hpp"

#include <gtest/gtest.h>

namespace prl::env {
namespace {

Episode failed(const std::string& type, bool is_transient) {
  Episode episode;
  episode.error = EpisodeError{type, "no answer", is_transient};
  return episode;
}

TEST(RolloutAttempt, FollowsFailuresThatMayPassUpToItsBound) {
  RolloutAttempt attempt;
  EXPECT_FALSE(attempt.try_again({}, 2)) << "it succeeded";
  EXPECT_FALSE(attempt.try_again(failed("ModelError", false), 2)) << "a refusal stays one";
  EXPECT_TRUE(attempt.try_again(failed("ModelError", true), 2));
  EXPECT_TRUE(attempt.try_again(failed("ModelError", true), 2));
  EXPECT_FALSE(attempt.try_again(failed("ModelError", true), 2));
  EXPECT_EQ(attempt.number, 2);
}

TEST(RolloutAttempt, OnlyAnInvalidReplyChangesTheSeed) {
  RolloutAttempt attempt;
  ASSERT_TRUE(attempt.try_again(failed("ModelError", true), 9));
  EXPECT_EQ(attempt.seed_from(42), 42u);
  ASSERT_TRUE(attempt.try_again(failed("InvalidModelResponseError", true), 9));
  const std::uint64_t second = attempt.seed_from(42);
  EXPECT_NE(second, 42u);
  ASSERT_TRUE(attempt.try_again(failed("ModelError", true), 9));
  EXPECT_EQ(attempt.seed_from(42), second);
  ASSERT_TRUE(attempt.try_again(failed("InvalidModelResponseError", true), 9));
  EXPECT_NE(attempt.seed_from(42), second);
}

}  // namespace
}  // namespace prl::env
