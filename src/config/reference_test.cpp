// docs/configuration/ is written from the schema. After a change of keys, run the test with PRL_UPDATE_GOLDEN=1 and commit the pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "config/bind.hpp"
#include "config/cli.hpp"
#include "config/status.hpp"

namespace prl::config {
namespace {

std::string cell(std::string_view text) {
  std::string escaped;
  for (const char c : text) escaped += c == '|' ? std::string("\\|") : std::string(1, c);
  return escaped;
}

std::string status_cell(Status status) {
  if (status.has_effect()) return "built";
  std::string text = fmt::format("**{}**: {}", status_name(status), status.text);
  if (!status.instead.empty()) text += fmt::format("; {}", status.instead);
  return text;
}

std::string section_of(const std::string& key) {
  const std::size_t dot = key.rfind('.');
  return dot == std::string::npos ? std::string() : key.substr(0, dot);
}

/// One table per section. `elsewhere`: sections whose keys have pages of their own.
std::string tables(const TypeOps& ops, const std::vector<std::string>& elsewhere = {}) {
  const std::vector<KeyInfo> keys = list_keys(ops);
  std::vector<std::string> sections, hidden;
  for (const std::string& section : elsewhere) hidden.push_back(section + ".");
  const auto is_hidden = [&](const KeyInfo& info) {
    return std::any_of(hidden.begin(), hidden.end(), [&](const std::string& prefix) { return info.key.starts_with(prefix); });
  };
  std::vector<KeyInfo> shown;
  for (const KeyInfo& info : keys) {
    if (is_hidden(info)) continue;
    shown.push_back(info);
    // One line says that a section has no effect or is not built.
    if (info.is_section && !info.status.has_effect()) hidden.insert(hidden.end(), {info.key + ".", info.key + "[]", info.key + "<"});
    const std::string section = section_of(info.key);
    if (std::find(sections.begin(), sections.end(), section) == sections.end()) sections.push_back(section);
  }
  std::stable_sort(sections.begin(), sections.end(), [](const std::string& a, const std::string& b) { return a.empty() && !b.empty(); });
  std::string text;
  for (const std::string& section : sections) {
    if (!section.empty()) text += fmt::format("\n## `{}`\n", section);
    text += "\n| key | type | default | status | meaning |\n|---|---|---|---|---|\n";
    for (const KeyInfo& info : shown) {
      if (section_of(info.key) != section) continue;
      const std::string name = info.key.substr(section.empty() ? 0 : section.size() + 1);
      std::string doc(info.doc);
      if (!info.meta.unit.empty()) doc += fmt::format(" ({})", info.meta.unit);
      const std::string usual = info.default_text.empty() ? std::string() : fmt::format("`{}`", cell(info.default_text));
      text += fmt::format("| `{}` | {} | {} | {} | {} |\n", name, cell(info.type), usual, status_cell(info.status), cell(doc));
    }
  }
  return text;
}

class Reference : public ::testing::Test {
 protected:
  void expect_page(const std::string& name, const std::string& title, const std::string& text) {
    const std::filesystem::path path = folder_ / (name + ".md");
    const std::string page = fmt::format(
        "# {}\n\n<!-- Generated from src/config/ by `PRL_UPDATE_GOLDEN=1 config_test`; edits here are lost. -->\n{}", title, text);
    if (std::getenv("PRL_UPDATE_GOLDEN")) write_file_atomic(path, page);
    EXPECT_TRUE(std::filesystem::exists(path) && read_file(path) == page)
        << path << " is stale: run config_test with PRL_UPDATE_GOLDEN=1 and commit the page";
  }
  template <class C>
  void expect_command(Command command) {
    const std::string name(command_name(command));
    std::string purpose;
    for (const CommandInfo& info : all_commands())
      if (info.command == command) purpose = std::string(info.purpose);
    expect_page(name, fmt::format("Keys of `prl {}`", name),
                fmt::format("\n{}. [What the columns mean](README.md).\n{}", purpose, tables(ops_of<C>())));
  }

  std::filesystem::path folder_ = test_source_dir() / "docs/configuration";
};

TEST_F(Reference, EveryCommandHasAPageThatIsUpToDate) {
  if (std::getenv("PRL_UPDATE_GOLDEN")) std::filesystem::create_directories(folder_);
  expect_page(
      "rl", "Keys of `prl rl`",
      "\nReinforcement learning: trainer, orchestrator and inference in one launch. [What the columns mean](README.md).\n\n"
      "The sections `[trainer]`, `[orchestrator]` and `[inference]` have the keys of the commands of these names:\n"
      "[trainer](trainer.md), [orchestrator](orchestrator.md), [inference](inference.md); `[teacher_inference]` those of inference.\n" +
          tables(ops_of<RlConfig>(), {"trainer", "orchestrator", "inference", "teacher_inference"}));
  expect_command<TrainerConfig>(Command::kTrainer);
  expect_command<OrchestratorConfig>(Command::kOrchestrator);
  expect_command<InferenceConfig>(Command::kInference);
  expect_command<SftConfig>(Command::kSft);
  expect_command<EvalConfig>(Command::kEval);
  expect_command<SynthesizeConfig>(Command::kSynthesize);
  expect_command<ResultsConfig>(Command::kResults);
  expect_command<InitModelConfig>(Command::kInitModel);
  expect_command<MakeDataConfig>(Command::kMakeData);
  expect_command<ConvertConfig>(Command::kConvert);
  expect_command<ChatConfig>(Command::kChat);
  expect_command<BenchConfig>(Command::kBench);
  expect_command<PlanConfig>(Command::kPlan);
  expect_command<DoctorConfig>(Command::kDoctor);
  expect_command<EnvCommandConfig>(Command::kEnv);
  expect_command<EnvServerConfig>(Command::kEnvServer);
  expect_command<LaunchConfig>(Command::kLaunch);
  expect_command<RouterToolConfig>(Command::kRouter);
  expect_command<K8sConfig>(Command::kK8s);
  expect_command<RunsToolConfig>(Command::kRuns);
  expect_command<DashboardToolConfig>(Command::kDashboard);
  expect_command<PlotConfig>(Command::kPlot);
  expect_command<ReportConfig>(Command::kReport);
  expect_command<TopConfig>(Command::kTop);
  expect_command<ReplayConfig>(Command::kReplay);
  expect_command<EvalsConfig>(Command::kEvals);
  std::string index =
      "\nOne page per command, written from the program's own list of keys; `prl COMMAND --help` prints the same.\n\n"
      "| command | purpose |\n|---|---|\n";
  for (const CommandInfo& info : all_commands()) {
    index += fmt::format("| [{0}]({0}.md) | {1} |\n", info.name, info.purpose);
  }
  index +=
      "\n## Columns\n\n"
      "- **key**: written `key = value` below `[section]` in a TOML file, `--section.key value` on the command line. `env[]` stands for "
      "the\n"
      "  items of a list (`[[env]]`, `--env.0.id x`), `optim<sgd>` for the keys that go with `type = \"sgd\"`.\n"
      "- **type**: `?` marks keys that may be left unset (`None`); `section?` a section that is off until it is written or switched on "
      "with\n"
      "  `--section`.\n"
      "- **status**: what setting the key to another value than the default does. *built*: what the last column says. *inert*: nothing; it "
      "is\n"
      "  accepted so that configurations of other programs run, and the start says which inert keys are set. *not built*: the start is\n"
      "  refused. The keys of an inert or not built section are not listed one by one.\n\n"
      "A few values of built keys are refused too, such as `float16` for training; the error names the key and what to use instead.\n";
  expect_page("README", "Configuration reference", index);
}

}  // namespace
}  // namespace prl::config
