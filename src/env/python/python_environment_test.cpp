#include "env/python/python_environment.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "base/rng.hpp"
#include "base/testing/eventually.hpp"
#include "env/python/python_function.hpp"
#include "env/python/setup.hpp"
#include "env/python/worker_files.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "net/http_server.hpp"
#include "net/io_runtime.hpp"
#include "net/task_group.hpp"
#include "text/json_python.hpp"

/// The pool and the environment over it, with real worker processes that play the fake environment (python/prl_worker/adapters/fake.py).
namespace prl::env::python {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// Writes words backwards, as the fake environment asks.
class Reverser final : public ChatClient {
 public:
  explicit Reverser(std::chrono::milliseconds latency, json::array* tools = nullptr) : latency_(latency), tools_(tools) {}
  asio::awaitable<ChatTurn> complete(const ChatRequest& request) override {
    if (tools_ != nullptr) *tools_ = request.tools;
    if (latency_.count() > 0) co_await net::sleep_for(latency_);
    const json::value* content = request.messages.back().as_object().if_contains("content");
    std::string word = content != nullptr && content->is_string() ? std::string(content->get_string()) : "";
    word = word.substr(word.rfind(' ') + 1);
    ChatTurn turn;
    turn.message = json::object{{"role", "assistant"}, {"content", std::string(word.rbegin(), word.rend())}};
    turn.finish_reason = "stop";
    turn.tokens.prompt_ids.assign(3, 1);
    turn.tokens.completion_ids.assign(2, static_cast<std::int32_t>(*request.sampling.seed % 1000));
    turn.tokens.logprobs.assign(2, -0.5f);
    turn.has_tokens = true;
    turn.num_prompt_tokens = 3;
    turn.num_completion_tokens = 2;
    co_return turn;
  }

 private:
  std::chrono::milliseconds latency_;
  json::array* tools_;
};

std::filesystem::path test_folder() {
  const std::string name = ::testing::UnitTest::GetInstance()->current_test_info()->name();
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / ("prl-python-" + name);
  return folder;
}

struct Wanted {
  std::string args = "{}";
  int num_workers = 2;
  std::int64_t rollouts = 8;
  bool sandbox = false;
  bool forks = true;  ///< as configurations have it
  std::function<void(PythonOptions&)> change = {};
  PythonSettings settings = {};
};

class PythonEnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::remove_all(test_folder());
    std::filesystem::create_directories(test_folder());
  }

  const PythonEnvironment& make(Wanted setup) {
    setup.settings.kind = "fake";
    setup.settings.num_workers = setup.num_workers;
    setup.settings.rollouts = setup.rollouts;
    setup.settings.sandbox = setup.sandbox;
    setup.settings.forks = setup.forks;
    setup.settings.log_folder = test_folder();
    PythonOptions options = plan_environment(
        "fake", "fake", text::parse_json(setup.args, text::kJsonDepth, text::LargeNumbers::kKeepText).as_object(), setup.settings);
    options.pool.schedule.heartbeat = 3s;
    options.pool.schedule.restart_wait = 20ms;
    options.pool.schedule.max_lag_ms = 800;
    options.pool.schedule.cancel_limit = 2s;
    options.start_limit = 60s;
    if (setup.change) setup.change(options);
    environment_ = std::make_unique<PythonEnvironment>(std::move(options));
    return *environment_;
  }

  /// One rollout of each task at the same time, `per_task` of each; in order.
  std::vector<Episode> play(std::int64_t num_tasks, std::int64_t per_task = 1, std::chrono::milliseconds limit = 60s,
                            std::chrono::milliseconds latency = 0ms) {
    std::vector<Episode> episodes(static_cast<std::size_t>(num_tasks * per_task));
    net::TaskGroup group(io_.executor(), "test");
    for (std::int64_t i = 0; i < num_tasks * per_task; ++i)
      group.spawn("rollout", play_one(i / per_task, i % per_task, limit, latency, &episodes[static_cast<std::size_t>(i)]));
    EXPECT_TRUE(group.join_blocking(120s)) << "rollouts did not end";
    return episodes;
  }

  asio::awaitable<void> play_one(std::int64_t index, std::int64_t rollout, std::chrono::milliseconds limit,
                                 std::chrono::milliseconds latency, Episode* out) {
    Reverser chat(latency, &tools_);
    RolloutContext context;
    context.client = &chat;
    context.open_conversation = [latency](const std::string&) { return std::make_unique<Reverser>(latency); };
    context.seed = static_cast<std::uint64_t>(100 + index * 10 + rollout);
    context.trajectory_id = fmt::format("t{}-{}", index, rollout);
    context.group_id = fmt::format("g{}", index);
    context.deadline = net::Clock::now() + limit;
    context.max_total_completion_tokens = max_total_completion_tokens_;
    context.is_training = is_training_;
    auto fetching = environment_->fetch_task(Split::kTrain, index);
    Task task = co_await std::move(fetching);
    auto running = environment_->run(std::move(task), std::move(context));
    *out = co_await std::move(running);
  }

  std::string log_text() const {
    std::stringstream text;
    text << std::ifstream(test_folder() / "fake.log").rdbuf();
    return text.str();
  }

  static void expect_solved(const std::vector<Episode>& episodes, std::set<std::size_t> except = {}) {
    for (std::size_t i = 0; i < episodes.size(); ++i) {
      if (except.contains(i)) continue;
      EXPECT_FALSE(episodes[i].error) << i << ": " << episodes[i].error->type << ": " << episodes[i].error->message;
      EXPECT_EQ(episodes[i].reward, 1.0) << i;
      EXPECT_EQ(episodes[i].num_turns(), 1) << i;
    }
  }

  net::IoRuntime io_{1, "test"};
  std::unique_ptr<PythonEnvironment> environment_;
  std::int64_t max_total_completion_tokens_ = -1;
  bool is_training_ = false;
  json::array tools_;  ///< of the last call
};

TEST_F(PythonEnvironmentTest, PlaysRolloutsWithTheTokensOfItsChatClient) {
  const PythonEnvironment& environment = make({.args = R"({"num_train": 100, "turns": 2})"});
  EXPECT_EQ(environment.num_tasks(Split::kTrain), 100);
  EXPECT_EQ(environment.num_tasks(Split::kEval), 20);
  const Task task = environment.task(Split::kTrain, 99);
  EXPECT_EQ(task.example_id, 99);
  EXPECT_EQ(task.key(), environment.task(Split::kTrain, 99).key());
  EXPECT_NE(task.key(), environment.task(Split::kTrain, 98).key());
  EXPECT_THROW(environment.task(Split::kTrain, 100), Error);
  const std::vector<Episode> episodes = play(8);
  for (const Episode& episode : episodes) {
    ASSERT_FALSE(episode.error) << episode.error->message;
    ASSERT_EQ(episode.num_turns(), 2);
    EXPECT_TRUE(episode.trajectory[0].has_tokens);
    // Turn k is sampled with the seed that a native environment gives it.
    const std::uint64_t seed = 100 + static_cast<std::uint64_t>(episode.example_id) * 10;
    for (std::uint64_t k = 0; k < 2; ++k)
      EXPECT_EQ(episode.trajectory[k].tokens.completion_ids[0], static_cast<std::int32_t>((mix_seed(seed, k) >> 1) % 1000));
    EXPECT_EQ(episode.completion.size() >= 3, true);
    EXPECT_EQ(episode.metrics.at("num_turns"), 2.0);
    EXPECT_TRUE(episode.is_completed);
  }
}

TEST_F(PythonEnvironmentTest, ARolloutThatKillsItsWorkerTwiceFailsAloneAndTheOthersAreGivenToOthers) {
  const PythonEnvironment& environment = make({.args = R"({"misbehave": {"3": "kill"}, "latency_s": 0.05})"});
  const std::vector<Episode> episodes = play(12);
  expect_solved(episodes, {3});
  ASSERT_TRUE(episodes[3].error);
  EXPECT_EQ(episodes[3].error->type, "WorkerDied");
  EXPECT_FALSE(episodes[3].error->is_transient);
  EXPECT_THAT(episodes[3].error->message, HasSubstr("not tried again"));
  EXPECT_GE(environment.stats().num_deaths, 2);
}

TEST_F(PythonEnvironmentTest, KilledWorkersLoseNoRollout) {
  const PythonEnvironment& environment = make({.args = R"({"latency_s": 0.02})"});
  environment.prepare();
  std::atomic<bool> is_done{false};
  int num_kills = 0;
  std::jthread killer([&](std::stop_token stop) {
    // As soon as a worker is up again, once in a while: most rollouts get through.
    while (!is_done && num_kills < 6 && !stop.stop_requested()) {
      std::this_thread::sleep_for(300ms);
      for (const auto& pid : environment.stats().pids)
        if (pid && environment.stats().num_ready == 2) {
          ::kill(*pid, SIGKILL);
          ++num_kills;
          break;
        }
    }
  });
  std::int64_t num_played = 0;
  std::int64_t num_failed = 0;
  for (int round = 0; round < 5; ++round)
    for (const Episode& episode : play(20)) {
      ++num_played;
      if (episode.error) {
        ++num_failed;
        EXPECT_EQ(episode.error->type, "WorkerDied") << episode.error->message;
      } else {
        EXPECT_EQ(episode.reward, 1.0);
        EXPECT_EQ(episode.num_turns(), 1) << "turns of a dead attempt do not count";
      }
    }
  is_done = true;
  killer.join();
  EXPECT_EQ(num_played, 100);
  EXPECT_GT(num_kills, 0);
  EXPECT_LE(num_failed, num_kills) << "who is hit twice is blamed; nobody else";
}

TEST_F(PythonEnvironmentTest, ABlockedLoopIsReplaced) {
  make({.args = R"({"misbehave": {"2": "block:600"}})", .num_workers = 1, .change = [](PythonOptions& options) {
          options.pool.schedule.heartbeat = 700ms;
        }});
  const std::vector<Episode> episodes = play(4);
  expect_solved(episodes, {2});
  ASSERT_TRUE(episodes[2].error);
  EXPECT_EQ(episodes[2].error->type, "WorkerDied");
}

TEST_F(PythonEnvironmentTest, AHangEndsAtItsDeadline) {
  make({.args = R"({"misbehave": {"1": "hang"}})"}).prepare();
  const std::vector<Episode> episodes = play(3, 1, 5s);
  expect_solved(episodes, {1});
  ASSERT_TRUE(episodes[1].error);
  EXPECT_EQ(episodes[1].error->type, "TimeoutError");
  EXPECT_EQ(episodes[1].stop_condition, "timeout_reached");
  EXPECT_FALSE(episodes[1].error->is_transient);
}

TEST_F(PythonEnvironmentTest, WhatRolloutsDoWrongIsTheirError) {
  make({.args = R"({"misbehave": {"1": "raise", "2": "stdout:200000", "3": "huge:10000000", "4": "nan", "5": "exit", "6": "stray_call",
                                 "7": "unknown_type", "8": "double", "9": "surrogate", "10": "many_calls:20", "11": "log:300",
                                 "12": "reward:1e300"}})"});
  const std::vector<Episode> episodes = play(13);
  for (const std::size_t good : {0u, 2u, 3u, 6u, 7u, 8u, 11u})
    EXPECT_FALSE(episodes[good].error) << good << ": " << episodes[good].error->message;
  ASSERT_TRUE(episodes[1].error);
  EXPECT_THAT(episodes[1].error->message, HasSubstr("told to"));
  ASSERT_TRUE(episodes[4].error);
  ASSERT_TRUE(episodes[12].error);
  EXPECT_THAT(episodes[12].error->message, HasSubstr("a reward of 1e+300; 1e+18 is the limit"));
  EXPECT_THAT(log_text(), HasSubstr("straight to descriptor 1"));
  EXPECT_EQ(environment_->stats().num_deaths, 0);
}

TEST_F(PythonEnvironmentTest, RecordsBelowTheLogLevelStayAway) {
  for (const std::string level : {"info", "warning"}) {
    Wanted wanted{.args = R"({"misbehave": {"0": "log:3"}})", .num_workers = 1};
    wanted.settings.log_level = level;
    make(wanted);
    play(1);
    environment_.reset();  // the log is whole
    EXPECT_EQ(log_text().find("record 2") != std::string::npos, level == "info") << log_text();
    SetUp();
  }
}

TEST_F(PythonEnvironmentTest, BrokenFramesEndTheWorkerAndTheRolloutIsBlamed) {
  make({.args = R"({"misbehave": {"1": "garbage", "4": "oversize"}})"});
  const std::vector<Episode> episodes = play(6);
  expect_solved(episodes, {1, 4});
  for (const std::size_t bad : {1u, 4u}) {
    ASSERT_TRUE(episodes[bad].error);
    EXPECT_EQ(episodes[bad].error->type, "WorkerDied");
  }
}

TEST_F(PythonEnvironmentTest, ForkBombsStopAtTheLimitOfProcesses) {
  if (!can_isolate_network()) GTEST_SKIP() << "this machine makes no namespaces";
  Wanted setup{.args = R"({"misbehave": {"1": "fork:400"}})", .num_workers = 1, .sandbox = true};
  setup.settings.processes = 60;
  make(std::move(setup));
  const std::vector<Episode> episodes = play(3);
  expect_solved(episodes, {1});
  ASSERT_TRUE(episodes[1].error) << "400 processes were started";
  EXPECT_THAT(episodes[1].error->message,
              ::testing::AnyOf(HasSubstr("Resource temporarily unavailable"), HasSubstr("worker processes died")));
}

TEST_F(PythonEnvironmentTest, TheSandboxHasNoNetworkAndNoKeys) {
  if (!can_isolate_network()) GTEST_SKIP() << "this machine makes no namespaces";
  ::setenv("PRL_TEST_SECRET_KEY", "secret", 1);

  const auto options = plan_environment("fake", "fake", {}, [] {
    PythonSettings settings;
    settings.kind = "fake";
    return settings;
  }());
  for (const std::string& variable : options.pool.env) EXPECT_THAT(variable, ::testing::Not(HasSubstr("secret")));
  ChildOptions child{.name = "probe",
                     .argv = {options.pool.argv[0], "-c", R"(
import os, socket
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
socket.create_connection(s.getsockname(), 5)
try:
    socket.create_connection(("192.0.2.1", 80), 2); print("NETWORK")
except OSError as e:
    print("no network:", e)
print("files", os.path.exists("/etc/passwd"), "pgid", os.getpgid(0) == os.getpid())
)"},
                     .env = options.pool.env,
                     .folder = test_folder(),
                     .limits = options.pool.limits,
                     .isolate_network = true};
  ChildProcess process = ChildProcess::start(child);
  const int output = process.release_output();
  std::string text;
  char buffer[512];
  for (ssize_t got = 0; (got = ::read(output, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<std::size_t>(got));
  ::close(output);
  EXPECT_THAT(text, HasSubstr("no network:"));
  EXPECT_THAT(text, HasSubstr("files True pgid True"));
}

TEST_F(PythonEnvironmentTest, AWrongProtocolNumberIsSaidOnce) {
  const PythonEnvironment& environment = make({.forks = false, .change = [](PythonOptions& options) {
                                                 options.pool.argv.insert(options.pool.argv.end(), {"--protocol", "2"});
                                               }});
  try {
    environment.prepare();
    FAIL() << "it started";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("protocol"));
  }
}

TEST_F(PythonEnvironmentTest, BadArgumentsAreNamed) {
  const PythonEnvironment& environment = make({.args = R"({"no_such_argument": 1})"});
  try {
    environment.num_tasks(Split::kTrain);
    FAIL() << "it loaded";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no_such_argument"));
  }
}

TEST_F(PythonEnvironmentTest, GroupsAreScoredTogether) {
  const PythonEnvironment& environment = make({.args = R"({"group": true, "misbehave": {"2": "raise"}})"});
  environment.prepare();
  ASSERT_TRUE(environment.scores_groups());
  std::vector<Episode> episodes = play(3, 4);
  for (std::size_t first = 0; first < episodes.size(); first += 4) {
    std::span<Episode> group(&episodes[first], 4);
    auto scoring = environment.score_group(group);
    io_.run_blocking(std::move(scoring), 60s, "scores");
  }
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_FALSE(episodes[i].error) << episodes[i].error->message;
    EXPECT_EQ(episodes[i].reward, 0.0) << "equal to the mean of the group";
  }
  for (std::size_t i = 8; i < 12; ++i) EXPECT_TRUE(episodes[i].error);
}

TEST_F(PythonEnvironmentTest, SeveralSeatsAndCallsAtTheSameTimeHaveConversationsOfTheirOwn) {
  make({.args = R"({"seats": ["a", "_judge"], "parallel": 3, "turns": 2})"});
  const std::vector<Episode> episodes = play(6, 1, 60s, 5ms);
  for (const Episode& episode : episodes) {
    ASSERT_FALSE(episode.error) << episode.error->message;
    EXPECT_EQ(episode.num_turns(), 2) << "of the seat that learns";
    EXPECT_TRUE(episode.metrics.contains("reward/a"));
  }
}

TEST_F(PythonEnvironmentTest, InTrainingEachSeatThatLearnsHasARolloutOfItsOwn) {
  const PythonEnvironment& environment = make({.args = R"({"seats": ["a", "_judge", "b"], "misbehave": {"1": "raise"}})"});
  environment.prepare();
  EXPECT_EQ(environment.num_learners(), 2);
  is_training_ = true;
  const std::vector<Episode> episodes = play(2);
  const Episode& first = episodes[0];
  ASSERT_FALSE(first.error) << first.error->message;
  ASSERT_EQ(first.others.size(), 1u);
  const Episode& second = first.others[0];
  EXPECT_EQ(first.seat, "a");
  EXPECT_EQ(second.seat, "b");
  EXPECT_EQ(first.reward, 1.0);
  EXPECT_EQ(second.reward, 1.0);
  EXPECT_EQ(first.num_turns(), 1);
  EXPECT_EQ(second.num_turns(), 1);
  EXPECT_NE(first.trajectory_id, second.trajectory_id);
  EXPECT_NE(first.trajectory[0].tokens.completion_ids, second.trajectory[0].tokens.completion_ids) << "each session has seeds of its own";
  EXPECT_EQ(second.prompt, first.prompt);
  EXPECT_TRUE(episodes[1].error);
  EXPECT_TRUE(episodes[1].others.empty());
}

TEST_F(PythonEnvironmentTest, AStateIsAskedForAndGivenBack) {
  const auto count = [](const Episode& episode) { return episode.info.at("done_before").to_number<std::int64_t>(); };
  const PythonEnvironment& environment = make({.args = R"({"stateful": true})", .num_workers = 1});
  environment.prepare();
  EXPECT_EQ(count(play(1)[0]), 0);
  EXPECT_EQ(count(play(1)[0]), 1);
  auto saving = environment.save_state();
  const json::value state = io_.run_blocking(std::move(saving), 60s, "state");
  EXPECT_EQ(state, json::parse(R"([{"done": 2}])"));
  const PythonEnvironment& resumed = make({.args = R"({"stateful": true})", .num_workers = 1});
  resumed.prepare();
  resumed.load_state(state);
  EXPECT_EQ(count(play(1)[0]), 2);
  const PythonEnvironment& other = make({.num_workers = 1});
  other.prepare();
  auto none = other.save_state();
  EXPECT_TRUE(io_.run_blocking(std::move(none), 60s, "state").is_null());
}

TEST_F(PythonEnvironmentTest, CancelledRolloutsEndAndTheWorkerGoesOn) {
  const PythonEnvironment& environment = make({.args = R"({"misbehave": {"0": "hang"}})", .num_workers = 1});
  environment.prepare();
  Episode episode;
  {
    net::TaskGroup group(io_.executor(), "test");
    group.spawn("rollout", play_one(0, 0, 60s, 0ms, &episode));
    EXPECT_TRUE(prl::testing::eventually([&] { return environment.stats().num_inflight == 1; }));
    group.cancel();
    EXPECT_TRUE(group.join_blocking(20s));
  }
  EXPECT_TRUE(prl::testing::eventually([&] { return environment.stats().num_inflight == 0; }));
  EXPECT_EQ(environment.stats().num_deaths, 0);
}

/// A service that says yes, and counts.
class YesServer {
 public:
  YesServer() : server_(options()) {
    server_.route("POST", "/v1/chat/completions", [this](net::HttpRequest request) { return answer(std::move(request)); });
    server_.start();
  }
  ~YesServer() { server_.stop(0ms); }
  std::string url() const { return fmt::format("http://127.0.0.1:{}/v1", server_.port()); }
  std::atomic<int> num_calls{0};
  std::string model;  ///< of the last call

 private:
  static net::HttpServer::Options options() {
    net::HttpServer::Options out;
    out.num_io_threads = 1;
    return out;
  }
  asio::awaitable<net::HttpResponse> answer(net::HttpRequest request) {
    ++num_calls;
    model = std::string(text::parse_json(request.body).at("model").as_string());
    co_return net::HttpResponse::json(
        R"({"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1}})");
  }
  net::HttpServer server_;
};

TEST_F(PythonEnvironmentTest, JudgesAreAnsweredByTheirServiceWithinABudget) {
  YesServer server;
  Wanted wanted{.args = R"({"num_train": 4, "judge": true})", .num_workers = 1};
  wanted.settings.judge = JudgeSettings{.base_url = server.url(), .model = "", .api_key = "", .max_calls = 3};
  make(std::move(wanted));
  std::vector<Episode> episodes = play(2);
  for (const Episode& episode : episodes) {
    EXPECT_FALSE(episode.error) << episode.error->message;
    EXPECT_EQ(episode.reward, 1.0);
    EXPECT_EQ(episode.num_turns(), 1) << "the judge's call is no turn";
  }
  EXPECT_EQ(server.num_calls, 2);
  EXPECT_EQ(server.model, "fake-judge");
  play(2);
  EXPECT_EQ(server.num_calls, 2) << "the same calls at temperature 0 come from memory";
  episodes = play(4);
  EXPECT_EQ(server.num_calls, 3);
  int num_refused = 0;
  for (const Episode& episode : episodes) {
    if (!episode.error) continue;
    ++num_refused;
    EXPECT_EQ(episode.error->type, "JudgeError");
    EXPECT_THAT(episode.error->message, HasSubstr("judge.max_calls"));
    EXPECT_EQ(episode.reward, 0);
  }
  EXPECT_EQ(num_refused, 1);
}

TEST_F(PythonEnvironmentTest, AJudgeWithoutAServiceFailsTheRollout) {
  make({.args = R"({"num_train": 1, "judge": true})", .num_workers = 1});
  const std::vector<Episode> episodes = play(1);
  ASSERT_TRUE(episodes[0].error);
  EXPECT_THAT(episodes[0].error->message, HasSubstr("[env.judge]"));
}

TEST_F(PythonEnvironmentTest, StateColumnsAreSavedWithTheRollout) {
  Wanted wanted{.args = R"({"num_train": 1})", .num_workers = 1};
  wanted.settings.state_columns = {"word"};
  make(std::move(wanted));
  const std::vector<Episode> episodes = play(1);
  ASSERT_TRUE(episodes[0].info.contains("word"));
  EXPECT_TRUE(episodes[0].info.at("word").is_string());
}

TEST_F(PythonEnvironmentTest, NumbersOfAnySizeKeepTheirDigitsBothWays) {
  const std::string number = "1267650600228229401496703205376";
  Wanted wanted{.args = R"({"num_train": 2, "tools": true, "number": )" + number + "}", .num_workers = 1};
  wanted.settings.state_columns = {"number"};
  const PythonEnvironment& environment = make(std::move(wanted));
  const Task task = environment.task(Split::kTrain, 1);
  ASSERT_NE(task.row, nullptr);
  EXPECT_NE(task.row->text.find("\"number\":" + number), std::string::npos) << task.row->text;
  const std::vector<Episode> episodes = play(1);
  expect_solved(episodes);
  EXPECT_EQ(text::to_json_text(episodes[0].info.at("number")), number) << "the row went there and came back";
  EXPECT_NE(text::to_json_text(tools_).find("\"maximum\":" + number), std::string::npos) << text::to_json_text(tools_);
  EXPECT_NE(text::to_json_text(environment.tools(task)).find("\"maximum\":" + number), std::string::npos);
}

TEST_F(PythonEnvironmentTest, ARolloutSamplesNoMoreTokensThanItMay) {
  make({.args = R"({"num_train": 1, "turns": 5})", .num_workers = 1});
  max_total_completion_tokens_ = 4;
  const std::vector<Episode> episodes = play(1);
  EXPECT_FALSE(episodes[0].error) << episodes[0].error->message;
  EXPECT_EQ(episodes[0].num_turns(), 2) << "two tokens each";
  EXPECT_EQ(episodes[0].stop_condition, "max_total_completion_tokens_reached");
}

TEST_F(PythonEnvironmentTest, FunctionsAreCalledInAWorker) {
  std::ofstream(test_folder() / "credit.py") << "def double(values, by=2):\n    return [by * value for value in values]\n\n"
                                                "def broken(values):\n    raise KeyError('no such thing')\n";
  PythonSettings settings;
  settings.path = test_folder().string();
  settings.sandbox = false;
  const auto call = [&](const char* path, json::object kwargs) {
    const PythonFunction function("advantage", path, std::move(kwargs), settings);
    auto calling = function.call(json::array{json::array{1, 2.5}}, 30s);
    return io_.run_blocking(std::move(calling), 90s);
  };
  EXPECT_EQ(call("credit.double", {}), (json::array{2, 5.0}));
  EXPECT_EQ(call("credit.double", {{"by", 10}}), (json::array{10, 25.0}));
  const auto refusal = [&](const char* path) {
    try {
      call(path, {});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refusal("credit.broken"), HasSubstr("no such thing"));
  EXPECT_THAT(refusal("credit.absent"), HasSubstr("credit.absent"));
  EXPECT_THAT(refusal("credit"), HasSubstr("wanted module.name"));
}

}  // namespace
}  // namespace prl::env::python
