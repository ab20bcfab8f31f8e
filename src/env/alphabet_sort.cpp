#include "env/alphabet_sort.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <set>
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

constexpr const char* kFirstTag = "alphabetical_sorted";
constexpr const char* kLaterTag = "combined_alphabetical_sorted";
constexpr const char* kNewMark = " // new name!";

constexpr std::array kFirstNames{"Ada",   "Alan",    "Barbara", "Carl",   "Chen",   "Diana",  "Edsger", "Elena",  "Emmy",  "Felix",
                                 "Grace", "Haruto",  "Hedy",    "Ines",   "Ivan",   "Jia",    "John",   "Katya",  "Kofi",  "Lars",
                                 "Leila", "Linus",   "Maria",   "Marvin", "Mei",    "Nadia",  "Niklas", "Olga",   "Omar",  "Paul",
                                 "Priya", "Quentin", "Rosa",    "Sergei", "Sofia",  "Tariq",  "Uma",    "Viktor", "Wanda", "Xavier",
                                 "Yara",  "Zoe",     "Boris",   "Clara",  "Dmitri", "Esther", "Franz",  "Greta",  "Hugo",  "Irina"};
constexpr std::array kLastNames{"Abe",     "Backus",   "Cantor",   "Dirac",   "Euler",   "Fermi",   "Gauss",  "Hopper", "Ibarra",
                                "Jensen",  "Knuth",    "Lovelace", "Maxwell", "Noether", "Okafor",  "Pascal", "Quine",  "Ramanujan",
                                "Shannon", "Turing",   "Ulam",     "Vega",    "Wiener",  "Xu",      "Yamada", "Zorn",   "Bell",
                                "Curie",   "Dijkstra", "Erdos",    "Feynman", "Godel",   "Hilbert", "Ito",    "Jordan", "Klein",
                                "Lamport", "Markov",   "Newton",   "Ostrom",  "Perlman", "Riemann", "Silva",  "Tarski", "Varma",
                                "Weyl",    "Young",    "Zhang",    "Banach",  "Church"};

struct SortOptions {
  std::int64_t min_turns = 1;
  std::int64_t max_turns = 3;
  std::int64_t min_names_per_turn = 1;
  std::int64_t max_names_per_turn = 5;
  std::int64_t similarity_power = 4;
  bool power_per_turn = true;
  std::uint64_t seed = 1337420;
};

/// One task before it becomes messages.
struct SortTask {
  json::array prompt;
  std::string answer;
  json::object info;
};

bool is_upper(char32_t c) {
  std::string text;
  text::append_code_point(text, c);
  return text::to_lower(text) != text && text::to_upper(text) == text;
}

/// Byte position of the first capital after the first character, or size().
std::size_t split_position(const std::string& name) {
  std::size_t at = 0;
  if (!name.empty()) text::next_code_point(name, at);
  while (at < name.size()) {
    const std::size_t begin = at;
    if (is_upper(text::next_code_point(name, at))) return begin;
  }
  return name.size();
}

std::string sort_key(const std::string& name, bool by_first) {
  const std::size_t at = split_position(name);
  return by_first ? name.substr(0, at) : name.substr(at);
}

template <typename T>
void shuffle(std::vector<T>& items, Rng& rng) {
  for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[rng.next_below(i)]);
}

json::array to_array(const std::vector<std::string>& texts) {
  json::array array;
  for (const std::string& text : texts) array.emplace_back(text);
  return array;
}

json::object user_message(const std::string& content) { return json::object{{"role", "user"}, {"content", content}}; }

std::string example_lines(std::int64_t count, std::int64_t new_after) {
  std::string lines;
  for (std::int64_t i = 1; i <= count; ++i) lines += fmt::format("{}Name{}{}", i > 1 ? "\n" : "", i, i > new_after ? kNewMark : "");
  return lines;
}

std::string follow_up_text(const char* kind, const std::vector<std::string>& names, const std::string& example) {
  std::string text = fmt::format(
      "Now sort ALL of these names alphabetically by {} name: {}\n\nThese are in addition to the prior list. Mark any NEW names "
      "(that weren't in the prior list) with `// new name!` at the end.",
      kind, fmt::join(names, ", "));
  if (example.empty()) return text + " Follow the same format as before.";
  return text + fmt::format("\n\nUse exactly this format:\n<{}>\n{}\n</{}>", kLaterTag, example, kLaterTag);
}

/// Builds a task from a list of different names; nullopt when there are too few for the drawn turns.
std::optional<SortTask> build_task(const std::vector<std::string>& names, const SortOptions& options, Rng& rng) {
  const std::int64_t num_turns = between(rng, options.min_turns, options.max_turns);
  std::vector<std::vector<std::string>> turns(static_cast<std::size_t>(num_turns));
  std::vector<std::int64_t> counts;
  std::int64_t num_needed = 0;
  for (std::int64_t i = 0; i < num_turns; ++i) {
    counts.push_back(between(rng, options.min_names_per_turn, options.max_names_per_turn));
    num_needed += counts.back();
  }
  if (static_cast<std::int64_t>(names.size()) < num_needed) return std::nullopt;
  const bool by_first = rng.next_below(2) == 0;
  const char* kind = by_first ? "FIRST" : "LAST";
  auto next = names.begin();
  for (std::size_t i = 0; i < turns.size(); ++i) {
    turns[i].assign(next, next + counts[i]);
    next += counts[i];
  }

  json::array truths;
  json::array turn_names;
  std::vector<std::string> so_far;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    so_far.insert(so_far.end(), turns[i].begin(), turns[i].end());
    turn_names.push_back(to_array(turns[i]));
    std::vector<std::string> sorted = so_far;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](const std::string& a, const std::string& b) { return sort_key(a, by_first) < sort_key(b, by_first); });
    if (i > 0)
      for (std::string& name : sorted)
        if (std::find(turns[i].begin(), turns[i].end(), name) != turns[i].end()) name += kNewMark;
    truths.push_back(to_array(sorted));
  }

  SortTask task;
  std::vector<std::string> shown = turns[0];
  shuffle(shown, rng);
  const std::int64_t num_lines = between(rng, options.min_names_per_turn, options.max_names_per_turn);
  task.prompt.push_back(
      user_message(fmt::format("Sort these names in alphabetical order by {} name: {}\n\nUse exactly this format:\n<{}>\n{}\n</{}>", kind,
                               fmt::join(shown, ", "), kFirstTag, example_lines(num_lines, num_lines), kFirstTag)));
  json::array follow_ups;
  std::int64_t num_so_far = counts[0];
  for (std::size_t i = 1; i < turns.size(); ++i) {
    shown = turns[i];
    shuffle(shown, rng);
    num_so_far += counts[i];
    const std::int64_t num_example = between(rng, options.min_names_per_turn, num_so_far);
    const std::int64_t new_after = between(rng, 0, num_example - 1);
    follow_ups.emplace_back(follow_up_text(kind, shown, i == 1 ? example_lines(num_example, new_after) : ""));
  }
  task.info["follow_ups"] = std::move(follow_ups);
  task.info["turn_names"] = std::move(turn_names);
  task.info["ground_truths"] = std::move(truths);
  task.info["num_turns"] = num_turns;
  task.info["sort_by_first"] = by_first;
  return task;
}

std::vector<std::string> lines_of(const std::string& content) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at <= content.size();) {
    const std::size_t end = std::min(content.find('\n', at), content.size());
    std::string line = strip(content.substr(at, end - at));
    if (!line.empty()) lines.push_back(std::move(line));
    at = end + 1;
  }
  return lines;
}

std::string lower_joined(const std::vector<std::string>& lines) {
  std::string text;
  for (std::size_t i = 0; i < lines.size(); ++i) text += (i > 0 ? "\n" : "") + text::to_lower(strip(lines[i]));
  return text;
}

double attempt_score(const std::string& content, const std::vector<std::string>& expected, double power) {
  const std::vector<std::string> predicted = lines_of(content);
  if (predicted.empty() || expected.empty()) return 0.0;
  return std::pow(similarity_ratio(lower_joined(predicted), lower_joined(expected)), power);
}

double turn_score(const std::string& reply, std::size_t turn_idx, const std::vector<std::string>& expected, double power) {
  const std::vector<std::string> attempts = extract_tags(reply, turn_idx == 0 ? kFirstTag : kLaterTag);
  double last = 0.0;
  for (std::size_t i = 0; i < attempts.size(); ++i) {
    const double score = attempt_score(attempts[i], expected, power);
    if (i > 0 && score <= last) return 0.0;
    last = score;
  }
  return last;
}

double score_episode(const Task& task, const Episode& episode, const SortOptions& options) {
  const json::array& truths = task.info.at("ground_truths").as_array();
  const std::vector<std::string> replies = assistant_texts(episode.completion);
  const double power = static_cast<double>(options.similarity_power);
  double total = 0;
  for (std::size_t i = 0; i < truths.size() && i < replies.size(); ++i) {
    std::vector<std::string> expected;
    for (const json::value& line : truths[i].as_array()) expected.emplace_back(line.as_string());
    total += turn_score(replies[i], i, expected, options.power_per_turn ? power : 1.0);
  }
  const double mean = truths.empty() ? 0.0 : total / static_cast<double>(truths.size());
  return options.power_per_turn ? mean : std::pow(mean, power);
}

Rubric make_rubric(const SortOptions& options) {
  Rubric rubric;
  rubric.reward("weighted_reward", 1.0,
                [options](const Task& task, const Episode& episode) { return score_episode(task, episode, options); });
  return rubric;
}

class AlphabetSort final : public MultiTurnEnv {
 public:
  AlphabetSort(std::string name, const SortOptions& options, std::vector<SortTask> train, std::vector<SortTask> eval)
      : MultiTurnEnv(std::move(name), Limits{options.max_turns, -1}, make_rubric(options)),
        train_(std::move(train)),
        eval_(std::move(eval)) {}

  std::int64_t num_tasks(Split split) const override { return static_cast<std::int64_t>(tasks(split).size()); }

  Task task(Split split, std::int64_t index) const override {
    const SortTask& source = tasks(split).at(static_cast<std::size_t>(index));
    Task task;
    task.example_id = index;
    task.env_name = name();
    task.prompt = source.prompt;
    task.info = source.info;
    return task;
  }

  std::optional<json::array> demonstration(const Task& task) const override {
    json::array messages;
    const json::array& truths = task.info.at("ground_truths").as_array();
    const json::array& follow_ups = task.info.at("follow_ups").as_array();
    for (std::size_t i = 0; i < truths.size(); ++i) {
      if (i > 0) messages.push_back(user_message(std::string(follow_ups[i - 1].as_string())));
      const char* tag = i == 0 ? kFirstTag : kLaterTag;
      std::string content = fmt::format("<{}>\n", tag);
      for (const json::value& line : truths[i].as_array()) content += std::string(line.as_string()) + "\n";
      messages.push_back(json::object{{"role", "assistant"}, {"content", content + fmt::format("</{}>", tag)}});
    }
    return messages;
  }

 protected:
  std::string stop_condition(const Rollout& rollout) const override {
    return rollout.episode.num_turns() >= rollout.task.info.at("num_turns").to_number<std::int64_t>() ? "all_turns_done" : "";
  }

  asio::awaitable<json::array> respond(Rollout* rollout) const override {
    const auto turn_idx = static_cast<std::size_t>(rollout->episode.num_turns() - 1);
    json::array answer;
    answer.push_back(user_message(std::string(rollout->task.info.at("follow_ups").as_array().at(turn_idx).as_string())));
    co_return answer;
  }

 private:
  const std::vector<SortTask>& tasks(Split split) const { return split == Split::kTrain ? train_ : eval_; }
  std::vector<SortTask> train_;
  std::vector<SortTask> eval_;
};

/// `where` names the rows in messages.
std::vector<SortTask> tasks_of(const std::vector<json::object>& rows, const std::string& where, const SortOptions& options, Rng rng) {
  std::vector<SortTask> tasks;
  std::int64_t row_number = 0;
  for (const json::object& row : rows) {
    ++row_number;
    const json::value* names = row.if_contains("names");
    if (names == nullptr || !names->is_array())
      fail(ErrorCode::kInvalidArgument, "{}: row {} has no list in the column 'names'", where, row_number);
    std::vector<std::string> combined;
    std::set<std::string> seen;
    for (const json::value& value : names->get_array()) {
      if (!text::is_text(value)) fail(ErrorCode::kInvalidArgument, "{}: row {}: a name is not a text", where, row_number);
      std::string name(value.get_string());
      std::erase(name, ' ');
      if (seen.insert(name).second) combined.push_back(std::move(name));
    }
    if (auto task = build_task(combined, options, rng)) tasks.push_back(std::move(*task));
  }
  if (tasks.empty())
    fail(ErrorCode::kInvalidArgument, "{}: no row has the names that args.max_turns {} and args.max_names_per_turn {} need", where,
         options.max_turns, options.max_names_per_turn);
  return tasks;
}

std::vector<SortTask> generate_tasks(std::int64_t count, const SortOptions& options, Rng rng, std::unordered_set<std::string>& taken) {
  const auto num_names = static_cast<std::size_t>(options.max_turns * options.max_names_per_turn);
  if (num_names > kFirstNames.size() * kLastNames.size() / 4)
    fail(ErrorCode::kInvalidArgument,
         "environment alphabet-sort: {} turns of {} names need more names than the generator has; use args.dataset_path", options.max_turns,
         options.max_names_per_turn);
  std::vector<SortTask> tasks;
  std::int64_t num_misses = 0;
  while (static_cast<std::int64_t>(tasks.size()) < count) {
    std::vector<std::string> names;
    while (names.size() < num_names) {
      std::string name =
          fmt::format("{}{}", kFirstNames[rng.next_below(kFirstNames.size())], kLastNames[rng.next_below(kLastNames.size())]);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
    }
    std::optional<SortTask> task = build_task(names, options, rng);
    PRL_CHECK(task.has_value(), "alphabet-sort: {} names were too few", num_names);
    std::string key;
    for (const json::value& turn : task->info.at("turn_names").as_array())
      for (const json::value& name : turn.as_array()) key += std::string(name.as_string()) + " ";
    if (taken.insert(std::move(key)).second) {
      tasks.push_back(std::move(*task));
      num_misses = 0;
    } else if (++num_misses > 10'000) {
      fail(ErrorCode::kInvalidArgument,
           "environment alphabet-sort: the generator found only {} different tasks for a split of {}; raise "
           "max_turns or max_names_per_turn, or lower num_train and num_eval",
           tasks.size(), count);
    }
  }
  return tasks;
}

}  // namespace

EnvironmentPtr make_alphabet_sort(std::string name, Args args) {
  SortOptions options;
  options.min_turns = args.integer("min_turns", 1, 1, 100);
  options.max_turns = args.integer("max_turns", std::max<std::int64_t>(3, options.min_turns), 1, 100);
  options.min_names_per_turn = args.integer("min_names_per_turn", 1, 1, 1000);
  options.max_names_per_turn = args.integer("max_names_per_turn", std::max<std::int64_t>(5, options.min_names_per_turn), 1, 1000);
  options.similarity_power = args.integer("similarity_power", 4, 1, 100);
  options.power_per_turn = args.boolean("power_per_turn", true);
  options.seed = static_cast<std::uint64_t>(args.integer("seed", 1337420, 0, INT64_MAX));
  const std::int64_t num_train = args.integer("num_train", 1000, 1, 10'000'000);
  const std::int64_t num_eval = args.integer("num_eval", 100, 0, 10'000'000);
  const std::string train_path = args.string("dataset_path", "");
  const std::string eval_path = args.string("eval_dataset_path", "");
  std::string hub_name = args.string("hf_dataset_path", "");
  if (const std::string same = args.string("dataset_name", ""); !same.empty()) hub_name = same;
  const auto subset = args.optional_string("dataset_subset", std::nullopt);
  const std::string split = args.string("dataset_split", "train");
  const std::string eval_split = args.string("eval_dataset_split", "");
  args.finish();
  if (options.min_turns > options.max_turns)
    fail(ErrorCode::kInvalidArgument, "environment alphabet-sort: args.min_turns {} is above max_turns {}", options.min_turns,
         options.max_turns);
  if (options.min_names_per_turn > options.max_names_per_turn)
    fail(ErrorCode::kInvalidArgument, "environment alphabet-sort: args.min_names_per_turn {} is above max_names_per_turn {}",
         options.min_names_per_turn, options.max_names_per_turn);
  std::vector<SortTask> train;
  std::vector<SortTask> eval;
  if (!train_path.empty() || !eval_path.empty()) {
    if (!train_path.empty()) train = tasks_of(read_task_rows(train_path), train_path, options, Rng(options.seed, 0));
    if (!eval_path.empty()) eval = tasks_of(read_task_rows(eval_path), eval_path, options, Rng(options.seed, 1));
  } else if (!hub_name.empty()) {
    const NamedRows rows = read_named(name, hub_name, subset, split, eval_split);
    train = tasks_of(rows.train, hub_name, options, Rng(options.seed, 0));
    if (!eval_split.empty()) eval = tasks_of(rows.eval, hub_name, options, Rng(options.seed, 1));
  } else {
    std::unordered_set<std::string> taken;
    eval = generate_tasks(num_eval, options, Rng(options.seed, 1), taken);
    train = generate_tasks(num_train, options, Rng(options.seed, 0), taken);
  }
  return std::make_shared<AlphabetSort>(std::move(name), options, std::move(train), std::move(eval));
}

}  // namespace prl::env
