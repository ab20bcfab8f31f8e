#include "env/rubric.hpp"

#include <cmath>
#include <exception>
#include <utility>

#include "base/log.hpp"
#include "text/utf8.hpp"

namespace prl::env {

namespace json = boost::json;

Rubric& Rubric::reward(std::string name, double weight, Score score) {
  entries_.push_back({std::move(name), weight, std::move(score)});
  return *this;
}

void Rubric::score(const Task& task, Episode& episode) const {
  double total = 0;
  for (const Entry& entry : entries_) {
    double value = 0;
    try {
      value = entry.score(task, episode);
    } catch (const std::exception& e) {
      log::warning("{}: reward function {} failed on example {}: {}; counted 0", task.env_name, entry.name, task.example_id, e.what());
    }
    if (!(std::abs(value) <= Episode::kMaxReward)) {  // or no number
      log::warning("{}: reward function {} gave {} on example {}, wanted a number within {:g} either way; counted 0", task.env_name,
                   entry.name, value, task.example_id, Episode::kMaxReward);
      value = 0;
    }
    episode.metrics[entry.name] = value;
    total += entry.weight * value;
  }
  episode.reward = total;
}

namespace {

const json::object* as_assistant(const json::value& message) {
  const json::object* object = message.if_object();
  if (object == nullptr) return nullptr;
  const json::value* role = object->if_contains("role");
  return role != nullptr && role->is_string() && role->get_string() == "assistant" ? object : nullptr;
}

std::string content_of(const json::object& message) {
  const json::value* content = message.if_contains("content");
  return content != nullptr && content->is_string() ? std::string(content->get_string()) : std::string();
}

}  // namespace

std::vector<std::string> assistant_texts(const json::array& messages) {
  std::vector<std::string> texts;
  for (const json::value& message : messages)
    if (const json::object* assistant = as_assistant(message)) texts.push_back(content_of(*assistant));
  return texts;
}

std::string last_assistant_text(const json::array& messages) {
  const std::vector<std::string> texts = assistant_texts(messages);
  return texts.empty() ? std::string() : texts.back();
}

std::vector<std::string> extract_tags(const std::string& text, const std::string& tag) {
  const std::string open = "<" + tag + ">";
  const std::string close = "</" + tag + ">";
  std::vector<std::string> contents;
  std::size_t at = 0;
  for (;;) {
    const std::size_t begin = text.find(open, at);
    if (begin == std::string::npos) return contents;
    const std::size_t end = text.find(close, begin + open.size());
    if (end == std::string::npos) return contents;
    contents.push_back(text.substr(begin + open.size(), end - begin - open.size()));
    at = end + close.size();
  }
}

std::string extract_tag(const std::string& text, const std::string& tag) {
  const std::vector<std::string> contents = extract_tags(text, tag);
  return contents.empty() ? std::string() : strip(contents.front());
}

std::string strip(const std::string& text) {
  const std::string valid = text::replace_invalid_utf8(text);
  std::size_t begin = valid.size();
  std::size_t end = 0;
  for (std::size_t at = 0; at < valid.size();) {
    const std::size_t start = at;
    if (text::is_python_space(text::next_code_point(valid, at))) continue;
    if (begin > start) begin = start;
    end = at;
  }
  return begin < end ? valid.substr(begin, end - begin) : std::string();
}

}  // namespace prl::env
