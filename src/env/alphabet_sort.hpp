#pragma once

#include <string>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// Multi-turn: sort CamelCase names by first or last name; each later turn adds names, and all names so far are to be sorted
/// again with the new ones marked "// new name!".
///
/// Turn 1 answers in <alphabetical_sorted>, later turns in <combined_alphabetical_sorted>. A turn's score is the
/// similarity_ratio of the lower-cased, stripped lines with the expected ones. Several tags in one reply count only if each
/// is strictly better than the one before; then the last counts. Turns that were not played score 0.
/// power_per_turn: the mean of score^similarity_power; otherwise (mean of scores)^similarity_power.
///
/// Args: min_turns 1, max_turns 3, min_names_per_turn 1, max_names_per_turn 5, similarity_power 4, power_per_turn true,
/// seed 1337420, and either dataset_path (column `names`: a list of names; eval_dataset_path), or dataset_name (also hf_dataset_path: a hub
/// id or folder; dataset_subset, dataset_split "train", eval_dataset_split: none), or num_train, num_eval for generated names.
/// Source: environments/alphabet_sort of the verifiers repository; the tasks are drawn with our generator, not CPython's.
EnvironmentPtr make_alphabet_sort(std::string name, Args args);

}  // namespace prl::env
