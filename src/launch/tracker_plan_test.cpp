#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "launch/trackers.hpp"

namespace prl::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(TrackerPlan, NamesWhatIsSwitchedOnForAllRoles) {
  config::RlConfig config;
  config.output_dir = "/tmp/somewhere/first/";
  EXPECT_THAT(tracker_plan(config).kinds, IsEmpty());
  config.tensorboard.emplace();
  config.mlflow.emplace();
  config.orchestrator.wandb.emplace();
  config.orchestrator.wandb->tags = {"a", "b"};
  config.orchestrator.prime_monitor.emplace();
  const TrackerPlan plan = tracker_plan(config);
  EXPECT_THAT(plan.kinds, ElementsAre("wandb", "tensorboard", "mlflow", "prime"));
  EXPECT_EQ(plan.run_folder, "/tmp/somewhere/first");
  EXPECT_EQ(plan.settings.at("name").as_string(), "first");
  EXPECT_EQ(plan.settings.at("config").as_string(), "configs/rl.json");
  EXPECT_EQ(plan.settings.at("wandb").at("tags").as_array().size(), 2U);
  EXPECT_EQ(plan.settings.at("wandb").at("log_extras").at("interval").as_int64(), 10);
  EXPECT_FALSE(plan.settings.contains("role"));
}

TEST(TrackerPlan, ARoleAloneHasARunOfItsOwn) {
  config::TrainerConfig config;
  config.wandb.emplace();
  config.wandb->name = "x";
  const TrackerPlan plan = tracker_plan(config);
  EXPECT_EQ(plan.settings.at("role").as_string(), "trainer");
  EXPECT_EQ(plan.settings.at("wandb").at("name").as_string(), "x-trainer");
  config::OrchestratorConfig other;
  other.wandb.emplace();
  const TrackerPlan of_other = tracker_plan(other);
  EXPECT_EQ(plan.settings.at("state").as_string(), "trackers/trainer");
  EXPECT_EQ(of_other.settings.at("state").as_string(), "trackers/orchestrator")
      << "in one folder they would take each other's run of wandb";
  config.max_concurrent_runs = 2;
  EXPECT_THAT(tracker_plan(config).kinds, IsEmpty()) << "each run has its own";
}

}  // namespace
}  // namespace prl::launch
