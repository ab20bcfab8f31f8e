#include "env/math_env.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <unordered_set>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "env/math_answer.hpp"
#include "env/multi_turn_env.hpp"
#include "env/numeric_answer.hpp"
#include "env/python/python_function.hpp"
#include "env/task_data.hpp"
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

const json::value* first_of(const json::object& row, const std::vector<std::string>& keys) {
  for (const std::string& key : keys)
    if (const json::value* value = row.if_contains(key); value != nullptr && !value->is_null()) return value;
  return nullptr;
}

/// What the columns of a data set are called; the first that a row has counts.
struct Columns {
  std::vector<std::string> question = {"question", "problem", "prompt"};
  std::vector<std::string> answer = {"answer", "solution"};
  bool digits_only = false;  ///< answers are numbers with decoration, "336^\\circ"
};

/// The final answer of a data set's solution, and what stands before it.
Problem read_problem(const json::object& row, const Columns& columns, const std::string& where) {
  const json::value* question = first_of(row, columns.question);
  if (question == nullptr || !text::is_text(*question))
    fail(ErrorCode::kInvalidArgument, "{}: wanted a text in one of the columns {}", where, fmt::join(columns.question, ", "));
  const json::value* answer = first_of(row, columns.answer);
  if (answer == nullptr || !(text::is_text(*answer) || text::as_double(*answer)))
    fail(ErrorCode::kInvalidArgument, "{}: wanted a text or a number in one of the columns {}", where, fmt::join(columns.answer, ", "));
  Problem problem;
  problem.question = std::string(question->get_string());
  const std::string solution = text::is_text(*answer) ? std::string(answer->get_string()) : text::dump_python(*answer);
  const auto final_answer = extract_final_answer(solution);
  problem.answer = final_answer ? *final_answer : strip(solution);
  if (columns.digits_only) {
    std::erase_if(problem.answer, [](char c) { return c != '.' && (c < '0' || c > '9'); });
    problem.answer.erase(
        0, std::min(problem.answer.find_first_not_of('0'), problem.answer.size() - std::min<std::size_t>(problem.answer.size(), 1)));
  }
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

std::vector<Problem> read_problems(const std::vector<json::object>& rows, const Columns& columns, const std::string& source) {
  std::vector<Problem> problems;
  for (const json::object& row : rows)
    problems.push_back(read_problem(row, columns, fmt::format("{}: row {}", source, problems.size() + 1)));
  if (problems.empty()) fail(ErrorCode::kInvalidArgument, "{}: no rows", source);
  return problems;
}

/// What a published environment of that id plays.
struct Published {
  std::string_view id;
  DataCopies train;
  DataCopies eval;
  bool digits_only = false;
};

std::vector<Published> published_environments() {
  const auto part = [](const char* dataset, const char* subset, const char* split) {
    return DataPart{dataset, *subset != '\0' ? std::optional<std::string>(subset) : std::nullopt, split};
  };
  std::vector<Published> all;
  all.push_back({"gsm8k", {{part("openai/gsm8k", "main", "train")}}, {{part("openai/gsm8k", "main", "test")}}});
  all.push_back({"math500", {}, {{part("HuggingFaceH4/MATH-500", "", "test")}}});
  all.push_back({"aime2024", {}, {{part("HuggingFaceH4/aime_2024", "", "train")}, {part("math-ai/aime24", "", "test")}}, true});
  all.push_back({"aime2025",
                 {},
                 {{part("opencompass/AIME2025", "AIME2025-I", "test"), part("opencompass/AIME2025", "AIME2025-II", "test")},
                  {part("MathArena/aime_2025", "", "train")},
                  {part("math-ai/aime25", "", "test")}},
                 true});
  all.push_back({"math-env", {{part("PrimeIntellect/INTELLECT-3-RL", "math", "train")}}, {}});
  return all;
}

/// Arguments of the generator; one of them asks for made-up questions.
constexpr std::array kGeneratorArgs = {"mode", "min_steps", "max_steps", "max_number", "operations", "num_train", "num_eval", "seed"};

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

/// The package math-verify in a worker process.
struct Verifier {
  std::unique_ptr<python::PythonFunction> function;  ///< null: answers are compared here
  bool only_where_needed = false;                    ///< ask for answers that cannot be read here
  std::chrono::milliseconds limit{};
};

// Longer than the worker's own limits (python/prl_worker/math_verdict.py), so that it is the worker that gives up.
constexpr std::chrono::seconds kVerifierSlack{120};
constexpr const char* kVerdict = "math_verify";

Verifier make_verifier(const std::string& name, Args& args) {
  const std::string who = args.choice("verify", "native", {"native", "math-verify", "auto"});
  const std::string python = args.string("verify_python", "");
  const std::int64_t num_workers = args.integer("math_verify_max_workers", 1, 1, 1000);
  const double timeout = args.number("math_verify_timeout", 5.0, 0.0, 1e4);
  Verifier verifier;
  if (who == "native") return verifier;
  python::PythonSettings settings;
  settings.python = python;
  json::object kwargs{{"timeout_s", timeout}, {"max_workers", num_workers}};
  verifier.function =
      std::make_unique<python::PythonFunction>(name + ".verify", "prl_worker.math_verdict.verify", std::move(kwargs), settings);
  verifier.only_where_needed = who == "auto";
  verifier.limit = std::chrono::milliseconds(static_cast<std::int64_t>(timeout * 3000)) + kVerifierSlack;
  return verifier;
}

Rubric make_math_rubric() {
  Rubric rubric;
  rubric.reward("correct_answer", 1.0, [](const Task& task, const Episode& episode) {
    if (const auto verdict = episode.metrics.find(kVerdict); verdict != episode.metrics.end()) return verdict->second;
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
  MathEnv(std::string name, std::optional<std::string> system_prompt, bool is_boxed, std::vector<Problem> train, std::vector<Problem> eval,
          Verifier verifier)
      : SingleTurnEnv(std::move(name), make_math_rubric()),
        system_prompt_(std::move(system_prompt)),
        is_boxed_(is_boxed),
        train_(std::move(train)),
        eval_(std::move(eval)),
        verifier_(std::move(verifier)) {}

  void prepare() const override {
    if (verifier_.function) verifier_.function->call_now({"1", "1"}, verifier_.limit);
  }

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

 protected:
  asio::awaitable<void> judge(Rollout* rollout, net::TimePoint deadline) const override {
    if (!verifier_.function) co_return;
    const auto given = extract_final_answer(last_assistant_text(rollout->episode.completion));
    if (!given) co_return;
    if (verifier_.only_where_needed && compare_answers(*given, rollout->task.answer)) co_return;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - net::Clock::now());
    auto asking = verifier_.function->call({*given, rollout->task.answer}, std::min(verifier_.limit, left));
    const json::value verdict = co_await std::move(asking);
    rollout->episode.metrics[kVerdict] = verdict.is_bool() && verdict.get_bool() ? 1.0 : 0.0;
  }

 private:
  const std::vector<Problem>& problems(Split split) const { return split == Split::kTrain ? train_ : eval_; }

  std::optional<std::string> system_prompt_;
  bool is_boxed_;
  std::vector<Problem> train_;
  std::vector<Problem> eval_;
  Verifier verifier_;
};

/// Questions and answers of both splits.
struct ProblemSplits {
  std::vector<Problem> train;
  std::vector<Problem> eval;
};

ProblemSplits make_up(const std::string& name, Args& args) {
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
  std::unordered_set<std::string> taken;
  ProblemSplits problems;
  problems.eval = generate(options, num_eval, Rng(seed, 1), taken);
  problems.train = generate(options, num_train, Rng(seed, 0), taken);
  return problems;
}

/// Questions of files, of a data set that the arguments name, or of the published one of that id.
ProblemSplits read_data(const std::string& id, const std::string& name, Args& args) {
  const std::string train_path = args.string("dataset_path", "");
  const std::string eval_path = args.string("eval_dataset_path", "");
  const std::string dataset = args.string("dataset_name", "");
  const auto subset = args.optional_string("dataset_subset", std::nullopt);
  const std::string split = args.string("dataset_split", "train");
  const std::string eval_split = args.string("eval_dataset_split", "test");
  Columns columns;
  if (const std::string key = args.string("question_key", ""); !key.empty()) columns.question = {key};
  if (const std::string key = args.string("answer_key", ""); !key.empty()) columns.answer = {key};
  for (const char* key : kGeneratorArgs) args.ignore(key);
  args.finish();
  ProblemSplits problems;
  if (!train_path.empty()) problems.train = read_problems(read_task_rows(train_path), columns, train_path);
  if (!eval_path.empty()) problems.eval = read_problems(read_task_rows(eval_path), columns, eval_path);
  if (!train_path.empty() || !eval_path.empty()) return problems;
  const std::vector<Published> all = published_environments();
  const auto known = std::find_if(all.begin(), all.end(), [&](const Published& entry) { return entry.id == id; });
  PRL_CHECK(known != all.end(), "environment {}: no data set is known for {}", name, id);
  DataCopies train = known->train, eval = known->eval;
  columns.digits_only = known->digits_only;
  if (!dataset.empty()) {
    columns.digits_only = false;
    train = {{DataPart{dataset, subset, split}}};
    eval = {{DataPart{dataset, subset, eval_split}}};
  }
  TaskData data(name);
  if (!train.empty())
    if (const auto rows = data.find(train)) problems.train = read_problems(*rows, columns, train.front().front().dataset);
  const std::string problem = data.problem();
  if (!eval.empty())
    if (const auto rows = data.find(eval)) problems.eval = read_problems(*rows, columns, eval.front().front().dataset);
  if (problems.train.empty() && problems.eval.empty())
    fail(ErrorCode::kNotFound, "{}{}", problem.empty() ? data.problem() : problem,
         id == "gsm8k" || id == "math-env" ? fmt::format("; made-up questions: {}-synthetic", id) : "");
  if (!data.problem().empty()) log::warning("{}", data.problem());
  return problems;
}

}  // namespace

bool makes_up_math(const json::object& args) {
  const auto has = [&](const char* key) { return args.contains(key); };
  return !has("dataset_path") && !has("eval_dataset_path") && !has("dataset_name") &&
         std::any_of(kGeneratorArgs.begin(), kGeneratorArgs.end(), has);
}

EnvironmentPtr make_math(const std::string& id, std::string name, Args args) {
  const bool is_boxed = args.choice("answer_format", "boxed", {"boxed", "hashes"}) == "boxed";
  const std::optional<std::string> system_prompt =
      args.optional_string("system_prompt", is_boxed ? "Solve the problem step by step. Write the final answer in \\boxed{}."
                                                     : "Solve the problem step by step. End with a line \"#### \" and the final answer.");
  Verifier verifier = make_verifier(name, args);
  const bool is_made_up = id.ends_with(kSynthetic) || makes_up_math(args.values());
  ProblemSplits problems = is_made_up ? make_up(name, args) : read_data(id, name, args);
  return std::make_shared<MathEnv>(std::move(name), system_prompt, is_boxed, std::move(problems.train), std::move(problems.eval),
                                   std::move(verifier));
}

}  // namespace prl::env
