#include "env/python/player.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "net/deadline.hpp"

namespace prl::env::python {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

/// What workers would be told.
class RecordedRun final : public PooledRun {
 public:
  RecordedRun() : PooledRun(1 << 20) {}
  void reply(std::string, std::string) override { ++num_replies; }
  void cancel() override {}
  int num_replies = 0;
};

/// A model of which calls end some time after they were cancelled, as those of a server do whose connection is closed in good order.
class SlowToEnd final : public ChatClient {
 public:
  asio::awaitable<ChatTurn> complete(const ChatRequest&) override {
    ++num_begun;
    if (on_begin) on_begin();
    co_await asio::this_coro::reset_cancellation_state(asio::disable_cancellation());
    auto sleeping = net::sleep_for(100ms);
    co_await std::move(sleeping);
    ++num_ended;
    fail(ErrorCode::kCancelled, "the call was cancelled");
  }
  std::function<void()> on_begin;
  int num_begun = 0, num_ended = 0;
};

json::object model_call(const std::string& call_id) {
  return {{"t", "model_call"},
          {"call_id", call_id},
          {"run_id", "r"},
          {"session_id", "s"},
          {"messages", json::array{{{"role", "user"}, {"content", "a"}}}}};
}

class PlayerTest : public ::testing::Test {
 protected:
  /// Plays the events, then stops.
  void play(std::vector<RunEvent> events) {
    context_.client = &model_;
    for (RunEvent& event : events) push(std::move(event));
    asio::io_context io;
    Player player(io.get_executor(), run_, &context_, {}, {});
    auto playing = [&]() -> asio::awaitable<void> {
      auto ending = player.until_end(net::Clock::now() + 20s);
      co_await std::move(ending);
      auto stopping = player.stop();
      co_await std::move(stopping);
      num_ended_when_stopped_ = model_.num_ended;
    };
    asio::co_spawn(io, playing(), [&](std::exception_ptr error) { error_ = error; });
    io.run();
  }
  void push(RunEvent event) { EXPECT_TRUE(run_->events.try_push(event)); }
  static RunEvent event(RunEvent::Kind kind, json::object message) { return {.kind = kind, .message = std::move(message), .failure = {}}; }

  std::shared_ptr<RecordedRun> run_ = std::make_shared<RecordedRun>();
  SlowToEnd model_;
  RolloutContext context_;
  std::exception_ptr error_;
  int num_ended_when_stopped_ = -1;
};

TEST_F(PlayerTest, ACancelledCallIsWaitedForAsOthersAre) {
  model_.on_begin = [this] {
    for (const char* id : {"none", "1"}) push(event(RunEvent::Kind::kCallCancelled, {{"t", "model_cancel"}, {"call_id", id}}));
    push(event(RunEvent::Kind::kEnded, {}));
  };
  play({event(RunEvent::Kind::kCall, model_call("1"))});
  EXPECT_EQ(error_, nullptr);
  EXPECT_EQ(model_.num_begun, 1);
  EXPECT_EQ(num_ended_when_stopped_, 1) << "it works on the player";
  EXPECT_EQ(run_->num_replies, 0);
}

TEST_F(PlayerTest, TwoCallsOfOneIdAreAnError) {
  play({event(RunEvent::Kind::kCall, model_call("1")), event(RunEvent::Kind::kCall, model_call("1")), event(RunEvent::Kind::kEnded, {})});
  ASSERT_NE(error_, nullptr);
  try {
    std::rethrow_exception(error_);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("call_id is '1'"));
  }
}

}  // namespace
}  // namespace prl::env::python
