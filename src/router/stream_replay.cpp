#include "router/stream_replay.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::router {
namespace {

namespace json = boost::json;

/// Names that an engine makes up: they differ from one attempt to the next without meaning anything.
bool is_made_up(std::string_view key) { return key == "id"; }

[[noreturn]] void fail_differs(const std::string& place) {
  fail(ErrorCode::kOutOfSync,
       "the engine was lost, and the reply cannot continue: its repetition differs at {}, since the weights changed meanwhile", place);
}

}  // namespace

void StreamReplay::restart() {
  is_replay_ = true;
  for (auto& [name, place] : places_) place.num_seen = 0;
}

bool StreamReplay::trim_text(json::string& text, const std::string& name) {
  Place& place = places_[name];
  const std::size_t begin = place.num_seen;
  place.num_seen += text.size();
  if (begin < place.text.size()) {
    const std::size_t num_known = std::min(place.text.size() - begin, text.size());
    const bool is_equal = std::string_view(place.text).substr(begin, num_known) == std::string_view(text).substr(0, num_known);
    if (!is_equal && !name.ends_with(".id")) fail_differs(name);
    text.erase(0, num_known);
  }
  place.text += std::string_view(text);
  return !text.empty();
}

bool StreamReplay::trim_list(json::array& list, const std::string& name) {
  Place& place = places_[name];
  const std::size_t begin = place.num_seen;
  place.num_seen += list.size();
  if (begin < place.items.size()) {
    const std::size_t num_known = std::min(place.items.size() - begin, list.size());
    for (std::size_t i = 0; i < num_known; ++i)
      if (text::to_json_text(list[i]) != place.items[begin + i]) fail_differs(name);
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(num_known));
  }
  for (const json::value& item : list) place.items.push_back(text::to_json_text(item));
  return !list.empty();
}

bool StreamReplay::trim(json::value& value, const std::string& place) {
  if (text::is_text(value)) return trim_text(value.get_string(), place);
  if (value.is_array()) {
    // Tool calls are told piece by piece too, each under its number.
    if (!place.ends_with(".tool_calls")) return trim_list(value.get_array(), place);
    bool is_new = false;
    for (json::value& call : value.get_array()) {
      const json::value* index = call.is_object() ? call.get_object().if_contains("index") : nullptr;
      if (trim(call, place + "." + (index ? text::to_json_text(*index) : "0"))) is_new = true;
    }
    return is_new;
  }
  if (!value.is_object()) return false;
  bool is_new = false;
  for (auto& member : value.get_object())
    if (trim(member.value(), place + "." + std::string(member.key())) && !is_made_up(member.key())) is_new = true;
  return is_new;
}

bool StreamReplay::trim_choice(json::object& choice) {
  const json::value* index = choice.if_contains("index");
  const std::string name = "choice " + (index ? text::to_json_text(*index) : std::string("0"));
  bool is_new = false;
  for (auto& member : choice) {
    if (member.key() == "finish_reason" || member.key() == "stop_reason" || member.key() == "index") continue;
    if (trim(member.value(), name + "." + std::string(member.key()))) is_new = true;
  }
  const json::value* reason = choice.if_contains("finish_reason");
  if (reason && reason->is_string() && !std::exchange(is_finished_[name], true)) is_new = true;
  return is_new;
}

std::optional<std::string> StreamReplay::take(std::string_view data) {
  json::value event;
  try {
    event = text::parse_json(data, text::kJsonDepth, text::LargeNumbers::kKeepText);
  } catch (const Error&) {
    return std::string(data);
  }
  if (!event.is_object()) return std::string(data);
  json::value* choices = event.get_object().if_contains("choices");
  if (!choices || !choices->is_array()) return std::string(data);
  bool is_new = choices->get_array().empty();  // the usage at the end
  for (json::value& choice : choices->get_array())
    if (choice.is_object() && trim_choice(choice.get_object())) is_new = true;
  if (!is_replay_) {
    ++num_delivered_;
    return std::string(data);
  }
  if (!is_new) return std::nullopt;
  ++num_delivered_;
  return text::to_json_text(event);
}

}  // namespace prl::router
