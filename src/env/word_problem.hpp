#pragma once

#include <cstdint>
#include <string>

#include "base/rng.hpp"

namespace prl::env {

struct WordProblemOptions {
  bool is_story = true;  ///< a story; else a bare sum
  std::int64_t min_steps = 2;
  std::int64_t max_steps = 4;
  std::int64_t max_number = 20;  ///< of each number that the question names
  bool can_subtract = true;
  bool can_multiply = true;  ///< and divide without rest
};

/// A question about whole numbers with its solution; the answer is never negative.
struct WordProblem {
  std::string question;
  std::string reasoning;  ///< one equation per step, without the final answer
  std::int64_t answer = 0;
};

/// Pure in the state of `rng`.
WordProblem make_word_problem(const WordProblemOptions& options, Rng& rng);

}  // namespace prl::env
