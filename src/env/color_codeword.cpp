#include "env/color_codeword.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/rng.hpp"
#include "env/multi_turn_env.hpp"
#include "vision/image.hpp"

namespace prl::env {
namespace {

namespace json = boost::json;

struct NamedColor {
  const char* name;
  std::array<std::uint8_t, 3> rgb;
};
constexpr std::array<NamedColor, 9> kColors{{{"red", {255, 0, 0}},
                                             {"green", {0, 255, 0}},
                                             {"blue", {0, 0, 255}},
                                             {"yellow", {255, 255, 0}},
                                             {"purple", {128, 0, 128}},
                                             {"cyan", {0, 255, 255}},
                                             {"orange", {255, 165, 0}},
                                             {"white", {255, 255, 255}},
                                             {"black", {0, 0, 0}}}};

char letter_of(std::size_t color) { return static_cast<char>('A' + color); }

/// The last run of `length` capital letters that no other letter or digit touches, or of any number if none has that length.
std::string codeword_in(const std::string& answer, std::size_t length) {
  const auto is_capital = [](char c) { return c >= 'A' && c <= 'Z'; };
  const auto is_of_word = [&](char c) { return is_capital(c) || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
  std::string found;
  for (auto begin = std::find_if(answer.begin(), answer.end(), is_of_word); begin != answer.end();) {
    const auto end = std::find_if_not(begin, answer.end(), is_of_word);
    const std::string word(begin, end);
    if (std::all_of(word.begin(), word.end(), is_capital) && (word.size() == length || found.size() != length)) found = word;
    begin = std::find_if(end, answer.end(), is_of_word);
  }
  return found;
}

Rubric make_codeword_rubric() {
  Rubric rubric;
  rubric.reward("exact_match", 1.0, [](const Task& task, const Episode& episode) {
    return codeword_in(last_assistant_text(episode.completion), task.answer.size()) == task.answer ? 1.0 : 0.0;
  });
  rubric.metric("partial_match", [](const Task& task, const Episode& episode) {
    const std::string found = codeword_in(last_assistant_text(episode.completion), task.answer.size());
    double num_right = 0;
    for (std::size_t i = 0; i < std::min(found.size(), task.answer.size()); ++i) num_right += found[i] == task.answer[i];
    return num_right / static_cast<double>(task.answer.size());
  });
  return rubric;
}

struct CodewordOptions {
  std::optional<std::string> system_prompt;
  std::uint64_t seed = 42;
  std::int64_t num_train = 1000, num_eval = 100, num_turns = 3, images_per_turn = 1, num_colors = 9, image_size = 64;
};

class ColorCodeword final : public MultiTurnEnv {
 public:
  ColorCodeword(std::string name, CodewordOptions options)
      : MultiTurnEnv(std::move(name), Limits{options.num_turns, -1}, make_codeword_rubric()), options_(std::move(options)) {
    for (std::size_t color = 0; color < static_cast<std::size_t>(options_.num_colors); ++color) {
      vision::Image square{.width = options_.image_size, .height = options_.image_size, .rgb = {}};
      for (std::int64_t pixel = 0; pixel < square.width * square.height; ++pixel)
        square.rgb.insert(square.rgb.end(), kColors[color].rgb.begin(), kColors[color].rgb.end());
      uris_.push_back(vision::png_data_uri(vision::encode_png(square)));
    }
  }

  std::int64_t num_tasks(Split split) const override { return split == Split::kTrain ? options_.num_train : options_.num_eval; }

  Task task(Split split, std::int64_t index) const override {
    Rng rng(mix_seed(options_.seed, split == Split::kTrain ? 0 : 1), static_cast<std::uint64_t>(index));
    Task task;
    task.example_id = index;
    task.env_name = name();
    for (std::int64_t i = 0; i < options_.num_turns * options_.images_per_turn; ++i)
      task.answer += letter_of(rng.next_below(static_cast<std::uint64_t>(options_.num_colors)));
    if (options_.system_prompt) task.prompt.push_back(json::object{{"role", "system"}, {"content", *options_.system_prompt}});
    task.prompt.push_back(message_of(task.answer, 0));
    return task;
  }

  std::optional<json::array> demonstration(const Task& task) const override {
    json::array messages;
    for (std::int64_t turn = 0; turn < options_.num_turns; ++turn) {
      if (turn > 0) messages.push_back(message_of(task.answer, turn));
      const auto known = static_cast<std::size_t>((turn + 1) * options_.images_per_turn);
      messages.push_back(json::object{{"role", "assistant"}, {"content", task.answer.substr(0, known)}});
    }
    return messages;
  }

 protected:
  asio::awaitable<json::array> respond(Rollout* rollout) const override {
    json::array messages;
    messages.push_back(message_of(rollout->task.answer, rollout->episode.num_turns()));
    co_return messages;
  }

 private:
  json::object message_of(const std::string& codeword, std::int64_t turn) const {
    const bool is_last = turn + 1 == options_.num_turns;
    json::array parts;
    for (std::int64_t i = 0; i < options_.images_per_turn; ++i) {
      const auto color = static_cast<std::size_t>(codeword[static_cast<std::size_t>(turn * options_.images_per_turn + i)] - 'A');
      parts.push_back(json::object{{"type", "image_url"}, {"image_url", json::object{{"url", uris_[color]}}}});
    }
    parts.push_back(json::object{{"type", "text"},
                                 {"text", fmt::format("Turn {} of {}. {}", turn + 1, options_.num_turns,
                                                      is_last ? "Give the whole codeword of all turns." : "Give the codeword so far.")}});
    return {{"role", "user"}, {"content", std::move(parts)}};
  }

  CodewordOptions options_;
  std::vector<std::string> uris_;  ///< a square of each colour
};

std::string default_prompt(std::int64_t num_colors) {
  std::string out = "You see coloured squares, some each turn. Each colour stands for a letter:";
  for (std::size_t color = 0; color < static_cast<std::size_t>(num_colors); ++color)
    out += fmt::format("{} {} is {}", color == 0 ? "" : ",", kColors[color].name, letter_of(color));
  return out + ". Answer with the letters of all squares seen so far, in order, and nothing else.";
}

}  // namespace

EnvironmentPtr make_color_codeword(std::string name, Args args) {
  CodewordOptions options;
  options.num_train = args.integer("num_train", options.num_train, 1, 10'000'000);
  options.num_eval = args.integer("num_eval", options.num_eval, 0, 10'000'000);
  options.seed = static_cast<std::uint64_t>(args.integer("seed", 42, 0, INT64_MAX));
  options.num_turns = args.integer("num_turns", options.num_turns, 1, 16);
  options.images_per_turn = args.integer("images_per_turn", options.images_per_turn, 1, 16);
  options.num_colors = args.integer("num_colors", options.num_colors, 2, static_cast<std::int64_t>(kColors.size()));
  options.image_size = args.integer("image_size", options.image_size, 1, 2048);
  options.system_prompt = args.optional_string("system_prompt", default_prompt(options.num_colors));
  args.finish();
  return std::make_shared<ColorCodeword>(std::move(name), std::move(options));
}

}  // namespace prl::env
