#include "env/math_env.hpp"

#include <fmt/core.h>

#include <array>
#include <unordered_set>
#include <vector>

#include "base/error.hpp"
#include "env/jsonl.hpp"
#include "env/multi_turn_env.hpp"
#include "env/numeric_answer.hpp"
#include "env/word_problem.hpp"
#include "text/json_python.hpp"

namespace prl::env {

namespace json = boost::json;

namespace {

struct Problem {
  std::string question;
  std::string answer;
  std::string reasoning;  ///< empty: none is known
};

const json::value* first_of(const json::object& row, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const json::value* value = row.if_contains(key); value != nullptr && !value->is_null()) return value;
  return nullptr;
}

/// The final answer of a data set's solution, and what stands before it.
Problem read_problem(const json::object& row, const std::string& where) {
  const json::value* question = first_of(row, {"question", "problem", "prompt"});
  if (question == nullptr || !question->is_string())
    fail(ErrorCode::kInvalidArgument, "{}: wanted a text in 'question', 'problem' or 'prompt'", where);
  const json::value* answer = first_of(row, {"answer", "solution"});
  if (answer == nullptr || !(answer->is_string() || answer->is_number()))
    fail(ErrorCode::kInvalidArgument, "{}: wanted a text or a number in 'answer' or 'solution'", where);
  Problem problem;
  problem.question = std::string(question->get_string());
  const std::string solution = answer->is_string() ? std::string(answer->get_string()) : text::dump_python(*answer);
  const auto final_answer = extract_final_answer(solution);
  problem.answer = final_answer ? *final_answer : strip(solution);
  if (problem.answer.empty()) fail(ErrorCode::kInvalidArgument, "{}: the answer is empty", where);
  // Solutions of gsm8k end in "#### 72" and hold calculator marks <<48/2=24>> that no model should write.
  if (const std::size_t mark = solution.rfind("####"); mark != std::string::npos) {
    problem.reasoning = solution.substr(0, mark);
    for (std::size_t open = problem.reasoning.find("<<"); open != std::string::npos; open = problem.reasoning.find("<<")) {
      const std::size_t close = problem.reasoning.find(">>", open);
      if (close == std::string::npos) break;
      problem.reasoning.erase(open, close + 2 - open);
    }
  }
  return problem;
}

std::vector<Problem> read_problems(const std::string& path) {
  std::vector<Problem> problems;
  for (const json::object& row : read_jsonl(path))
    problems.push_back(read_problem(row, fmt::format("{}: row {}", path, problems.size() + 1)));
  if (problems.empty()) fail(ErrorCode::kInvalidArgument, "{}: no rows", path);
  return problems;
}

std::vector<Problem> generate(const WordProblemOptions& options, std::int64_t count, Rng rng, std::unordered_set<std::string>& taken) {
  std::vector<Problem> problems;
  std::int64_t num_misses = 0;
  while (static_cast<std::int64_t>(problems.size()) < count) {
    WordProblem made = make_word_problem(options, rng);
    if (taken.insert(made.question).second) {
      problems.push_back({std::move(made.question), std::to_string(made.answer), std::move(made.reasoning)});
      num_misses = 0;
    } else if (++num_misses > 10'000) {
      fail(ErrorCode::kInvalidArgument,
           "environment math: the generator found only {} different questions for a split of {}; raise max_number or max_steps, or "
           "lower num_train and num_eval",
           problems.size(), count);
    }
  }
  return problems;
}

Rubric make_math_rubric() {
  Rubric rubric;
  rubric.reward("correct_answer", 1.0, [](const Task& task, const Episode& episode) {
    const auto given = extract_final_answer(last_assistant_text(episode.completion));
    return given && is_same_answer(*given, task.answer) ? 1.0 : 0.0;
  });
  rubric.metric("has_answer", [](const Task&, const Episode& episode) {
    return extract_final_answer(last_assistant_text(episode.completion)) ? 1.0 : 0.0;
  });
  return rubric;
}

class MathEnv final : public SingleTurnEnv {
 public:
  MathEnv(std::string name, std::optional<std::string> system_prompt, bool is_boxed, std::vector<Problem> train, std::vector<Problem> eval)
      : SingleTurnEnv(std::move(name), make_math_rubric()),
        system_prompt_(std::move(system_prompt)),
        is_boxed_(is_boxed),
        train_(std::move(train)),
        eval_(std::move(eval)) {}

  std::int64_t num_tasks(Split split) const override { return static_cast<std::int64_t>(problems(split).size()); }

  Task task(Split split, std::int64_t index) const override {
    const Problem& problem = problems(split).at(static_cast<std::size_t>(index));
    Task task;
    task.example_id = index;
    task.env_name = name();
    if (system_prompt_) task.prompt.push_back(json::object{{"role", "system"}, {"content", *system_prompt_}});
    task.prompt.push_back(json::object{{"role", "user"}, {"content", problem.question}});
    task.answer = problem.answer;
    if (!problem.reasoning.empty()) task.info["reasoning"] = problem.reasoning;
    return task;
  }

  std::optional<json::array> demonstration(const Task& task) const override {
    const json::value* reasoning = task.info.if_contains("reasoning");
    if (reasoning == nullptr) return std::nullopt;
    const std::string last = is_boxed_ ? fmt::format("\\boxed{{{}}}", task.answer) : fmt::format("#### {}", task.answer);
    json::array messages;
    messages.push_back(json::object{{"role", "assistant"}, {"content", strip(std::string(reasoning->as_string())) + "\n" + last}});
    return messages;
  }

 private:
  const std::vector<Problem>& problems(Split split) const { return split == Split::kTrain ? train_ : eval_; }

  std::optional<std::string> system_prompt_;
  bool is_boxed_;
  std::vector<Problem> train_;
  std::vector<Problem> eval_;
};

}  // namespace

EnvironmentPtr make_math(std::string name, Args args) {
  const bool is_boxed = args.choice("answer_format", "boxed", {"boxed", "hashes"}) == "boxed";
  const std::optional<std::string> system_prompt =
      args.optional_string("system_prompt", is_boxed ? "Solve the problem step by step. Write the final answer in \\boxed{}."
                                                     : "Solve the problem step by step. End with a line \"#### \" and the final answer.");
  const std::string train_path = args.string("dataset_path", "");
  const std::string eval_path = args.string("eval_dataset_path", "");
  const std::string hub_name = args.string("dataset_name", "");
  for (const char* key : {"dataset_subset", "dataset_split"}) args.string(key, "");
  // Of the Python environment's verifier, which runs in processes of its own.
  args.integer("math_verify_max_workers", 1, 1, 100'000);
  args.number("math_verify_timeout", 5.0, 0.0, 1e6);
  WordProblemOptions options;
  options.is_story = args.choice("mode", "words", {"words", "sums"}) == "words";
  options.min_steps = args.integer("min_steps", options.is_story ? 2 : 1, 1, 20);
  options.max_steps = args.integer("max_steps", std::max<std::int64_t>(options.min_steps, options.is_story ? 4 : 2), 1, 20);
  options.max_number = args.integer("max_number", 20, 2, 10'000);
  const std::string operations = args.choice("operations", "all", {"add", "add_sub", "all"});
  options.can_subtract = operations != "add";
  options.can_multiply = operations == "all";
  const std::int64_t num_train = args.integer("num_train", 1000, 1, 10'000'000);
  const std::int64_t num_eval = args.integer("num_eval", 100, 0, 10'000'000);
  const auto seed = static_cast<std::uint64_t>(args.integer("seed", 0, 0, INT64_MAX));
  args.finish();
  if (options.min_steps > options.max_steps)
    fail(ErrorCode::kInvalidArgument, "environment {}: args.min_steps {} is above max_steps {}", name, options.min_steps,
         options.max_steps);
  if (!hub_name.empty() && train_path.empty() && eval_path.empty())
    fail(ErrorCode::kNotImplemented,
         "environment {}: args.dataset_name {} names a hub data set, which environments do not download; save it as JSON Lines with the "
         "columns 'question' and 'answer' and set args.dataset_path and args.eval_dataset_path",
         name, hub_name);
  std::vector<Problem> train, eval;
  if (!train_path.empty() || !eval_path.empty()) {
    if (!train_path.empty()) train = read_problems(train_path);
    if (!eval_path.empty()) eval = read_problems(eval_path);
  } else {
    std::unordered_set<std::string> taken;
    eval = generate(options, num_eval, Rng(seed, 1), taken);
    train = generate(options, num_train, Rng(seed, 0), taken);
  }
  return std::make_shared<MathEnv>(std::move(name), system_prompt, is_boxed, std::move(train), std::move(eval));
}

}  // namespace prl::env
