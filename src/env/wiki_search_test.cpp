#include "env/wiki_search.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "env/testing/scripted_chat.hpp"
#include "env/text_corpus.hpp"

namespace prl::env {
namespace {

namespace fs = std::filesystem;
using namespace testing;

fs::path scratch() {
  const fs::path folder = fs::temp_directory_path() / fmt::format("prl_wiki_{}", ::getpid());
  fs::remove_all(folder);
  fs::create_directories(folder / "pages/deep");
  return folder;
}

TEST(TextCorpus, RanksPagesByTheirWords) {
  const TextCorpus corpus({{"a", "River Otters", {{"Life", "Otters swim and eat fish."}}},
                           {"b", "Fish", {{"Kinds", "There are many fish: carp, pike, trout."}}},
                           {"c", "Mountains", {{"Alps", "Snow and rock."}}}});
  const auto found = corpus.search("what do OTTERS eat", 10);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0]->id, "a");
  const auto fish = corpus.search("fish", 10);
  ASSERT_EQ(fish.size(), 2u);
  EXPECT_EQ(fish[0]->id, "b") << "a word of the title counts more";
  EXPECT_EQ(corpus.search("fish", 1).size(), 1u);
  EXPECT_TRUE(corpus.search("zebra", 10).empty());
  EXPECT_TRUE(corpus.search("", 10).empty());
  EXPECT_EQ(corpus.find("b")->title, "Fish");
  EXPECT_EQ(corpus.find("z"), nullptr);
  EXPECT_THROW(TextCorpus({{"a", "x", {{"s", "t"}}}, {"a", "y", {{"s", "t"}}}}), Error);
}

TEST(TextCorpus, ReadsFoldersAndJsonl) {
  const fs::path folder = scratch();
  std::ofstream(folder / "pages/otters.md") << "# River Otters\nThey swim.\n## Food\nFish.\n## Food\nMore fish.\n";
  std::ofstream(folder / "pages/deep/plain.txt") << "Only text.\n#tag is no heading\n";
  const TextCorpus pages = TextCorpus::load(folder / "pages");
  ASSERT_EQ(pages.pages().size(), 2u);
  const CorpusPage& plain = pages.pages()[0];
  EXPECT_EQ(plain.id, "deep_plain");
  EXPECT_EQ(plain.title, "plain");
  EXPECT_EQ(plain.sections[0].text, "Only text.\n#tag is no heading");
  const CorpusPage& otters = pages.pages()[1];
  EXPECT_EQ(otters.title, "River Otters");
  ASSERT_EQ(otters.sections.size(), 3u);
  EXPECT_EQ(otters.sections[0].title, "Introduction");
  EXPECT_EQ(otters.sections[1].text, "Fish.");
  std::ofstream(folder / "c.jsonl") << R"({"title": "Ünder", "content": "a\n# B\nb"})"
                                    << "\n";
  const TextCorpus lines = TextCorpus::load(folder / "c.jsonl");
  EXPECT_EQ(lines.pages()[0].id, "ünder");
  EXPECT_EQ(lines.pages()[0].sections[1].title, "B");
  std::ofstream(folder / "c.jsonl") << R"({"title": "x"})"
                                    << "\n";
  EXPECT_THROW(TextCorpus::load(folder / "c.jsonl"), Error);
  EXPECT_THROW(TextCorpus::load(folder / "pages/none"), Error);
  fs::remove_all(folder);
}

TEST(WikiSearch, ToolsAnswerAndTheFinalReplyIsScored) {
  const fs::path folder = scratch();
  std::ofstream(folder / "pages/otters.md") << "# River Otters\n## Food\nThey eat trout.\n## Food\nAnd crabs.\n";
  std::ofstream(folder / "q.jsonl") << R"({"question": "What do otters eat?", "answers": ["trout", "rainbow trout"]})"
                                    << "\n";
  const auto environment = make(
      "wiki-search", fmt::format(R"({{"corpus_path": "{0}/pages", "eval_dataset_path": "{0}/q.jsonl", "max_turns": 6}})", folder.string()));
  const Task task = environment->task(Split::kEval, 0);
  ScriptedChat chat({calls("search_pages", R"({"query": "otters"})"), calls("view_sections", R"({"page_id": "otters"})"),
                     calls("read_section", R"({"section_id": "otters:food_2"})"), calls("read_section", R"({"section_id": "otters:none"})"),
                     says("They eat Rainbow Trout.")});
  const Episode episode = play(*environment, task, chat);
  EXPECT_EQ(episode.reward, 1);
  EXPECT_EQ(episode.stop_condition, "no_tools_called");
  EXPECT_EQ(episode.metrics.at("total_tool_calls"), 4);
  EXPECT_EQ(episode.metrics.at("read_section_calls"), 2);
  EXPECT_EQ(episode.completion[1].at("content").as_string(), R"([{"page_id": "otters", "title": "River Otters"}])");
  EXPECT_EQ(episode.completion[5].at("content").as_string(), "And crabs.");
  EXPECT_NE(episode.completion[7].at("content").as_string().find("Error: there is no section"), std::string::npos);
  ASSERT_EQ(chat.requests[0].tools.size(), 3u);
  EXPECT_EQ(environment->tools(task), chat.requests[0].tools);
  EXPECT_EQ(chat.requests[0].tools[2].at("function").at("parameters").at("required").as_array()[0].as_string(), "section_id");

  ScriptedChat wrong({says("They eat crabs.")});
  EXPECT_EQ(play(*environment, task, wrong).reward, 0);
  std::string everything = "trout";
  for (int i = 0; i < 60; ++i) everything += " word";
  ScriptedChat lengthy({says(everything)});
  EXPECT_EQ(play(*environment, task, lengthy).reward, 0);
  fs::remove_all(folder);
}

TEST(WikiSearch, DemonstrationsOfTheMadeUpWorldReachTheAnswer) {
  const auto environment = make("wiki-search", R"({"num_pages": 60, "num_train": 100, "num_eval": 30, "seed": 4})");
  const auto again = make("wiki-search", R"({"num_pages": 60, "num_train": 100, "num_eval": 30, "seed": 4})");
  ASSERT_EQ(environment->num_tasks(Split::kTrain), 100);
  std::set<std::string> questions;
  std::size_t longest = 0;
  for (int i = 0; i < 100; ++i) {
    const Task task = environment->task(Split::kTrain, i);
    EXPECT_EQ(task.prompt, again->task(Split::kTrain, i).prompt);
    questions.insert(std::string(task.prompt.back().at("content").as_string()));
    const auto demonstration = environment->demonstration(task);
    ASSERT_TRUE(demonstration);
    longest = std::max(longest, demonstration->size());
    std::deque<ChatTurn> turns;
    for (const auto& message : *demonstration) {
      if (message.at("role").as_string() != "assistant") continue;
      turns.push_back(says(""));
      turns.back().message = message.as_object();
    }
    ScriptedChat chat(std::move(turns));
    const Episode episode = play(*environment, task, chat);
    EXPECT_EQ(episode.reward, 1) << task.answer;
    EXPECT_EQ(episode.completion, *demonstration) << "the tools answer what the demonstration holds";
    // What was read holds the answer.
    EXPECT_NE(std::string(demonstration->at(demonstration->size() - 2).at("content").as_string()).find(task.answer), std::string::npos);
  }
  EXPECT_EQ(longest, 13u) << "two sources of three calls, and the answer";
  EXPECT_EQ(questions.size(), 100u);
  for (int i = 0; i < 30; ++i)
    EXPECT_FALSE(questions.contains(std::string(environment->task(Split::kEval, i).prompt.back().at("content").as_string())));
}

TEST(WikiSearch, ArgumentsThatDoNotFit) {
  EXPECT_THROW(make("wiki-search", R"({"corpus_path": "x"})"), Error);
  EXPECT_THROW(make("wiki-search", R"({"num_pages": 2, "num_eval": 100})"), Error);
  EXPECT_THROW(make("wiki-search", R"({"judge_model": "gpt-4.1-mini"})"), Error);
}

}  // namespace
}  // namespace prl::env
