#include "config/args.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/detail/test_support.hpp"
#include "config/merge.hpp"

namespace prl::config {
namespace {

using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::load_line;
using ::testing::Pair;
using testing::parse_line;
using testing::split;

ParsedArgs parse(const std::string& line) {
  Report report;
  ParsedArgs parsed = parse_args(split(line), {}, report);
  for (const Problem& problem : report.problems) ADD_FAILURE() << describe(problem);
  return parsed;
}

std::string problem_of(const std::string& line) {
  Report report;
  parse_args(split(line), {}, report);
  return report.problems.empty() ? "" : describe(report.problems.front());
}

TEST(Args, FilesAtTheRootAndUnderSections) {
  const ParsedArgs parsed = parse("@ a.toml --trainer @ b.toml @ c.toml --orchestrator.train @d.toml --max-steps 5");
  EXPECT_THAT(parsed.root_files, ElementsAre("a.toml", "c.toml"));
  EXPECT_THAT(parsed.section_files, ElementsAre(Pair("trainer", "b.toml"), Pair("orchestrator.train", "d.toml")));
  EXPECT_EQ(parsed.flags.find("max_steps")->as_string(), "5");
}

TEST(Args, KebabSnakeEqualsAndNegation) {
  const ParsedArgs parsed = parse("--a.b-c=1 --d_e 2 --no-f.g-h --i");
  EXPECT_EQ(find_path(parsed.flags, "a.b_c")->as_string(), "1");
  EXPECT_EQ(parsed.flags.find("d_e")->as_string(), "2");
  EXPECT_FALSE(find_path(parsed.flags, "f.g_h")->as_bool());
  EXPECT_TRUE(parsed.flags.find("i")->as_bool());
  EXPECT_EQ(find_path(parsed.flags, "a.b_c")->origin().where, "--a.b-c");
}

TEST(Args, ValuesAreGreedyAndMayStartWithOneDash) {
  const ParsedArgs parsed = parse("--xs 1 2 -1e-3 --y -5");
  EXPECT_EQ(parsed.flags.find("xs")->items().size(), 3u);
  EXPECT_EQ(parsed.flags.find("y")->as_string(), "-5");
}

TEST(Args, JsonValuesBecomeTrees) {
  const ParsedArgs parsed = parse(R"(--args {"a":{"b":[1,null]}} --xs [1,2] --pattern [a-z]+])");
  EXPECT_EQ(find_path(parsed.flags, "args.a.b.0")->as_int(), 1);
  EXPECT_EQ(parsed.flags.find("xs")->items().size(), 2u);
  EXPECT_TRUE(parsed.flags.find("pattern")->is_string());
}

TEST(Args, ASwitchNextToItsKeysKeepsThem) {
  EXPECT_EQ(find_path(parse("--ckpt --ckpt.interval 5").flags, "ckpt.interval")->as_string(), "5");
  EXPECT_EQ(find_path(parse("--ckpt.interval 5 --ckpt").flags, "ckpt.interval")->as_string(), "5");
}

TEST(Args, MistakesAreExplained) {
  EXPECT_THAT(problem_of("@rl.toml"), HasSubstr("needs a space after the @: write `@ rl.toml`"));
  EXPECT_THAT(problem_of("--max-steps 5 @rl.toml"), HasSubstr("needs a space"));
  EXPECT_THAT(problem_of("@"), HasSubstr("must be followed by the path"));
  EXPECT_THAT(problem_of("--trainer @"), HasSubstr("must be followed by the path"));
  EXPECT_THAT(problem_of("rl.toml"), HasSubstr("with a space between: `@ rl.toml`"));
  EXPECT_THAT(problem_of("--no-x=1"), HasSubstr("takes no value"));
  EXPECT_THAT(problem_of("--.x 1"), HasSubstr("not the name of a key"));
}

TEST(Args, TypesOfFlagsComeFromTheSchema) {
  const auto trainer = load_line<TrainerConfig>(
      "trainer --max-steps 1e3 --optim.lr 1e-5 --model.ac.freq=2 --deterministic true --log.ranks-filter 0,1 2 --seed 7 "
      "--model.lora.target-modules q_proj v_proj --env-vars {\"A\":\"x\"}");
  EXPECT_EQ(trainer.config.max_steps, 1000);
  EXPECT_EQ(std::get<AdamWConfig>(trainer.config.optim).lr, 1e-5);
  EXPECT_TRUE(trainer.config.deterministic);
  EXPECT_THAT(trainer.config.log.ranks_filter, ElementsAre(0, 1, 2));
  EXPECT_THAT(trainer.config.model.lora->target_modules, ElementsAre("q_proj", "v_proj"));
  EXPECT_EQ(trainer.config.env_vars.at("A"), "x");
  for (const char* flags : {"--env.id reverse-text --env.0.args {\"n\":5}", "--env.0.args {\"n\":5} --env.0.id reverse-text",
                            "--env.0.args.n 5 --env.id reverse-text --env.1.id wordle"}) {
    const EvalConfig eval = load_line<EvalConfig>(std::string("eval --model.name m ") + flags).config;
    ASSERT_GE(eval.env.size(), 1u) << flags;
    EXPECT_EQ(eval.env[0].id, "reverse-text") << flags;
    EXPECT_EQ(eval.env[0].args.find("n")->as_int(), 5) << flags;
    EXPECT_TRUE(eval.env.size() == 1 || eval.env[1].id == "wordle") << flags;
  }
  using Map = std::map<std::string, std::string>;
  const Map one{{"sql", "org/a=b"}}, two{{"sql", "A"}, {"chat", "B"}};
  EXPECT_EQ(load_line<InferenceConfig>("inference --enable-lora --lora-modules sql=org/a=b").config.lora_modules, one);
  EXPECT_EQ(load_line<InferenceConfig>("inference --enable-lora --lora-modules sql=A chat=B").config.lora_modules, two);
  for (const char* wrong : {"sql", "=A", "sql=A chat"})
    EXPECT_THROW(load_line<InferenceConfig>(std::string("inference --enable-lora --lora-modules ") + wrong), Error) << wrong;
}

TEST(Args, FreeArgumentsTakeTheTypeTheyLookLike) {
  const auto rl = load_line<OrchestratorConfig>(
      "orchestrator --train.env.0.args.n 5 --train.env.0.args.p 0.5 --train.env.0.args.on true --train.env.0.args.text hi");
  const Value& args = rl.config.train.env.at(0).args;
  EXPECT_TRUE(args.find("n")->is_int());
  EXPECT_TRUE(args.find("p")->is_float());
  EXPECT_TRUE(args.find("on")->is_bool());
  EXPECT_TRUE(args.find("text")->is_string());
}

TEST(Args, WrongFlagsSayWhatToType) {
  EXPECT_THAT(error_of<TrainerConfig>("trainer --max-stepz 5"),
              HasSubstr("max_stepz: unknown key (got \"5\") [flag --max-stepz]; did you mean max_steps"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --max-steps"), HasSubstr("--max-steps requires a value"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model"), HasSubstr("is a group of keys, such as --model.name"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --max-steps 1 2"), HasSubstr("takes one value, got 2"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --deterministic maybe"), HasSubstr("expects true or false"));
  EXPECT_THAT(error_of<TrainerConfig>("trainer --model.attn flash"), HasSubstr("must be one of auto, sdpa"));
  EXPECT_THAT(error_of<SftConfig>("sft --model.cp"), HasSubstr("--model.cp requires a value"));
}

TEST(Args, NoneUnsetsAndNoSwitchesOff) {
  EXPECT_FALSE(std::get<AdamWConfig>(load_line<TrainerConfig>("trainer --optim.max-norm None").config.optim).max_norm.has_value());
  EXPECT_FALSE(load_line<TrainerConfig>("trainer --ckpt.interval 5 --no-ckpt").config.ckpt.has_value());
  EXPECT_TRUE(load_line<TrainerConfig>("trainer --no-ckpt --ckpt.interval 5").config.ckpt.has_value());
  EXPECT_FALSE(load_line<TrainerConfig>("trainer --wandb.offline --no-wandb.log-extras").config.wandb->log_extras.has_value());
  EXPECT_TRUE(load_line<SftConfig>("sft --model.ac").config.model.ac.has_value());
}

TEST(Args, EmptyListsAndSwitchesOfLists) {
  EXPECT_TRUE(load_line<TrainerConfig>("trainer --log.ranks-filter").config.log.ranks_filter.empty());
  EXPECT_TRUE(load_line<OrchestratorConfig>("orchestrator --filters []").config.filters.empty());
}

TEST(Environment, VariablesNameNestedKeys) {
  Context context = testing::plain_context();
  context.environment = {{"PRIME_MODEL__SEQ_LEN", "512"}, {"PRIME_MAX_STEPS", "9"},        {"PRIME_API_KEY", "secret"},
                         {"PRIME_LOG_LEVEL", "debug"},    {"PRIME_VF_LOG_LEVEL", "error"}, {"OTHER", "x"},
                         {"PRIME_SOMETHING__ELSE", "1"},  {"PRIME_OPTIM__LR", "0.5"}};
  const auto trainer = load_line<TrainerConfig>("trainer --optim.lr 0.25", context);
  EXPECT_EQ(trainer.config.model.seq_len, 512);
  EXPECT_EQ(trainer.config.max_steps, 9);
  EXPECT_EQ(trainer.config.log.level, LogLevel::kDebug);
  EXPECT_EQ(trainer.config.log.vf_level, LogLevel::kError);
  EXPECT_EQ(std::get<AdamWConfig>(trainer.config.optim).lr, 0.25);
  EXPECT_THAT(trainer.warnings, ::testing::Contains(HasSubstr("PRIME_SOMETHING__ELSE")));
  context.environment = {{"PRIME_MODEL__SEQ_LENGTH", "512"}};
  EXPECT_THAT(error_of<TrainerConfig>("trainer", context), HasSubstr("[variable PRIME_MODEL__SEQ_LENGTH]; did you mean model.seq_len"));
}

TEST(CommandLine, NamesOfCommandsAndLinks) {
  EXPECT_EQ(parse_line("rl @ x.toml").command, Command::kRl);
  EXPECT_EQ(parse_line("uv run rl @ x.toml").args, (std::vector<std::string>{"@", "x.toml"}));
  const char* linked[] = {"/usr/bin/sft", "--ckpt"};
  EXPECT_EQ(parse_command(2, linked).command, Command::kSft);
  EXPECT_EQ(parse_command(2, linked).program, "sft");
  EXPECT_TRUE(parse_line("--version").wants_version);
  EXPECT_FALSE(parse_line("--help").command.has_value());
  EXPECT_FALSE(parse_line("").command.has_value());
  EXPECT_THAT(program_help(), HasSubstr("synthesize"));
}

TEST(CommandLine, OtherProgramsAreExplained) {
  const auto message = [](const std::string& line) {
    try {
      parse_line(line);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message("trian"), HasSubstr("did you mean `trainer`"));
  EXPECT_THAT(message("helpp"), HasSubstr("did you mean `help`"));
  EXPECT_THAT(message("@ rl.toml"), HasSubstr("the command must come first"));
  EXPECT_THAT(message("vllm serve x"), HasSubstr("prl inference --model.name"));
  EXPECT_THAT(message("uv pip install x"), HasSubstr("nothing here needs that"));
}

TEST(Help, ListsKeysWithTypesUnitsRangesAndDefaults) {
  const auto loaded = load_line<RlConfig>("rl --help all");
  ASSERT_TRUE(loaded.help.has_value());
  EXPECT_THAT(*loaded.help, HasSubstr("usage: prl rl [@ FILE]"));
  EXPECT_THAT(*loaded.help, HasSubstr("--max-async-level <int?>"));
  EXPECT_THAT(*loaded.help, HasSubstr("steps, 0 to 64"));
  EXPECT_THAT(*loaded.help, HasSubstr("trainer.optim<sgd>"));
  EXPECT_THAT(*load_line<SftConfig>("sft -h all").help, HasSubstr("--data<fake>.length <fixed|variable>"));
}

}  // namespace
}  // namespace prl::config
