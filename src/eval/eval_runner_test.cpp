#include "eval/eval_runner.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include <filesystem>
#include <fstream>
#include <future>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "env/jsonl.hpp"
#include "env/registry.hpp"
#include "eval/results_file.hpp"
#include "net/deadline.hpp"
#include "text/json_python.hpp"

namespace prl::eval {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

/// Right when `is_right(session id)` says so; counts, waits a little, and fails as told.
class ScriptedModel final : public env::ChatClientFactory {
 public:
  std::function<bool(const std::string&)> is_right = [](const std::string&) { return true; };
  std::function<bool(const std::string&)> fails = [](const std::string&) { return false; };
  ErrorCode failure_code = ErrorCode::kUnavailable;
  std::vector<std::string> sessions;
  std::set<std::uint64_t> seeds;
  int running = 0;
  int max_running = 0;

  std::unique_ptr<env::ChatClient> open(env::ConversationOptions options) override;
  asio::awaitable<void> check_health(net::TimePoint) override { co_return; }
  std::string describe() const override { return "script"; }
};

class ScriptedConversation final : public env::ChatClient {
 public:
  ScriptedConversation(ScriptedModel& model, std::string session) : model_(model), session_(std::move(session)) {}
  asio::awaitable<env::ChatTurn> complete(const env::ChatRequest& request) override {
    model_.sessions.push_back(session_);
    if (request.sampling.seed) model_.seeds.insert(*request.sampling.seed);
    model_.max_running = std::max(model_.max_running, ++model_.running);
    co_await net::sleep_for(std::chrono::microseconds(200 * (session_.size() % 5)));
    --model_.running;
    if (model_.fails(session_)) fail(model_.failure_code, "no luck");
    std::string word(request.messages.back().at("content").as_string());
    env::ChatTurn turn;
    const std::string answer = model_.is_right(session_) ? std::string(word.rbegin(), word.rend()) : std::string();
    turn.message = json::object{{"role", "assistant"}, {"content", "<reversed_text>" + answer + "</reversed_text>"}};
    turn.finish_reason = "stop";
    turn.num_prompt_tokens = static_cast<std::int64_t>(20 + word.size());
    turn.num_completion_tokens = static_cast<std::int64_t>(10 + answer.size());
    co_return turn;
  }

 private:
  ScriptedModel& model_;
  std::string session_;
};

std::unique_ptr<env::ChatClient> ScriptedModel::open(env::ConversationOptions options) {
  return std::make_unique<ScriptedConversation>(*this, options.session_id);
}

EvalTask small_task() {
  env::EnvSpec spec;
  spec.id = "reverse-text";
  spec.args = json::object{{"mode", "tiny"}, {"num_train", 4}, {"num_eval", 6}, {"min_chars", 4}, {"max_chars", 4}};
  EvalTask task;
  task.environment = env::make_environment(spec);
  task.retry = {.max_attempts = 3, .wait_multiplier = 1ms, .wait_min = 1ms, .wait_max = 2ms, .reraise = false};
  task.label = "v7";
  return task;
}

EvalResult evaluate(EvalTask task, std::shared_ptr<ScriptedModel> model) {
  asio::io_context context;
  auto running = run_eval(std::move(task), std::move(model));
  auto future = asio::co_spawn(context, std::move(running), asio::use_future);
  context.run();
  return future.get();
}

std::filesystem::path results_path() {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl_eval_{}", ::getpid());
  std::filesystem::remove_all(folder);
  return folder / "results.jsonl";
}

TEST(Eval, PassAtK) {
  EXPECT_DOUBLE_EQ(pass_at_k(4, 0, 1), 0);
  EXPECT_DOUBLE_EQ(pass_at_k(4, 1, 1), 0.25);
  EXPECT_DOUBLE_EQ(pass_at_k(4, 1, 2), 0.5);
  EXPECT_DOUBLE_EQ(pass_at_k(4, 2, 2), 1 - 1.0 / 6);
  EXPECT_DOUBLE_EQ(pass_at_k(4, 3, 2), 1);
  EXPECT_DOUBLE_EQ(pass_all_k(4, 3, 2), 0.5);
  EXPECT_DOUBLE_EQ(pass_all_k(4, 1, 2), 0);
  EXPECT_DOUBLE_EQ(pass_all_k(4, 4, 4), 1);
}

TEST(Eval, MeansAndPassRatesOverAllRollouts) {
  auto model = std::make_shared<ScriptedModel>();
  // Rollout 0 of each even example is right.
  model->is_right = [](const std::string& session) {
    return session.ends_with("-0-0-0") || session.ends_with("-2-0-0") || session.ends_with("-4-0-0");
  };
  EvalTask task = small_task();
  task.rollouts_per_example = 2;
  task.max_concurrent = 3;
  task.seed = 5;
  const EvalResult result = evaluate(task, model);
  EXPECT_EQ(result.num_examples, 6);
  EXPECT_DOUBLE_EQ(result.avg_reward, 0.25);
  EXPECT_DOUBLE_EQ(result.pass_at_k.at(1), 0.25);
  EXPECT_DOUBLE_EQ(result.pass_at_k.at(2), 0.5);
  EXPECT_EQ(model->max_running, 3);
  EXPECT_EQ(model->seeds.size(), 12u);
  ASSERT_EQ(result.episodes.size(), 12u);
  EXPECT_EQ(result.episodes[0].reward, 1);
  EXPECT_EQ(result.episodes[2].example_id, 1);
  EXPECT_EQ(result.completion_len_max, 14);
  EXPECT_EQ(result.completion_len_min, 10);
  EXPECT_NE(console_line(result).find(
                "(Avg@2=0.2500, Pass@1: 0.2500, Pass@2: 0.5000, Completion Length: 11.00 (±1.81, ∈[10.00, 14.00]), Truncated: 0.0%)"),
            std::string::npos)
      << console_line(result);
}

TEST(Eval, FailuresAreRetriedThenCountOrEndTheRun) {
  auto model = std::make_shared<ScriptedModel>();
  model->fails = [](const std::string& session) { return session.find("-3-0-") != std::string::npos || session.ends_with("-1-0-0"); };
  const EvalResult result = evaluate(small_task(), model);
  EXPECT_DOUBLE_EQ(result.error_mean, 1.0 / 6);
  EXPECT_DOUBLE_EQ(result.avg_reward, 5.0 / 6);
  EXPECT_EQ(model->sessions.size(), 6u + 1 + 2);
  for (const bool is_invalid : {false, true}) {
    auto seeded = std::make_shared<ScriptedModel>();
    seeded->fails = model->fails;
    seeded->failure_code = is_invalid ? ErrorCode::kCorrupt : ErrorCode::kUnavailable;
    EvalTask task = small_task();
    task.seed = 5;
    evaluate(task, seeded);
    EXPECT_EQ(seeded->sessions.size(), 9u);
    EXPECT_EQ(seeded->seeds.size(), is_invalid ? 9u : 6u) << "an invalid reply must not come again, a lost connection changes nothing";
  }
  EvalTask strict = small_task();
  strict.retry.reraise = true;
  try {
    evaluate(strict, model);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("example 3 failed 3 times"), std::string::npos) << error.what();
  }
}

TEST(Eval, ResultsStreamAndResume) {
  const std::filesystem::path path = results_path();
  auto model = std::make_shared<ScriptedModel>();
  EvalTask task = small_task();
  task.results_file = path;
  task.num_examples = 4;
  const EvalResult first = evaluate(task, model);
  ASSERT_EQ(env::read_jsonl(path).size(), 4u);
  for (const char* key : {"example_id", "rollout_idx", "prompt", "completion", "reward", "generation_ms", "total_ms", "info", "answer",
                          "completion_len", "is_truncated", "lcs_reward_func", "oai_tools", "task"})
    EXPECT_TRUE(env::read_jsonl(path)[0].contains(key)) << key;
  model->sessions.clear();
  task.resume = true;
  task.num_examples = 6;
  const EvalResult second = evaluate(task, model);
  EXPECT_EQ(model->sessions.size(), 2u) << "only what is missing is played";
  EXPECT_EQ(second.num_examples, 6);
  EXPECT_DOUBLE_EQ(second.avg_reward, 1.0);
  EXPECT_EQ(env::read_jsonl(path).size(), 6u);
  const EvalResult third = evaluate(task, model);
  EXPECT_DOUBLE_EQ(third.input_tokens_mean, second.input_tokens_mean) << "nothing was played again";
  EXPECT_DOUBLE_EQ(third.completion_len_mean, second.completion_len_mean);
  EXPECT_EQ(third.policy_version_min, second.policy_version_min);
  std::filesystem::remove_all(path.parent_path());
}

TEST(Eval, ARowGivesBackWhatItsEpisodeCounted) {
  env::Episode episode;
  for (const auto& [prompt, completion] : {std::pair<int, int>{100, 20}, {150, 25}, {200, 30}}) {
    env::TrajectoryStep& step = episode.trajectory.emplace_back();
    step.num_prompt_tokens = prompt;
    step.num_completion_tokens = completion;
    step.has_versions = true;
    step.version_start = PolicyVersion{3};
    step.version_end = PolicyVersion{prompt == 200 ? 4 : 3};
  }
  const json::object row = env::to_json(episode);
  EXPECT_EQ(json::serialize(row.at("token_usage")),
            R"({"input_tokens":450,"output_tokens":75,"final_input_tokens":155,"final_output_tokens":75})");
  const Outcome played = outcome_of(episode);
  const Outcome read = outcome_of_row(row);
  EXPECT_EQ(read.num_input_tokens, played.num_input_tokens);
  EXPECT_EQ(read.completion_len, played.completion_len);
  EXPECT_EQ(read.num_turns, played.num_turns);
  EXPECT_EQ(read.version_start, played.version_start);
  EXPECT_EQ(read.version_end, played.version_end);
}

TEST(Eval, NumbersOfAnySizeStayInTheRows) {
  const std::filesystem::path path = results_path();
  const std::string large = R"({"n":123456789012345678901234567890,"far":[1e400]})";
  env::Episode episode;
  episode.trajectory_id = "t";
  episode.env_name = "e";
  episode.info = text::parse_json(large, 200, text::LargeNumbers::kKeepText).as_object();
  {
    ResultsWriter::Options options;
    options.results_file = path;
    ResultsWriter writer(std::move(options));
    const std::int64_t index = 0;
    writer.write({&episode, 1}, {&index, 1});
  }
  EXPECT_NE(read_file(path).find("\"info\":" + large), std::string::npos) << read_file(path);
  EXPECT_EQ(take_over_results(path, {}, 0, 10, 1, false).size(), 1u);  // writes the rows anew
  EXPECT_NE(read_file(path).find("\"info\":" + large), std::string::npos) << read_file(path);
  std::filesystem::remove_all(path.parent_path());
}

TEST(Eval, AnInterruptedEvaluationGoesOnFromWhatIsWhole) {
  const std::filesystem::path path = results_path();
  auto model = std::make_shared<ScriptedModel>();
  EvalTask task = small_task();
  task.results_file = path;
  task.traces_file = path.parent_path() / "traces.jsonl";
  task.rollouts_per_example = 2;
  evaluate(task, model);
  // The process died while it wrote the ninth of twelve rows.
  std::vector<std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 12u);
  std::ofstream out(path, std::ios::trunc);
  for (int i = 0; i < 8; ++i) out << lines[static_cast<std::size_t>(i)] << '\n';
  out << lines[0] << '\n' << lines[8].substr(0, 40);
  out.close();
  model->sessions.clear();
  task.resume = true;
  const EvalResult result = evaluate(task, model);
  EXPECT_EQ(model->sessions.size(), 4u);
  EXPECT_DOUBLE_EQ(result.avg_reward, 1.0);
  const auto rows = env::read_jsonl(path);
  ASSERT_EQ(rows.size(), 12u) << "no row twice, none cut off";
  std::set<std::pair<std::int64_t, std::int64_t>> ids;
  for (const json::object& row : rows) ids.insert({row.at("example_id").as_int64(), row.at("rollout_idx").as_int64()});
  EXPECT_EQ(ids.size(), 12u);
  EXPECT_EQ(env::read_jsonl(task.traces_file).size(), 12u);
  std::filesystem::remove_all(path.parent_path());
}

TEST(Eval, WhatCannotSucceedIsNotTriedAgain) {
  auto model = std::make_shared<ScriptedModel>();
  model->fails = [](const std::string&) { return true; };
  model->failure_code = ErrorCode::kInvalidArgument;
  EXPECT_DOUBLE_EQ(evaluate(small_task(), model).error_mean, 1.0);
  EXPECT_EQ(model->sessions.size(), 6u);
}

TEST(Eval, ALimiterHoldsOverSeveralEvaluations) {
  auto model = std::make_shared<ScriptedModel>();
  const auto limiter = std::make_shared<Limiter>(2);
  asio::io_context context;
  std::vector<std::future<EvalResult>> futures;
  for (int i = 0; i < 3; ++i) {
    EvalTask task = small_task();
    task.limiter = limiter;
    auto running = run_eval(std::move(task), model);
    futures.push_back(asio::co_spawn(context, std::move(running), asio::use_future));
  }
  context.run();
  for (auto& future : futures) EXPECT_DOUBLE_EQ(future.get().avg_reward, 1.0);
  EXPECT_EQ(model->max_running, 2);
  EXPECT_EQ(limiter->num_free(), 2);
}

/// Gives every rollout of a task the group's best reward.
class BestOfGroup final : public env::Environment {
 public:
  explicit BestOfGroup(env::EnvironmentPtr inner) : inner_(std::move(inner)) {}
  const std::string& name() const noexcept override { return inner_->name(); }
  std::int64_t num_tasks(env::Split split) const override { return inner_->num_tasks(split); }
  env::Task task(env::Split split, std::int64_t index) const override { return inner_->task(split, index); }
  asio::awaitable<env::Episode> run(env::Task task, env::RolloutContext context) const override {
    return inner_->run(std::move(task), std::move(context));
  }
  bool scores_groups() const noexcept override { return true; }
  asio::awaitable<void> score_group(std::span<env::Episode> group) const override {
    double best = 0;
    for (const env::Episode& episode : group) best = std::max(best, episode.reward);
    for (env::Episode& episode : group) episode.reward = best;
    co_return;
  }

 private:
  env::EnvironmentPtr inner_;
};

TEST(Eval, GroupsAreScoredTogetherAndResumedWhole) {
  const std::filesystem::path path = results_path();
  auto model = std::make_shared<ScriptedModel>();
  model->is_right = [](const std::string& session) { return session.ends_with("-1-0"); };  // rollout 1 of every example
  EvalTask task = small_task();
  task.environment = std::make_shared<BestOfGroup>(task.environment);
  task.rollouts_per_example = 3;
  task.results_file = path;
  EXPECT_DOUBLE_EQ(evaluate(task, model).avg_reward, 1.0);
  // One row of the last group is lost: the group is played again.
  std::vector<json::object> rows = env::read_jsonl(path);
  std::ofstream out(path, std::ios::trunc);
  for (std::size_t i = 0; i + 1 < rows.size(); ++i) out << json::serialize(rows[i]) << '\n';
  out.close();
  model->sessions.clear();
  task.resume = true;
  EXPECT_DOUBLE_EQ(evaluate(task, model).avg_reward, 1.0);
  EXPECT_EQ(model->sessions.size(), 3u);
  EXPECT_EQ(env::read_jsonl(path).size(), 18u);
  task.per_rollout = true;
  EXPECT_THROW(evaluate(task, model), Error) << "a group's score needs the group";
  std::filesystem::remove_all(path.parent_path());
}

TEST(Eval, SyntheticDataAppendsAndDropsFailedGroups) {
  const std::filesystem::path path = results_path();
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << R"({"example_id": 77})"
                      << "\n{\"cut o";
  auto model = std::make_shared<ScriptedModel>();
  model->fails = [](const std::string& session) { return session.ends_with("-2-1-0"); };  // rollout 1 of example 2
  EvalTask task = small_task();
  task.split = env::Split::kTrain;
  task.rollouts_per_example = 2;
  task.retry.max_attempts = 1;
  task.drop_failed_groups = true;
  task.is_synthetic = true;
  task.results_file = path;
  const EvalResult result = evaluate(task, model);
  EXPECT_EQ(result.num_dropped_groups, 1);
  EXPECT_EQ(result.num_examples, 3);
  const auto rows = env::read_jsonl(path);
  ASSERT_EQ(rows.size(), 1u + 3 * 2);
  EXPECT_EQ(rows[0].at("example_id").as_int64(), 77) << "what was there stays";
  for (std::size_t i = 1; i < rows.size(); ++i) {
    EXPECT_NE(rows[i].at("example_id").as_int64(), 2);
    EXPECT_FALSE(rows[i].contains("rollout_idx"));
    EXPECT_FALSE(rows[i].contains("is_truncated"));
    EXPECT_TRUE(rows[i].contains("oai_tools"));
  }
  std::filesystem::remove_all(path.parent_path());
}

EvalTask synthetic_task(const std::filesystem::path& path) {
  EvalTask task = small_task();
  task.split = env::Split::kTrain;
  task.rollouts_per_example = 2;
  task.drop_failed_groups = true;
  task.is_synthetic = true;
  task.results_file = path;
  task.synthesis_key = "k1";
  return task;
}

TEST(Eval, SyntheticDataIsGoneOnWithAndNeverDoubled) {
  const std::filesystem::path path = results_path();
  auto model = std::make_shared<ScriptedModel>();
  model->failure_code = ErrorCode::kInvalidArgument;
  model->fails = [](const std::string& session) { return session.find("-2-1-") != std::string::npos; };
  const EvalResult first = evaluate(synthetic_task(path), model);
  EXPECT_EQ(first.num_dropped_groups, 1);
  EXPECT_EQ(first.num_wanted_examples, 4);
  EXPECT_EQ(env::read_jsonl(path).size(), 6u);
  model = std::make_shared<ScriptedModel>();
  const EvalResult second = evaluate(synthetic_task(path), model);
  EXPECT_EQ(model->sessions.size(), 2u) << "only the group that was lost is played";
  EXPECT_EQ(second.num_resumed_rollouts, 6);
  EXPECT_EQ(second.num_examples, 4);
  EXPECT_EQ(second.num_dropped_groups, 0);
  EXPECT_EQ(env::read_jsonl(path).size(), 8u);
  model = std::make_shared<ScriptedModel>();
  evaluate(synthetic_task(path), model);
  EXPECT_TRUE(model->sessions.empty());
  EvalTask other = synthetic_task(path);
  other.synthesis_key = "k2";
  evaluate(other, model);
  EXPECT_EQ(env::read_jsonl(path).size(), 16u) << "another seed or model is other data";
  // A crash in the middle of a group: what it left counts, the rest is played.
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 20);
  model = std::make_shared<ScriptedModel>();
  evaluate(other, model);
  EXPECT_EQ(model->sessions.size(), 1u);
  EXPECT_EQ(env::read_jsonl(path).size(), 16u);
  std::filesystem::remove_all(path.parent_path());
}

TEST(Eval, AFullDiskIsWaitedForAndLosesNothing) {
  const std::filesystem::path path = results_path();
  auto model = std::make_shared<ScriptedModel>();
  EvalTask task = synthetic_task(path);
  task.write_pause = 1ms;
  // Files of this process may grow to a thousand bytes until some requests have failed to write more: the disk of this test.
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto ignored = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  asio::io_context context;
  auto running = run_eval(std::move(task), model);
  auto future = asio::co_spawn(context, std::move(running), asio::use_future);
  for (const auto end = net::Clock::now() + 60s; model->sessions.size() < 8 && net::Clock::now() < end;) context.run_one_for(10ms);
  for (int i = 0; i < 100; ++i) context.run_one_for(10ms);  // attempts to write
  EXPECT_EQ(model->sessions.size(), 8u);
  EXPECT_LE(std::filesystem::file_size(path), 1000u);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, ignored);
  context.run();
  EXPECT_EQ(future.get().num_dropped_groups, 0);
  EXPECT_EQ(env::read_jsonl(path).size(), 8u) << "rows that were cut off stay, or are there twice";
  std::filesystem::remove_all(path.parent_path());
}

TEST(Eval, ADiskThatStaysFullEndsTheEvaluation) {
  auto model = std::make_shared<ScriptedModel>();
  EvalTask task = synthetic_task("/dev/full");
  task.synthesis_key.clear();
  task.write_pause = 1ms;
  task.write_patience = 20ms;
  try {
    evaluate(task, model);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
  }
}

TEST(Eval, AServiceThatRefusesEveryRequestEndsTheEvaluationAtOnce) {
  auto model = std::make_shared<ScriptedModel>();
  model->fails = [](const std::string&) { return true; };
  model->failure_code = ErrorCode::kUnauthorized;
  EvalTask task = small_task();
  task.max_concurrent = 1;
  EXPECT_THROW(evaluate(task, model), Error);
  EXPECT_EQ(model->sessions.size(), 1u);
}

TEST(Eval, SkipsAndRefusesWhatIsNotThere) {
  auto model = std::make_shared<ScriptedModel>();
  EvalTask task = small_task();
  task.skip_first = 5;
  EXPECT_EQ(evaluate(task, model).num_examples, 1);
  task.skip_first = 6;
  EXPECT_THROW(evaluate(task, model), Error);
}

}  // namespace
}  // namespace prl::eval
