#include "env/env_log.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "env/testing/scripted_chat.hpp"

namespace prl::env {
namespace {

namespace fs = std::filesystem;
using namespace testing;

struct EnvLogTest : ::testing::Test {
  EnvLogTest() { fs::remove_all(folder_); }
  ~EnvLogTest() override { fs::remove_all(folder_); }
  /// Of a run whose environments log at `level`.
  EnvironmentPtr in_run(const std::string& level) const {
    EnvSpec spec;
    spec.id = "reverse-text";
    spec.name = "words";
    spec.args = text::parse_json(R"({"mode": "tiny", "num_train": 4, "num_eval": 1})").as_object();
    spec.python.log_folder = folder_ / "train";
    spec.python.log_level = level;
    return make_environment(spec);
  }
  std::string log() const {
    std::ostringstream text;
    text << std::ifstream(folder_ / "train/words.log").rdbuf();
    return text.str();
  }
  bool says_in_log(const std::string& part) const { return log().find(part) != std::string::npos; }

  fs::path folder_ = fs::temp_directory_path() / fmt::format("prl_env_log_{}", ::getpid());
};

TEST_F(EnvLogTest, ANativeEnvironmentOfARunHasALogOfItsOwn) {
  {
    const EnvironmentPtr environment = in_run("debug");
    EXPECT_FALSE(fs::exists(folder_)) << "who only asks what the environment is leaves no file";
    environment->prepare();
    const Task task = environment->task(Split::kTrain, 2);
    ScriptedChat right({says("<reversed_text>" + task.answer + "</reversed_text>")}), silent({});
    EXPECT_EQ(play(*environment, task, right).reward, 1);
    EXPECT_TRUE(play(*environment, task, silent).error.has_value());
    EXPECT_TRUE(says_in_log("   INFO words is ready\n")) << log();
    EXPECT_TRUE(says_in_log("  DEBUG rollout t of task 2: reward 1.0000, 1 turns, ")) << log();
    EXPECT_TRUE(says_in_log("WARNING rollout t of task 2 failed after 0 turns")) << log();
    EXPECT_TRUE(says_in_log("the script has ended\n")) << log();
  }
  EXPECT_TRUE(says_in_log("   INFO 2 rollouts ended: 1 failed, 0 truncated, reward 0.5000, ")) << log();
}

TEST_F(EnvLogTest, ItsLevelIsThatOfTheRun) {
  {
    const EnvironmentPtr environment = in_run("warning");
    environment->prepare();
    const Task task = environment->task(Split::kTrain, 0);
    ScriptedChat right({says("x")});
    play(*environment, task, right);
    EXPECT_EQ(log(), "");
    ScriptedChat silent({});
    play(*environment, task, silent);
  }
  const std::string text = log();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
}

TEST_F(EnvLogTest, AFileThatCannotBeWrittenStopsNothing) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "train") << "a file where the folder would be";
  const EnvironmentPtr environment = in_run("info");
  environment->prepare();
  const Task task = environment->task(Split::kTrain, 0);
  ScriptedChat silent({});
  EXPECT_TRUE(play(*environment, task, silent).error.has_value());
}

}  // namespace
}  // namespace prl::env
