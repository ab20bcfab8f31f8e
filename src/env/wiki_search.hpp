#pragma once

#include <string>

#include "env/args.hpp"
#include "env/environment.hpp"

namespace prl::env {

/// Multi-turn with tools: answer a question from a corpus of pages (env/text_corpus.hpp).
///
/// Tools: search_pages(query) gives up to num_results pages [{page_id, title}]; view_sections(page_id) gives
/// [{section_id, section_name}] with ids "page:section"; read_section(section_id) gives its text, cut at max_section_chars.
/// The reply without a tool call is the answer. Reward correct_answer: 1 if the words of an accepted answer stand in it one
/// after the other and it has no more than max_answer_words words, else 0. Metrics: total_tool_calls and <tool>_calls.
///
/// Args: corpus_path (JSONL or folder), dataset_path and eval_dataset_path (JSONL {question, answer or answers}), or, without
/// a corpus, a made-up world of num_pages pages; num_train 1000, num_eval 100, seed 0, max_turns 10, num_results 10,
/// max_section_chars 8000, max_answer_words 50, system_prompt. Made-up questions come with demonstrations.
/// Source: the shape of the wiki-search environment of the verifiers repository, whose judge is a model; here words are compared.
EnvironmentPtr make_wiki_search(std::string name, Args args);

}  // namespace prl::env
