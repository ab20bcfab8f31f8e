#include "eval/browser.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::eval {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

std::string row(int example, int rollout, double reward, const std::string& reply) {
  return fmt::format(
      R"({{"example_id": {}, "rollout_idx": {}, "task": "gsm8k", "reward": {}, "num_turns": 1, "completion_len": 9, "answer": "4",)"
      R"( "error": null, "metrics": {{"correct_answer": {}}}, "stop_condition": "max_turns_reached",)"
      R"( "prompt": [{{"role": "system", "content": "S"}}, {{"role": "user", "content": "What is\n2 + {}?"}}],)"
      R"( "completion": [{{"role": "assistant", "content": "{}", "reasoning_content": "carefully",)"
      R"( "tool_calls": [{{"id": "c", "type": "function", "function": {{"name": "add", "arguments": "{{\"a\": 1}}"}}}}]}}]}})",
      example, rollout, reward, reward, example, reply);
}

class BrowserTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("prl_browser_{}", ::getpid());
    fs::remove_all(root_);
    make("a/1", row(0, 0, 1, "four") + "\n" + row(0, 1, 0, "five") + "\n" + row(1, 0, 0.5, "six") + "\n",
         R"({"env_id": "gsm8k", "model": "org/m", "ckpt_step": 20, "num_examples": 2, "rollouts_per_example": 2, "is_complete": true})");
    make("b/2", row(0, 0, 1, "\\u001b[2Jfour") + "\n" + row(0, 1, 0, "five") + "\n{\"example_id\": 1, \"rol",
         R"({"env_id": "gsm8k", "model": "org/m", "rollouts_per_example": 2, "is_complete": false})");
  }
  void TearDown() override { fs::remove_all(root_); }
  void make(const std::string& name, const std::string& rows, const std::string& metadata) {
    fs::create_directories(root_ / name);
    std::ofstream(root_ / name / "results.jsonl") << rows;
    std::ofstream(root_ / name / "metadata.json") << metadata;
  }
  fs::path root_;
};

TEST_F(BrowserTest, FindsAndListsEvaluations) {
  const auto folders = find_results(root_);
  ASSERT_EQ(folders.size(), 2u);
  EXPECT_EQ(folders[0].ckpt_step, 20);
  EXPECT_EQ(folders[0].num_rows, 3);
  EXPECT_DOUBLE_EQ(folders[0].avg_reward, 0.5);
  EXPECT_EQ(folders[0].pass_at_k, "") << "a reward of 0.5 is neither right nor wrong";
  EXPECT_FALSE(folders[1].is_complete);
  EXPECT_EQ(folders[1].num_rows, 2) << "the line that was cut off does not count";
  EXPECT_EQ(folders[1].pass_at_k, "pass@1 0.500 pass@2 1.000");
  const std::string list = list_folders(folders);
  EXPECT_THAT(list, HasSubstr("org/m"));
  EXPECT_THAT(list, HasSubstr("interrupted"));
  EXPECT_EQ(find_results(root_ / "a/1/results.jsonl").size(), 1u);
  EXPECT_THROW(find_results(root_ / "none"), Error);
}

TEST_F(BrowserTest, ShowsARolloutWithoutTerminalCommands) {
  Browser browser(find_results(root_), 100);
  EXPECT_TRUE(browser.feed("2"));
  EXPECT_THAT(browser.screen(), HasSubstr("What is 2 + 0?"));
  EXPECT_TRUE(browser.feed("1"));
  const std::string screen = browser.screen();
  EXPECT_THAT(screen, HasSubstr("[user]\n  What is\n  2 + 0?"));
  EXPECT_THAT(screen, HasSubstr("carefully"));
  EXPECT_THAT(screen, HasSubstr("-> add({\"a\": 1})"));
  EXPECT_THAT(screen, HasSubstr("?[2Jfour"));
  EXPECT_THAT(screen, Not(HasSubstr("\x1b")));
  EXPECT_THAT(screen, HasSubstr("reward 1.0000, stopped by max_turns_reached\nanswer: 4\n  correct_answer = 1"));
}

TEST_F(BrowserTest, GoesForwardBackAndSorts) {
  Browser browser(find_results(root_ / "a"), 100);  // the only evaluation is open at once
  EXPECT_THAT(browser.screen(), HasSubstr("example rollout"));
  EXPECT_TRUE(browser.feed("1"));
  EXPECT_THAT(browser.screen(), HasSubstr("rollout 0: reward 1.0"));
  EXPECT_TRUE(browser.feed("n"));
  EXPECT_THAT(browser.screen(), HasSubstr("rollout 1: reward 0.0"));
  EXPECT_TRUE(browser.feed("n"));
  EXPECT_TRUE(browser.feed("n"));
  EXPECT_THAT(browser.screen(), HasSubstr("this is the last"));
  EXPECT_TRUE(browser.feed("b"));
  EXPECT_TRUE(browser.feed("s"));
  EXPECT_TRUE(browser.feed("1"));
  EXPECT_THAT(browser.screen(), HasSubstr("rollout 1: reward 0.0")) << "the lowest reward comes first";
  EXPECT_TRUE(browser.feed("99"));
  EXPECT_THAT(browser.screen(), HasSubstr("type a number from 1 to 3"));
  EXPECT_TRUE(browser.feed("b"));
  EXPECT_FALSE(browser.feed("b"));
  EXPECT_FALSE(Browser(find_results(root_), 80).feed("q"));
}

TEST_F(BrowserTest, SelectsByReward) {
  const auto rows = [&] {
    std::vector<boost::json::object> all;
    for (const double reward : {1.0, 0.0, 0.5}) all.push_back(text::parse_json(row(0, 0, reward, "")).as_object());
    return all;
  };
  EXPECT_EQ(select_rows(rows(), RowOrder::kFile, 0.5, std::nullopt).size(), 2u);
  EXPECT_EQ(select_rows(rows(), RowOrder::kFile, 0.1, 0.6).size(), 1u);
  EXPECT_EQ(select_rows(rows(), RowOrder::kRewardDown, std::nullopt, std::nullopt)[0].at("reward").to_number<double>(), 1.0);
  EXPECT_THAT(list_rows({}, 80), HasSubstr("no rollouts"));
}

}  // namespace
}  // namespace prl::eval
