#include "config/bind.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/rl_config.hpp"
#include "config/sft_config.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

template <class C>
Report bind_toml(const std::string& text, C& config) {
  Report report;
  bind(parse_toml(text, "test.toml"), ops_of<C>(), &config, report);
  return report;
}

template <class C>
std::string problems_of(const std::string& text) {
  C config;
  std::string all;
  for (const Problem& problem : bind_toml(text, config).problems) all += describe(problem) + "\n";
  return all;
}

TEST(Bind, WritesEveryKindOfField) {
  RlConfig config;
  const Report report = bind_toml(R"(
max_steps = 7
output_dir = "outputs/x"
inference_gpu_ids = [0, 1]
env_vars = { A = "b", N = 3 }
[trainer.optim]
type = "muon"
mu = 0.9
[trainer.model]
fused_lm_head_token_chunk_size = 4096
ep = "auto"
[trainer.model.ac]
[trainer.wandb]
log_extras = "off"
[[orchestrator.train.env]]
id = "alphabet-sort"
args = { min_turns = 2, nested = { x = [1, 2] } }
)",
                                  config);
  ASSERT_EQ(report.problems.size(), 1u) << describe(report.problems.front());  // log_extras is no table
  EXPECT_EQ(config.max_steps, 7);
  EXPECT_EQ(config.output_dir, "outputs/x");
  EXPECT_THAT(*config.inference_gpu_ids, ElementsAre(0, 1));
  EXPECT_EQ(config.env_vars.at("N"), "3");
  EXPECT_EQ(std::get<MuonConfig>(config.trainer.optim).mu, 0.9);
  EXPECT_EQ(config.trainer.model.fused_lm_head_token_chunk_size.number, 4096);
  EXPECT_EQ(config.trainer.model.ac->freq, 1);
  EXPECT_EQ(config.orchestrator.train.env.at(0).id, "alphabet-sort");
  EXPECT_EQ(find_path(config.orchestrator.train.env.at(0).args, "nested.x.1")->as_int(), 2);
}

TEST(Bind, AllProblemsComeAtOnceWithKeyValueAndOrigin) {
  const std::string text = problems_of<TrainerConfig>(R"(
max_step = 10
max_async_level = 100
[model]
seq_len = "2048"
[optim]
lr = -1.0
[loss]
type = "grop"
)");
  EXPECT_THAT(text, HasSubstr("max_step: unknown key (got 10) [test.toml:2]; did you mean max_steps"));
  EXPECT_THAT(text, HasSubstr("max_async_level: must be between 0 and 64 steps (got 100) [test.toml:3]"));
  EXPECT_THAT(text, HasSubstr("model.seq_len: expects a whole number, written without quotes (got \"2048\")"));
  EXPECT_THAT(text, HasSubstr("optim.lr: must be at least 0 (got -1)"));
  EXPECT_THAT(text, HasSubstr("loss.type: must be one of default, ipo, grpo"));
  EXPECT_THAT(text, HasSubstr("did you mean grpo"));
}

TEST(Bind, AnUnknownLeafNamesWhereItLives) {
  EXPECT_THAT(problems_of<TrainerConfig>("lr = 1e-5\n"), HasSubstr("did you mean model.mtp.lr or optim.lr?"));
  EXPECT_THAT(problems_of<RlConfig>("tool_call_parser = \"hermes\"\n"), HasSubstr("inference.model.tool_call_parser"));
  EXPECT_THAT(problems_of<RlConfig>("model = \"./m\"\n"), HasSubstr("did you mean model.name?"));
}

TEST(Bind, KeysOfOtherVariantsAreExplained) {
  EXPECT_THAT(problems_of<TrainerConfig>("[optim]\nmomentum = 0.5\n"),
              HasSubstr("optim.momentum: unknown key of type adamw; momentum belongs to type sgd"));
  const std::string of_gspo = problems_of<TrainerConfig>("[loss]\ntype = \"gspo\"\ndppo_mask_low = 0.1\n");
  EXPECT_THAT(of_gspo, HasSubstr("dppo_mask_low belongs to type default"));
  EXPECT_THAT(of_gspo, Not(HasSubstr("did you mean loss.dppo_mask_low?"))) << "that is what is written";
}

TEST(Bind, AFlagMayNameAnotherVariantThanAFileHasKeysOf) {
  Value table = parse_toml("[loss]\ntype = \"default\"\ndppo_mask_low = 0.1\nkl_tau = 0.5\n", "test.toml");
  Value type("gspo");
  type.set_origin({Origin::Kind::kFlag, "--loss.type", 0});
  table.find("loss")->set("type", type);
  TrainerConfig config;
  Report report;
  bind(table, ops_of<TrainerConfig>(), &config, report);
  EXPECT_TRUE(report.problems.empty()) << describe(report.problems.front());
  EXPECT_TRUE(std::holds_alternative<GspoLossConfig>(config.loss));
  ASSERT_FALSE(report.inert.empty());
  EXPECT_EQ(report.inert.front().key, "loss.dppo_mask_low");
  EXPECT_EQ(report.inert.front().reason, "it belongs to type default, and the type is now gspo");
}

TEST(Bind, TheDefaultVariantNeedsNoType) {
  TrainerConfig config;
  EXPECT_TRUE(bind_toml("[optim]\nlr = 1e-5\n", config).problems.empty());
  EXPECT_EQ(std::get<AdamWConfig>(config.optim).lr, 1e-5);
  EXPECT_TRUE(bind_toml("[loss]\ntype = \"gspo\"\n", config).problems.empty());
  EXPECT_TRUE(std::holds_alternative<GspoLossConfig>(config.loss));
  SftConfig sft;
  EXPECT_TRUE(bind_toml("[data]\ntype = \"fake\"\nlength = \"variable\"\n", sft).problems.empty());
  EXPECT_EQ(std::get<FakeDataConfig>(sft.data).length, FakeLength::kVariable);
}

TEST(Bind, SectionsRejectScalarsAndScalarsRejectSections) {
  EXPECT_THAT(problems_of<TrainerConfig>("[model]\nac = \"full\"\n"),
              HasSubstr("model.ac: expects a table: write its keys under [model.ac]"));
  EXPECT_THAT(problems_of<TrainerConfig>("max_async_level = { a = 1 }\n"), HasSubstr("expects a whole number"));
  EXPECT_THAT(problems_of<TrainerConfig>("[seed]\nx = 1\n"), HasSubstr("seed: expects a whole number"));
}

TEST(Bind, NumbersMustBeFiniteAndFit) {
  EXPECT_THAT(problems_of<TrainerConfig>("[optim]\nlr = nan\n"), HasSubstr("optim.lr: must be a finite number"));
  EXPECT_THAT(problems_of<TrainerConfig>("[optim]\nlr = inf\n"), HasSubstr("must be a finite number"));
  EXPECT_THAT(problems_of<OrchestratorConfig>("group_size = 4294967297\n"), HasSubstr("is too large"));
  EXPECT_THAT(problems_of<TrainerConfig>("max_async_level = 0.5\n"), HasSubstr("expects a whole number"));
}

TEST(Bind, NullUnsetsOptionalKeysOnly) {
  TrainerConfig config;
  Value raw = parse_json(R"({"optim": {"max_norm": null}, "model": {"ac": null}})", "test");
  Report report;
  bind(raw, ops_of<TrainerConfig>(), &config, report);
  EXPECT_TRUE(report.problems.empty());
  EXPECT_FALSE(std::get<AdamWConfig>(config.optim).max_norm.has_value());
  raw = parse_json(R"({"optim": {"lr": null}})", "test");
  bind(raw, ops_of<TrainerConfig>(), &config, report);
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0].message, HasSubstr("cannot be None"));
}

template <class C>
void expect_round_trip(C config) {
  const Value json = dump(ops_of<C>(), &config, NullStyle::kAlways);
  C from_json;
  Report report;
  bind(parse_json(to_json(json), "dump.json"), ops_of<C>(), &from_json, report);
  EXPECT_TRUE(equals(dump(ops_of<C>(), &from_json, NullStyle::kAlways), json));

  const std::string toml = to_toml(dump(ops_of<C>(), &config, NullStyle::kIfNotDefault));
  Value parsed = parse_toml(toml, "dump.toml");
  C from_toml;
  std::function<void(Value&)> to_null = [&](Value& value) {
    if (value.is_string() && value.as_string() == "None") value = Value();
    if (value.is_table())
      for (Member& member : value.members()) to_null(member.value);
  };
  to_null(parsed);
  bind(parsed, ops_of<C>(), &from_toml, report);
  EXPECT_TRUE(equals(dump(ops_of<C>(), &from_toml, NullStyle::kAlways), json)) << toml;
  for (const Problem& problem : report.problems) ADD_FAILURE() << describe(problem);
}

TEST(Dump, ReadsBackEqual) {
  RlConfig config;
  config.inference.emplace();
  config.trainer.optim = SgdConfig{};
  std::get<SgdConfig>(config.trainer.optim).max_norm.reset();
  config.trainer.scheduler = LinearScheduler{};
  config.trainer.ckpt.emplace().weights.reset();
  config.inference->model.tool_call_parser.reset();
  config.orchestrator.train.env.resize(2);
  config.orchestrator.train.env[1].name = "second";
  config.orchestrator.train.env[1].args.set("text", Value("a \"quoted\"\nline"));
  config.orchestrator.eval.emplace().sampling.top_p = 0.9;
  config.env_vars["A"] = "1";
  expect_round_trip(config);
  expect_round_trip(SftConfig{});
  expect_round_trip(RlConfig{});
}

TEST(Dump, NullIsWrittenInTomlOnlyOverADefault) {
  TrainerConfig config;
  std::get<AdamWConfig>(config.optim).max_norm.reset();
  const std::string toml = to_toml(dump(ops_of<TrainerConfig>(), &config, NullStyle::kIfNotDefault));
  EXPECT_THAT(toml, HasSubstr("max_norm = \"None\""));
  EXPECT_THAT(toml, Not(HasSubstr("ckpt")));
}

}  // namespace
}  // namespace prl::config
