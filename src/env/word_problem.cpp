#include "env/word_problem.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <vector>

#include "env/draw.hpp"

namespace prl::env {
namespace {

constexpr std::array kNames = {"Ada",  "Ben",  "Cora", "Dev",  "Elif", "Finn",  "Grace", "Hugo", "Ines", "Jonas",
                               "Kofi", "Lena", "Mia",  "Noah", "Omar", "Priya", "Rosa",  "Sven", "Tara", "Yuki"};
constexpr std::array kThings = {"apples", "marbles", "stickers", "coins",   "pencils", "shells", "cards",
                                "books",  "cookies", "stamps",   "buttons", "beads",   "stones", "tickets"};

enum class Step { kAdd, kSubtract, kPacks, kMultiply, kShare };

/// The divisors of `total` in [2, limit].
std::vector<std::int64_t> divisors(std::int64_t total, std::int64_t limit) {
  std::vector<std::int64_t> found;
  for (std::int64_t d = 2; d <= std::min(limit, total); ++d)
    if (total % d == 0) found.push_back(d);
  return found;
}

Step choose(const WordProblemOptions& options, std::int64_t total, Rng& rng) {
  std::vector<Step> possible = {Step::kAdd};
  if (options.can_subtract && total >= 2) possible.push_back(Step::kSubtract);
  if (options.can_multiply) {
    possible.push_back(Step::kPacks);
    if (total > 0 && total <= 200) possible.push_back(Step::kMultiply);
    if (!divisors(total, 6).empty()) possible.push_back(Step::kShare);
  }
  return possible[rng.next_below(possible.size())];
}

/// One step of a story: its sentence, its equation, the new total.
void tell(Step step, const std::string& name, const std::string& things, std::int64_t max, Rng& rng, WordProblem& problem) {
  const std::int64_t total = problem.answer;
  std::string& question = problem.question;
  std::string& reasoning = problem.reasoning;
  switch (step) {
    case Step::kAdd: {
      const std::int64_t n = between(rng, 1, max);
      constexpr std::array kVerbs = {"finds", "buys", "is given", "wins"};
      question += fmt::format(" {} {} {} more {}.", name, pick(rng, kVerbs), n, things);
      problem.answer = total + n;
      reasoning += fmt::format("{} + {} = {}\n", total, n, problem.answer);
      return;
    }
    case Step::kSubtract: {
      const std::int64_t n = between(rng, 1, std::min(max, total - 1));
      constexpr std::array kVerbs = {"gives away", "loses", "sells", "lends a friend"};
      question += fmt::format(" {} {} {} of the {}.", name, pick(rng, kVerbs), n, things);
      problem.answer = total - n;
      reasoning += fmt::format("{} - {} = {}\n", total, n, problem.answer);
      return;
    }
    case Step::kPacks: {
      const std::int64_t packs = between(rng, 2, 6);
      const std::int64_t each = between(rng, 2, std::max<std::int64_t>(2, max / 2));
      question += fmt::format(" Then {} gets {} boxes with {} {} in each.", name, packs, each, things);
      problem.answer = total + packs * each;
      reasoning += fmt::format("{} * {} = {}\n{} + {} = {}\n", packs, each, packs * each, total, packs * each, problem.answer);
      return;
    }
    case Step::kMultiply: {
      const std::int64_t factor = between(rng, 2, 3);
      question += fmt::format(" A week later {} has {} as many {}.", name, factor == 2 ? "twice" : "three times", things);
      problem.answer = total * factor;
      reasoning += fmt::format("{} * {} = {}\n", total, factor, problem.answer);
      return;
    }
    case Step::kShare: {
      const auto parts = divisors(total, 6);
      const std::int64_t n = parts[rng.next_below(parts.size())];
      question += fmt::format(" {} splits all {} into {} equal piles and keeps one pile.", name, things, n);
      problem.answer = total / n;
      reasoning += fmt::format("{} / {} = {}\n", total, n, problem.answer);
      return;
    }
  }
}

WordProblem make_story(const WordProblemOptions& options, std::int64_t num_steps, Rng& rng) {
  const std::string name = pick(rng, kNames);
  const std::string things = pick(rng, kThings);
  WordProblem problem;
  problem.answer = between(rng, 2, options.max_number);
  problem.question = fmt::format("{} has {} {}.", name, problem.answer, things);
  for (std::int64_t i = 0; i < num_steps; ++i) tell(choose(options, problem.answer, rng), name, things, options.max_number, rng, problem);
  problem.question += fmt::format(" How many {} does {} have now?", things, name);
  return problem;
}

/// From left to right, so that every partial result is written down once and no rule of precedence is needed.
WordProblem make_sum(const WordProblemOptions& options, std::int64_t num_steps, Rng& rng) {
  WordProblem problem;
  problem.answer = between(rng, 1, options.max_number);
  std::string sum = std::to_string(problem.answer);
  bool only_product = true;
  for (std::int64_t i = 0; i < num_steps; ++i) {
    const std::int64_t total = problem.answer;
    std::int64_t n = between(rng, 1, options.max_number);
    const std::uint64_t kind = rng.next_below(3);
    char sign = '+';
    if (kind == 1 && options.can_subtract && total > 0) {
      sign = '-';
      n = between(rng, 1, std::min(n, total));
    } else if (kind == 2 && options.can_multiply && only_product && total * n <= 1'000'000'000) {
      sign = '*';
    }
    only_product = only_product && sign == '*';
    problem.answer = sign == '+' ? total + n : sign == '-' ? total - n : total * n;
    sum += fmt::format(" {} {}", sign, n);
    problem.reasoning += fmt::format("{} {} {} = {}\n", total, sign, n, problem.answer);
  }
  problem.question = fmt::format("What is {}?", sum);
  return problem;
}

}  // namespace

WordProblem make_word_problem(const WordProblemOptions& options, Rng& rng) {
  const std::int64_t num_steps = between(rng, options.min_steps, options.max_steps);
  return options.is_story ? make_story(options, num_steps, rng) : make_sum(options, num_steps, rng);
}

}  // namespace prl::env
