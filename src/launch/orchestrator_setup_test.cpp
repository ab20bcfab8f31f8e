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
  config.training_mode = config::TrainingMode::kOpsd;
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

TEST(OrchestratorSetup, EchoWeighsRolesAndSoDoesAnUnmaskedEnvironment) {
  config::OrchestratorConfig config = one_environment();
  EXPECT_FALSE(options_of(config).collect.advantage.echo.is_any());
  EXPECT_FALSE(train_environments(config)[0].wants_roles);
  config.mask_env_responses = false;
  EXPECT_EQ(options_of(config).collect.advantage.echo.user, 1.0f);
  EXPECT_TRUE(train_environments(config)[0].wants_roles);
  config.advantage.type = config::AdvantageType::kEcho;
  EXPECT_EQ(options_of(config).collect.advantage.algorithm, "grpo");
  EXPECT_EQ(options_of(config).collect.advantage.echo.tool, 0.1f) << "the tool alone, if no role is named";
  EXPECT_EQ(options_of(config).collect.advantage.echo.user, 0.0f);
  config.advantage.roles.emplace().user.emplace().alpha = 0.5;
  EXPECT_EQ(options_of(config).collect.advantage.echo.user, 0.5f);
  EXPECT_EQ(options_of(config).collect.advantage.echo.tool, 0.0f);
}

TEST(OrchestratorSetup, CurriculaAreOfOneEnvironment) {
  config::OrchestratorConfig config = one_environment();
  config.train.env.push_back(config.train.env.front());
  config.train.env[1].curriculum.emplace().sampler = config::DifficultyPoolSampler{.seed = 7};
  const orchestrator::OrchestratorOptions options = options_of(config);
  ASSERT_EQ(options.sampler.curricula.size(), 2u);
  EXPECT_EQ(options.sampler.curricula[0].order, orchestrator::Curriculum::Order::kRandom);
  EXPECT_EQ(options.sampler.curricula[1].order, orchestrator::Curriculum::Order::kDifficulty);
  EXPECT_EQ(options.sampler.curricula[1].seed, 7u);
  EXPECT_EQ(options.sampler.curricula[1].pools.size(), 3u);
  EXPECT_TRUE(options.collect.gates.contains(1)) << "though it has no gate";
  config.train.env[1].curriculum->sampler = config::StandardSampler{};
  EXPECT_EQ(options_of(config).sampler.curricula[1].order, orchestrator::Curriculum::Order::kSequential);
}

TEST(OrchestratorSetup, FurtherFieldsOfRequestsAreReadOrPassedOn) {
  config::TrainSamplingConfig sampling;
  sampling.extra_body.set("ignore_eos", true);
  sampling.extra_body.set("stop", "END");
  EXPECT_EQ(sampling_params(sampling).stop, (std::vector<std::string>{"END"}));
  EXPECT_TRUE(sampling_params(sampling).ignore_eos);
  EXPECT_TRUE(sampling_params(sampling).extra_json.empty());
  sampling.extra_body.set("vllm_xargs", 3);
  EXPECT_EQ(sampling_params(sampling).extra_json, R"({"vllm_xargs":3})");
  EXPECT_THROW(check_local_sampling(sampling_params(sampling)), Error);
  sampling.extra_body.set("stop", 3);
  EXPECT_THROW(sampling_params(sampling), Error);
  config::EvalSamplingConfig eval;
  eval.reasoning_effort = config::ReasoningEffort::kLow;
  EXPECT_EQ(sampling_params(eval).extra_json, R"({"reasoning_effort":"low"})");
  EXPECT_NO_THROW(check_local_sampling(sampling_params(eval)));
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
  config.training_mode = config::TrainingMode::kOpsd;
  const orchestrator::OrchestratorServices own = orchestrator_services(config, text, {}, nullptr);
  EXPECT_NE(own.teacher, nullptr) << "the policy is its own teacher";
  ASSERT_TRUE(own.demonstrations.prefix_of);
  const std::vector<std::int32_t> shown = own.demonstrations.prefix_of("like this");
  EXPECT_NE(text.tokenizer->decode(shown, false).find("<demonstration>\nlike this"), std::string::npos);
  config.training_mode = config::TrainingMode::kRl;
  config.tokenizer.name = (model.folder / "nowhere").string();
  EXPECT_THROW(load_policy_text(config), Error);
}

}  // namespace
}  // namespace prl::launch
