#include "config/cli.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "base/files.hpp"
#include "base/rng.hpp"
#include "base/testing/source_dir.hpp"
#include "config/bind.hpp"
#include "config/detail/test_support.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::load_line;
using ::testing::Not;

class CliFiles : public ::testing::Test {
 protected:
  CliFiles() : folder_(std::filesystem::path(::testing::TempDir()) / "prl_config_cli") { std::filesystem::remove_all(folder_); }
  ~CliFiles() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

TEST_F(CliFiles, DryRunWritesAFilePerRoleThatReadsBackEqual) {
  const auto rl = load_line<RlConfig>(
      "rl --model.name ./m --inference --max-steps 3 --deployment.type single_node --dry-run --output-dir " + folder_.string());
  EXPECT_TRUE(finish_early(Command::kRl, rl));
  for (const char* name : {"rl", "trainer", "orchestrator", "inference"})
    for (const char* extension : {".toml", ".json"})
      EXPECT_TRUE(std::filesystem::exists(folder_ / "configs" / (std::string(name) + extension))) << name << extension;
  const std::string configs = (folder_ / "configs/").string();
  const auto expect_equal = [&](const auto& config, const std::string& command, const char* extension) {
    using C = std::decay_t<decltype(config)>;
    const auto again = load_line<C>(command + " @ " + configs + command + extension);
    EXPECT_EQ(to_json(dump(ops_of<C>(), &again.config, NullStyle::kAlways)), to_json(dump(ops_of<C>(), &config, NullStyle::kAlways)))
        << command << extension;
  };
  for (const char* extension : {".toml", ".json"}) {
    expect_equal(rl.config.trainer, "trainer", extension);
    expect_equal(rl.config.orchestrator, "orchestrator", extension);
    expect_equal(*rl.config.inference, "inference", extension);
    expect_equal(rl.config, "rl", extension);
  }
}

/// What a run saved: extended by `flags`, it resolves to what the first line and the flags resolve to together.
template <class C>
void expect_varies(Command command, const std::filesystem::path& folder, const std::string& line, const std::string& flags) {
  SCOPED_TRACE(line + flags);
  const auto first = load_line<C>(line + "--output-dir " + folder.string());
  write_resolved(command, first.config, first.provenance);
  const std::string name(command_name(command));
  for (const char* extension : {".toml", ".json"}) {
    const std::string saved = fmt::format("{} @ {}{} ", name, (folder / "configs" / name).string(), extension);
    const auto text = [](const C& config) { return to_json(dump(ops_of<C>(), &config, NullStyle::kAlways)); };
    EXPECT_EQ(text(load_line<C>(saved).config), text(first.config)) << extension;
    EXPECT_EQ(text(load_line<C>(saved + flags).config), text(load_line<C>(line + "--output-dir " + folder.string() + " " + flags).config))
        << extension;
  }
}

TEST_F(CliFiles, NoFileOfTheUserIsReplaced) {
  const auto rl = load_line<RlConfig>("rl --model.name ./m --inference --dry-run --output-dir " + folder_.string());
  const auto sft = load_line<SftConfig>("sft --model.name ./m --dry-run --output-dir " + folder_.string());
  const auto refused = [&](const std::string& name) {
    const std::filesystem::path path = folder_ / "configs" / name;
    std::filesystem::create_directories(path.parent_path());
    write_file_atomic(path, "# mine\n");
    std::string error;
    try {
      name == "sft.toml" ? finish_early(Command::kSft, sft) : finish_early(Command::kRl, rl);
    } catch (const Error& caught) {
      error = caught.what();
    }
    EXPECT_EQ(read_file(path), "# mine\n");
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "configs"), {}), 1) << name;
    std::filesystem::remove(path);
    return error;
  };
  for (const char* name : {"rl.toml", "rl.json", "trainer.toml", "orchestrator.json", "teacher_inference.toml", "sft.toml"})
    EXPECT_THAT(refused(name), AllOf(HasSubstr(name), HasSubstr("was not made by a run"))) << name;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(finish_early(Command::kRl, rl)) << "its own give way";
}

TEST_F(CliFiles, TheEvaluationsOfAFineTuningRunGetAFileOfTheirOwn) {
  const auto sft = load_line<SftConfig>(
      "sft --model.name ./m --data.name d.jsonl --max-steps 9 --dry-run --eval.env.0.id gsm8k --output-dir " + folder_.string());
  EXPECT_TRUE(finish_early(Command::kSft, sft));
  const EvalsConfig wanted = evals_of(sft.config);
  const auto found = load_line<EvalsConfig>("evals @ " + (folder_ / "configs/evals.json").string());
  const auto text = [](const EvalsConfig& config) { return to_json(dump(ops_of<EvalsConfig>(), &config, NullStyle::kAlways)); };
  EXPECT_EQ(text(found.config), text(wanted));
  EXPECT_THAT(found.warnings, ::testing::IsEmpty());
  std::filesystem::remove_all(folder_ / "configs");
  std::filesystem::create_directories(folder_ / "configs");
  write_file_atomic(folder_ / "configs/evals.toml", "# mine\n");
  EXPECT_THROW(finish_early(Command::kSft, sft), Error);
  EXPECT_EQ(read_file(folder_ / "configs/evals.toml"), "# mine\n");
}

TEST_F(CliFiles, ASavedConfigurationCanBeVaried) {
  const std::string rl = "rl --model.name ./m --inference --max-steps 9 --seq-len 512 --ckpt.interval 3 ";
  for (const char* flags : {"--max-steps 2",
                            "--output-dir other",
                            "--seq-len 256",
                            "--max-async-level 3",
                            "--model.name ./other",
                            "--ckpt.interval 5",
                            "--no-ckpt",
                            "--seed 7",
                            "--deterministic",
                            "--compute.device cpu",
                            "--weight-broadcast.type filesystem --deployment.type single_node",
                            "--inference.server.port 9000",
                            "--orchestrator.batch-size 16",
                            "--orchestrator.oversampling-factor 2",
                            "--trainer.loss.type opo",
                            "--orchestrator.train.env.0.data tasks.jsonl",
                            "--trainer.loss.clip-ratio 4",
                            "--bench",
                            "--log.level debug",
                            "--max-model-len 128",
                            "--tokenizer.chat-template x.jinja",
                            "--env-vars.A 1",
                            "--trainer.max-steps 9",
                            "--inference.compute.dtype float32",
                            "--trainer.seed 7",
                            "--trainer.compute.num-threads 2",
                            "--trainer.optim.type muon",
                            "--deployment.type single_node --inference.api-key secret-key"})
    expect_varies<RlConfig>(Command::kRl, folder_, rl, flags);
  expect_varies<RlConfig>(Command::kRl, folder_, rl + "--orchestrator.train.env.0.data a.jsonl --deterministic ",
                          "--orchestrator.train.env.0.data b.jsonl --no-deterministic");
  for (const char* flags :
       {"--max-steps 2", "--output-dir other", "--data.seq-len 64", "--bench", "--model.name ./other", "--val.interval 7"})
    for (const char* eval : {"", "--eval.env.0.id gsm8k "})
      expect_varies<SftConfig>(Command::kSft, folder_, fmt::format("sft --model.name ./m --data.name d.jsonl --max-steps 9 {}", eval),
                               flags);
  for (const char* flags :
       {"--max-steps 2", "--loss.clip-ratio 4", "--loss.type cispo", "--output-dir other", "--bench", "--optim.type muon"})
    expect_varies<TrainerConfig>(Command::kTrainer, folder_, "trainer --model.name ./m --max-steps 9 ", flags);
  expect_varies<TrainerConfig>(Command::kTrainer, folder_, "trainer --loss.token-mask-low 0.2 ", "--loss.token-mask-high 4");
  for (const char* flags : {"--max-steps 2", "--batch-size 16", "--oversampling-factor 3", "--token-batch-size 1000", "--output-dir other"})
    expect_varies<OrchestratorConfig>(Command::kOrchestrator, folder_, "orchestrator --student.model.name ./m --max-steps 9 ", flags);
  for (const char* flags : {"--port 9001", "--model.dtype bfloat16", "--output-dir other"})
    expect_varies<InferenceConfig>(Command::kInference, folder_, "inference --model.name ./m ", flags);
  for (const char* flags : {"--env.0.data b.jsonl", "--num-examples 3", "--client.base-url http://h/v1", "--output-dir other"}) {
    expect_varies<EvalConfig>(Command::kEval, folder_, "eval --model.name m --env.0.data a.jsonl ", flags);
    expect_varies<SynthesizeConfig>(Command::kSynthesize, folder_, "synthesize --model.name m --env.0.data a.jsonl ", flags);
  }
}

TEST_F(CliFiles, DryRunOfWhatIsNotBuiltWritesAndThenFails) {
  const auto rl = load_line<RlConfig>("rl --model.name ./m --inference --trainer.model.quantization.type mxfp8 --dry-run --output-dir " +
                                      folder_.string());
  EXPECT_THROW(finish_early(Command::kRl, rl), Error);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "configs/rl.json"));
}

TEST(Render, TheBoxHasStraightEdgesAndWrapsLongLines) {
  std::vector<Problem> problems(3);
  problems[0] = {"a.b", std::string(150, 'x') + " " + std::string(30, 'y'), "1", {Origin::Kind::kFile, "rl.toml", 3}, {"a.c"}};
  problems[1] = {"", "caf\xc3\xa9 \xe2\x82\xac", "", {}, {}};
  problems[2] = {"d", "line one\nline two", "", {}, {}};
  const std::string box = render_error(ConfigError("rl", problems), 60, false);
  EXPECT_THAT(box, HasSubstr("Configuration error"));
  EXPECT_THAT(box, Not(HasSubstr("\x1b[")));
  EXPECT_THAT(render_error(ConfigError("rl", problems), 60, true), HasSubstr("\x1b[31m"));
  std::istringstream lines(box);
  std::vector<std::size_t> widths;
  for (std::string line; std::getline(lines, line);)
    widths.push_back(static_cast<std::size_t>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; })));
  EXPECT_THAT(widths, Each(60u));
  EXPECT_THAT(render_error(ConfigError("rl", problems), 5, false), HasSubstr("Configuration error"));
}

TEST(Render, TheTitleSaysWhereTheProblemsAre) {
  const auto title = [](Origin::Kind kind) {
    Problem problem{"a.b", "is wrong", "1", {kind, "here", 3}, {}};
    return render_error(ConfigError("rl", {problem}), 80, false);
  };
  EXPECT_THAT(title(Origin::Kind::kFile), HasSubstr("Config file error"));
  EXPECT_THAT(title(Origin::Kind::kFlag), HasSubstr("Command line error"));
  EXPECT_THAT(title(Origin::Kind::kEnvironment), HasSubstr("Environment variable error"));
  EXPECT_THAT(title(Origin::Kind::kDefault), HasSubstr("Configuration error"));
  EXPECT_THAT(render_error(ConfigError("rl", {{{}, "unexpected argument `x`", {}, {}, {}}}), 80, false), HasSubstr("Command line error"));
}

/// The help that `prl COMMAND --help WORDS` prints.
std::string help_of(const std::string& line) { return load_line<RlConfig>(line).help.value_or(""); }
template <class C>
void expect_short_help(Command command) {
  const std::string text = command_help(command, ops_of<C>(), {}, 110);
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 55) << text;
  EXPECT_THAT(text, HasSubstr(fmt::format("prl {} ", command_name(command))));
}

TEST(Help, OfEachCommandIsAPage) {
  expect_short_help<RlConfig>(Command::kRl);
  expect_short_help<TrainerConfig>(Command::kTrainer);
  expect_short_help<OrchestratorConfig>(Command::kOrchestrator);
  expect_short_help<InferenceConfig>(Command::kInference);
  expect_short_help<SftConfig>(Command::kSft);
  expect_short_help<EvalConfig>(Command::kEval);
  expect_short_help<SynthesizeConfig>(Command::kSynthesize);
  expect_short_help<ResultsConfig>(Command::kResults);
  expect_short_help<InitModelConfig>(Command::kInitModel);
  expect_short_help<MakeDataConfig>(Command::kMakeData);
  expect_short_help<ConvertConfig>(Command::kConvert);
  expect_short_help<ChatConfig>(Command::kChat);
  expect_short_help<BenchConfig>(Command::kBench);
  expect_short_help<PlanConfig>(Command::kPlan);
  const std::string text = help_of("rl --help");
  for (const char* key : {"--model.name", "--orchestrator.train.env.0.id", "--trainer.optim.lr", "--ckpt.resume-step", "trainer "})
    EXPECT_THAT(text, HasSubstr(key));
}

TEST(Help, OfASectionIsThatSectionAlone) {
  const std::string ckpt = help_of("rl --help ckpt");
  EXPECT_THAT(ckpt, HasSubstr("--ckpt.interval"));
  EXPECT_THAT(ckpt, HasSubstr("--ckpt.weights.save-format"));
  EXPECT_THAT(ckpt, Not(HasSubstr("--trainer")));
  EXPECT_EQ(help_of("help rl trainer.optim"), help_of("rl --help --trainer.optim"));
  EXPECT_THAT(help_of("rl --help trainer.optim"), HasSubstr("--trainer.optim<muon>.mu"));
  EXPECT_THAT(help_of("rl --help orchestrator.train.env.0"), HasSubstr("--orchestrator.train.env[].group-size"));
  const std::string trainer = help_of("rl --help trainer");
  EXPECT_THAT(trainer, HasSubstr("trainer.model"));
  EXPECT_THAT(trainer, Not(HasSubstr("--trainer.model.seq-len")));
  EXPECT_THAT(help_of("rl --help max-steps"), HasSubstr("--max-steps <int?>"));
  EXPECT_THAT(testing::error_of<RlConfig>("rl --help trainer.modle"), HasSubstr("did you mean trainer.model"));
}

TEST(Help, OfAllMarksWhatHasNoEffectAndWhatIsNotBuilt) {
  const std::string all = help_of("rl --help all");
  EXPECT_THAT(all, HasSubstr("[not built: "));
  EXPECT_THAT(all, HasSubstr("[inert: there"));
}

TEST(FirstHour, MessagesSayWhatToType) {
  const auto error = [](const std::string& line) { return testing::error_of<RlConfig>(line); };
  EXPECT_THAT(error("rl rl.toml"), HasSubstr("`@ rl.toml`"));
  EXPECT_THAT(error("rl rl.yaml"), HasSubstr("TOML or JSON"));
  EXPECT_THAT(error("rl max_steps=3"), HasSubstr("`--max-steps 3`"));
  EXPECT_THAT(error("rl -max-steps 3"), AllOf(HasSubstr("`--max-steps`"), HasSubstr("1 problem")));
  EXPECT_THAT(error("rl --inference --model.name ./m --max-steps"),
              AllOf(HasSubstr("--max-steps requires a value"), HasSubstr("1 problem")));
  EXPECT_THAT(error("rl @ nowhere.toml --max-steps x"), AllOf(HasSubstr("nowhere.toml"), HasSubstr("1 problem")));
  EXPECT_THAT(error("rl --inference --model.name ./m --lr 1e-5"), HasSubstr("trainer.optim.lr"));
  EXPECT_THAT(error("rl --inference --model.name ./m --batch-size 8"), HasSubstr("orchestrator.batch_size"));
  EXPECT_EQ(load_line<RlConfig>("rl --inference --model.name ./m --compute.device gpu").config.trainer.compute.device, DeviceKind::kCuda);
  EXPECT_TRUE(testing::parse_line("rl --version").wants_version);
  EXPECT_EQ(testing::parse_line("help sft").command, Command::kSft);
}

TEST(Nearest, NamesBySimilarity) {
  const std::vector<std::string> names = {"max_steps", "max_async_level", "seed", "seq_len"};
  EXPECT_EQ(nearest_names("max_step", names).front(), "max_steps");
  EXPECT_TRUE(nearest_names("zzz", names).empty());
  EXPECT_TRUE(nearest_names("", names).empty());
  EXPECT_LE(nearest_names("s", {"s1", "s2", "s3", "s4", "s5"}).size(), 3u);
}

/// Random damage to real files: every outcome is a configuration or an error with a message, never a crash.
TEST(Fuzz, DamagedFilesEndInErrors) {
  const std::filesystem::path seeds = test_source_dir() / "tests/seeds";
  std::vector<std::string> texts;
  for (const auto& entry : std::filesystem::directory_iterator(seeds))
    if (entry.path().extension() == ".toml") texts.push_back(read_file(entry.path()));
  std::sort(texts.begin(), texts.end());
  ASSERT_GE(texts.size(), 10u);
  const std::vector<std::string> pieces = {"[",        "]",
                                           "[[a]]\n",  "=",
                                           "\"",       "{",
                                           "}",        "\n",
                                           "None",     "true",
                                           "1e400",    "-1",
                                           "nan",      "type = \"sgd\"\n",
                                           "[ckpt]\n", "0.5",
                                           "\xff",     "[orchestrator.env]\n"};
  Rng rng(2024);
  int num_resolved = 0, num_errors = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string text = texts[rng.next_below(texts.size())];
    const std::uint64_t num_edits = 1 + rng.next_below(4);
    for (std::uint64_t edit = 0; edit < num_edits && !text.empty(); ++edit) {
      const std::size_t at = rng.next_below(text.size());
      switch (rng.next_below(4)) {
        case 0: text.erase(at, 1 + rng.next_below(10)); break;
        case 1: text.insert(at, pieces[rng.next_below(pieces.size())]); break;
        case 2: text[at] = static_cast<char>(rng.next_below(256)); break;
        default: {
          const std::string other = texts[rng.next_below(texts.size())];
          text.insert(at, other.substr(rng.next_below(other.size())));
        }
      }
    }
    try {
      const Value raw = parse_toml(text, "fuzz.toml");
      const auto resolution = resolve<RlConfig>(raw, testing::plain_context());
      for (const Problem& problem : resolution.report.problems) EXPECT_FALSE(describe(problem).empty());
      num_resolved += resolution.report.problems.empty() ? 1 : 0;
      num_errors += resolution.report.problems.empty() ? 0 : 1;
      to_toml(dump(ops_of<RlConfig>(), &resolution.config, NullStyle::kIfNotDefault));
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()), "");
      ++num_errors;
    }
  }
  EXPECT_GT(num_resolved, 25);
  EXPECT_GT(num_errors, 50);
}

/// The same for whole command lines, through files, aliases, merge and binding.
TEST(Fuzz, RandomCommandLinesEndInErrors) {
  std::filesystem::current_path(test_source_dir());
  const std::vector<std::string> words = {"@",
                                          "tests/seeds/full_rl.toml",
                                          "@x",
                                          "--trainer",
                                          "--orchestrator",
                                          "--orchestrator.env.0.id",
                                          "--orchestrator.env",
                                          "--inference",
                                          "--no-inference",
                                          "--ckpt",
                                          "--no-ckpt",
                                          "--wandb.log-extras",
                                          "None",
                                          "true",
                                          "[]",
                                          "{}",
                                          "{\"a\":{\"b\":1}}",
                                          "1,2",
                                          "-1",
                                          "--",
                                          "--resume",
                                          "--algo",
                                          "--orchestrator.algo",
                                          "--orchestrator.advantage",
                                          "--orchestrator.eval.source",
                                          "--trainer.model.fp8",
                                          "--model",
                                          "--orchestrator.train.env.7.id",
                                          "--inference.model",
                                          "--trainer.loss",
                                          "--weight-broadcast",
                                          "nccl",
                                          "--max-steps",
                                          "x",
                                          "--env-vars",
                                          "--=",
                                          "--.",
                                          "--a..b",
                                          "---x",
                                          "--no-",
                                          "--output-dir",
                                          "--orchestrator.batch-size",
                                          "0",
                                          "--seed",
                                          "99999999999999999999"};
#if defined(__SANITIZE_THREAD__)
  constexpr int kRounds = 300;  // one thread, a hundred times slower
#else
  constexpr int kRounds = 3000;
#endif
  Rng rng(7);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::string> line;
    const std::uint64_t count = rng.next_below(8);
    for (std::uint64_t i = 0; i < count; ++i) line.push_back(words[rng.next_below(words.size())]);
    try {
      load<RlConfig>(Command::kRl, line, testing::plain_context());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
  }
}

}  // namespace
}  // namespace prl::config
