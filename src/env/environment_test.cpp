#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/error.hpp"
#include "env/registry.hpp"
#include "env/testing/scripted_chat.hpp"
#include "env/tool_env.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;
using namespace std::chrono_literals;

using namespace testing;

void expect_error(const std::string& id, const std::string& args, ErrorCode code, const std::string& part) {
  try {
    make(id, args);
    FAIL() << id << args;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Registry, NamesWhatItKnowsAndRefusesTheRest) {
  EXPECT_EQ(make("reverse_text")->name(), "reverse-text");
  expect_error("gsm9k", "{}", ErrorCode::kNotFound, "reverse-text");
  expect_error("primeintellect/wordle", "{}", ErrorCode::kNotFound, "prl env install primeintellect/wordle");
  expect_error("reverse-text", R"({"sede": 1})", ErrorCode::kInvalidArgument, "args.sede");
  expect_error("reverse-text", R"({"seed": "x"})", ErrorCode::kInvalidArgument, "args.seed");
  expect_error("reverse-text", R"({"mode": "poem"})", ErrorCode::kInvalidArgument, "tiny");
  expect_error("reverse-text", R"({"mode": "tiny", "alphabet": "ab", "min_chars": 1, "max_chars": 2, "num_train": 100})",
               ErrorCode::kInvalidArgument, "different texts");
}

TEST(ReverseText, TasksAreSeededAndHeldOut) {
  const auto a = make("reverse-text", R"({"mode": "tiny", "seed": 3, "num_train": 200, "num_eval": 50})");
  const auto b = make("reverse-text", R"({"mode": "tiny", "seed": 3, "num_train": 200, "num_eval": 50})");
  const auto c = make("reverse-text", R"({"mode": "tiny", "seed": 4, "num_train": 200, "num_eval": 50})");
  EXPECT_EQ(a->num_tasks(Split::kTrain), 200);
  std::set<std::string> answers;
  int num_same_as_c = 0;
  for (int i = 0; i < 200; ++i) {
    const Task task = a->task(Split::kTrain, i);
    EXPECT_EQ(task.prompt, b->task(Split::kTrain, i).prompt);
    num_same_as_c += task.answer == c->task(Split::kTrain, i).answer ? 1 : 0;
    EXPECT_GE(task.answer.size(), 3u);
    EXPECT_LE(task.answer.size(), 6u);
    answers.insert(task.answer);
  }
  EXPECT_LT(num_same_as_c, 5);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(answers.contains(a->task(Split::kEval, i).answer));
}

TEST(ReverseText, ScoresTheTagContent) {
  const auto environment = make("reverse-text", R"({"mode": "tiny", "num_train": 5})");
  const Task task = environment->task(Split::kTrain, 0);
  const auto reward = [&](const std::string& reply) {
    ScriptedChat chat({says(reply)});
    return play(*environment, task, chat).reward;
  };
  EXPECT_EQ(reward("<reversed_text>\n " + task.answer + " \n</reversed_text>"), 1.0);
  EXPECT_EQ(reward(task.answer), 0.0) << "no tag";
  EXPECT_EQ(reward("<reversed_text>" + task.answer), 0.0) << "tag not closed";
  const double partial = reward("<reversed_text>" + task.answer + "zzzz</reversed_text>");
  const double size = static_cast<double>(task.answer.size());
  EXPECT_DOUBLE_EQ(partial, 2 * size / (2 * size + 4));
  ScriptedChat chat({says("x", "length")});
  const Episode cut = play(*environment, task, chat);
  EXPECT_TRUE(cut.is_truncated);
  EXPECT_EQ(cut.stop_condition, "max_turns_reached");
  EXPECT_TRUE(chat.requests[0].sampling.seed.has_value());
  EXPECT_EQ(chat.requests[0].messages.size(), 2u);
}

TEST(ReverseText, ReadsLocalFilesAndReversesCodePoints) {
  const auto path = std::filesystem::temp_directory_path() / "prl_reverse_text_test.jsonl";
  std::ofstream(path) << R"({"prompt": "a\u6f22b"})"
                      << "\n\n"
                      << R"({"prompt": "xyz"})"
                      << "\n";
  const auto environment = make("reverse-text", R"({"dataset_path": ")" + path.string() + R"(", "system_prompt": null})");
  EXPECT_EQ(environment->num_tasks(Split::kTrain), 2);
  EXPECT_EQ(environment->num_tasks(Split::kEval), 0);
  EXPECT_EQ(environment->task(Split::kTrain, 0).answer,
            "b\xe6\xbc\xa2"
            "a");
  EXPECT_EQ(environment->task(Split::kTrain, 0).prompt.size(), 1u);
  std::ofstream(path) << "{\"prompt\": \"ok\"}\n{\"prompt\": \n";
  try {
    make("reverse-text", R"({"dataset_path": ")" + path.string() + R"("})");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("prl_reverse_text_test.jsonl:2"), std::string::npos) << error.what();
  }
  std::filesystem::remove(path);
}

TEST(ReverseText, FailuresAreDataAndOverlongPromptsAreScored) {
  const auto environment = make("reverse-text", R"({"mode": "tiny", "num_train": 5})");
  ScriptedChat silent({});
  const Episode failed = play(*environment, environment->task(Split::kTrain, 0), silent);
  ASSERT_TRUE(failed.error.has_value());
  EXPECT_EQ(failed.error->type, "ModelError");
  EXPECT_EQ(failed.stop_condition, "has_error");
  EXPECT_EQ(failed.reward, 0);
  ScriptedChat overlong({says("", "overlong")});
  const Episode cut = play(*environment, environment->task(Split::kTrain, 0), overlong);
  EXPECT_FALSE(cut.error.has_value());
  EXPECT_TRUE(cut.is_truncated);
  EXPECT_EQ(cut.stop_condition, "prompt_too_long");
  const json::object row = to_json(cut);
  EXPECT_TRUE(row.at("error").is_null());
  EXPECT_EQ(row.at("stop_condition").as_string(), "prompt_too_long");
}

// A data set that arguments name is read as math and wiki read theirs; the name in metrics stays.
TEST(Environments, ReverseTextAndAlphabetSortReadNamedDataSets) {
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("prl-named-data-{}", ::getpid());
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "train.jsonl") << R"({"prompt": "abc", "names": ["Ann Lee", "Bob Fox", "Cid Roe"]})"
                                        << "\n";
  std::ofstream(folder / "test.jsonl") << R"({"prompt": "de", "names": ["Dan Day", "Eve Elm"]})"
                                       << "\n";
  const std::string named = R"("dataset_name": ")" + folder.string() + R"(", "eval_dataset_split": "test")";
  const auto reverse = make("reverse-text", "{" + named + "}");
  EXPECT_EQ(reverse->name(), "reverse-text");
  ASSERT_EQ(reverse->num_tasks(Split::kTrain), 1);
  EXPECT_EQ(reverse->task(Split::kTrain, 0).answer, "cba");
  EXPECT_EQ(reverse->task(Split::kEval, 0).answer, "ed");
  const auto sort = make("alphabet-sort", "{" + named + R"(, "max_turns": 1, "max_names_per_turn": 2})");
  EXPECT_EQ(sort->num_tasks(Split::kTrain), 1);
  EXPECT_EQ(sort->num_tasks(Split::kEval), 1);
  const auto only_train = make("reverse-text", R"({"dataset_name": ")" + folder.string() + R"("})");
  EXPECT_EQ(only_train->num_tasks(Split::kEval), 0) << "no eval split was named";
  ::setenv("HF_HUB_OFFLINE", "1", 1);
  expect_error("reverse-text", R"({"dataset_name": "nobody/nothing"})", ErrorCode::kNotFound,
               "hf download --repo-type dataset nobody/nothing");
  ::unsetenv("HF_HUB_OFFLINE");
  std::filesystem::remove_all(folder);
}

// ---- alphabet-sort ----

std::string demonstrated(const Environment& environment, const Task& task, std::size_t turn) {
  const json::array messages = *environment.demonstration(task);
  return std::string(messages.at(turn * 2).at("content").as_string());
}

Task task_with_turns(const Environment& environment, std::int64_t num_turns) {
  for (std::int64_t i = 0; i < environment.num_tasks(Split::kTrain); ++i)
    if (environment.task(Split::kTrain, i).info.at("num_turns").to_number<std::int64_t>() == num_turns)
      return environment.task(Split::kTrain, i);
  fail(ErrorCode::kNotFound, "no task with {} turns", num_turns);
}

TEST(AlphabetSort, AGoodConversationScoresOne) {
  const auto environment = make("alphabet-sort", R"({"min_turns": 3, "max_turns": 3, "num_train": 20})");
  const Task task = task_with_turns(*environment, 3);
  ScriptedChat chat(
      {says(demonstrated(*environment, task, 0)), says(demonstrated(*environment, task, 1)), says(demonstrated(*environment, task, 2))});
  const Episode episode = play(*environment, task, chat);
  EXPECT_DOUBLE_EQ(episode.reward, 1.0);
  EXPECT_EQ(episode.num_turns(), 3);
  EXPECT_EQ(episode.stop_condition, "all_turns_done");
  ASSERT_EQ(chat.requests.size(), 3u);
  EXPECT_EQ(chat.requests[2].messages.size(), 5u);
  EXPECT_NE(chat.requests[0].sampling.seed, chat.requests[1].sampling.seed);
  const std::string follow_up(chat.requests[1].messages.back().at("content").as_string());
  EXPECT_NE(follow_up.find("combined_alphabetical_sorted"), std::string::npos);
  EXPECT_NE(std::string(chat.requests[2].messages.back().at("content").as_string()).find("Follow the same format as before."),
            std::string::npos);
}

TEST(AlphabetSort, MissingTurnsAndPowers) {
  const std::string two = R"("min_turns": 2, "max_turns": 2, "num_train": 10)";
  const auto per_turn = make("alphabet-sort", "{" + two + "}");
  const auto whole = make("alphabet-sort", "{" + two + R"(, "power_per_turn": false})");
  const Task task = per_turn->task(Split::kTrain, 0);
  const std::string good = demonstrated(*per_turn, task, 0);
  const auto reward = [&](const Environment& environment, const std::string& first, const std::string& second) {
    ScriptedChat chat({says(first), says(second)});
    return play(environment, task, chat).reward;
  };
  EXPECT_DOUBLE_EQ(reward(*per_turn, good, "nothing"), 0.5);
  EXPECT_DOUBLE_EQ(reward(*whole, good, "nothing"), 0.0625);
  EXPECT_DOUBLE_EQ(reward(*per_turn, good, good), 0.5) << "later turns need the other tag";
}

TEST(AlphabetSort, SeveralAttemptsMustImprove) {
  const auto environment = make("alphabet-sort", R"({"min_turns": 1, "max_turns": 1, "min_names_per_turn": 4, "num_train": 10})");
  const Task task = environment->task(Split::kTrain, 0);
  const std::string good = demonstrated(*environment, task, 0);
  const std::string bad = "<alphabetical_sorted>\nzzz\n</alphabetical_sorted>";
  const auto reward = [&](const std::string& reply) {
    ScriptedChat chat({says(reply)});
    return play(*environment, task, chat).reward;
  };
  EXPECT_DOUBLE_EQ(reward(bad + good), 1.0);
  EXPECT_DOUBLE_EQ(reward(good + bad), 0.0);
  EXPECT_DOUBLE_EQ(reward(good + good), 0.0);
  const std::string tag = "<alphabetical_sorted>";
  const std::string names = good.substr(tag.size(), good.rfind("</") - tag.size());
  EXPECT_DOUBLE_EQ(reward(tag + "\n\n  " + text::to_upper(names) + "  \n</alphabetical_sorted>"), 1.0) << "case and space do not count";
}

TEST(AlphabetSort, SortsByTheChosenPartOfTheName) {
  const auto path = std::filesystem::temp_directory_path() / "prl_alphabet_sort_test.jsonl";
  std::ofstream file(path);
  for (int i = 0; i < 20; ++i)
    file << R"({"names": ["Bob Adams", "Alice Zuse", "Carl Moe", "Bob Adams"]})"
         << "\n";
  file.close();
  const auto environment =
      make("alphabet-sort", R"({"dataset_path": ")" + path.string() +
                                R"(", "min_turns": 1, "max_turns": 1, "min_names_per_turn": 3, "max_names_per_turn": 3})");
  std::set<bool> kinds;
  for (std::int64_t i = 0; i < environment->num_tasks(Split::kTrain); ++i) {
    const Task task = environment->task(Split::kTrain, i);
    const bool by_first = task.info.at("sort_by_first").as_bool();
    kinds.insert(by_first);
    const json::array wanted = by_first ? json::array{"AliceZuse", "BobAdams", "CarlMoe"} : json::array{"BobAdams", "CarlMoe", "AliceZuse"};
    EXPECT_EQ(task.info.at("ground_truths").at(0).as_array(), wanted);
  }
  EXPECT_EQ(kinds.size(), 2u);
  std::filesystem::remove(path);
}

// ---- tools ----

class Calculator final : public ToolEnv {
 public:
  Calculator() : ToolEnv("calculator", Limits{4, -1}, make_rubric(), make_tools()) {}
  std::int64_t num_tasks(Split) const override { return 1; }
  Task task(Split, std::int64_t) const override {
    Task task;
    task.env_name = name();
    task.prompt.push_back(json::object{{"role", "user"}, {"content", "2 + 3?"}});
    task.answer = "5";
    return task;
  }

 private:
  static Rubric make_rubric() {
    Rubric rubric;
    rubric.reward("correct", 2.0, [](const Task& task, const Episode& episode) {
      return last_assistant_text(episode.completion) == task.answer ? 1.0 : 0.0;
    });
    rubric.metric("broken", [](const Task&, const Episode&) -> double { fail(ErrorCode::kInternal, "always"); });
    return rubric;
  }
  static asio::awaitable<std::string> add(json::object arguments) {
    co_return std::to_string(arguments.at("a").to_number<int>() + arguments.at("b").to_number<int>());
  }
  static std::vector<Tool> make_tools() {
    Tool tool;
    tool.name = "add";
    tool.description = "Adds two numbers";
    tool.call = &Calculator::add;
    return {tool};
  }
};

TEST(ToolEnv, RunsCallsInOrderAndFeedsErrorsBack) {
  const Calculator environment;
  ScriptedChat chat({calls("add", R"({"a": 2, "b": 3})"), calls("subtract", "{}"), calls("add", "not json"), says("5")});
  const Episode episode = play(environment, environment.task(Split::kTrain, 0), chat);
  EXPECT_EQ(episode.stop_condition, "no_tools_called");
  EXPECT_DOUBLE_EQ(episode.reward, 2.0);
  EXPECT_EQ(episode.metrics.at("correct"), 1.0);
  EXPECT_EQ(episode.metrics.at("broken"), 0.0);
  ASSERT_EQ(chat.requests.size(), 4u);
  EXPECT_EQ(chat.requests[0].tools.size(), 1u);
  EXPECT_EQ(chat.requests[1].messages.back().at("content").as_string(), "5");
  EXPECT_EQ(chat.requests[1].messages.back().at("tool_call_id").as_string(), "call_1");
  EXPECT_NE(std::string(chat.requests[2].messages.back().at("content").as_string()).find("no tool named 'subtract'"), std::string::npos);
  EXPECT_TRUE(std::string(chat.requests[3].messages.back().at("content").as_string()).starts_with("Error:"));
}

TEST(ToolEnv, StopsAtTheTurnLimit) {
  const Calculator environment;
  std::deque<ChatTurn> turns;
  for (int i = 0; i < 10; ++i) turns.push_back(calls("add", R"({"a": 1, "b": 1})"));
  ScriptedChat chat(std::move(turns));
  const Episode episode = play(environment, environment.task(Split::kTrain, 0), chat);
  EXPECT_EQ(episode.num_turns(), 4);
  EXPECT_EQ(episode.stop_condition, "max_turns_reached");
}

TEST(MultiTurnEnv, EndsWhenTheRolloutHasSampledItsTokens) {
  const auto environment = make("alphabet-sort", R"({"min_turns": 3, "max_turns": 3, "num_train": 2})");
  ScriptedChat chat({says("12345"), says("12345"), says("12345")});
  const Episode episode = play(*environment, environment->task(Split::kTrain, 0), chat, 8);
  EXPECT_EQ(episode.num_turns(), 2);
  EXPECT_EQ(episode.stop_condition, "max_total_completion_tokens_reached");
  EXPECT_EQ(chat.requests.at(0).sampling.max_tokens, 8);
  EXPECT_EQ(chat.requests.at(1).sampling.max_tokens, 3) << "what is left";
}

}  // namespace
}  // namespace prl::env
