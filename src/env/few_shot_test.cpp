#include "env/few_shot.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "env/testing/scripted_chat.hpp"

namespace prl::env {
namespace {

using namespace testing;

std::string text_of(const json::value& message) { return std::string(message.at("content").as_string()); }

std::vector<std::string> roles_of(const json::array& messages) {
  std::vector<std::string> roles;
  for (const json::value& message : messages) roles.emplace_back(message.at("role").as_string());
  return roles;
}

/// make_environment's message when it refuses `args`; empty when it does not.
std::string refusal(const std::string& id, const std::string& args) {
  try {
    make(id, args);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
}

TEST(FewShot, TheLastTrainingTasksAreTurnsBeforeEveryQuestion) {
  const auto plain = make("math-env", R"({"num_train": 10, "num_eval": 5, "system_prompt": "Add up."})");
  const auto shown = make("math-env", R"({"num_train": 10, "num_eval": 5, "system_prompt": "Add up.", "num_shots": 2})");
  EXPECT_EQ(shown->name(), plain->name());
  ASSERT_EQ(shown->num_tasks(Split::kTrain), 8) << "what is shown with its answer is no task";
  ASSERT_EQ(shown->num_tasks(Split::kEval), 5);

  for (const Split split : {Split::kTrain, Split::kEval}) {
    for (std::int64_t i = 0; i < shown->num_tasks(split); ++i) {
      const Task bare = plain->task(split, i);
      const Task task = shown->task(split, i);
      EXPECT_EQ(task.answer, bare.answer);
      EXPECT_EQ(shown->demonstration(task), plain->demonstration(bare));
      ASSERT_EQ(roles_of(task.prompt), (std::vector<std::string>{"system", "user", "assistant", "user", "assistant", "user"}));
      EXPECT_EQ(task.prompt.front(), bare.prompt.front());
      EXPECT_EQ(task.prompt.back(), bare.prompt.back());
      for (std::int64_t shot = 0; shot < 2; ++shot) {
        const Task example = plain->task(Split::kTrain, 8 + shot);
        EXPECT_EQ(task.prompt[1 + 2 * shot], example.prompt.back());
        EXPECT_EQ(task.prompt[2 + 2 * shot], plain->demonstration(example)->at(0));
        EXPECT_NE(text_of(task.prompt.back()), text_of(example.prompt.back()));
      }
    }
  }
}

TEST(FewShot, WithoutASystemTextTheExamplesComeFirst) {
  const auto environment = make("math-env", R"({"num_train": 4, "num_eval": 1, "system_prompt": null, "num_shots": 1})");
  EXPECT_EQ(roles_of(environment->task(Split::kEval, 0).prompt), (std::vector<std::string>{"user", "assistant", "user"}));
}

TEST(FewShot, TheModelIsAskedWithTheExamplesAndScoredOnItsOwnReply) {
  const auto environment = make("math-env", R"({"num_train": 10, "num_eval": 5, "num_shots": 3})");
  const Task task = environment->task(Split::kEval, 2);
  ScriptedChat right({says("\\boxed{" + task.answer + "}")});
  const Episode good = play(*environment, task, right);
  ASSERT_EQ(right.requests.size(), 1u);
  EXPECT_EQ(right.requests[0].messages, task.prompt);
  EXPECT_EQ(good.reward, 1);
  ScriptedChat silent({says("I do not know.")});
  EXPECT_EQ(play(*environment, task, silent).reward, 0) << "the answers of the examples in the prompt count for nothing";
}

TEST(FewShot, ConversationsOfSeveralTurnsAreShownWhole) {
  const auto plain = make("alphabet-sort", R"({"num_train": 6, "num_eval": 2, "min_turns": 2, "max_turns": 2})");
  const auto shown = make("alphabet-sort", R"({"num_train": 6, "num_eval": 2, "min_turns": 2, "max_turns": 2, "num_shots": 1})");
  const Task example = plain->task(Split::kTrain, 5);
  const std::size_t num_added = example.prompt.size() + plain->demonstration(example)->size();
  const Task task = shown->task(Split::kTrain, 0);
  EXPECT_EQ(task.prompt.size(), plain->task(Split::kTrain, 0).prompt.size() + num_added);
  EXPECT_GE(plain->demonstration(example)->size(), 3u) << "answer, follow-up, answer";
  EXPECT_EQ(roles_of(task.prompt).back(), "user");
}

TEST(FewShot, RefusesWhatCannotBeShown) {
  EXPECT_EQ(refusal("math-env", R"({"num_train": 3, "num_eval": 1, "num_shots": 2})"), "");
  EXPECT_NE(refusal("math-env", R"({"num_train": 3, "num_eval": 1, "num_shots": 3})").find("leaves no task"), std::string::npos);
  EXPECT_NE(refusal("math-env", R"({"num_shots": -1})").find("args.num_shots"), std::string::npos);
  EXPECT_NE(refusal("math-env", R"({"num_shots": "two"})").find("args.num_shots"), std::string::npos);

  const auto path = std::filesystem::temp_directory_path() / fmt::format("prl_few_shot_{}.jsonl", ::getpid());
  std::ofstream(path) << R"({"question": "1 + 2?", "answer": "1 + 2 = 3\n#### 3"})"
                         "\n"
                         R"({"question": "2 + 3?", "answer": 5})"
                         "\n";
  const std::string args = fmt::format(R"({{"dataset_path": "{}", "num_shots": 1}})", path.string());
  EXPECT_NE(refusal("math-env", args).find("task 1 of the train split has none"), std::string::npos) << "an answer without its working";
  std::filesystem::remove(path);
}

TEST(FewShot, ZeroShowsNothing) {
  const auto plain = make("math-env", R"({"num_train": 3, "num_eval": 1})");
  const auto zero = make("math-env", R"({"num_train": 3, "num_eval": 1, "num_shots": 0})");
  EXPECT_EQ(zero->num_tasks(Split::kTrain), 3);
  EXPECT_EQ(zero->task(Split::kTrain, 2).prompt, plain->task(Split::kTrain, 2).prompt);
}

}  // namespace
}  // namespace prl::env
