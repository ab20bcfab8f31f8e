#include "env/math_env.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "env/numeric_answer.hpp"
#include "env/testing/scripted_chat.hpp"
#include "env/word_problem.hpp"

namespace prl::env {
namespace {

using namespace testing;

TEST(NumericAnswer, FindsTheFinalAnswer) {
  EXPECT_EQ(extract_final_answer("so \\boxed{12}"), "12");
  EXPECT_EQ(extract_final_answer("first \\boxed{1}, no: \\boxed{\\frac{3}{4}}."), "\\frac{3}{4}");
  EXPECT_EQ(extract_final_answer("2 + 2 = 4\n#### 4\nthat is all"), "4");
  EXPECT_EQ(extract_final_answer("#### 5\nbut \\boxed{6}"), "6");
  EXPECT_EQ(extract_final_answer("<think>\\boxed{1}</think> it is \\boxed {2}"), "2");
  EXPECT_EQ(extract_final_answer("<think>\\boxed{1}</think> it is 2"), std::nullopt);
  EXPECT_EQ(extract_final_answer("\\boxed{7} or \\boxed{8"), "7") << "a box that is cut off does not count";
  EXPECT_EQ(extract_final_answer("the answer is 4"), std::nullopt);
  EXPECT_EQ(extract_final_answer("####"), std::nullopt);
}

TEST(NumericAnswer, ReadsNumbersExactly) {
  const auto is = [](const char* text, std::int64_t numerator, std::int64_t denominator) {
    const auto number = parse_number(text);
    return number && number->numerator == numerator && number->denominator == denominator;
  };
  EXPECT_TRUE(is("42", 42, 1));
  EXPECT_TRUE(is("-3.50", -7, 2));
  EXPECT_TRUE(is("1,234,567", 1234567, 1));
  EXPECT_TRUE(is("$18.00", 18, 1));
  EXPECT_TRUE(is("50\\%", 50, 1));
  EXPECT_TRUE(is("3/4", 3, 4));
  EXPECT_TRUE(is("-\\dfrac{6}{8}", -3, 4));
  EXPECT_TRUE(is("\\frac12", 1, 2));
  EXPECT_TRUE(is("1\\frac{1}{2}", 3, 2));
  EXPECT_TRUE(is("x = 7", 7, 1));
  EXPECT_TRUE(is("12 apples.", 12, 1));
  EXPECT_TRUE(is("5\\text{ cm}", 5, 1));
  EXPECT_TRUE(is("007", 7, 1));
  for (const char* text : {"", "apples", "3 or 4", "1,23", "3/0", "\\frac{1}{0}", "2x+1", "12345678901234567890", "1 + 1", "2^3", "--3"})
    EXPECT_EQ(parse_number(text), std::nullopt) << text;
}

TEST(NumericAnswer, ComparesValuesThenTexts) {
  EXPECT_TRUE(is_same_answer("0.75", "\\frac{3}{4}"));
  EXPECT_TRUE(is_same_answer("1,000", "1000"));
  EXPECT_FALSE(is_same_answer("0.333", "1/3"));
  EXPECT_TRUE(is_same_answer("\\left( 3, 4 \\right)", "(3,4)"));
  EXPECT_TRUE(is_same_answer("\\text{Tuesday}", "tuesday."));
  EXPECT_FALSE(is_same_answer("x+1", "1+x")) << "no algebra is done";
  EXPECT_FALSE(is_same_answer("", ""));
}

TEST(WordProblem, EveryEquationHoldsAndTheLastGivesTheAnswer) {
  Rng rng(11);
  for (int i = 0; i < 300; ++i) {
    WordProblemOptions options;
    options.is_story = i % 2 == 0;
    options.min_steps = 1;
    options.max_steps = 6;
    const WordProblem problem = make_word_problem(options, rng);
    EXPECT_GE(problem.answer, 0);
    std::istringstream lines(problem.reasoning);
    std::int64_t a = 0, b = 0, result = 0;
    char sign = 0, equals = 0;
    while (lines >> a >> sign >> b >> equals >> result) {
      const std::int64_t wanted = sign == '+' ? a + b : sign == '-' ? a - b : sign == '*' ? a * b : a / b;
      EXPECT_EQ(result, wanted) << problem.reasoning;
      if (sign == '/') {
        EXPECT_EQ(a % b, 0) << problem.reasoning;
      }
    }
    EXPECT_EQ(result, problem.answer) << problem.question;
  }
}

TEST(MathEnv, DemonstrationsAreRightAndSplitsDiffer) {
  for (const char* args : {R"({"num_train": 50, "num_eval": 20})", R"({"mode": "sums", "num_train": 50, "num_eval": 20, "max_number": 50})",
                           R"({"num_train": 50, "num_eval": 20, "answer_format": "hashes"})"}) {
    const auto environment = make("gsm8k", args);
    std::set<std::string> questions;
    for (int i = 0; i < 50; ++i) {
      const Task task = environment->task(Split::kTrain, i);
      questions.insert(std::string(task.prompt.back().at("content").as_string()));
      const auto demonstration = environment->demonstration(task);
      ASSERT_TRUE(demonstration);
      ScriptedChat chat({says(std::string(demonstration->at(0).at("content").as_string()))});
      EXPECT_EQ(play(*environment, task, chat).reward, 1);
    }
    EXPECT_EQ(questions.size(), 50u);
    for (int i = 0; i < 20; ++i)
      EXPECT_FALSE(questions.contains(std::string(environment->task(Split::kEval, i).prompt.back().at("content").as_string())));
  }
}

TEST(MathEnv, ReadsDataSetsAndScores) {
  const auto path = std::filesystem::temp_directory_path() / fmt::format("prl_math_{}.jsonl", ::getpid());
  std::ofstream(path) << R"({"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,024"})"
                      << "\n"
                      << R"({"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$."})"
                      << "\n"
                      << R"({"prompt": "Plain?", "answer": 7})"
                      << "\n";
  const auto environment = make("math_env", fmt::format(R"({{"eval_dataset_path": "{}", "system_prompt": null}})", path.string()));
  EXPECT_EQ(environment->num_tasks(Split::kTrain), 0);
  ASSERT_EQ(environment->num_tasks(Split::kEval), 3);
  EXPECT_EQ(environment->task(Split::kEval, 0).answer, "1,024");
  EXPECT_EQ(environment->task(Split::kEval, 0).prompt.size(), 1u);
  EXPECT_EQ(environment->demonstration(environment->task(Split::kEval, 0))->at(0).at("content").as_string(), "48/2 = 24\n\\boxed{1,024}");
  const auto reward = [&](int index, const char* reply) {
    ScriptedChat chat({says(reply)});
    return play(*environment, environment->task(Split::kEval, index), chat);
  };
  EXPECT_EQ(reward(0, "\\boxed{1024}").reward, 1);
  EXPECT_EQ(reward(1, "#### 0.5").reward, 1);
  EXPECT_EQ(reward(2, "\\boxed{8}").reward, 0);
  EXPECT_EQ(reward(2, "\\boxed{8}").metrics.at("has_answer"), 1);
  EXPECT_EQ(reward(2, "7").reward, 0) << "an answer that is not marked does not count";
  std::ofstream(path) << R"({"question": "How many?"})"
                      << "\n";
  EXPECT_THROW(make("gsm8k", fmt::format(R"({{"dataset_path": "{}"}})", path.string())), Error);
  EXPECT_THROW(make("gsm8k", R"({"dataset_name": "openai/gsm8k"})"), Error);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace prl::env
