#include "launch/orchestrator_setup.hpp"

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "launch/testing/tiny_engine.hpp"
#include "rollouts/local_queue.hpp"

namespace prl::launch {
namespace {

config::OrchestratorConfig one_environment() {
  config::OrchestratorConfig config;
  config::EnvConfig env;
  env.id = "reverse-text";
  config.train.env = {env};
  return config;
}

orchestrator::OrchestratorOptions options_of(const config::OrchestratorConfig& config) { return orchestrator_options(config, 320, 0); }

TEST(OrchestratorSetup, TheZeroAdvantageFilterIsASwitchAndOthersKeepTheirOptions) {
  config::OrchestratorConfig config = one_environment();
  EXPECT_TRUE(options_of(config).collect.filter_zero_advantages);
  config.train.filter_zero_advantages = false;
  EXPECT_FALSE(options_of(config).collect.filter_zero_advantages);
  config.train.filter_zero_advantages = true;
  config.filters = {config::ZeroAdvantageFilter{.enforce = false}, config::RepetitionFilter{.enforce = true, .window = 9}};
  const orchestrator::CollectorOptions collect = options_of(config).collect;
  EXPECT_FALSE(collect.filter_zero_advantages);
  ASSERT_EQ(collect.filters.size(), 1u);
  EXPECT_EQ(collect.filters[0].kind, orchestrator::RolloutFilterOptions::Kind::kRepetition);
  EXPECT_TRUE(collect.filters[0].enforce);
  EXPECT_EQ(collect.filters[0].window, 9);
}

TEST(OrchestratorSetup, ModesOfTrainingDecideTheLossAndAdvantagesTheirAlgorithm) {
  config::OrchestratorConfig config = one_environment();
  EXPECT_EQ(options_of(config).collect.loss, orchestrator::SampleLoss::kPolicyGradient);
  config.training_mode = config::TrainingMode::kOpd;
  EXPECT_EQ(options_of(config).collect.loss, orchestrator::SampleLoss::kDistillation);
  config.training_mode = config::TrainingMode::kSft;
  EXPECT_EQ(options_of(config).collect.loss, orchestrator::SampleLoss::kImitation);
  config.advantage.type = config::AdvantageType::kRloo;
  EXPECT_EQ(options_of(config).collect.advantage.algorithm, "rloo");
  EXPECT_TRUE(options_of(config).collect.env_advantages.empty());
  config.train.env[0].algo.emplace();
  config.train.env[0].algo->type = config::AdvantageType::kRae;
  config.train.env[0].algo->decay = 0.5;
  const orchestrator::CollectorOptions own = options_of(config).collect;
  EXPECT_EQ(own.advantage.algorithm, "rloo");
  EXPECT_EQ(own.env_advantages.at(0).algorithm, "rae");
  EXPECT_EQ(own.env_advantages.at(0).decay, 0.5);
}

TEST(OrchestratorSetup, RatiosOfEnvironmentsCountWhereTheBufferHasNone) {
  config::OrchestratorConfig config = one_environment();
  config.train.env.push_back(config.train.env.front());
  EXPECT_TRUE(options_of(config).sampler.env_ratios.empty());
  config.train.env[1].ratio = 3.0;
  EXPECT_EQ(options_of(config).sampler.env_ratios, (std::vector<double>{1, 3}));
  config.buffer.env_ratios = std::vector<double>{5, 1};
  EXPECT_EQ(options_of(config).sampler.env_ratios, (std::vector<double>{5, 1}));
}

TEST(OrchestratorSetup, CheckpointsLieWhereTheyAreAskedForAndAResumeNeedsBothParts) {
  config::OrchestratorConfig config = one_environment();
  config.output_dir = "out";
  EXPECT_FALSE(options_of(config).checkpoints.has_value());
  EXPECT_EQ(orchestrator_resume_step(config), 0);
  config.ckpt.emplace();
  config.ckpt->interval = 5;
  EXPECT_EQ(options_of(config).checkpoints->folder, std::filesystem::path("out/checkpoints"));
  EXPECT_EQ(options_of(config).checkpoints->interval, 5);
  config.ckpt->output_dir = std::filesystem::temp_directory_path() / fmt::format("prl-orchestrator-setup-{}", ::getpid());
  EXPECT_EQ(checkpoints_folder(config), *config.ckpt->output_dir / "checkpoints");
  config.ckpt->resume_step = -1;
  EXPECT_EQ(orchestrator_resume_step(config), 0) << "the latest of none is a fresh start";
  std::filesystem::create_directories(checkpoints_folder(config) / "step_4" / "trainer");
  config.ckpt->resume_step = 4;
  EXPECT_THROW(orchestrator_resume_step(config), Error) << "neither part of step 4 is whole";
  std::filesystem::remove_all(*config.ckpt->output_dir);
}

TEST(OrchestratorSetup, ServicesSpeakTheTokenizersTextAndATeacherNeedsAnExecutor) {
  const testing::TinyModel model("setup");
  config::OrchestratorConfig config = one_environment();
  config.student.model.name = model.folder.string();
  const TextSetup text = load_policy_text(config);
  rollouts::LocalSampleQueue queue(1, 1);
  OrchestratorTransports transports;
  transports.samples = queue.make_sender();
  const orchestrator::OrchestratorServices services = orchestrator_services(config, text, std::move(transports), nullptr);
  EXPECT_EQ(services.environments.size(), 1u);
  EXPECT_NE(services.chat, nullptr);
  EXPECT_EQ(services.teacher, nullptr);
  config.tokenizer.name = (model.folder / "nowhere").string();
  EXPECT_THROW(load_policy_text(config), Error);
}

}  // namespace
}  // namespace prl::launch
