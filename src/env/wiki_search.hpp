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
/// Args: corpus_path (JSONL, Parquet or folder) with dataset_path and eval_dataset_path (JSONL {question, answer or answers}); without
/// them the published pages and questions (env/task_data.hpp says where they are looked for), whose one split serves as both. With
/// one of num_pages 400, num_train 1000, num_eval 100, seed 0, or "-synthetic" behind the id, a made-up world, whose questions come with
/// demonstrations. And max_turns 10, num_results 10, max_section_chars 8000, max_answer_words 50, system_prompt.
/// Source: the shape of the wiki-search environment of the verifiers repository, whose judge is a model; here words are compared.
EnvironmentPtr make_wiki_search(const std::string& id, std::string name, Args args);
/// Whether these arguments ask for a made-up world.
bool makes_up_wiki(const boost::json::object& args);

}  // namespace prl::env
