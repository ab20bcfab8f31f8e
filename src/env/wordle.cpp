#include "env/wordle.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <set>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/rng.hpp"
#include "env/multi_turn_env.hpp"
#include "env/wordle_words.hpp"
#include "text/utf8.hpp"

namespace prl::env {

namespace json = boost::json;

std::string wordle_marks(std::string_view guess, std::string_view secret) {
  std::string marks(guess.size(), 'X');
  int left[256] = {};
  for (std::size_t i = 0; i < guess.size(); ++i) {
    if (guess[i] == secret[i])
      marks[i] = 'G';
    else
      ++left[static_cast<unsigned char>(secret[i])];
  }
  // A letter of the secret answers for one letter of the guess only, the leftmost first.
  for (std::size_t i = 0; i < guess.size(); ++i)
    if (marks[i] == 'X' && left[static_cast<unsigned char>(guess[i])]-- > 0) marks[i] = 'Y';
  return marks;
}

namespace {

constexpr const char* kGuessTag = "guess";

struct Words {
  std::vector<std::string> list;
  std::set<std::string, std::less<>> known;
  std::size_t length = 0;
  bool only_known = false;
};

/// The word of a reply: lower case; "" unless exactly one tag holds a word of the right length.
std::string guess_of(const std::string& reply, const Words& words) {
  std::string visible = reply;
  if (const std::size_t end = visible.rfind("</think>"); end != std::string::npos) visible.erase(0, end + 8);
  const std::vector<std::string> tags = extract_tags(visible, kGuessTag);
  if (tags.size() != 1) return {};
  std::string word = text::to_lower(strip(tags[0]));
  if (word.size() >= 2 && word.front() == '[' && word.back() == ']') word = strip(word.substr(1, word.size() - 2));
  const bool has_letters = std::all_of(word.begin(), word.end(), [](char c) { return c >= 'a' && c <= 'z'; });
  if (word.size() != words.length || !has_letters || (words.only_known && !words.known.contains(word))) return {};
  return word;
}

/// A game as its replies tell it. One entry per reply; "" for a reply without a valid word.
std::vector<std::string> guesses_of(const json::array& completion, const Words& words) {
  std::vector<std::string> guesses;
  for (const std::string& reply : assistant_texts(completion)) guesses.push_back(guess_of(reply, words));
  return guesses;
}

bool is_solved(const std::vector<std::string>& guesses, const std::string& secret) { return !guesses.empty() && guesses.back() == secret; }

std::string spaced(std::string_view letters, bool upper) {
  std::string text;
  for (const char c : letters) {
    if (!text.empty()) text += ' ';
    text += upper && c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  }
  return text;
}

Rubric make_rubric(std::shared_ptr<const Words> words) {
  Rubric rubric;
  rubric.reward("correct_answer", 1.0, [words](const Task& task, const Episode& episode) {
    return is_solved(guesses_of(episode.completion, *words), task.answer) ? 1.0 : 0.0;
  });
  rubric.reward("partial_answer", 1.0, [words](const Task& task, const Episode& episode) {
    const auto guesses = guesses_of(episode.completion, *words);
    if (is_solved(guesses, task.answer)) return 0.0;
    const auto last = std::find_if(guesses.rbegin(), guesses.rend(), [](const std::string& g) { return !g.empty(); });
    if (last == guesses.rend()) return 0.0;
    const std::string marks = wordle_marks(*last, task.answer);
    return 0.2 * static_cast<double>(std::count(marks.begin(), marks.end(), 'G')) +
           0.1 * static_cast<double>(std::count(marks.begin(), marks.end(), 'Y'));
  });
  rubric.reward("length_bonus", 1.0, [words](const Task& task, const Episode& episode) {
    const auto guesses = guesses_of(episode.completion, *words);
    return is_solved(guesses, task.answer) ? 1.0 / static_cast<double>(guesses.size()) : 0.0;
  });
  rubric.reward("format_reward", 0.2, [words](const Task&, const Episode& episode) {
    const auto guesses = guesses_of(episode.completion, *words);
    const auto valid = std::count_if(guesses.begin(), guesses.end(), [](const std::string& g) { return !g.empty(); });
    return guesses.empty() ? 0.0 : static_cast<double>(valid) / static_cast<double>(guesses.size());
  });
  rubric.metric("num_guesses", [words](const Task&, const Episode& episode) {
    return static_cast<double>(guesses_of(episode.completion, *words).size());
  });
  return rubric;
}

class Wordle final : public MultiTurnEnv {
 public:
  Wordle(std::string name, std::optional<std::string> system_prompt, std::shared_ptr<const Words> words, std::int64_t max_guesses,
         std::vector<std::string> train, std::vector<std::string> eval, std::uint64_t seed)
      : MultiTurnEnv(std::move(name), Limits{max_guesses, -1}, make_rubric(words)),
        system_prompt_(std::move(system_prompt)),
        words_(std::move(words)),
        max_guesses_(max_guesses),
        train_(std::move(train)),
        eval_(std::move(eval)),
        seed_(seed) {}

  std::int64_t num_tasks(Split split) const override { return static_cast<std::int64_t>(secrets(split).size()); }

  Task task(Split split, std::int64_t index) const override {
    Task task;
    task.example_id = index;
    task.env_name = name();
    if (system_prompt_) task.prompt.push_back(json::object{{"role", "system"}, {"content", *system_prompt_}});
    task.prompt.push_back(json::object{
        {"role", "user"},
        {"content", fmt::format("Find the secret word of {} letters. You have {} guesses. After each guess you see its letters with a mark "
                                "below each: G means the letter is in the right place, Y means it is in the word but elsewhere, X means "
                                "it is not in the word. Guess with <guess>word</guess>.",
                                words_->length, max_guesses_)}});
    task.answer = secrets(split).at(static_cast<std::size_t>(index));
    return task;
  }

  /// Plays a whole game: every guess fits all marks so far.
  std::optional<json::array> demonstration(const Task& task) const override {
    Rng rng(seed_, hash_bytes(task.answer, static_cast<std::uint64_t>(task.example_id)));
    std::vector<std::string> possible = words_->list;
    json::array messages;
    for (std::int64_t turn = 1;; ++turn) {
      const std::string guess = turn == max_guesses_ ? task.answer : possible[rng.next_below(possible.size())];
      messages.push_back(json::object{{"role", "assistant"}, {"content", fmt::format("<{}>{}</{}>", kGuessTag, guess, kGuessTag)}});
      if (guess == task.answer) return messages;
      messages.push_back(json::object{{"role", "user"}, {"content", feedback(guess, task.answer, turn)}});
      const std::string marks = wordle_marks(guess, task.answer);
      std::erase_if(possible, [&](const std::string& word) { return wordle_marks(guess, word) != marks; });
    }
  }

 protected:
  std::string stop_condition(const Rollout& rollout) const override {
    return is_solved(guesses_of(rollout.episode.completion, *words_), rollout.task.answer) ? "solved" : "";
  }

  asio::awaitable<json::array> respond(Rollout* rollout) const override {
    const std::string guess = guess_of(last_assistant_text(rollout->episode.completion), *words_);
    json::array messages;
    messages.push_back(json::object{{"role", "user"}, {"content", feedback(guess, rollout->task.answer, rollout->episode.num_turns())}});
    co_return messages;
  }

 private:
  const std::vector<std::string>& secrets(Split split) const { return split == Split::kTrain ? train_ : eval_; }

  std::string feedback(const std::string& guess, const std::string& secret, std::int64_t turn) const {
    const std::int64_t left = max_guesses_ - turn;
    const std::string rest = fmt::format("{} {} left.", left, left == 1 ? "guess" : "guesses");
    if (guess.empty())
      return fmt::format("That was no valid guess: write one {} of {} letters as <guess>word</guess>. {}",
                         words_->only_known ? "English word" : "word", words_->length, rest);
    return fmt::format("{}\n{}\n{}", spaced(guess, true), spaced(wordle_marks(guess, secret), false), rest);
  }

  std::optional<std::string> system_prompt_;
  std::shared_ptr<const Words> words_;
  std::int64_t max_guesses_;
  std::vector<std::string> train_;
  std::vector<std::string> eval_;
  std::uint64_t seed_;
};

std::vector<std::string> read_words(const std::string& path) {
  std::vector<std::string> list;
  const std::string bytes = read_file(path, 64 << 20);
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\n', at), bytes.size());
    std::string word = strip(bytes.substr(at, end - at));
    at = end + 1;
    if (word.empty()) continue;
    word = text::to_lower(word);
    if (!std::all_of(word.begin(), word.end(), [](char c) { return c >= 'a' && c <= 'z'; }))
      fail(ErrorCode::kInvalidArgument, "{}: '{}' has other characters than a to z", path, word);
    if (!list.empty() && word.size() != list.front().size())
      fail(ErrorCode::kInvalidArgument, "{}: '{}' and '{}' differ in length; all words must have one", path, word, list.front());
    list.push_back(std::move(word));
  }
  return list;
}

/// `count` games over `words`, each word once before any comes again.
std::vector<std::string> games(const std::vector<std::string>& words, std::int64_t count, Rng rng) {
  std::vector<std::string> secrets;
  std::vector<std::string> order;
  while (static_cast<std::int64_t>(secrets.size()) < count) {
    if (order.empty()) {
      order = words;
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.next_below(i)]);
    }
    secrets.push_back(std::move(order.back()));
    order.pop_back();
  }
  return secrets;
}

}  // namespace

EnvironmentPtr make_wordle(std::string name, Args args) {
  const std::optional<std::string> system_prompt =
      args.optional_string("system_prompt", "You play a word game. Think step by step, then give one guess inside <guess>...</guess>.");
  const std::string path = args.string("words_path", "");
  const std::int64_t num_train = args.integer("num_train", args.integer("num_train_examples", 2000, 1, 10'000'000), 1, 10'000'000);
  const std::int64_t num_eval = args.integer("num_eval", args.integer("num_eval_examples", 20, 0, 10'000'000), 0, 10'000'000);
  const std::int64_t max_guesses = args.integer("max_guesses", 6, 1, 1000);
  const bool only_known = args.boolean("only_known_words", false);
  const auto seed = static_cast<std::uint64_t>(args.integer("seed", 0, 0, INT64_MAX));
  args.finish();
  auto words = std::make_shared<Words>();
  if (path.empty())
    for (const std::string_view word : wordle_words()) words->list.emplace_back(word);
  else
    words->list = read_words(path);
  words->known.insert(words->list.begin(), words->list.end());
  words->list.assign(words->known.begin(), words->known.end());
  words->only_known = only_known;
  if (words->list.size() < 2) fail(ErrorCode::kInvalidArgument, "environment {}: {} holds fewer than two words", name, path);
  words->length = words->list.front().size();
  // A tenth of the words, but no more than there are eval games, are secrets of the eval split and of no other.
  const std::vector<std::string> shuffled = games(words->list, static_cast<std::int64_t>(words->list.size()), Rng(seed, 2));
  const auto num_held_out = std::min<std::int64_t>(num_eval, std::max<std::int64_t>(1, static_cast<std::int64_t>(shuffled.size()) / 10));
  const std::vector<std::string> held_out(shuffled.begin(), shuffled.begin() + num_held_out);
  const std::vector<std::string> rest(shuffled.begin() + num_held_out, shuffled.end());
  return std::make_shared<Wordle>(std::move(name), system_prompt, std::move(words), max_guesses, games(rest, num_train, Rng(seed, 0)),
                                  held_out.empty() ? std::vector<std::string>() : games(held_out, num_eval, Rng(seed, 1)), seed);
}

}  // namespace prl::env
