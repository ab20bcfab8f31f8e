#include "env/wiki_search.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "env/made_up_world.hpp"
#include "env/task_data.hpp"
#include "env/text_corpus.hpp"
#include "env/tool_env.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::env {

namespace json = boost::json;

namespace {

using CorpusPtr = std::shared_ptr<const TextCorpus>;

struct ToolLimits {
  std::size_t num_results = 10;
  std::size_t max_section_chars = 8000;
};

/// "page:title", with a number when an earlier section of the page has the same title.
std::string section_id(const CorpusPage& page, std::size_t section) {
  const std::string title = slug(page.sections[section].title);
  std::size_t num_earlier = 0;
  for (std::size_t i = 0; i < section; ++i) num_earlier += slug(page.sections[i].title) == title ? 1 : 0;
  return page.id + ":" + title + (num_earlier == 0 ? std::string() : fmt::format("_{}", num_earlier + 1));
}

std::string search_pages(const TextCorpus& corpus, const std::string& query, std::size_t limit) {
  json::array found;
  for (const CorpusPage* page : corpus.search(query, limit)) found.push_back(json::object{{"page_id", page->id}, {"title", page->title}});
  return text::dump_python(found);
}

std::string view_sections(const TextCorpus& corpus, const std::string& page_id) {
  const CorpusPage* page = corpus.find(page_id);
  if (page == nullptr) fail(ErrorCode::kNotFound, "there is no page '{}'; search_pages gives the ids of pages", page_id);
  json::array sections;
  for (std::size_t i = 0; i < page->sections.size(); ++i)
    sections.push_back(json::object{{"section_id", section_id(*page, i)}, {"section_name", page->sections[i].title}});
  return text::dump_python(sections);
}

std::string read_section(const TextCorpus& corpus, const std::string& id, std::size_t max_chars) {
  const CorpusPage* page = corpus.find(id.substr(0, id.find(':')));
  if (page != nullptr && id.find(':') != std::string::npos)
    for (std::size_t i = 0; i < page->sections.size(); ++i)
      if (section_id(*page, i) == id) {
        const std::string& text = page->sections[i].text;
        return text.substr(0, text::byte_of_code_point(text, max_chars));
      }
  fail(ErrorCode::kNotFound, "there is no section '{}'; view_sections gives the ids of a page's sections", id);
}

/// The text argument `key`, which the schema demands.
std::string text_argument(const json::object& arguments, const char* key) {
  const json::value* value = arguments.if_contains(key);
  if (value == nullptr || !value->is_string()) fail(ErrorCode::kInvalidArgument, "the argument '{}' is missing or no text", key);
  return std::string(value->get_string());
}

Tool make_tool(const char* name, const char* description, const char* argument, const char* meaning,
               std::function<std::string(const std::string&)> run) {
  Tool tool;
  tool.name = name;
  tool.description = description;
  json::object property{{"type", "string"}, {"description", meaning}};
  json::object properties;
  properties[argument] = std::move(property);
  tool.parameters["type"] = "object";
  tool.parameters["properties"] = std::move(properties);
  tool.parameters["required"] = json::array{argument};
  // The closure is owned by the tool; the coroutine gets what it needs by value.
  struct Call {
    static asio::awaitable<std::string> make(std::function<std::string(const std::string&)> body, std::string text) {
      co_return body(text);
    }
  };
  tool.call = [run = std::move(run), argument](json::object arguments) { return Call::make(run, text_argument(arguments, argument)); };
  return tool;
}

std::vector<Tool> make_tools(const CorpusPtr& corpus, ToolLimits limits) {
  return {
      make_tool("search_pages", "Find pages that fit a query. Returns page ids and titles, the best first.", "query", "Words to look for",
                [corpus, limits](const std::string& query) { return search_pages(*corpus, query, limits.num_results); }),
      make_tool("view_sections", "List the sections of a page.", "page_id", "Id of a page, from search_pages",
                [corpus](const std::string& id) { return view_sections(*corpus, id); }),
      make_tool("read_section", "Read the text of one section.", "section_id", "Id of a section, from view_sections",
                [corpus, limits](const std::string& id) { return read_section(*corpus, id, limits.max_section_chars); })};
}

bool holds_words(const std::vector<std::string>& text, const std::vector<std::string>& wanted) {
  return !wanted.empty() && std::search(text.begin(), text.end(), wanted.begin(), wanted.end()) != text.end();
}

/// Calls of one tool, or of all when `name` is empty.
double count_calls(const Episode& episode, const std::string& name) {
  double count = 0;
  for (const json::value& message : episode.completion) {
    const json::object* object = message.if_object();
    const json::value* calls = object != nullptr ? object->if_contains("tool_calls") : nullptr;
    if (calls == nullptr || !calls->is_array()) continue;
    for (const json::value& call : calls->get_array()) {
      boost::system::error_code ec;
      const json::value* called = call.find_pointer("/function/name", ec);
      if (name.empty() || (called != nullptr && called->is_string() && called->get_string() == name)) ++count;
    }
  }
  return count;
}

Rubric make_rubric(std::size_t max_answer_words) {
  Rubric rubric;
  rubric.reward("correct_answer", 1.0, [max_answer_words](const Task& task, const Episode& episode) {
    if (episode.stop_condition != "no_tools_called") return 0.0;
    const std::vector<std::string> given = words_of(last_assistant_text(episode.completion));
    if (given.size() > max_answer_words) return 0.0;
    for (const json::value& answer : task.info.at("answers").as_array())
      if (holds_words(given, words_of(std::string(answer.as_string())))) return 1.0;
    return 0.0;
  });
  rubric.metric("total_tool_calls", [](const Task&, const Episode& episode) { return count_calls(episode, ""); });
  for (const char* tool : {"search_pages", "view_sections", "read_section"})
    rubric.metric(std::string(tool) + "_calls", [tool](const Task&, const Episode& episode) { return count_calls(episode, tool); });
  return rubric;
}

class WikiSearch final : public ToolEnv {
 public:
  WikiSearch(std::string name, std::optional<std::string> system_prompt, std::int64_t max_turns, std::size_t max_answer_words,
             CorpusPtr corpus, ToolLimits limits, std::vector<CorpusQuestion> train, std::vector<CorpusQuestion> eval)
      : ToolEnv(std::move(name), Limits{max_turns, -1}, make_rubric(max_answer_words), make_tools(corpus, limits)),
        system_prompt_(std::move(system_prompt)),
        corpus_(std::move(corpus)),
        limits_(limits),
        train_(std::move(train)),
        eval_(std::move(eval)) {}

  std::int64_t num_tasks(Split split) const override { return static_cast<std::int64_t>(questions(split).size()); }

  Task task(Split split, std::int64_t index) const override {
    const CorpusQuestion& question = questions(split).at(static_cast<std::size_t>(index));
    Task task;
    task.example_id = index;
    task.env_name = name();
    if (system_prompt_) task.prompt.push_back(json::object{{"role", "system"}, {"content", *system_prompt_}});
    task.prompt.push_back(json::object{{"role", "user"}, {"content", question.question}});
    task.answer = question.answers.front();
    json::array answers(question.answers.begin(), question.answers.end());
    task.info["answers"] = std::move(answers);
    json::array sources;
    for (const CorpusQuestion::Source& source : question.sources)
      sources.push_back(json::object{{"query", source.query}, {"page_id", source.page_id}, {"section", source.section}});
    if (!sources.empty()) task.info["sources"] = std::move(sources);
    return task;
  }

  /// For each source: search, look at the sections, read; then the answer.
  std::optional<json::array> demonstration(const Task& task) const override {
    const json::value* sources = task.info.if_contains("sources");
    if (sources == nullptr) return std::nullopt;
    json::array messages;
    for (const json::value& source : sources->as_array()) {
      const std::string query(source.at("query").as_string());
      const std::string page_id(source.at("page_id").as_string());
      const CorpusPage* page = corpus_->find(page_id);
      PRL_CHECK(page != nullptr, "{}: a made-up question names the page {}, which is not there", name(), page_id);
      const std::string section = section_id(*page, source.at("section").to_number<std::size_t>());
      use_tool(messages, "search_pages", "query", query, search_pages(*corpus_, query, limits_.num_results));
      use_tool(messages, "view_sections", "page_id", page_id, view_sections(*corpus_, page_id));
      use_tool(messages, "read_section", "section_id", section, read_section(*corpus_, section, limits_.max_section_chars));
    }
    messages.push_back(json::object{{"role", "assistant"}, {"content", task.answer}});
    return messages;
  }

 private:
  const std::vector<CorpusQuestion>& questions(Split split) const { return split == Split::kTrain ? train_ : eval_; }

  static void use_tool(json::array& messages, const char* tool, const char* argument, const std::string& value, const std::string& result) {
    const std::string id = fmt::format("call_{}", messages.size() / 2);
    json::object arguments;
    arguments[argument] = value;
    json::object function{{"name", tool}, {"arguments", text::dump_python(arguments)}};
    json::object call{{"id", id}, {"type", "function"}};
    call["function"] = std::move(function);
    json::object assistant{{"role", "assistant"}, {"content", ""}};
    json::array calls;
    calls.push_back(std::move(call));
    assistant["tool_calls"] = std::move(calls);
    messages.push_back(std::move(assistant));
    messages.push_back(json::object{{"role", "tool"}, {"tool_call_id", id}, {"content", result}});
  }

  std::optional<std::string> system_prompt_;
  CorpusPtr corpus_;
  ToolLimits limits_;
  std::vector<CorpusQuestion> train_;
  std::vector<CorpusQuestion> eval_;
};

std::vector<CorpusQuestion> read_questions(const std::vector<json::object>& rows, const std::string& path) {
  std::vector<CorpusQuestion> questions;
  for (const json::object& row : rows) {
    CorpusQuestion question;
    if (const json::value* text = row.if_contains("question"); text != nullptr && text::is_text(*text))
      question.question = std::string(text->get_string());
    for (const char* key : {"answer", "answers"}) {
      const json::value* value = row.if_contains(key);
      if (value == nullptr) continue;
      if (text::is_text(*value)) question.answers.emplace_back(value->get_string());
      if (value->is_array())
        for (const json::value& answer : value->get_array())
          if (text::is_text(answer)) question.answers.emplace_back(answer.get_string());
    }
    if (question.question.empty() || question.answers.empty())
      fail(ErrorCode::kInvalidArgument, "{}: row {}: wanted a text in 'question' and texts in 'answer' or 'answers'", path,
           questions.size() + 1);
    questions.push_back(std::move(question));
  }
  if (questions.empty()) fail(ErrorCode::kInvalidArgument, "{}: no rows", path);
  return questions;
}

constexpr std::array kWorldArgs = {"num_pages", "num_train", "num_eval", "seed"};
constexpr const char* kQuestions = "willcb/wiki-trivia-questions-v4";
constexpr const char* kPages = "willcb/rare-wiki-pages";

/// Pages, and questions of both splits about them.
struct WikiWorld {
  CorpusPtr corpus;
  std::vector<CorpusQuestion> train;
  std::vector<CorpusQuestion> eval;
};

WikiWorld make_up_world(const std::string& name, Args& args) {
  const std::int64_t num_pages = args.integer("num_pages", 400, 2, 1'000'000);
  const std::int64_t num_train = args.integer("num_train", 1000, 1, 10'000'000);
  const std::int64_t num_eval = args.integer("num_eval", 100, 0, 10'000'000);
  const auto seed = static_cast<std::uint64_t>(args.integer("seed", 0, 0, INT64_MAX));
  args.finish();
  MadeUpWorld made = make_world(num_pages, seed);
  WikiWorld world;
  world.corpus = std::make_shared<const TextCorpus>(std::move(made.pages));
  if (static_cast<std::int64_t>(made.questions.size()) < num_eval + 1)
    fail(ErrorCode::kInvalidArgument,
         "environment {}: {} pages give {} questions, fewer than num_eval {} and one to train on; raise num_pages", name, num_pages,
         made.questions.size(), num_eval);
  Rng rng(seed, 1);
  for (std::size_t i = made.questions.size(); i > 1; --i) std::swap(made.questions[i - 1], made.questions[rng.next_below(i)]);
  world.eval.assign(made.questions.begin(), made.questions.begin() + num_eval);
  const auto end = std::min<std::int64_t>(num_eval + num_train, static_cast<std::int64_t>(made.questions.size()));
  world.train.assign(made.questions.begin() + num_eval, made.questions.begin() + end);
  return world;
}

/// Pages and questions of files, else the published ones.
WikiWorld read_world(const std::string& name, Args& args) {
  const std::string corpus_path = args.string("corpus_path", "");
  const std::string train_path = args.string("dataset_path", "");
  const std::string eval_path = args.string("eval_dataset_path", "");
  for (const char* key : kWorldArgs) args.ignore(key);
  args.finish();
  const bool has_questions = !train_path.empty() || !eval_path.empty();
  if (has_questions != !corpus_path.empty())
    fail(ErrorCode::kInvalidArgument,
         "environment {}: corpus_path and the questions of dataset_path or eval_dataset_path belong together; set both, or none for the "
         "published ones",
         name);
  WikiWorld world;
  if (has_questions) {
    world.corpus = std::make_shared<const TextCorpus>(TextCorpus::load(corpus_path));
    if (!train_path.empty()) world.train = read_questions(read_task_rows(train_path), train_path);
    if (!eval_path.empty()) world.eval = read_questions(read_task_rows(eval_path), eval_path);
    return world;
  }
  TaskData data(name);
  const auto pages = data.find({{DataPart{.dataset = kPages}}});
  const auto questions = pages ? data.find({{DataPart{.dataset = kQuestions}}}) : std::nullopt;
  if (!questions)
    fail(ErrorCode::kNotFound, "{} (with args.corpus_path); made-up pages and questions: wiki-search-synthetic", data.problem());
  world.corpus = std::make_shared<const TextCorpus>(TextCorpus::from_rows(*pages, kPages));
  world.train = read_questions(*questions, kQuestions);
  world.eval = world.train;  // there is one split; who trains on it evaluates on what it has seen, as with the Python environment
  return world;
}

}  // namespace

bool makes_up_wiki(const json::object& args) {
  const auto has = [&](const char* key) { return args.contains(key); };
  return !has("corpus_path") && std::any_of(kWorldArgs.begin(), kWorldArgs.end(), has);
}

EnvironmentPtr make_wiki_search(const std::string& id, std::string name, Args args) {
  const std::optional<std::string> system_prompt = args.optional_string(
      "system_prompt", "Answer the question with the help of the tools. When you know the answer, reply with it alone.");
  const std::int64_t max_turns = args.integer("max_turns", 10, 1, 1000);
  ToolLimits limits;
  limits.num_results = static_cast<std::size_t>(args.integer("num_results", 10, 1, 1000));
  limits.max_section_chars = static_cast<std::size_t>(args.integer("max_section_chars", 8000, 1, 10'000'000));
  const auto max_answer_words = static_cast<std::size_t>(args.integer("max_answer_words", 50, 1, 100'000));
  // Of the Python environment: its judge is a model behind an API.
  for (const char* key : {"judge_model", "judge_base_url", "judge_api_key_var"})
    if (!args.string(key, "").empty())
      fail(ErrorCode::kNotImplemented, "environment {}: args.{}: answers are compared word by word here, no judge model is asked", name,
           key);
  const bool is_made_up = id.ends_with(kSynthetic) || makes_up_wiki(args.values());
  WikiWorld world = is_made_up ? make_up_world(name, args) : read_world(name, args);
  return std::make_shared<WikiSearch>(std::move(name), system_prompt, max_turns, max_answer_words, std::move(world.corpus), limits,
                                      std::move(world.train), std::move(world.eval));
}

}  // namespace prl::env
