#include "nn/models/config_reader.hpp"

#include <limits>

#include "base/error.hpp"

namespace prl::nn {
namespace json = boost::json;

const json::value* ConfigReader::get(std::string_view key) const {
  const json::value* value = object_->if_contains(json::string_view(key.data(), key.size()));
  return value == nullptr || value->is_null() ? nullptr : value;
}

std::vector<std::string> ConfigReader::keys_of_objects() const {
  std::vector<std::string> out;
  for (const auto& member : *object_)
    if (member.value().is_object()) out.emplace_back(member.key().data(), member.key().size());
  return out;
}

void ConfigReader::bad(std::string_view key, std::string_view wanted, const json::value* found) const {
  fail(ErrorCode::kCorrupt, "{}: key '{}': wanted {}, found {}", subject_, key, wanted,
       found == nullptr ? std::string("nothing") : json::serialize(*found).substr(0, 200));
}

std::int64_t ConfigReader::integer(std::string_view key, std::optional<std::int64_t> fallback, std::int64_t min, std::int64_t max) const {
  const json::value* value = get(key);
  if (value == nullptr && fallback) return *fallback;
  json::error_code error;
  const std::int64_t n = value != nullptr && value->is_number() ? value->to_number<std::int64_t>(error) : min - 1;
  if (value == nullptr || error.failed() || n < min || n > max) bad(key, fmt::format("an integer in [{}, {}]", min, max), value);
  return n;
}

double ConfigReader::number(std::string_view key, std::optional<double> fallback, double min, double max) const {
  const json::value* value = get(key);
  if (value == nullptr && fallback) return *fallback;
  json::error_code error;
  const double x = value != nullptr && value->is_number() ? value->to_number<double>(error) : std::numeric_limits<double>::quiet_NaN();
  if (value == nullptr || error.failed() || !(x >= min && x <= max)) bad(key, fmt::format("a number in [{}, {}]", min, max), value);
  return x;
}

bool ConfigReader::boolean(std::string_view key, bool fallback) const {
  const json::value* value = get(key);
  if (value == nullptr) return fallback;
  if (!value->is_bool()) bad(key, "true or false", value);
  return value->get_bool();
}

std::string ConfigReader::string(std::string_view key, std::string_view fallback) const {
  const json::value* value = get(key);
  if (value == nullptr) return std::string(fallback);
  if (!value->is_string()) bad(key, "a string", value);
  return {value->get_string().data(), value->get_string().size()};
}

std::vector<std::int32_t> ConfigReader::ids(std::string_view key, std::string_view wanted) const {
  const json::value* value = get(key);
  std::vector<std::int32_t> out;
  if (value == nullptr) return out;
  const auto take = [&](const json::value& item) {
    json::error_code error;
    const std::int64_t id = item.is_number() ? item.to_number<std::int64_t>(error) : -1;
    if (error.failed() || id < 0 || id > std::numeric_limits<std::int32_t>::max()) bad(key, wanted, value);
    out.push_back(static_cast<std::int32_t>(id));
  };
  if (value->is_array()) {
    for (const json::value& item : value->get_array()) take(item);
  } else {
    take(*value);
  }
  return out;
}

std::vector<double> ConfigReader::numbers(std::string_view key, double min, double max) const {
  const json::value* value = get(key);
  const std::string wanted = fmt::format("a list of numbers in [{}, {}]", min, max);
  if (value == nullptr || !value->is_array()) bad(key, wanted, value);
  std::vector<double> out;
  for (const json::value& item : value->get_array()) {
    json::error_code error;
    // As transformers 5 writes it.
    if (item == json::value{{"__float__", "Infinity"}} && max == std::numeric_limits<double>::infinity()) {
      out.push_back(max);
      continue;
    }
    out.push_back(item.is_number() ? item.to_number<double>(error) : std::numeric_limits<double>::quiet_NaN());
    if (error.failed() || !(out.back() >= min && out.back() <= max)) bad(key, wanted, &item);
  }
  return out;
}

std::optional<ConfigReader> ConfigReader::object(std::string_view key) const {
  const json::value* value = get(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) bad(key, "an object", value);
  return ConfigReader(fmt::format("{}: {}", subject_, key), value->get_object());
}

std::vector<std::string> ConfigReader::strings(std::string_view key) const {
  const json::value* value = get(key);
  std::vector<std::string> out;
  if (value == nullptr) return out;
  if (!value->is_array()) bad(key, "a list of strings", value);
  for (const json::value& item : value->get_array()) {
    if (!item.is_string()) bad(key, "a list of strings", value);
    out.emplace_back(item.get_string().data(), item.get_string().size());
  }
  return out;
}

void ConfigReader::require_string(std::string_view key, std::string_view fallback, std::string_view wanted) const {
  const std::string found = string(key, fallback);
  if (found != wanted) fail(ErrorCode::kNotImplemented, "{}: key '{}' is '{}', this build knows '{}' only", subject_, key, found, wanted);
}

namespace {
void append_pretty(std::string& out, const json::value& value, int indent) {
  const auto newline = [&](int depth) { out.append("\n").append(static_cast<std::size_t>(2 * depth), ' '); };
  if (value.is_object() && !value.get_object().empty()) {
    out += '{';
    bool first = true;
    for (const auto& member : value.get_object()) {
      if (!first) out += ',';
      first = false;
      newline(indent + 1);
      out += json::serialize(json::string_view(member.key()));
      out += ": ";
      append_pretty(out, member.value(), indent + 1);
    }
    newline(indent);
    out += '}';
  } else if (value.is_array() && !value.get_array().empty()) {
    out += '[';
    bool first = true;
    for (const json::value& item : value.get_array()) {
      if (!first) out += ',';
      first = false;
      newline(indent + 1);
      append_pretty(out, item, indent + 1);
    }
    newline(indent);
    out += ']';
  } else if (value.is_double()) {
    // As Python prints it: the shortest digits that read back, with a point or an exponent.
    const std::string text = fmt::format("{}", value.get_double());
    out += text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
  } else {
    out += json::serialize(value);
  }
}
}  // namespace

std::string pretty_json(const json::value& value) {
  std::string out;
  append_pretty(out, value, 0);
  out += '\n';
  return out;
}

}  // namespace prl::nn
