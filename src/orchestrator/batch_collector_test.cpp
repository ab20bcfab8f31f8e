#include "orchestrator/batch_collector.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "orchestrator/metrics.hpp"
#include "orchestrator/progress.hpp"
#include "orchestrator/testing/fakes.hpp"
#include "text/json_python.hpp"

namespace prl::orchestrator {
namespace {

env::Episode episode(double reward, bool failed = false, bool silent = false) {
  env::Episode out;
  out.env_name = "reverse-text";
  out.reward = reward;
  out.trajectory_id = "t";
  if (failed) out.error = env::EpisodeError{"ModelError", "the server is away"};
  if (silent) return out;
  env::TrajectoryStep step;
  step.has_tokens = true;
  step.tokens.prompt_ids = {1, 2};
  step.tokens.completion_ids = {3, 4};
  step.tokens.logprobs = {-0.25f, -1.0f / 3.0f};
  step.num_prompt_tokens = 2;
  step.num_completion_tokens = 2;
  out.trajectory.push_back(step);
  return out;
}

FinishedGroup group(std::int64_t id, std::vector<env::Episode> episodes, std::int64_t version = 0) {
  FinishedGroup out;
  out.id = GroupId{id};
  out.version = PolicyVersion{version};
  out.episodes = std::move(episodes);
  return out;
}

CollectorOptions options(std::int64_t batch_size) {
  CollectorOptions out;
  out.batch_size = batch_size;
  return out;
}

const env::Environment& environment() {
  static const env::EnvironmentPtr made = testing::tiny_environment();
  return *made;
}

TEST(BatchCollector, OlderVersionsShipFirst) {
  BatchCollector collector(options(4));
  collector.add(group(0, {episode(1), episode(0)}, 5), environment());
  collector.add(group(1, {episode(1), episode(0)}, 4), environment());
  collector.add(group(2, {episode(1), episode(0)}, 5), environment());
  const Backlog backlog = collector.backlog();
  EXPECT_EQ(backlog.units, (std::map<PolicyVersion, std::int64_t>{{PolicyVersion{4}, 2}, {PolicyVersion{5}, 4}}));
  std::vector<std::int64_t> groups;
  for (const ReadyRollout& rollout : collector.take().rollouts) groups.push_back(rollout.group.value);
  EXPECT_EQ(groups, (std::vector<std::int64_t>{1, 1, 0, 0}));
}

TEST(BatchCollector, SurvivorsQueueAndZeroAdvantagesArePruned) {
  BatchCollector collector(options(4));
  EXPECT_EQ(collector.add(group(0, {episode(1), episode(0, true), episode(0)}), environment()).num_queued, 2);
  EXPECT_FALSE(collector.is_ready());
  const auto added = collector.add(group(1, {episode(0.5), episode(0.5)}), environment());
  EXPECT_EQ(added.mean_reward, 0.5);
  ASSERT_TRUE(collector.is_ready());
  const CollectedBatch batch = collector.take();
  EXPECT_EQ(batch.rollouts.size(), 4u);
  ASSERT_EQ(batch.samples.size(), 2u) << "the second group has advantage 0";
  EXPECT_EQ(batch.num_trainable, 2);
  EXPECT_EQ(batch.samples[0].advantages, (std::vector<float>{0, 0, 0.5f, 0.5f}));
  EXPECT_EQ(batch.samples[1].advantages[3], -0.5f);
  EXPECT_TRUE(batch.rollouts[0].episode.trajectory[0].tokens.completion_ids.empty());
  const auto& counts = batch.window.envs.at("reverse-text");
  EXPECT_EQ(counts.num_errored, 1);
  EXPECT_EQ(counts.num_rollouts, 5);
  EXPECT_EQ(collector.num_queued(), 0);
}

std::vector<float> advantages_of(const BatchCollector& collector) {
  std::vector<float> out;
  for (const ReadyRollout& rollout : collector.queue()) out.push_back(rollout.advantage);
  return out;
}

TEST(BatchCollector, EnvironmentsHaveTheirOwnAdvantages) {
  CollectorOptions both = options(8);
  both.env_advantages[1].algorithm = "reward";
  both.env_advantages[2].algorithm = "rae";
  both.env_advantages[2].decay = 0.5;
  BatchCollector collector(both);
  for (const int env_idx : {0, 1, 2}) {
    FinishedGroup made = group(env_idx, {episode(1), episode(0)});
    made.task.env_idx = env_idx;
    collector.add(std::move(made), environment());
  }
  EXPECT_EQ(advantages_of(collector), (std::vector<float>{0.5f, -0.5f, 1.0f, 0.0f, 1.0f, -0.5f}));
  // The running average goes on from group to group: 0, 0.5, 0.25.
  FinishedGroup more = group(3, {episode(1)});
  more.task.env_idx = 2;
  collector.add(std::move(more), environment());
  EXPECT_EQ(advantages_of(collector).back(), 0.75f);
}

TEST(BatchCollector, AdvantagesThatComeWithAGroupAreTaken) {
  BatchCollector collector(options(4));
  FinishedGroup made = group(0, {episode(1), episode(0, /*failed=*/true), episode(0)});
  made.advantages = {3, 4, -5};
  collector.add(std::move(made), environment());
  EXPECT_EQ(advantages_of(collector), (std::vector<float>{3, -5})) << "the failed one's is left out";
}

TEST(BatchCollector, AGateRejectsGroupsWhoseAdvantagesAllLieInItsRange) {
  CollectorOptions gated = options(2);
  gated.gates[0] = {{0, 0}};
  gated.gates[1] = {{-0.5, 0.25}};
  BatchCollector collector(gated);
  EXPECT_FALSE(collector.add(group(0, {episode(1), episode(1)}), environment()).is_admitted) << "all exactly 0";
  EXPECT_TRUE(collector.add(group(1, {episode(1), episode(0)}), environment()).is_admitted);
  const auto add = [&](std::int64_t id, std::vector<env::Episode> episodes) {
    FinishedGroup made = group(id, std::move(episodes));
    made.task.env_idx = 1;
    return collector.add(std::move(made), environment());
  };
  EXPECT_FALSE(add(2, {episode(0.4), episode(0)}).is_admitted) << "0.2 and -0.2";
  const auto rejected = add(3, {episode(0.5), episode(0)});
  EXPECT_FALSE(rejected.is_admitted) << "0.25 and -0.25: the ends belong to the range";
  EXPECT_TRUE(rejected.has_survivors);
  EXPECT_EQ(rejected.mean_reward, 0.25) << "the task's difficulty is learnt all the same";
  EXPECT_TRUE(add(4, {episode(1), episode(0)}).is_admitted);
  EXPECT_EQ(collector.num_queued(), 4);
}

TEST(BatchCollector, FindingsOfOutsideFiltersDropOrCount) {
  BatchCollector collector(options(4));
  FinishedGroup made = group(0, {episode(1), episode(0), episode(0.5)});
  made.filter_findings = {FilterFinding{"short", true}, FilterFinding{"odd", false}, std::nullopt};
  EXPECT_EQ(collector.add(std::move(made), environment()).num_queued, 2);
  EXPECT_EQ(collector.queue()[0].filters_matched, (std::vector<std::string>{"odd"}));
  EXPECT_TRUE(collector.queue()[1].filters_matched.empty());
}

TEST(BatchCollector, AdvantagesOfTheEnvironmentAreTakenAsTheyAre) {
  BatchCollector collector(options(4));
  std::vector<env::Episode> episodes{episode(1), episode(0)};
  episodes[0].advantage = 7.0f;
  episodes[1].advantage = -2.0f;
  collector.add(group(0, std::move(episodes)), environment());
  EXPECT_EQ(advantages_of(collector), (std::vector<float>{7, -2}));
}

TEST(BatchCollector, SeatsOfAnEpisodeAreRolloutsOfTheirOwn) {
  CollectorOptions seats = options(4);
  seats.advantage.algorithm = "hierarchical_grpo";
  seats.advantage.episode_agents = {"first", "second"};
  BatchCollector collector(seats);
  std::vector<env::Episode> episodes{episode(1), episode(0), episode(0.5), episode(0.5)};
  for (std::size_t i = 0; i < episodes.size(); ++i) episodes[i].seat = i % 2 == 0 ? "first" : "second";
  FinishedGroup made = group(0, std::move(episodes));
  made.plays = {0, 0, 1, 1};
  collector.add(std::move(made), environment());
  EXPECT_EQ(advantages_of(collector), (std::vector<float>{0.5f, -0.5f, 0, 0}));
  EXPECT_EQ(collector.queue()[1].episode.seat, "second");
}

TEST(BatchCollector, EchoTrainsWhatTheEnvironmentSays) {
  CollectorOptions echo = options(2);
  echo.advantage.echo.tool = 0.5f;
  BatchCollector collector(echo);
  env::Episode two_turns = episode(1);
  env::TrajectoryStep step = two_turns.trajectory[0];
  step.tokens.prompt_ids = {1, 2, 3, 4, 5};
  step.tokens.prompt_roles.assign(5, env::PromptRole::kNone);
  step.tokens.prompt_roles[4] = env::PromptRole::kTool;
  two_turns.trajectory.push_back(step);
  collector.add(group(0, {two_turns, two_turns}), environment());
  const CollectedBatch batch = collector.take();
  ASSERT_EQ(batch.samples.size(), 2u) << "their advantages are 0, and yet they train";
  EXPECT_EQ(batch.samples[0].ce_weights, (std::vector<float>{0, 0, 0, 0, 0.5f, 0, 0}));
  EXPECT_EQ(batch.samples[0].rl_weights, (std::vector<float>{1, 1, 0, 0, 1, 0, 0}));
}

TEST(BatchCollector, OnlineDifficultyFilteringDropsAllZeroAndAllOne) {
  CollectorOptions o = options(2);
  o.online_difficulty_filtering = true;
  BatchCollector collector(o);
  EXPECT_FALSE(collector.add(group(0, {episode(0), episode(0)}), environment()).is_admitted);
  EXPECT_FALSE(collector.add(group(1, {episode(1), episode(1)}), environment()).is_admitted);
  EXPECT_TRUE(collector.add(group(2, {episode(0.5), episode(0.5)}), environment()).is_admitted);
  EXPECT_TRUE(collector.add(group(3, {episode(1), episode(0)}), environment()).is_admitted);
}

TEST(BatchCollector, TokenBatches) {
  CollectorOptions o = options(100);
  o.token_batch_size = 9;
  BatchCollector collector(o);
  collector.add(group(0, {episode(1), episode(0)}), environment());
  EXPECT_FALSE(collector.is_ready());
  collector.add(group(1, {episode(1), episode(0)}), environment());
  ASSERT_TRUE(collector.is_ready());
  EXPECT_EQ(collector.take().rollouts.size(), 3u) << "the shortest prefix with 9 tokens: 3 rollouts of 4";
  EXPECT_EQ(collector.num_queued(), 1);
}

TEST(BatchCollector, StaleRolloutsLeaveTheQueue) {
  BatchCollector collector(options(8));
  collector.add(group(0, {episode(1), episode(0)}, 1), environment());
  collector.add(group(1, {episode(1), episode(0)}, 3), environment());
  EXPECT_EQ(collector.drop_stale([](PolicyVersion version) { return version.value < 2; }), 2);
  EXPECT_EQ(collector.num_queued(), 2);
  EXPECT_EQ(collector.queue().front().version_start.value, 3);
}

TEST(BatchCollector, NothingButFailuresEndsWithTheReason) {
  BatchCollector collector(options(4));
  std::string message;
  int num_groups = 0;
  try {
    for (; num_groups < 100; ++num_groups) collector.add(group(num_groups, {episode(0, true), episode(0, true)}), environment());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    message = error.what();
  }
  EXPECT_EQ(num_groups, 19) << "10 batches of 4";
  EXPECT_NE(message.find("the server is away"), std::string::npos) << message;
}

TEST(BatchCollector, OneGoodGroupResetsTheBudget) {
  BatchCollector collector(options(4));
  for (int i = 0; i < 100; ++i)
    collector.add(group(i, i % 15 == 0 ? std::vector{episode(1), episode(0)} : std::vector{episode(0, false, true), episode(0, true)}),
                  environment());
  EXPECT_EQ(collector.num_queued(), 14);
}

TEST(OrchestratorState, RecoveriesGoAndOtherFilesBesideThemStay) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl_orchestrator_recovery_{}", ::getpid());
  std::filesystem::remove_all(folder);
  const std::vector<env::EnvironmentPtr> envs{testing::tiny_environment()};
  OrchestratorState state;
  state.progress = {7, 1000, 64, 8};
  state.sampler = TaskSampler(envs, {}).save();
  keep_recovery(folder, state, envs);
  EXPECT_EQ(newest_recovery(folder), 7);
  drop_recovery(folder);
  EXPECT_FALSE(std::filesystem::exists(folder));
  drop_recovery(folder);

  keep_recovery(folder, state, envs);
  const std::filesystem::path kept[] = {folder / "notes.txt", folder / "step_7" / "mine.txt", folder / "step_9" / "plan.txt"};
  for (const auto& path : kept) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "mine";
  }
  drop_recovery(folder);
  EXPECT_EQ(newest_recovery(folder), std::nullopt);
  for (const auto& path : kept) EXPECT_TRUE(std::filesystem::exists(path)) << path;
  std::filesystem::remove_all(folder);
}

TEST(OrchestratorState, SavesAndLoadsExactly) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl_orchestrator_state_{}", ::getpid());
  std::filesystem::remove_all(folder);
  const std::vector<env::EnvironmentPtr> envs{testing::tiny_environment()};
  BatchCollector collector(options(8));
  collector.add(group(5, {episode(1), episode(1.0 / 3)}, 6), environment());
  OrchestratorState state;
  state.progress = {7, 1000, 64, 8};
  TaskSampler sampler(envs, {});
  static_cast<void>(sampler.draw());
  state.sampler = sampler.save();
  state.unfinished_tasks = {{0, 3}, {0, 1}};
  state.queue = collector.queue();
  const std::string large = R"({"n":123456789012345678901234567890,"far":[1e400]})";  // of a Python environment
  state.queue[0].episode.info = text::parse_json(large, 200, text::LargeNumbers::kKeepText).as_object();
  state.env_states["python"] = state.queue[0].episode.info;
  state.queue[1].samples[0].routed_experts = {.start = 0, .num_layers = 1, .top_k = 2, .ids = {1, 300, 2, 0, 0, 0, 7, 8}};
  auto pixels = std::make_shared<wire::ImagePixels>(
      wire::ImagePixels{.rgb = std::vector<std::uint8_t>(12, 200), .height = 2, .width = 2, .deviation = {1, 1, 1}});
  auto other = std::make_shared<wire::ImagePixels>(*pixels);
  other->rgb[0] = 7;
  for (const auto& picture : {pixels, other}) picture->hash = wire::hash_of(*picture);
  state.queue[0].samples[0].images = {{.pixels = other, .first = 0, .rows = 1, .cols = 1},
                                      {.pixels = pixels, .first = 2, .rows = 1, .cols = 1}};
  state.queue[1].samples[0].images = {{.pixels = pixels, .first = 1, .rows = 1, .cols = 1}};
  state.queue[1].samples[0].versions = {-1, -1, 6, 7};
  save_state(folder, state, envs);
  save_state(folder, state, envs);  // again: replaces
  const OrchestratorState loaded = load_state(folder, 7, envs);
  EXPECT_EQ(loaded.progress.total_tokens, 1000);
  EXPECT_EQ(loaded.unfinished_tasks, state.unfinished_tasks);
  EXPECT_EQ(loaded.sampler, state.sampler);
  ASSERT_EQ(loaded.queue.size(), 2u);
  EXPECT_EQ(loaded.queue[1].samples[0].logprobs, state.queue[1].samples[0].logprobs);
  EXPECT_EQ(loaded.queue[1].samples[0].advantages, state.queue[1].samples[0].advantages);
  EXPECT_EQ(loaded.queue[1].samples[0].routed_experts, state.queue[1].samples[0].routed_experts);
  EXPECT_TRUE(loaded.queue[0].samples[0].routed_experts.empty());
  ASSERT_EQ(loaded.queue[1].samples[0].images.size(), 1u);
  EXPECT_EQ(loaded.queue[1].samples[0].images[0].pixels->rgb, pixels->rgb);
  EXPECT_EQ(loaded.queue[1].samples[0].images[0].pixels->hash, wire::hash_of(*pixels));
  ASSERT_EQ(loaded.queue[0].samples[0].images.size(), 2u);
  EXPECT_EQ(loaded.queue[0].samples[0].images[0].pixels->rgb, other->rgb);
  EXPECT_EQ(loaded.queue[0].samples[0].images[1].pixels, loaded.queue[1].samples[0].images[0].pixels) << "a picture is there once";
  EXPECT_EQ(loaded.queue[0].samples[0].images[1].first, 2);
  EXPECT_EQ(loaded.queue[1].samples[0].versions, state.queue[1].samples[0].versions);
  EXPECT_EQ(loaded.queue[1].episode.reward, 1.0 / 3);
  EXPECT_EQ(loaded.queue[1].episode.num_final_tokens(), 4);
  EXPECT_EQ(loaded.queue[0].version_start.value, 6);
  EXPECT_EQ(text::to_json_text(loaded.queue[0].episode.info), large);
  EXPECT_EQ(text::to_json_text(loaded.env_states.at("python")), large);

  EXPECT_THROW(load_state(folder, 8, envs), Error);
  const std::vector<env::EnvironmentPtr> others{testing::tiny_environment("other")};
  EXPECT_THROW(load_state(folder, 7, others), Error);
  std::ofstream(folder / "step_7" / "orchestrator" / "state.json", std::ios::app) << " ";
  try {
    load_state(folder, 7, envs);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_NE(std::string(error.what()).find("state.json"), std::string::npos) << error.what();
  }
  std::filesystem::remove_all(folder);
}

// A history that was rewritten leaves a last turn shorter than what was sampled before it.
TEST(StepMetrics, TokensOfAStepAreCountedLikeThoseOfTheRun) {
  env::Episode rewritten = episode(1.0);
  rewritten.trajectory[0].num_completion_tokens = 20;
  env::TrajectoryStep last = rewritten.trajectory[0];
  last.num_prompt_tokens = 10;
  last.num_completion_tokens = 5;
  rewritten.trajectory.push_back(last);
  CollectedBatch batch;
  for (const env::Episode& one : {rewritten, episode(0.0)}) batch.rollouts.emplace_back().episode = one;
  Progress progress;
  for (const ReadyRollout& rollout : batch.rollouts) progress.total_tokens += count_tokens(rollout.episode).total();
  StepFacts facts;
  facts.step = 1;
  const monitor::Metrics metrics = step_metrics(batch, facts, progress);
  EXPECT_EQ(metrics.at("progress/tokens"), 25 + 4);
  EXPECT_EQ(metrics.at("progress/total_tokens"), metrics.at("progress/tokens"));
  EXPECT_EQ(metrics.at("progress/tokens"), metrics.at("progress/prefill_tokens") + metrics.at("progress/decode_tokens"));
  EXPECT_FALSE(metrics.contains("step")) << "the row has that field already";
}

}  // namespace
}  // namespace prl::orchestrator
