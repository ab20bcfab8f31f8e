#include "env/wordle.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "env/testing/scripted_chat.hpp"
#include "env/wordle_words.hpp"

namespace prl::env {
namespace {

using namespace testing;

Task game(const Environment& environment, const std::string& secret) {
  Task task = environment.task(Split::kTrain, 0);
  task.answer = secret;
  return task;
}

TEST(Wordle, MarksCountEachLetterOfTheSecretOnce) {
  EXPECT_EQ(wordle_marks("crane", "crane"), "GGGGG");
  EXPECT_EQ(wordle_marks("speed", "abide"), "XXYXY");
  EXPECT_EQ(wordle_marks("allow", "llama"), "YGYXX");
  EXPECT_EQ(wordle_marks("geese", "elect"), "XYGXX") << "the last e has no letter of the secret left";
}

TEST(Wordle, AGameIsScoredByItsGuesses) {
  const auto environment = make("wordle");
  ScriptedChat chat({says("I think <guess>[crane]</guess>"), says("hm"), says("<guess>CRATE</guess>")});
  const Episode won = play(*environment, game(*environment, "crate"), chat);
  EXPECT_EQ(won.stop_condition, "solved");
  EXPECT_EQ(won.metrics.at("correct_answer"), 1);
  EXPECT_NEAR(won.reward, 1 + 1.0 / 3 + 0.2 * 2 / 3, 1e-12);
  EXPECT_EQ(won.completion[1].at("content").as_string(), "C R A N E\nG G G X G\n5 guesses left.");
  EXPECT_NE(won.completion[3].at("content").as_string().find("no valid guess"), std::string::npos);

  ScriptedChat poor({says("<guess>stamp</guess>"), says("<guess>water</guess>")});
  const auto two = make("wordle", R"({"max_guesses": 2})");
  const Episode lost = play(*two, game(*two, "crate"), poor);
  EXPECT_EQ(lost.stop_condition, "max_turns_reached");
  // water against crate: a Y, t Y, e Y, r Y.
  EXPECT_EQ(wordle_marks("water", "crate"), "XYYYY");
  EXPECT_NEAR(lost.reward, 0.4 + 0.2, 1e-12);
}

TEST(Wordle, OnlyOneWordOfTheRightLengthIsAGuess) {
  const auto strict = make("wordle", R"({"only_known_words": true, "max_guesses": 1})");
  for (const auto& [reply, format] : {std::pair{"<guess>zzzzz</guess>", 0.0},
                                      {"<guess>cranes</guess>", 0.0},
                                      {"<guess>crane</guess> <guess>crate</guess>", 0.0},
                                      {"<guess>cr4ne</guess>", 0.0},
                                      {"<think><guess>crate</guess></think><guess>crane</guess>", 1.0}}) {
    ScriptedChat chat({says(reply)});
    EXPECT_EQ(play(*strict, game(*strict, "spoon"), chat).metrics.at("format_reward"), format) << reply;
  }
}

TEST(Wordle, DemonstrationsWinAndSplitsDiffer) {
  const auto environment = make("wordle", R"({"num_train": 700, "num_eval": 20})");
  std::set<std::string> secrets;
  for (int i = 0; i < 700; ++i) secrets.insert(environment->task(Split::kTrain, i).answer);
  EXPECT_EQ(secrets.size(), wordle_words().size() - 20) << "every word is used before one comes again";
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(secrets.contains(environment->task(Split::kEval, i).answer));
  for (int i = 0; i < 50; ++i) {
    const Task task = environment->task(Split::kTrain, i);
    std::deque<ChatTurn> turns;
    const auto demonstration = environment->demonstration(task);
    for (const auto& message : *demonstration)
      if (message.at("role").as_string() == "assistant") turns.push_back(says(std::string(message.at("content").as_string())));
    ScriptedChat chat(std::move(turns));
    const Episode episode = play(*environment, task, chat);
    EXPECT_EQ(episode.metrics.at("correct_answer"), 1);
    EXPECT_EQ(episode.completion, *demonstration) << "the environment answers what the demonstration holds";
  }
}

TEST(Wordle, WordsOfAFile) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("prl_words_{}.txt", ::getpid());
  std::ofstream(path) << "cat\nDOG\n\npig\n";
  const auto environment = make("wordle", fmt::format(R"({{"words_path": "{}", "num_train": 2, "num_eval": 1}})", path.string()));
  EXPECT_EQ(environment->task(Split::kTrain, 0).answer.size(), 3u);
  std::ofstream(path) << "cat\nhorse\n";
  EXPECT_THROW(make("wordle", fmt::format(R"({{"words_path": "{}"}})", path.string())), Error);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace prl::env
