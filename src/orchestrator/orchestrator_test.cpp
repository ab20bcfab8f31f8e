#include "orchestrator/orchestrator.hpp"

#include <gtest/gtest.h>
#include <unistd.h>
#include <boost/json/parse.hpp>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "base/error.hpp"
#include "monitor/sinks.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/testing/fakes.hpp"
#include "rollouts/local_queue.hpp"

namespace prl::orchestrator {
namespace {

using namespace std::chrono_literals;
using namespace testing;

OrchestratorOptions small_options(std::int64_t max_steps, std::int64_t async_level) {
  OrchestratorOptions options;
  options.dispatch.batch_size = 16;
  options.dispatch.group_size = 4;
  options.dispatch.max_async_level = async_level;
  options.dispatch.max_steps = max_steps;
  options.pack.seq_len = 128;
  options.retry_wait = 1ms;
  options.policy_timeout = 20s;
  options.ship_timeout = 20s;
  return options;
}

struct RunSettings {
  OrchestratorOptions options;
  FakeChatOptions chat{};
  std::chrono::milliseconds train_time{0};
  std::chrono::milliseconds apply_time{0};
  std::int64_t start_version = 0;
  bool with_trainer = true;
  std::chrono::milliseconds stop_after{0};
  monitor::Monitor* monitor = nullptr;
  int max_retries = 2;
};

struct RunResult {
  OrchestratorReport report;
  std::vector<std::string> batches;
  std::int64_t max_running = 0;
};

RunResult run(RunSettings settings) {
  auto weights = std::make_shared<FakeWeights>();
  weights->published = settings.start_version;
  auto chat = std::make_shared<FakeChat>(weights, settings.chat);
  rollouts::LocalSampleQueue queue(1, 2);
  OrchestratorServices services;
  services.environments = {TrainEnv{tiny_environment(), {}, 10s, settings.max_retries}};
  services.chat = chat;
  services.samples = queue.make_sender();
  services.policy = std::make_shared<FakePolicySource>(weights, settings.apply_time);
  services.monitor = settings.monitor;
  std::unique_ptr<FakeTrainer> trainer;
  if (settings.with_trainer) trainer = std::make_unique<FakeTrainer>(queue.make_receiver(0), weights, settings.train_time);
  std::stop_source stop;
  std::jthread stopper;
  if (settings.stop_after > 0ms)
    stopper = std::jthread([&](std::stop_token early) {
      const auto end = net::Clock::now() + settings.stop_after;
      while (!early.stop_requested() && net::Clock::now() < end) std::this_thread::sleep_for(1ms);
      stop.request_stop();
    });
  RunResult result;
  {
    Orchestrator orchestrator(std::move(settings.options), std::move(services));
    result.report = orchestrator.run(stop.get_token());
  }
  if (trainer) result.batches = trainer->batches();
  result.max_running = chat->max_running();
  return result;
}

std::string error_of(RunSettings settings, ErrorCode code) {
  try {
    run(std::move(settings));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

std::filesystem::path fresh_folder(const char* name) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("prl_orchestrator_{}_{}", name, ::getpid());
  std::filesystem::remove_all(path);
  return path;
}

TEST(Orchestrator, LockStepGivesTheSameBatchesWhateverTheTiming) {
  RunSettings fast{.options = small_options(6, 0)};
  fast.chat.max_delay = 0us;
  RunSettings slow{.options = small_options(6, 0)};
  slow.chat.max_delay = 5ms;
  const RunResult a = run(fast);
  const RunResult b = run(slow);
  ASSERT_EQ(a.batches.size(), 6u);
  EXPECT_EQ(a.batches, b.batches);
  EXPECT_EQ(a.report.max_staleness, 0);
  EXPECT_EQ(a.report.progress.step, 6);
  EXPECT_EQ(a.report.progress.total_samples, 96);
  EXPECT_EQ(a.report.episodes.num_started, 96);
  EXPECT_EQ(a.report.episodes.num_processed, 96);
  RunSettings other{.options = small_options(6, 0)};
  other.options.seed = 43;
  EXPECT_NE(run(other).batches, a.batches);
}

TEST(Orchestrator, LockStepStaysReplayableWithOversamplingAndDifficultyPools) {
  const auto settings = [](std::chrono::microseconds delay) {
    RunSettings s{.options = small_options(6, 0)};
    s.options.dispatch.oversampling_factor = 2;
    s.options.collect.online_difficulty_filtering = true;
    s.options.sampler.easy_threshold = 0.8;
    s.chat.max_delay = delay;
    return s;
  };
  const RunResult a = run(settings(0us));
  const RunResult b = run(settings(4ms));
  ASSERT_EQ(a.batches.size(), 6u);
  EXPECT_EQ(a.batches, b.batches);
}

TEST(Orchestrator, AResumedRunEqualsOneThatNeverStopped) {
  const auto folder = fresh_folder("resume");
  const auto settings = [&](std::int64_t max_steps, std::int64_t resume_step) {
    RunSettings s{.options = small_options(max_steps, 0)};
    s.options.sampler.easy_threshold = 0.8;
    s.options.checkpoints = OrchestratorCheckpoints{folder, 2};
    s.options.resume_step = resume_step;
    s.start_version = resume_step;
    s.chat.max_delay = 1ms;
    return s;
  };
  const RunResult whole = run(settings(6, 0));
  std::filesystem::remove_all(folder);
  const RunResult first = run(settings(3, 0));
  EXPECT_TRUE(std::filesystem::exists(folder / "step_2" / "orchestrator" / "state.json"));
  const RunResult second = run(settings(6, 3));
  ASSERT_EQ(first.batches.size(), 3u);
  ASSERT_EQ(second.batches.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(first.batches[i], whole.batches[i]) << i;
    EXPECT_EQ(second.batches[i], whole.batches[i + 3]) << i + 3;
  }
  EXPECT_EQ(second.report.progress.total_samples, whole.report.progress.total_samples);
  EXPECT_EQ(second.report.progress.total_tokens, whole.report.progress.total_tokens);
  std::filesystem::remove_all(folder);
}

TEST(Orchestrator, AStopInTheMiddleOfABatchResumesAtItsStart) {
  const auto folder = fresh_folder("stop");
  RunSettings whole_settings{.options = small_options(400, 0)};
  whole_settings.options.checkpoints = OrchestratorCheckpoints{folder, std::nullopt};
  whole_settings.chat.max_delay = 3ms;
  whole_settings.stop_after = 150ms;
  const RunResult first = run(whole_settings);
  ASSERT_TRUE(first.report.was_stopped);
  const std::int64_t stopped_at = first.report.progress.step;
  ASSERT_GT(stopped_at, 0);
  ASSERT_EQ(static_cast<std::int64_t>(first.batches.size()), stopped_at) << "the trainer drains what was shipped";
  RunSettings rest{.options = small_options(stopped_at + 2, 0)};
  rest.options.checkpoints = OrchestratorCheckpoints{folder, std::nullopt};
  rest.options.resume_step = rest.start_version = stopped_at;
  const RunResult second = run(rest);
  const RunResult whole = run({.options = small_options(stopped_at + 2, 0)});
  ASSERT_EQ(second.batches.size(), 2u);
  EXPECT_EQ(second.batches[0], whole.batches[static_cast<std::size_t>(stopped_at)]);
  EXPECT_EQ(second.batches[1], whole.batches[static_cast<std::size_t>(stopped_at) + 1]);
  std::filesystem::remove_all(folder);
}

TEST(Orchestrator, AsyncNeverExceedsItsBoundsWithASlowTrainer) {
  for (const std::int64_t level : {1, 2}) {
    RunSettings settings{.options = small_options(12, level)};
    settings.options.dispatch.max_off_policy_steps = level;
    settings.options.dispatch.max_inflight = 24;
    settings.chat.max_delay = 3ms;
    settings.train_time = 15ms;
    const RunResult result = run(settings);
    EXPECT_EQ(result.batches.size(), 12u);
    EXPECT_LE(result.report.max_staleness, level);
    EXPECT_GT(result.report.max_staleness, 0) << "the trainer is slow: batches must run ahead";
    // A cancelled request gives back its permit at once and ends when its coroutine next runs.
    EXPECT_LE(result.max_running, 24 + result.report.episodes.num_cancelled);
    EXPECT_EQ(result.report.progress.total_samples, 12 * 16);
  }
}

TEST(Orchestrator, AsyncDropsWhatASlowEngineMakesTooOld) {
  RunSettings settings{.options = small_options(25, 1)};
  settings.options.dispatch.oversampling_factor = 3;
  // One reply in twenty takes longer than several steps.
  auto count = std::make_shared<std::atomic<int>>(0);
  settings.chat.max_delay = 1ms;
  settings.apply_time = 1ms;
  RunResult result;
  {
    RunSettings s = settings;
    s.chat.max_delay = 20ms;
    result = run(s);
  }
  EXPECT_EQ(result.batches.size(), 25u);
  EXPECT_LE(result.report.max_staleness, 1);
  const EpisodeCounts& counts = result.report.episodes;
  EXPECT_EQ(counts.num_started, counts.num_processed + counts.num_cancelled + counts.num_dropped);
  EXPECT_GT(counts.num_cancelled + counts.num_dropped + result.report.num_dropped_queued, 0)
      << "nothing was ever too old: the test shows nothing";
  // Every processed rollout was shipped, dropped from the queue, or was left over at the end.
  EXPECT_GE(counts.num_processed, 25 * 16 + result.report.num_dropped_queued);
}

TEST(Orchestrator, WithoutOversamplingASlowEngineWastesNothing) {
  RunSettings settings{.options = small_options(12, 1)};
  settings.options.dispatch.max_inflight = 48;
  settings.chat.max_delay = 20ms;
  settings.apply_time = 1ms;
  const RunResult result = run(settings);
  EXPECT_EQ(result.batches.size(), 12u);
  EXPECT_LE(result.report.max_staleness, 1);
  const EpisodeCounts& counts = result.report.episodes;
  EXPECT_EQ(result.report.num_dropped_queued, 0);
  EXPECT_EQ(counts.num_processed, 12 * 16);
  EXPECT_EQ(counts.num_started, 12 * 16);
}

TEST(Orchestrator, AFullBatchSaysThatItWaitsForTheOldestRollouts) {
  monitor::MetricSet declared;
  declared.declare(metric_infos());
  monitor::Monitor monitor(declared);
  double seconds = 0;
  monitor.add_sink(monitor::make_callback_sink(
      [&](std::int64_t, const monitor::Metrics& metrics) { seconds += metrics.find("time/wait_for_oldest")->second; }));
  RunSettings settings{.options = small_options(4, 1)};
  settings.options.dispatch.max_inflight = 48;
  settings.options.status_interval = 1ms;
  settings.chat.first_delay = 2s;  // of the first group, which batch 2 is the last to hold
  settings.monitor = &monitor;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run(settings).batches.size(), 4u);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_GT(seconds, 0);
  EXPECT_LT(seconds, 60);
  EXPECT_NE(said.find("the orchestrator has been waiting for the oldest rollouts in flight to finish, before full batch"),
            std::string::npos)
      << said;
}

TEST(Orchestrator, AnInvalidReplyIsSampledAgainWithAnotherSeed) {
  auto invalid = std::make_shared<std::multiset<std::uint64_t>>();
  RunSettings settings{.options = small_options(3, 0)};
  settings.max_retries = 8;
  settings.chat.is_invalid = [invalid](std::uint64_t seed) {
    if (seed % 4 != 0) return false;
    invalid->insert(seed);
    return true;
  };
  const RunResult result = run(settings);
  EXPECT_EQ(result.batches.size(), 3u);
  EXPECT_EQ(result.report.progress.total_samples, 48);
  ASSERT_GT(invalid->size(), 4u);
  for (const std::uint64_t seed : *invalid) EXPECT_EQ(invalid->count(seed), 1u) << "the same request came again";
}

TEST(Orchestrator, AFailingRequestIsTriedAgainAndAnAlwaysFailingOneEndsTheRun) {
  auto count = std::make_shared<std::atomic<int>>(0);
  RunSettings flaky{.options = small_options(3, 0)};
  flaky.chat.before_reply = [count] {
    if (++*count % 5 == 0) fail(ErrorCode::kUnavailable, "the connection broke");
  };
  const RunResult result = run(flaky);
  EXPECT_EQ(result.batches, run({.options = small_options(3, 0)}).batches) << "a lost connection changes no seed";
  RunSettings broken{.options = small_options(3, 0)};
  broken.max_retries = 0;
  broken.chat.before_reply = [] { fail(ErrorCode::kUnavailable, "the connection broke"); };
  const std::string message = error_of(broken, ErrorCode::kUnavailable);
  EXPECT_NE(message.find("the connection broke"), std::string::npos) << message;
}

TEST(Orchestrator, EqualRewardsForEverEndTheRun) {
  RunSettings settings{.options = small_options(3, 0)};
  settings.chat.always_wrong = true;
  const std::string message = error_of(settings, ErrorCode::kUnavailable);
  EXPECT_NE(message.find("10 batches in a row"), std::string::npos) << message;
}

TEST(Orchestrator, WaitsSayWhoWaitsForWhom) {
  RunSettings no_trainer{.options = small_options(3, 0)};
  no_trainer.with_trainer = false;
  no_trainer.options.policy_timeout = 300ms;
  std::string message = error_of(no_trainer, ErrorCode::kDeadline);
  EXPECT_NE(message.find("batch 2"), std::string::npos) << message;
  EXPECT_NE(message.find("fake trainer"), std::string::npos) << message;

  RunSettings no_first{.options = small_options(3, 0)};
  no_first.start_version = -1;
  no_first.options.policy_timeout = 100ms;
  message = error_of(no_first, ErrorCode::kDeadline);
  EXPECT_NE(message.find("the trainer to publish the first policy, v0"), std::string::npos) << message;

  RunSettings full{.options = small_options(5, 4)};
  full.with_trainer = false;
  full.options.ship_timeout = 300ms;
  message = error_of(full, ErrorCode::kDeadline);
  EXPECT_NE(message.find("so that batch 3 can be sent"), std::string::npos) << message;

  // Engines that take long to load weights have a deadline of their own, and are not told as a trainer that is away.
  RunSettings loading{.options = small_options(2, 0)};
  loading.apply_time = 2500ms;
  loading.options.policy_timeout = 2s;
  EXPECT_EQ(run(loading).batches.size(), 2u);
  loading.apply_time = 10min;
  loading.options.update_timeout = 50ms;
  message = error_of(loading, ErrorCode::kDeadline);
  EXPECT_NE(message.find("to take the weights of policy v0"), std::string::npos) << message;
}

TEST(Orchestrator, VersionsThatCannotBeAreRefusedInAsyncModeToo) {
  for (const std::int64_t offset : {std::int64_t{100}, std::int64_t{-100}}) {
    RunSettings settings{.options = small_options(6, 2)};
    settings.chat.version_offset = offset;
    const std::string message = error_of(settings, ErrorCode::kOutOfSync);
    EXPECT_NE(message.find("its group was opened under v"), std::string::npos) << message;
  }
}

TEST(Orchestrator, AServiceThatRefusesEveryRequestEndsTheRunAtOnce) {
  RunSettings settings{.options = small_options(3, 1)};
  std::atomic<int> num_asked{0};
  settings.chat.before_reply = [&] {
    ++num_asked;
    fail(ErrorCode::kUnauthorized, "answered 401 Unauthorized");
  };
  const std::string message = error_of(settings, ErrorCode::kUnavailable);
  EXPECT_NE(message.find("401"), std::string::npos) << message;
  EXPECT_LE(num_asked, 64) << "some more than were in flight when the first answer came";
}

TEST(Orchestrator, RequestsThatCanNeverSucceedEndTheRunAfterABound) {
  RunSettings settings{.options = small_options(3, 1)};
  settings.chat.before_reply = [] { fail(ErrorCode::kInvalidArgument, "temperature is -1"); };
  const std::string message = error_of(settings, ErrorCode::kUnavailable);
  EXPECT_NE(message.find("rollouts in a row failed"), std::string::npos) << message;
  EXPECT_NE(message.find("temperature is -1"), std::string::npos) << message;
}

TEST(Orchestrator, ValidationPlaysHeldOutTasksAndTrainingDoesNotNoticeIt) {
  monitor::MetricSet declared;
  declared.declare(metric_infos());
  monitor::Monitor monitor(std::move(declared));
  std::map<std::int64_t, double> rewards;
  monitor.add_sink(monitor::make_callback_sink([&](std::int64_t step, const monitor::Metrics& metrics) {
    const auto found = metrics.find("val_reward/reverse-text/mean");
    if (found == metrics.end()) return;
    EXPECT_EQ(metrics.at("val_reward/all/mean"), found->second);
    rewards[step] = found->second;
  }));
  RunSettings settings{.options = small_options(4, 0)};
  const std::vector<std::string> without = run(settings).batches;
  settings.options.validation = ValidationOptions{.num_examples = 3, .rollouts_per_example = 2, .interval = 2};
  settings.monitor = &monitor;
  EXPECT_EQ(run(settings).batches, without);
  ASSERT_EQ(rewards.size(), 3u) << "before the first step, after step 2 and after step 4";
  EXPECT_TRUE(rewards.contains(0) && rewards.contains(2) && rewards.contains(4));
}

TEST(Orchestrator, ValidationDrawsDifferentTasksOfTheEvalSplitEachTime) {
  const std::vector<TrainEnv> environments = {TrainEnv{tiny_environment("a"), {}, 10s, 5}, TrainEnv{tiny_environment("b"), {}, 10s, 0}};
  const auto drawn = [&](std::int64_t version) {
    std::vector<std::pair<std::string, std::int64_t>> out;
    for (const eval::EvalTask& task :
         validation_tasks({.num_examples = 7, .rollouts_per_example = 2}, environments, PolicyVersion{version})) {
      EXPECT_EQ(task.split, env::Split::kEval);
      EXPECT_EQ(task.rollouts_per_example, 2);
      EXPECT_EQ(task.retry.max_attempts, task.environment->name() == "a" ? 6 : 1);
      for (const std::int64_t example : task.examples) {
        EXPECT_LT(example, task.environment->num_tasks(env::Split::kEval));
        out.emplace_back(task.environment->name(), example);
      }
    }
    return out;
  };
  const auto first = drawn(0);
  EXPECT_EQ(first.size(), 7u);
  EXPECT_EQ((std::set<std::pair<std::string, std::int64_t>>(first.begin(), first.end()).size()), 7u) << "none twice";
  EXPECT_EQ(first, drawn(0));
  EXPECT_NE(first, drawn(10));
}

TEST(Orchestrator, AVersionThatLiesIsOutOfSync) {
  RunSettings settings{.options = small_options(3, 0)};
  settings.chat.version_offset = 1;
  const std::string message = error_of(settings, ErrorCode::kOutOfSync);
  EXPECT_NE(message.find("lock-step"), std::string::npos) << message;
}

TEST(Orchestrator, LockStepTakesTheVersionOfItsBatchFromATrainerThatIsAhead) {
  const RunResult undisturbed = run({.options = small_options(3, 0)});
  RunSettings restarted{.options = small_options(3, 0)};
  restarted.start_version = 5;
  const RunResult result = run(std::move(restarted));
  ASSERT_EQ(result.batches.size(), 3u);
  EXPECT_EQ(result.batches, undisturbed.batches);
}

TEST(Orchestrator, AStopWhileTheQueueIsFullIsClean) {
  RunSettings settings{.options = small_options(50, 4)};
  settings.with_trainer = false;
  settings.stop_after = 200ms;
  const RunResult result = run(settings);
  EXPECT_TRUE(result.report.was_stopped);
  EXPECT_EQ(result.report.progress.step, 2);
}

TEST(Orchestrator, AStopEndsAWaitForInferenceAndAnEvaluation) {
  RunSettings waiting{.options = small_options(5, 0)};
  waiting.chat.health_delay = 60s;
  waiting.stop_after = 50ms;
  EXPECT_TRUE(run(waiting).report.was_stopped);
  RunSettings loading{.options = small_options(5, 0)};
  loading.apply_time = 10min;  // of engines that were stopped just before
  loading.stop_after = 50ms;
  EXPECT_TRUE(run(loading).report.was_stopped);
  RunSettings evaluating{.options = small_options(5, 0)};
  OnlineEval online;
  online.task.environment = tiny_environment("held-out");
  evaluating.options.evals.push_back(online);
  evaluating.chat.max_delay = 60s;
  evaluating.stop_after = 100ms;
  EXPECT_TRUE(run(evaluating).report.was_stopped);
}

TEST(Orchestrator, EvaluatesMeasuresAndLogs) {
  const auto folder = fresh_folder("logs");
  monitor::MetricSet declared;
  declared.declare(metric_infos());
  monitor::Monitor monitor(declared);
  std::map<std::int64_t, monitor::Metrics> train;
  std::map<std::int64_t, double> evals;
  monitor.add_sink(monitor::make_callback_sink([&](std::int64_t step, const monitor::Metrics& metrics) {
    if (metrics.contains("eval/held-out/avg@2"))
      evals[step] = metrics.find("eval/held-out/avg@2")->second;
    else
      train[step] = metrics;
  }));
  RunSettings settings{.options = small_options(5, 0)};
  settings.monitor = &monitor;
  settings.options.output_dir = folder;
  settings.options.log_tokens = true;
  OnlineEval online;
  online.interval = 2;
  online.task.environment = tiny_environment("held-out");
  online.task.rollouts_per_example = 2;
  online.task.seed = 1;
  settings.options.evals.push_back(online);
  const RunResult result = run(settings);
  EXPECT_EQ(result.batches, run({.options = small_options(5, 0)}).batches) << "evaluations do not change training";
  std::vector<std::int64_t> eval_steps;
  for (const auto& [step, value] : evals) eval_steps.push_back(step);
  EXPECT_EQ(eval_steps, (std::vector<std::int64_t>{0, 2, 4, 5}));
  ASSERT_EQ(train.size(), 5u);
  for (const char* name : {"reward/all/mean", "reward/reverse-text/max", "seq_len/all/mean", "off_policy_level/all/max",
                           "scheduler/async_level", "time/step", "progress/total_samples", "stop_condition/all/max_turns_reached",
                           "metrics/reverse-text/lcs_reward_func", "effective_batch_size/all", "pool/reverse-text/normal"})
    EXPECT_TRUE(train[5].contains(name)) << name;
  EXPECT_EQ(train[5]["scheduler/async_level"], 0);
  ASSERT_EQ(result.report.final_evals.size(), 1u);
  EXPECT_EQ(result.report.final_evals[0].num_examples, 8);
  EXPECT_EQ(result.report.final_evals[0].policy_version_min, 5);
  std::ifstream rows(folder / "rollouts" / "step_3" / "train_rollouts.jsonl");
  int num_rows = 0;
  for (std::string line; std::getline(rows, line);) num_rows += line.find("\"advantage\"") != std::string::npos ? 1 : 0;
  EXPECT_EQ(num_rows, 16);
  std::ifstream tokens(folder / "rollouts" / "step_3" / "train_tokens.jsonl");
  std::string first;
  ASSERT_TRUE(std::getline(tokens, first));
  const boost::json::object sample = boost::json::parse(first).as_object();
  EXPECT_EQ(sample.at("row"), 0);
  for (const char* name : {"loss_mask", "advantages", "inference_logprobs"})
    EXPECT_EQ(sample.at(name).as_array().size(), sample.at("token_ids").as_array().size()) << name;
  EXPECT_TRUE(std::filesystem::exists(folder / "rollouts" / "step_4" / "eval_rollouts.jsonl"));
  std::filesystem::remove_all(folder);
}

TEST(Orchestrator, TheConsoleLineHasTheFormThatAcceptanceTestsRead) {
  CollectedBatch batch;
  batch.rollouts.resize(2);
  batch.rollouts[0].episode.reward = 1;
  StepFacts facts;
  facts.step = 3;
  facts.seconds_step = 1.234;
  facts.policy_version = 2;
  batch.rollouts[0].version_start = batch.rollouts[1].version_start = PolicyVersion{1};
  const std::string line = step_line(batch, facts);
  EXPECT_TRUE(line.starts_with("Step 3 | Time: 1.23s | Reward: 0.5000 | ")) << line;
  EXPECT_NE(line.find("Async Level: 0 | Max. Off-Policy Level: 1"), std::string::npos) << line;
}

}  // namespace
}  // namespace prl::orchestrator
