#include "env/reverse_text.hpp"

#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "env/draw.hpp"
#include "env/multi_turn_env.hpp"
#include "env/sequence_matcher.hpp"
#include "env/task_data.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

constexpr const char* kSystemPrompt = "Reverse the text character-by-character. Put your answer in <reversed_text> tags.";
constexpr const char* kAnswerTag = "reversed_text";

constexpr std::array kTextWords{
    "the",    "of",     "and",    "to",     "in",      "is",     "was",    "for",      "on",    "are",   "with",   "as",    "his",
    "they",   "be",     "at",     "one",    "have",    "this",   "from",   "or",       "had",   "by",    "hot",    "word",  "but",
    "what",   "some",   "we",     "can",    "out",     "other",  "were",   "all",      "there", "when",  "up",     "use",   "your",
    "how",    "said",   "an",     "each",   "she",     "which",  "do",     "their",    "time",  "if",    "will",   "way",   "about",
    "many",   "then",   "them",   "write",  "would",   "like",   "so",     "these",    "her",   "long",  "make",   "thing", "see",
    "him",    "two",    "has",    "look",   "more",    "day",    "could",  "go",       "come",  "did",   "number", "sound", "no",
    "most",   "people", "my",     "over",   "know",    "water",  "than",   "call",     "first", "who",   "may",    "down",  "side",
    "been",   "now",    "find",   "any",    "new",     "work",   "part",   "take",     "get",   "place", "made",   "live",  "where",
    "after",  "back",   "little", "only",   "round",   "man",    "year",   "came",     "show",  "every", "good",   "me",    "give",
    "our",    "under",  "name",   "very",   "through", "just",   "form",   "sentence", "great", "think", "say",    "help",  "low",
    "line",   "differ", "turn",   "cause",  "much",    "mean",   "before", "move",     "right", "boy",   "old",    "too",   "same",
    "tell",   "does",   "set",    "three",  "want",    "air",    "well",   "also",     "play",  "small", "end",    "put",   "home",
    "read",   "hand",   "port",   "large",  "spell",   "add",    "even",   "land",     "here",  "must",  "big",    "high",  "such",
    "follow", "act",    "why",    "ask",    "men",     "change", "went",   "light",    "kind",  "off",   "need",   "house", "picture",
    "try",    "us",     "again",  "animal", "point",   "mother", "world",  "near",     "build", "self",  "earth",  "father"};

struct GeneratorOptions {
  std::string mode;
  std::int64_t min_words = 3;
  std::int64_t max_words = 8;
  std::int64_t min_chars = 2;
  std::int64_t max_chars = 8;
  std::vector<char32_t> alphabet;
  std::uint64_t seed = 0;
  std::int64_t num_train = 1000;
  std::int64_t num_eval = 100;
};

std::string generate_text(const GeneratorOptions& options, Rng& rng) {
  std::string text;
  const std::int64_t num_words = between(rng, options.min_words, options.max_words);
  for (std::int64_t i = 0; i < num_words; ++i) {
    if (i > 0) text += ' ';
    if (options.mode == "words") {
      text += kTextWords[rng.next_below(kTextWords.size())];
      continue;
    }
    const std::int64_t num_chars = between(rng, options.min_chars, options.max_chars);
    for (std::int64_t c = 0; c < num_chars; ++c) text::append_code_point(text, options.alphabet[rng.next_below(options.alphabet.size())]);
  }
  return text;
}

/// Different texts that are not in `taken`; adds them there.
std::vector<std::string> generate_split(const GeneratorOptions& options, std::int64_t count, Rng rng,
                                        std::unordered_set<std::string>& taken) {
  std::vector<std::string> texts;
  std::int64_t num_misses = 0;
  while (static_cast<std::int64_t>(texts.size()) < count) {
    std::string text = generate_text(options, rng);
    if (taken.insert(text).second) {
      texts.push_back(std::move(text));
      num_misses = 0;
    } else if (++num_misses > 10'000) {
      fail(ErrorCode::kInvalidArgument,
           "environment reverse-text: the generator found only {} different texts for a split of {}; widen min/max_words, "
           "min/max_chars or alphabet, or lower num_train and num_eval",
           texts.size(), count);
    }
  }
  return texts;
}

/// `where` names the rows in messages.
std::vector<std::string> prompts_of(const std::vector<json::object>& rows, const std::string& where) {
  std::vector<std::string> texts;
  for (const json::object& row : rows) {
    const json::value* prompt = row.if_contains("prompt");
    if (prompt == nullptr || !text::is_text(*prompt))
      fail(ErrorCode::kInvalidArgument, "{}: row {} has no text in the column 'prompt'", where, texts.size() + 1);
    texts.emplace_back(prompt->get_string());
  }
  if (texts.empty()) fail(ErrorCode::kInvalidArgument, "{}: no rows", where);
  return texts;
}

std::string reversed(const std::string& text) {
  std::vector<char32_t> points = text::to_code_points(text);
  std::string out;
  for (auto it = points.rbegin(); it != points.rend(); ++it) text::append_code_point(out, *it);
  return out;
}

Rubric make_reverse_rubric() {
  Rubric rubric;
  rubric.reward("lcs_reward_func", 1.0, [](const Task& task, const Episode& episode) {
    return similarity_ratio(extract_tag(last_assistant_text(episode.completion), kAnswerTag), task.answer);
  });
  return rubric;
}

class ReverseText final : public SingleTurnEnv {
 public:
  ReverseText(std::string name, std::optional<std::string> system_prompt, std::vector<std::string> train, std::vector<std::string> eval,
              GeneratorOptions options, double demonstration_noise)
      : SingleTurnEnv(std::move(name), make_reverse_rubric()),
        system_prompt_(std::move(system_prompt)),
        train_(std::move(train)),
        eval_(std::move(eval)),
        options_(std::move(options)),
        demonstration_noise_(demonstration_noise) {}

  std::int64_t num_tasks(Split split) const override { return static_cast<std::int64_t>(texts(split).size()); }

  Task task(Split split, std::int64_t index) const override {
    const std::string& text = texts(split).at(static_cast<std::size_t>(index));
    Task task;
    task.example_id = index;
    task.env_name = name();
    if (system_prompt_) task.prompt.push_back(json::object{{"role", "system"}, {"content", *system_prompt_}});
    task.prompt.push_back(json::object{{"role", "user"}, {"content", text}});
    task.answer = reversed(text);
    return task;
  }

  std::optional<json::array> demonstration(const Task& task) const override {
    std::string answer = task.answer;
    if (demonstration_noise_ > 0) {
      Rng rng(options_.seed, task.key());
      std::vector<char32_t> points = text::to_code_points(answer);
      answer.clear();
      for (const char32_t point : points) {
        const bool is_wrong = rng.next_double() < demonstration_noise_;
        text::append_code_point(answer, is_wrong ? options_.alphabet[rng.next_below(options_.alphabet.size())] : point);
      }
    }
    json::array messages;
    messages.push_back(json::object{{"role", "assistant"}, {"content", fmt::format("<{}>{}</{}>", kAnswerTag, answer, kAnswerTag)}});
    return messages;
  }

 private:
  const std::vector<std::string>& texts(Split split) const { return split == Split::kTrain ? train_ : eval_; }

  std::optional<std::string> system_prompt_;
  std::vector<std::string> train_;
  std::vector<std::string> eval_;
  GeneratorOptions options_;
  double demonstration_noise_;
};

GeneratorOptions read_generator(Args& args) {
  GeneratorOptions options;
  options.mode = args.choice("mode", "words", {"words", "letters", "tiny"});
  const bool tiny = options.mode == "tiny";
  options.min_words = args.integer("min_words", tiny ? 1 : 3, 1, 10'000);
  options.max_words = args.integer("max_words", std::max<std::int64_t>(options.min_words, tiny ? 1 : 8), 1, 10'000);
  options.min_chars = args.integer("min_chars", tiny ? 3 : 2, 1, 10'000);
  options.max_chars = args.integer("max_chars", std::max<std::int64_t>(options.min_chars, tiny ? 6 : 8), 1, 10'000);
  const std::string alphabet = args.string("alphabet", "abcdefghijklmnopqrstuvwxyz");
  options.alphabet = text::to_code_points(text::replace_invalid_utf8(alphabet));
  options.seed = static_cast<std::uint64_t>(args.integer("seed", 0, 0, INT64_MAX));
  options.num_train = args.integer("num_train", 1000, 1, 10'000'000);
  options.num_eval = args.integer("num_eval", 100, 0, 10'000'000);
  if (options.min_words > options.max_words)
    fail(ErrorCode::kInvalidArgument, "environment reverse-text: args.min_words {} is above max_words {}", options.min_words,
         options.max_words);
  if (options.min_chars > options.max_chars)
    fail(ErrorCode::kInvalidArgument, "environment reverse-text: args.min_chars {} is above max_chars {}", options.min_chars,
         options.max_chars);
  if (options.alphabet.empty()) fail(ErrorCode::kInvalidArgument, "environment reverse-text: args.alphabet is empty");
  return options;
}

}  // namespace

EnvironmentPtr make_reverse_text(std::string name, Args args) {
  const std::optional<std::string> system_prompt = args.optional_string("system_prompt", kSystemPrompt);
  const std::string train_path = args.string("dataset_path", "");
  const std::string eval_path = args.string("eval_dataset_path", "");
  const std::string hub_name = args.string("dataset_name", "");
  const auto subset = args.optional_string("dataset_subset", std::nullopt);
  const std::string split = args.string("dataset_split", "train");
  const std::string eval_split = args.string("eval_dataset_split", "");
  const GeneratorOptions options = read_generator(args);
  const double demonstration_noise = args.number("demonstration_noise", 0.0, 0.0, 1.0);
  args.finish();
  std::vector<std::string> train;
  std::vector<std::string> eval;
  if (!train_path.empty() || !eval_path.empty()) {
    if (!train_path.empty()) train = prompts_of(read_task_rows(train_path), train_path);
    if (!eval_path.empty()) eval = prompts_of(read_task_rows(eval_path), eval_path);
  } else if (!hub_name.empty()) {
    const NamedRows rows = read_named(name, hub_name, subset, split, eval_split);
    train = prompts_of(rows.train, hub_name);
    if (!eval_split.empty()) eval = prompts_of(rows.eval, hub_name);
  } else {
    std::unordered_set<std::string> taken;
    eval = generate_split(options, options.num_eval, Rng(options.seed, 1), taken);
    train = generate_split(options, options.num_train, Rng(options.seed, 0), taken);
  }
  return std::make_shared<ReverseText>(std::move(name), system_prompt, std::move(train), std::move(eval), options, demonstration_noise);
}

}  // namespace prl::env
