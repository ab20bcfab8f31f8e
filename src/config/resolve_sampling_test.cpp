#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/testing/source_dir.hpp"
#include "config/bind.hpp"
#include "config/detail/test_support.hpp"

namespace prl::config {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using testing::error_of;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kRlLine;
using testing::load_line;

TEST(Sampling, EnvironmentsTakeFromTheirSectionWhatTheyLeaveOut) {
  const RlConfig rl = load_line<RlConfig>(kRlLine +
                                          "--orchestrator.sampling.temperature 0.7 --orchestrator.sampling.max-completion-tokens 40 "
                                          "--orchestrator.env [{\"id\":\"reverse-text\",\"sampling\":{\"max_completion_tokens\":9}}] "
                                          "--orchestrator.eval.sampling.top-p 0.5 --orchestrator.eval.sampling.top-k 3 "
                                          "--orchestrator.eval.env [{\"id\":\"gsm8k\",\"sampling\":{\"top_k\":7}}]")
                          .config;
  EXPECT_EQ(rl.orchestrator.train.env[0].sampling->temperature, 0.7);
  EXPECT_EQ(rl.orchestrator.train.env[0].sampling->max_completion_tokens, 9);
  EXPECT_EQ(rl.orchestrator.eval->env[0].sampling->top_p, 0.5);
  EXPECT_EQ(rl.orchestrator.eval->env[0].sampling->top_k, 7);
  const std::string flag = "--sampling.top-p 0.5 --env.0.id gsm8k --env.0.sampling.top-k 7";
  EXPECT_EQ(load_line<EvalConfig>("eval --model.name m --client.base-url http://h:1/v1 " + flag).config.env[0].sampling->top_p, 0.5);
  EXPECT_EQ(load_line<SynthesizeConfig>("synthesize --model.name m --client.base-url http://h:1/v1 " + flag).config.env[0].sampling->top_p,
            0.5);
  const auto alone = load_line<OrchestratorConfig>("orchestrator --sampling.temperature 0.7 --env.0.sampling.max-completion-tokens 9");
  EXPECT_EQ(alone.config.train.env[0].sampling->temperature, 0.7);
}

TEST(Sampling, ATemperatureThatCannotTrainIsRefused) {
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--orchestrator.sampling.temperature 0"),
              HasSubstr("orchestrator.train.sampling.temperature: is 0, from which a policy cannot learn"));
  EXPECT_THAT(error_of<RlConfig>(kRlLine + "--orchestrator.env [{\"id\":\"reverse-text\",\"sampling\":{\"temperature\":0.005}}]"),
              HasSubstr("orchestrator.train.env.0.sampling.temperature: is 0.005"));
  EXPECT_THAT(error_of<OrchestratorConfig>("orchestrator --sampling.temperature 0"), HasSubstr("train.sampling.temperature: is 0"));
  const std::string teacher = "--orchestrator.teacher.model.name t --orchestrator.teacher.client.base-url http://h:1/v1 ";
  EXPECT_THAT(error_of<RlConfig>(kRlLine + teacher + "--orchestrator.training-mode opd --orchestrator.sampling.temperature 0"),
              HasSubstr("cannot learn"));
  EXPECT_EQ(error_of<RlConfig>(kRlLine + teacher + "--orchestrator.training-mode sft --orchestrator.sampling.temperature 0"), "")
      << "a teacher may write its likeliest answers";
  EXPECT_EQ(error_of<RlConfig>(kRlLine + "--orchestrator.eval.sampling.temperature 0"), "");
}

TEST(Sampling, WhatChangesTheSampledDistributionIsNamed) {
  const auto warnings = [](const std::string& flags) { return load_line<RlConfig>(kRlLine + flags).warnings; };
  EXPECT_THAT(warnings("--orchestrator.sampling.repetition-penalty 1.1"),
              Contains(AllOf(HasSubstr("orchestrator.train.sampling.repetition_penalty: is 1.1"), HasSubstr("mismatch_kl"))));
  EXPECT_THAT(warnings("--orchestrator.env.0.sampling.min-tokens 4"),
              Contains(AllOf(HasSubstr("orchestrator.train.env.0.sampling.min_tokens: is 4"), HasSubstr("mismatch_kl"))));
  EXPECT_EQ(warnings("--orchestrator.sampling.min-tokens 4 --orchestrator.env.0.sampling.temperature 0.9").size(), 1u)
      << "an environment that takes it from the section is not named again";
  EXPECT_THAT(warnings("--orchestrator.sampling.temperature 0.9"), IsEmpty());
}

TEST(Sampling, RetriesComeFromTheSectionUnlessTheEnvironmentSaysOtherwise) {
  const auto rl = load_line<RlConfig>(
      kRlLine + "--orchestrator.train.max-retries 7 --orchestrator.env [{\"id\":\"reverse-text\"},{\"id\":\"gsm8k\",\"max_retries\":0}]");
  EXPECT_EQ(rl.config.orchestrator.train.env[0].max_retries, 7);
  EXPECT_EQ(rl.config.orchestrator.train.env[1].max_retries, 0);
  const auto eval = load_line<EvalConfig>(
      "eval --model.name m --client.base-url http://h:1/v1 --retry.max-attempts 5 --env "
      "[{\"id\":\"gsm8k\"},{\"id\":\"wordle\",\"max_retries\":1}]");
  EXPECT_EQ(eval.config.env[0].max_retries, 4) << "four attempts after the first make five";
  EXPECT_EQ(eval.config.env[1].max_retries, 1);
}

TEST(Sampling, FlagsChangeTheOnlyEnvironmentOfAFile) {
  std::filesystem::current_path(test_source_dir());
  const auto eval = load_line<EvalConfig>("eval @ examples/gsm8k/eval.toml --model.name m --env.args {\"seed\":3} --env.max-retries 0");
  ASSERT_EQ(eval.config.env.size(), 1u);
  EXPECT_EQ(eval.config.env[0].id, "gsm8k");
  EXPECT_EQ(eval.config.env[0].args.find("seed")->as_int(), 3);
  EXPECT_EQ(eval.config.env[0].max_retries, 0);
  EXPECT_EQ(load_line<EvalConfig>("eval @ examples/gsm8k/eval.toml --model.name m --env.id wordle").config.env[0].id, "wordle");
  EXPECT_THAT(error_of<EvalConfig>("eval @ configs/debug/eval/multi_env.toml --model.name m --env.max-retries 0"),
              HasSubstr("max_retries: there are 2 entries"));
  EXPECT_EQ(load_line<EvalConfig>("eval --model.name m --env.id gsm8k --env.max-retries 2").config.env[0].max_retries, 2);
}

TEST(Sampling, ASavedConfigurationKeepsWhatWasWrittenOfAnEnvironmentAndNotWhatItTook) {
  const auto rl = load_line<RlConfig>(kRlLine +
                                      "--orchestrator.sampling.temperature 0.7 --orchestrator.train.max-retries 5 "
                                      "--orchestrator.env.id gsm8k --orchestrator.env.sampling.max-completion-tokens 9");
  const Value saved = without_derived(dump(ops_of<RlConfig>(), &rl.config, NullStyle::kAlways), rl.provenance);
  const auto at = [&](const char* key) { return find_path(saved, std::string("orchestrator.train.env.0.") + key); };
  ASSERT_NE(at("sampling.max_completion_tokens"), nullptr);
  EXPECT_EQ(at("sampling.max_completion_tokens")->as_int(), 9);
  EXPECT_EQ(at("sampling.temperature"), nullptr) << "follows from the section's";
  EXPECT_EQ(at("max_retries"), nullptr) << "follows from the section's";
  const auto own = load_line<RlConfig>(kRlLine + "--orchestrator.env.id gsm8k --orchestrator.env.max-retries 1");
  const Value kept = without_derived(dump(ops_of<RlConfig>(), &own.config, NullStyle::kAlways), own.provenance);
  ASSERT_NE(find_path(kept, "orchestrator.train.env.0.max_retries"), nullptr);
  EXPECT_EQ(find_path(kept, "orchestrator.train.env.0.max_retries")->as_int(), 1);
}

TEST(Sampling, EnforcedFiltersAreBuilt) {
  EXPECT_THAT(load_line<RlConfig>(kRlLine + "--orchestrator.filters [{\"type\":\"gibberish\",\"enforce\":true}]").not_built, IsEmpty());
}

}  // namespace
}  // namespace prl::config
