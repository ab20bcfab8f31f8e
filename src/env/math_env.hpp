#pragma once

#include <string>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// Single-turn questions with one final answer (gsm8k, MATH): reward 1 if the answer in the reply's last \boxed{} or after its
/// last "####" is the wanted one (env/numeric_answer.hpp), else 0. Metric has_answer: whether the reply states one.
///
/// Tasks come from JSONL (dataset_path, eval_dataset_path) with a question (question, problem or prompt) and an answer
/// (answer, solution; the part in \boxed{} or after "####" if it has one; a text or a number), or from a seeded generator:
/// mode "words": stories of min_steps to max_steps steps with numbers up to max_number; mode "sums": "What is 12 + 7?" with
/// max_steps operations. Generated tasks come with worked demonstrations.
///
/// Args: dataset_path, eval_dataset_path, mode words, min_steps 2 (sums: 1), max_steps 4 (sums: 2), max_number 20, operations all (add,
/// add_sub, all), num_train 1000, num_eval 100, seed 0, answer_format boxed (or hashes: what the system prompt asks for), system_prompt.
EnvironmentPtr make_math(std::string name, Args args);

}  // namespace prl::env
