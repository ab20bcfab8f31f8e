
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "base/failure.hpp"
#include "base/testing/eventually.hpp"
#include "engine/core.hpp"
#include "engine/engine.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"

namespace prl::engine {
namespace {
using namespace std::chrono_literals;
using testing::Collected;
using testing::expected_output;
using testing::fake_weights;
using testing::FakeRunner;
using testing::Inbox;
using wire::FinishReason;

constexpr std::int32_t kFakeVocab = 1000;
using prl::testing::kPatience;

/// Holds the engine's thread inside a step until it is opened.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    is_reached_ = true;
    changed_.notify_all();
    PRL_CHECK(changed_.wait_for(lock, kPatience, [&] { return is_open_; }), "the gate was never opened");
  }
  void wait_reached() {
    std::unique_lock lock(mutex_);
    PRL_CHECK(changed_.wait_for(lock, kPatience, [&] { return is_reached_; }), "nobody came to the gate");
  }
  void open() {
    std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false, is_open_ = false;
};

/// With a device that keeps the host, and with one that computes beside it.
class EngineThreadTest : public ::testing::TestWithParam<bool> {
 protected:
  EngineThreadTest() {
    options_.max_model_len = 64;
    options_.max_num_seqs = 4;
    options_.max_queued_requests = 16;
    config_.vocab_size = kFakeVocab;
    config_.max_position = 64;
    config_.eos_ids = {0};
  }
  void start() {
    CoreOptions core;
    core.num_blocks = 64;
    core.block_size = 4;
    core.scheduler.max_num_seqs = options_.max_num_seqs;
    auto runner = std::make_unique<FakeRunner>(core.num_blocks, core.block_size, kFakeVocab);
    runner->before_run = before_run_;
    runner->is_beside_host = GetParam();
    engine_ = std::make_unique<Engine>(options_, config_, std::make_unique<EngineCore>(core, std::move(runner)));
  }
  static wire::GenerateRequest request_of(std::vector<std::int32_t> prompt, std::int32_t max_tokens) {
    wire::GenerateRequest request;
    request.prompt_ids = std::move(prompt);
    request.sampling.max_tokens = max_tokens;
    request.sampling.seed = 5;
    request.sampling.ignore_eos = true;
    return request;
  }
  std::pair<RequestId, std::shared_ptr<Inbox>> submit(wire::GenerateRequest request) {
    auto inbox = std::make_shared<Inbox>();
    const RequestId id = engine_->submit(std::move(request), [inbox](const StepEvent& event) { inbox->push(event); });
    return {id, inbox};
  }
  template <typename F>
  static Error error_of(F&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error";
    return Error(ErrorCode::kInternal, "");
  }

  EngineOptions options_;
  nn::ModelConfig config_;
  std::function<void(const StepPlan&)> before_run_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(EngineThreadTest, AnswersRequestsOfSeveralThreads) {
  options_.max_queued_requests = 1000;
  start();
  std::vector<std::thread> clients;
  std::atomic<int> num_right{0};
  for (std::int32_t c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (std::int32_t i = 0; i < 20; ++i) {
        auto request = request_of({c + 1, i + 1, 3}, 5);
        const auto resolved = resolve_request(request, options_, config_);
        if (submit(request).second->wait().output.token_ids == expected_output(resolved, 5, PolicyVersion{0}, kFakeVocab)) ++num_right;
      }
    });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(num_right, 80);
}

TEST_P(EngineThreadTest, RequestsWithoutASeedFollowTheEnginesSeed) {
  const auto run = [&](std::uint64_t seed) {
    options_.seed = seed;
    start();
    std::vector<std::vector<std::int32_t>> tokens;
    for (int i = 0; i < 3; ++i) {
      auto request = request_of({1, 2}, 5);
      request.sampling.seed.reset();
      tokens.push_back(submit(request).second->wait().output.token_ids);
    }
    return tokens;
  };
  const auto first = run(1), again = run(1), other = run(2);
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
  EXPECT_NE(first[0], first[1]);
}

TEST_P(EngineThreadTest, AFullQueueAnswersOverloaded) {
  start();
  engine_->pause(kPatience);
  std::vector<std::shared_ptr<Inbox>> inboxes;
  for (int i = 0; i < 20; ++i) inboxes.push_back(submit(request_of({1, 2}, 3)).second);
  const Error error = error_of([&] { submit(request_of({1, 2}, 3)); });
  EXPECT_EQ(error.code(), ErrorCode::kOverloaded);
  EXPECT_TRUE(is_transient(error.code()));
  EXPECT_EQ(engine_->stats().num_waiting, 20);
  engine_->resume();
  for (auto& inbox : inboxes) EXPECT_EQ(inbox->wait().output.finish_reason, FinishReason::kLength);
  engine_->pause(kPatience);  // the last events are counted when their step is over
  EXPECT_EQ(engine_->stats().num_waiting, 0);
  engine_->resume();
  EXPECT_EQ(submit(request_of({1, 2}, 3)).second->wait().output.finish_reason, FinishReason::kLength);
}

TEST_P(EngineThreadTest, AThousandWaitWhileThirtyTwoRun) {
  options_.max_num_seqs = 32;
  options_.max_queued_requests = 1000;
  std::atomic<std::size_t> most_rows{0};
  before_run_ = [&](const StepPlan& plan) { most_rows = std::max(most_rows.load(), plan.rows.size()); };
  start();
  engine_->pause(kPatience);
  std::vector<std::shared_ptr<Inbox>> inboxes;
  for (std::int32_t i = 0; i < 1032; ++i) inboxes.push_back(submit(request_of({i % 900 + 1}, 3)).second);
  EXPECT_EQ(error_of([&] { submit(request_of({1}, 3)); }).code(), ErrorCode::kOverloaded);
  engine_->resume();
  for (auto& inbox : inboxes) EXPECT_EQ(inbox->wait().output.token_ids.size(), 3u);
  EXPECT_EQ(most_rows, 32u);
}

TEST_P(EngineThreadTest, PauseHoldsRequestsAndResumeLetsThemGo) {
  std::atomic<int> num_runs{0};
  before_run_ = [&](const StepPlan&) { ++num_runs; };
  start();
  engine_->pause(kPatience);
  engine_->pause(kPatience);
  EXPECT_TRUE(engine_->stats().is_paused);
  const auto [id, inbox] = submit(request_of({1, 2}, 3));
  EXPECT_EQ(engine_->update_weights(fake_weights(4), kPatience).version, PolicyVersion{4});
  EXPECT_EQ(num_runs, 0);
  EXPECT_EQ(engine_->weights()->version, PolicyVersion{4});
  engine_->resume();
  EXPECT_EQ(inbox->wait().output.versions, (std::vector<std::int64_t>{4, 4, 4}));
}

TEST_P(EngineThreadTest, WhoPausesHasHeardOfAllSteps) {
  before_run_ = [](const StepPlan&) { std::this_thread::sleep_for(1ms); };
  start();
  std::atomic<std::int64_t> num_heard{0};
  engine_->submit(request_of({1, 2}, 60),
                  [&](const StepEvent& event) { num_heard += static_cast<std::int64_t>(event.delta.token_ids.size()); });
  EXPECT_TRUE(prl::testing::eventually([&] { return engine_->stats().num_generation_tokens >= 5; }));
  engine_->pause(kPatience);
  EXPECT_EQ(num_heard, engine_->stats().num_generation_tokens);
  engine_->shutdown();
}

TEST_P(EngineThreadTest, AnUpdateThatComesTooLateIsWithdrawnAndSaysSo) {
  auto gate = std::make_shared<Gate>();
  before_run_ = [gate](const StepPlan&) { gate->pass(); };
  start();
  const auto [id, inbox] = submit(request_of({1, 2}, 3));
  gate->wait_reached();
  const Error error = error_of([&] { engine_->update_weights(fake_weights(4), 1ms); });
  EXPECT_EQ(error.code(), ErrorCode::kDeadline);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("update its weights"));
  EXPECT_FALSE(engine_->is_alive(0ms)) << "a step that does not end shows";
  EXPECT_TRUE(engine_->is_alive(kPatience));
  gate->open();
  EXPECT_EQ(inbox->wait().output.versions, (std::vector<std::int64_t>{0, 0, 0}));
  EXPECT_EQ(engine_->proof(kPatience).version, PolicyVersion{0});
}

TEST_P(EngineThreadTest, AnUpdateInTheMiddleOfARequestChangesLaterTokens) {
  auto gate = std::make_shared<Gate>();
  std::atomic<int> num_runs{0};
  before_run_ = [&, gate](const StepPlan&) {
    if (++num_runs == 3) gate->pass();
  };
  start();
  const auto [id, inbox] = submit(request_of({1, 2}, 6));
  gate->wait_reached();
  std::thread updater([&] { engine_->update_weights(fake_weights(9), kPatience); });
  std::thread pauser([&] { engine_->pause(kPatience); });
  EXPECT_TRUE(prl::testing::eventually([&] { return engine_->stats().is_paused; }));
  gate->open();
  updater.join();
  pauser.join();
  engine_->resume();
  EXPECT_EQ(inbox->wait().output.versions, (std::vector<std::int64_t>{0, 0, 0, 9, 9, 9}));
}

TEST_P(EngineThreadTest, AnIdleEngineIsAliveUntilItIsShutDown) {
  start();
  engine_->pause(kPatience);
  engine_->resume();
  const auto [id, inbox] = submit(request_of({1, 2}, 3));
  inbox->wait();
  EXPECT_TRUE(engine_->is_alive(kPatience));
  engine_->shutdown();
  engine_->shutdown();
  EXPECT_FALSE(engine_->is_alive(kPatience));
  EXPECT_EQ(error_of([&] { submit(request_of({1}, 1)); }).code(), ErrorCode::kUnavailable);
  EXPECT_EQ(error_of([&] { engine_->proof(1s); }).code(), ErrorCode::kUnavailable);
}

TEST_P(EngineThreadTest, ShutdownEndsRunningAndQueuedRequests) {
  auto gate = std::make_shared<Gate>();
  before_run_ = [gate](const StepPlan&) { gate->pass(); };
  start();
  const auto running = submit(request_of({1, 2}, 50)).second;
  gate->wait_reached();
  const auto queued = submit(request_of({1, 2}, 50)).second;
  std::thread closer([&] { engine_->shutdown(); });
  const auto refuses = [&] {
    try {
      engine_->submit(request_of({1}, 1), [](const StepEvent&) {});
    } catch (const Error& error) {
      return error.code() == ErrorCode::kUnavailable;
    }
    return false;
  };
  EXPECT_TRUE(prl::testing::eventually(refuses)) << "an engine that shuts down still takes requests";
  gate->open();
  closer.join();
  EXPECT_EQ(running->wait().output.finish_reason, FinishReason::kAbort);
  EXPECT_EQ(queued->wait().output.finish_reason, FinishReason::kAbort);
}

TEST_P(EngineThreadTest, ASinkMayStopItsRequestAtTheTokenItSees) {
  start();
  auto inbox = std::make_shared<Inbox>();
  auto num_tokens = std::make_shared<int>(0);
  auto request = request_of({1, 2}, 50);
  if (GetParam()) request.sampling.stop = {"END"};  // else the host is ahead by a step
  engine_->submit(std::move(request), [&, inbox, num_tokens](const StepEvent& event) {
    inbox->push(event);
    if (++*num_tokens == 3) engine_->stop(event.id, "END");
  });
  const auto& choice = inbox->wait().output;
  EXPECT_EQ(choice.token_ids.size(), 3u);
  EXPECT_EQ(choice.finish_reason, FinishReason::kStop);
  EXPECT_EQ(choice.stop_string, "END");
}

TEST_P(EngineThreadTest, GivesUpWhenEveryStepFails) {
  before_run_ = [](const StepPlan&) { fail(ErrorCode::kInternal, "made to fail"); };
  options_.max_num_seqs = 1;
  start();
  engine_->pause(kPatience);
  std::vector<std::shared_ptr<Inbox>> inboxes;
  for (int i = 0; i < 5; ++i) inboxes.push_back(submit(request_of({1, 2}, 3)).second);
  engine_->resume();
  for (auto& inbox : inboxes) EXPECT_EQ(inbox->wait().output.finish_reason, FinishReason::kError);
  EXPECT_THAT(inboxes[0]->wait().output.error, ::testing::HasSubstr("made to fail"));
  EXPECT_THAT(inboxes[4]->wait().output.error, ::testing::HasSubstr("steps in a row failed"));
  const Error error = error_of([&] { submit(request_of({1}, 1)); });
  EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  EXPECT_THAT(error.what(), ::testing::HasSubstr("steps in a row failed"));
}

TEST_P(EngineThreadTest, RefusesWhatCannotFit) {
  start();
  EXPECT_EQ(error_of([&] { submit(request_of(std::vector<std::int32_t>(64, 1), 1)); }).code(), ErrorCode::kOverlong);
}

INSTANTIATE_TEST_SUITE_P(Devices, EngineThreadTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "BesideTheHost" : "WithTheHost"; });

}  // namespace
}  // namespace prl::engine
