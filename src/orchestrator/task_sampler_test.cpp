#include "orchestrator/task_sampler.hpp"

#include <gtest/gtest.h>

#include <map>

#include "base/error.hpp"
#include "orchestrator/testing/fakes.hpp"

namespace prl::orchestrator {
namespace {

using testing::tiny_environment;

std::vector<TaskRef> draws(TaskSampler& sampler, int count) {
  std::vector<TaskRef> out;
  for (int i = 0; i < count; ++i) out.push_back(sampler.draw());
  return out;
}

TEST(TaskSampler, TheSameSeedDrawsTheSameTasks) {
  const std::vector<env::EnvironmentPtr> envs{tiny_environment("a", 50), tiny_environment("b", 150)};
  TaskSampler one(envs, {});
  TaskSampler two(envs, {});
  TaskSamplerOptions other;
  other.seed = 1;
  TaskSampler three(envs, other);
  const auto first = draws(one, 400);
  EXPECT_EQ(first, draws(two, 400));
  EXPECT_NE(first, draws(three, 400));
  std::map<std::int64_t, int> per_env;
  for (const TaskRef& task : first) ++per_env[task.env_idx];
  EXPECT_NEAR(per_env[1], 300, 40) << "by number of tasks";
}

TEST(TaskSampler, RatiosWeighEnvironments) {
  TaskSamplerOptions options;
  options.env_ratios = {3, 1};
  TaskSampler sampler({tiny_environment("a", 10), tiny_environment("b", 200)}, options);
  std::map<std::int64_t, int> per_env;
  for (const TaskRef& task : draws(sampler, 400)) ++per_env[task.env_idx];
  EXPECT_NEAR(per_env[0], 300, 40);
  options.env_ratios = {1};
  EXPECT_THROW(TaskSampler({tiny_environment("a", 10), tiny_environment("b", 20)}, options), Error);
}

TEST(TaskSampler, SequentialOrderGoesRound) {
  TaskSamplerOptions options;
  options.curricula.resize(1);
  options.curricula[0].order = Curriculum::Order::kSequential;
  TaskSampler sampler({tiny_environment("a", 3)}, options);
  EXPECT_EQ(draws(sampler, 5), (std::vector<TaskRef>{{0, 0}, {0, 1}, {0, 2}, {0, 0}, {0, 1}}));
}

/// Two of its tasks are the same.
class Repeating final : public env::Environment {
 public:
  Repeating() : rows_(tiny_environment("a", 5)) {}
  const std::string& name() const noexcept override { return rows_->name(); }
  std::int64_t num_tasks(env::Split split) const override { return rows_->num_tasks(split); }
  env::Task task(env::Split split, std::int64_t index) const override { return rows_->task(split, index == 4 ? 1 : index); }
  env::asio::awaitable<env::Episode> run(env::Task task, env::RolloutContext rollout) const override {
    return rows_->run(std::move(task), std::move(rollout));
  }

 private:
  env::EnvironmentPtr rows_;
};

TEST(TaskSampler, ACurriculumWantsEachTaskOnce) {
  const std::vector<env::EnvironmentPtr> envs{std::make_shared<Repeating>()};
  TaskSamplerOptions options;
  EXPECT_NO_THROW(TaskSampler(envs, options)) << "at random it does not matter";
  options.curricula.resize(1);
  for (const auto order : {Curriculum::Order::kSequential, Curriculum::Order::kDifficulty}) {
    options.curricula[0].order = order;
    try {
      TaskSampler(envs, options);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("train tasks 1 and 4 are the same"), std::string::npos) << error.what();
    }
  }
}

TEST(TaskSampler, DifficultyPoolsDrawByTheirWeights) {
  const std::vector<env::EnvironmentPtr> envs{tiny_environment("a", 12)};
  TaskSamplerOptions options;
  options.curricula.resize(1);
  options.curricula[0].order = Curriculum::Order::kDifficulty;
  options.curricula[0].pools = {{"hard", 0.25, 0.5}, {"normal", 0.75, 2.0}, {"easy", 1.0, 0.0}};
  TaskSampler sampler(envs, options);
  for (std::int64_t i = 0; i < 4; ++i) sampler.observe({0, i}, 0.25);  // hard: at most its threshold
  for (std::int64_t i = 4; i < 8; ++i) sampler.observe({0, i}, 0.5);   // normal
  for (std::int64_t i = 8; i < 10; ++i) sampler.observe({0, i}, 1.0);  // easy, never drawn
  EXPECT_EQ(sampler.difficulty_sizes(0), (std::map<std::string, std::int64_t>{{"hard", 4}, {"normal", 4}, {"easy", 2}, {"unseen", 2}}));
  std::map<std::int64_t, int> count;
  constexpr int kDraws = 6000;
  for (const TaskRef& task : draws(sampler, kDraws)) ++count[task.task_idx];
  // Weights 4 * 0.5 + 4 * 2 + 2 * 1 = 12.
  EXPECT_NEAR(count[0], kDraws * 0.5 / 12, 60);
  EXPECT_NEAR(count[5], kDraws * 2.0 / 12, 120);
  EXPECT_NEAR(count[11], kDraws * 1.0 / 12, 90);
  EXPECT_EQ(count[8] + count[9], 0);

  TaskSampler resumed(envs, options);
  resumed.load(sampler.save());
  EXPECT_EQ(draws(resumed, 50), draws(sampler, 50)) << "a resumed sampler goes on with the same draws";
  sampler.observe({0, 0}, 2.0);
  EXPECT_EQ(sampler.difficulty_sizes(0).at("easy"), 3) << "above every threshold: the last pool, and only the last reward counts";
  for (std::int64_t i = 0; i < 12; ++i) sampler.observe({0, i}, 1.0);
  EXPECT_THROW(sampler.draw(), Error) << "all weights are 0";
}

TEST(TaskSampler, EasyAndHardTasksLeaveAndAreSavedAndReturn) {
  const std::vector<env::EnvironmentPtr> envs{tiny_environment("a", 40)};
  TaskSamplerOptions options;
  options.easy_threshold = 0.9;
  options.hard_threshold = 0.1;
  TaskSampler sampler(envs, options);
  for (std::int64_t i = 0; i < 10; ++i) sampler.observe({0, i}, 0.9);
  for (std::int64_t i = 10; i < 14; ++i) sampler.observe({0, i}, 0.1);
  sampler.observe({0, 20}, 0.5);
  EXPECT_EQ(sampler.pool_sizes(0).easy, 10);
  EXPECT_EQ(sampler.pool_sizes(0).hard, 4);
  EXPECT_EQ(sampler.pool_sizes(0).normal, 26);
  for (const TaskRef& task : draws(sampler, 200)) EXPECT_GE(task.task_idx, 14);

  const boost::json::object state = sampler.save();
  TaskSampler resumed(envs, options);
  resumed.load(state);
  EXPECT_EQ(draws(resumed, 50), draws(sampler, 50)) << "a resumed sampler goes on with the same draws";

  options.easy_fraction = 0.5;
  TaskSampler returning(envs, options);
  returning.load(state);
  EXPECT_EQ(returning.pool_sizes(0).easy, 5);
  EXPECT_EQ(returning.pool_sizes(0).normal, 31);

  for (std::int64_t i = 0; i < 40; ++i) sampler.observe({0, i}, 1);
  EXPECT_THROW(sampler.draw(), Error);
}

}  // namespace
}  // namespace prl::orchestrator
