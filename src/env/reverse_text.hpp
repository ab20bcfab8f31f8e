#pragma once

#include <string>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// Single turn: write a text backwards, character by character, inside <reversed_text> tags. Reward: similarity_ratio of the
/// stripped tag content and the reversed text, 0 without the tag.
///
/// Tasks come from a local file (`dataset_path`, column `prompt`, `eval_dataset_path` for the eval split), from a data set (`dataset_name`:
/// a hub id or folder; `dataset_subset`, `dataset_split` "train", `eval_dataset_split`: none) or from a seeded generator. Args of the
/// generator:
///   mode        "words": common English words; "letters": random words over `alphabet`; "tiny": one short lower-case word,
///               for byte-level models of a few million parameters
///   min_words, max_words, min_chars, max_chars (letters per word), alphabet, seed, num_train, num_eval
/// demonstration_noise: the part of letters that demonstration() writes wrong, for imperfect warm-up data.
/// Eval texts never occur among the train texts; the eval split depends on the seed alone. system_prompt = null sends none.
/// Source: environments/reverse_text of the verifiers repository.
EnvironmentPtr make_reverse_text(std::string name, Args args);

}  // namespace prl::env
