// The list of all keys, so that a new, renamed or re-defaulted key is a visible difference. After a change on purpose, run
// the test with PRL_UPDATE_GOLDEN=1 and commit the file.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "config/bind.hpp"
#include "config/cli.hpp"
#include "config/detail/test_support.hpp"
#include "config/status.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

template <class C>
void list_command(Command command, std::string& out) {
  for (const KeyInfo& info : list_keys(ops_of<C>())) {
    out += fmt::format("{} {} {}", command_name(command), info.key, info.type);
    if (!info.default_text.empty()) out += " = " + info.default_text;
    out += fmt::format(" | {} | {}\n", info.owner, info.status.kind == Status::Kind::kPassedOn ? "passed on" : status_name(info.status));
    EXPECT_FALSE(info.doc.empty()) << info.key;
    EXPECT_LE(info.doc.size(), 130u) << info.key;
  }
}

TEST(GoldenKeys, EveryKeyIsListed) {
  std::string found;
  list_command<RlConfig>(Command::kRl, found);
  list_command<SftConfig>(Command::kSft, found);
  list_command<EvalConfig>(Command::kEval, found);
  list_command<SynthesizeConfig>(Command::kSynthesize, found);
  list_command<InitModelConfig>(Command::kInitModel, found);
  list_command<MakeDataConfig>(Command::kMakeData, found);
  list_command<ResultsConfig>(Command::kResults, found);
  list_command<ConvertConfig>(Command::kConvert, found);
  list_command<ChatConfig>(Command::kChat, found);
  list_command<BenchConfig>(Command::kBench, found);
  list_command<PlanConfig>(Command::kPlan, found);
  list_command<DoctorConfig>(Command::kDoctor, found);
  list_command<EnvCommandConfig>(Command::kEnv, found);
  list_command<RouterToolConfig>(Command::kRouter, found);
  list_command<K8sConfig>(Command::kK8s, found);
  list_command<RunsToolConfig>(Command::kRuns, found);
  list_command<DashboardToolConfig>(Command::kDashboard, found);
  list_command<PlotConfig>(Command::kPlot, found);
  list_command<ReportConfig>(Command::kReport, found);
  list_command<TopConfig>(Command::kTop, found);
  list_command<ReplayConfig>(Command::kReplay, found);
  list_command<EvalsConfig>(Command::kEvals, found);
  list_command<EnvServerConfig>(Command::kEnvServer, found);
  list_command<LaunchConfig>(Command::kLaunch, found);
  const std::filesystem::path golden = test_source_dir() / "tests/golden/config_keys.txt";
  if (std::getenv("PRL_UPDATE_GOLDEN")) write_file_atomic(golden, found);
  std::istringstream wanted_lines(read_file(golden)), found_lines(found);
  std::set<std::string> wanted, present;
  for (std::string line; std::getline(wanted_lines, line);) wanted.insert(line);
  for (std::string line; std::getline(found_lines, line);) present.insert(line);
  for (const std::string& line : wanted) EXPECT_TRUE(present.contains(line)) << "gone: " << line;
  for (const std::string& line : present) EXPECT_TRUE(wanted.contains(line)) << "new: " << line;
}

/// Every file of the tree parses with the command that its place or first comment names.
TEST(Configs, EveryFileParses) {
  std::filesystem::current_path(test_source_dir());
  int num_files = 0;
  for (const char* root : {"configs", "examples"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      if (entry.path().extension() != ".toml") continue;
      const std::string path = entry.path().string();
      ++num_files;
      SCOPED_TRACE(path);
      const auto contains = [&](const char* part) { return path.find(part) != std::string::npos; };
      if (contains("/eval/") || contains("eval.toml")) {
        EXPECT_EQ(testing::error_of<EvalConfig>("eval @ " + path), "");
      } else if (contains("/synthesize/")) {
        EXPECT_EQ(testing::error_of<SynthesizeConfig>("synthesize @ " + path), "");
      } else if (contains("debug/rl/train")) {
        EXPECT_EQ(testing::error_of<TrainerConfig>("trainer @ " + path), "");
      } else if (contains("sft")) {
        EXPECT_EQ(testing::error_of<SftConfig>("sft @ " + path), "");
      } else if (contains("infer")) {
        EXPECT_EQ(testing::error_of<InferenceConfig>("inference @ " + path), "");
      } else {
        EXPECT_EQ(testing::error_of<RlConfig>("rl @ " + path), "");
      }
    }
  }
  EXPECT_GE(num_files, 14);
}

TEST(Configs, TheRunnableOnesNeedNothingThatIsMissing) {
  std::filesystem::current_path(test_source_dir());
  for (const char* path :
       {"configs/demo/rl.toml", "configs/reverse_text/rl.toml", "configs/reverse_text/rl_lockstep.toml", "configs/alphabet_sort/rl.toml"}) {
    const auto rl = testing::load_line<RlConfig>(std::string("rl @ ") + path);
    for (const NotBuilt& entry : rl.not_built) ADD_FAILURE() << path << " " << entry.key << ": " << entry.feature;
  }
  for (const char* path : {"configs/debug/synthesize/single_turn.toml", "configs/debug/synthesize/multi_env.toml",
                           "configs/debug/synthesize/multi_turn.toml", "configs/debug/synthesize/multi_turn_tool_call.toml"})
    EXPECT_TRUE(testing::load_line<SynthesizeConfig>(std::string("synthesize --client.base-url http://h/v1 @ ") + path).not_built.empty());
  for (const char* path : {"examples/gsm8k/eval.toml", "examples/wordle/eval.toml", "examples/wiki_search/eval.toml"})
    EXPECT_TRUE(testing::load_line<EvalConfig>(std::string("eval --client.base-url http://h/v1 @ ") + path).not_built.empty()) << path;
  EXPECT_TRUE(testing::load_line<SftConfig>("sft @ configs/reverse_text/sft.toml").not_built.empty());
  EXPECT_EQ(testing::load_line<RlConfig>("rl @ configs/reverse_text/rl_lockstep.toml").config.orchestrator.max_async_level, 0);
}

}  // namespace
}  // namespace prl::config
