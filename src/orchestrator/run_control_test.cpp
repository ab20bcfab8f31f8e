#include "orchestrator/run_control.hpp"

#include <gtest/gtest.h>

#include "net/deadline.hpp"
#include "net/io_runtime.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;

asio::awaitable<void> fail_with(ErrorCode code, std::string message) {
  co_await net::sleep_for(1ms);
  throw Error(code, message);
}

asio::awaitable<int> wait_long() {
  co_await net::sleep_for(10min);
  co_return 1;
}

asio::awaitable<void> fail_then_await(RunControl* control) {
  auto failing = control->guard(fail_with(ErrorCode::kIo, "the first"));
  co_await std::move(failing);
  auto another = control->guard(fail_with(ErrorCode::kIo, "the second"));
  co_await std::move(another);
  auto waiting = control->until_ended<int>(wait_long());
  co_await std::move(waiting);
}

asio::awaitable<void> await_stopped(RunControl* control) {
  auto waiting = control->until_ended<int>(wait_long());
  co_await std::move(waiting);
}

TEST(RunControl, TheFirstFailureEndsWhatIsAwaited) {
  net::IoRuntime io(1);
  RunControl control;
  try {
    io.run_blocking(fail_then_await(&control), 60s);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
  EXPECT_TRUE(control.has_failed());
  EXPECT_THROW(control.check(), Error);
}

TEST(RunControl, AStopCancelsWhatIsAwaitedAndIsNoFailure) {
  net::IoRuntime io(1);
  RunControl control;
  std::stop_source stop;
  control.begin(stop.get_token());
  stop.request_stop();
  try {
    io.run_blocking(await_stopped(&control), 60s);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCancelled);
  }
  EXPECT_TRUE(control.is_stopped());
  EXPECT_FALSE(control.has_failed());
}

TEST(RunControl, ACancellationAfterTheEndIsNoFailureButAnErrorIs) {
  net::IoRuntime io(1);
  RunControl control;
  control.finish();
  io.run_blocking(control.guard(fail_with(ErrorCode::kCancelled, "cancelled")), 60s);
  EXPECT_FALSE(control.has_failed());
  io.run_blocking(control.guard(fail_with(ErrorCode::kIo, "disk full")), 60s);
  EXPECT_TRUE(control.has_failed());
}

}  // namespace
}  // namespace prl::orchestrator
