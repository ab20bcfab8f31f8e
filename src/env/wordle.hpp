#pragma once

#include <string>
#include <string_view>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// The marks of a guess, one letter each: 'G' right place, 'Y' in the word at another place, 'X' not in it (or not that often).
/// Both words have one length, lower case.
std::string wordle_marks(std::string_view guess, std::string_view secret);

/// Multi-turn: find a secret word in max_guesses guesses, each written as <guess>word</guess> (brackets around the word are
/// allowed). The environment answers with the letters and their marks. A reply without one valid word uses up a guess.
///
/// reward = correct_answer (1 if found) + partial_answer (0.2 per G and 0.1 per Y of the last valid guess, if not found)
///        + length_bonus (1 / number of guesses, if found) + 0.2 * format_reward (share of replies with one valid word).
/// Metric num_guesses. Demonstrations come from a player that only guesses words that are still possible.
///
/// Args: words_path (a file with one word per line; all of one length) or the built-in list of five-letter words; num_train
/// 2000, num_eval 20 games (secrets of the two splits differ; a split with more games than words repeats them), max_guesses 6,
/// only_known_words false (true: a guess must be in the list), seed 0, system_prompt.
/// Source: the game and its rewards as in the Wordle environment of the verifiers repository.
EnvironmentPtr make_wordle(std::string name, Args args);

}  // namespace prl::env
