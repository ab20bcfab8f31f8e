#include "server/json_fields.hpp"

#include <cmath>
#include <limits>

#include "net/http_message.hpp"
#include "text/json_python.hpp"

namespace prl::server {
namespace {

constexpr std::size_t kMaxJsonDepth = 100;

std::string show(const boost::json::value& value) {
  constexpr std::size_t kShown = 60;
  std::string text = text::to_json_text(value);
  if (text.size() > kShown) text = text.substr(0, kShown) + "...";
  return text;
}

/// The value as an integer, if it is one.
std::optional<std::int64_t> as_integer(const boost::json::value& value) {
  if (value.is_int64()) return value.get_int64();
  if (value.is_uint64()) {
    if (value.get_uint64() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
    return static_cast<std::int64_t>(value.get_uint64());
  }
  constexpr double kExact = 9007199254740992.0;  // 2^53: beyond it not every integer is a double
  if (value.is_double() && std::trunc(value.get_double()) == value.get_double() && std::abs(value.get_double()) <= kExact)
    return static_cast<std::int64_t>(value.get_double());
  return std::nullopt;
}

}  // namespace

void JsonFields::fail_type(std::string_view name, std::string_view wanted, const boost::json::value& found) const {
  const std::string full = full_name(name);
  net::fail_param(full, fmt::format("{}: wanted {}, found {}", full, wanted, show(found)));
}

const boost::json::value* JsonFields::find(std::string_view name) const {
  const boost::json::value* value = object_->if_contains(name);
  return value && !value->is_null() ? value : nullptr;
}

std::optional<bool> JsonFields::boolean(std::string_view name) const {
  const boost::json::value* value = find(name);
  if (!value) return std::nullopt;
  if (!value->is_bool()) fail_type(name, "true or false", *value);
  return value->get_bool();
}

std::optional<std::int64_t> JsonFields::integer(std::string_view name, std::int64_t min, std::int64_t max) const {
  const boost::json::value* value = find(name);
  if (!value) return std::nullopt;
  const auto number = as_integer(*value);
  if (!number) fail_type(name, "an integer", *value);
  if (*number < min || *number > max) fail_type(name, fmt::format("an integer from {} to {}", min, max), *value);
  return number;
}

std::optional<double> JsonFields::number(std::string_view name, double min, double max) const {
  const boost::json::value* value = find(name);
  if (!value) return std::nullopt;
  const auto number = text::as_double(*value);
  if (!number) fail_type(name, "a number", *value);
  if (!(*number >= min && *number <= max)) fail_type(name, fmt::format("a number from {} to {}", min, max), *value);
  return number;
}

std::optional<std::string> JsonFields::string(std::string_view name) const {
  const boost::json::value* value = find(name);
  if (!value) return std::nullopt;
  if (!text::is_text(*value)) fail_type(name, "a string", *value);
  return std::string(value->get_string());
}

const boost::json::object* JsonFields::object(std::string_view name) const {
  const boost::json::value* value = find(name);
  if (!value) return nullptr;
  if (!value->is_object()) fail_type(name, "an object", *value);
  return &value->get_object();
}

const boost::json::array* JsonFields::array(std::string_view name) const {
  const boost::json::value* value = find(name);
  if (!value) return nullptr;
  if (!value->is_array()) fail_type(name, "a list", *value);
  return &value->get_array();
}

std::optional<std::vector<std::int32_t>> JsonFields::token_ids(std::string_view name, std::int64_t vocab_size) const {
  const boost::json::array* list = array(name);
  if (!list) return std::nullopt;
  return read_token_ids(*list, full_name(name), vocab_size);
}

std::optional<std::vector<std::string>> JsonFields::strings(std::string_view name, std::size_t max_items) const {
  const boost::json::value* value = find(name);
  if (!value) return std::nullopt;
  if (text::is_text(*value)) return std::vector<std::string>{std::string(value->get_string())};
  if (!value->is_array()) fail_type(name, "a string or a list of strings", *value);
  const boost::json::array& list = value->get_array();
  if (list.size() > max_items) fail_type(name, fmt::format("at most {} strings", max_items), *value);
  std::vector<std::string> out;
  for (const auto& item : list) {
    if (!text::is_text(item)) fail_type(name, "a string or a list of strings", *value);
    out.emplace_back(item.get_string());
  }
  return out;
}

std::vector<std::int32_t> read_token_ids(const boost::json::array& array, const std::string& name, std::int64_t vocab_size) {
  std::vector<std::int32_t> ids;
  ids.reserve(array.size());
  for (std::size_t i = 0; i < array.size(); ++i) {
    const auto id = as_integer(array[i]);
    if (!id) net::fail_param(name, fmt::format("{}[{}]: wanted a token id, found {}", name, i, show(array[i])));
    if (*id < 0 || *id >= vocab_size)
      net::fail_param(name, fmt::format("{}[{}]: token id {} is not in the vocabulary of {} tokens", name, i, *id, vocab_size));
    ids.push_back(static_cast<std::int32_t>(*id));
  }
  return ids;
}

boost::json::object parse_body(std::string_view body) {
  boost::json::value value;
  try {
    value = text::parse_json(body, kMaxJsonDepth, text::LargeNumbers::kKeepInRequest);
  } catch (const Error& error) {
    net::fail_param("body", fmt::format("the request body is not valid JSON: {}", error.what()));
  }
  if (!value.is_object()) net::fail_param("body", "the request body must be a JSON object, found " + show(value));
  boost::json::object object = std::move(value.get_object());
  if (boost::json::value* extra = object.if_contains("extra_body"); extra && extra->is_object()) {
    const boost::json::object members = std::move(extra->get_object());
    for (const auto& [key, member] : members)
      if (!object.contains(key)) object.emplace(key, member);
  }
  return object;
}

}  // namespace prl::server
