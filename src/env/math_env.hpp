#pragma once

#include <string>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// Single-turn questions with one final answer (gsm8k, MATH): reward 1 if the answer in the reply's last \boxed{} or after its
/// last "####" is the wanted one (env/numeric_answer.hpp), else 0. Metric has_answer: whether the reply states one.
///
/// Tasks are those of the published data set of `id` (gsm8k, math500, aime2024, aime2025, math-env; env/task_data.hpp says where they
/// are looked for), of one that args.dataset_name names (hub id, folder or file), or of the files dataset_path and eval_dataset_path: a
/// question (question, problem or prompt) and an answer (answer, solution; the part in \boxed{} or after "####" if it has one; a text or
/// a number). With an argument of the generator, or with "-synthetic" behind the id, they are made up from a seed:
/// mode "words": stories of min_steps to max_steps steps with numbers up to max_number; mode "sums": "What is 12 + 7?" with
/// max_steps operations. Generated tasks come with worked demonstrations.
///
/// Args: dataset_path, eval_dataset_path, dataset_name, dataset_subset, dataset_split train, eval_dataset_split test, question_key,
/// answer_key; or mode words, min_steps 2 (sums: 1), max_steps 4 (sums: 2), max_number 20, operations all (add, add_sub, all),
/// num_train 1000, num_eval 100, seed 0; and answer_format boxed (or hashes: what the system prompt asks for), system_prompt.
/// verify says who compares: native (env/math_answer.hpp, the default), math-verify (the Python package, in a worker process that
/// verify_python has it for), or auto: native where it can read both answers, the package for the others. Then math_verify_timeout 5,
/// seconds, and math_verify_max_workers 1, its processes.
/// Error{kNotFound} saying what to fetch when the data set is not there.
EnvironmentPtr make_math(const std::string& id, std::string name, Args args);
/// Whether these arguments ask for made-up questions.
bool makes_up_math(const boost::json::object& args);

}  // namespace prl::env
