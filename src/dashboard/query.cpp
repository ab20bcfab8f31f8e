#include "dashboard/query.hpp"

#include <fmt/core.h>

#include <charconv>
#include <cmath>
#include <iterator>

#include "io/json_text.hpp"

namespace prl::dashboard {

std::string found_text(std::string_view value) {
  constexpr std::size_t kMaxShown = 60;
  std::string quoted;
  io::append_json_text(quoted, value.substr(0, kMaxShown));
  return ", found " + quoted;
}

std::optional<std::string> Query::text(std::string_view name, std::size_t max_bytes) const {
  const std::string* const value = fields_.find(name);
  if (value == nullptr) return std::nullopt;
  if (value->size() > max_bytes)
    net::fail_param(std::string(name), fmt::format("{} has {} bytes, at most {} are taken", name, value->size(), max_bytes));
  return *value;
}

std::optional<std::int64_t> Query::integer(std::string_view name, std::int64_t min, std::int64_t max) const {
  const auto value = text(name, 32);
  if (!value || value->empty()) return std::nullopt;
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (error != std::errc() || end != value->data() + value->size() || number < min || number > max)
    net::fail_param(std::string(name), fmt::format("{} must be a whole number from {} to {}", name, min, max) + found_text(*value));
  return number;
}

std::optional<double> Query::number(std::string_view name) const {
  const auto value = text(name, 64);
  if (!value || value->empty()) return std::nullopt;
  double number = 0;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (error != std::errc() || end != value->data() + value->size() || !std::isfinite(number))
    net::fail_param(std::string(name), fmt::format("{} must be a number", name) + found_text(*value));
  return number;
}

std::optional<bool> Query::flag(std::string_view name) const {
  const auto value = text(name, 8);
  if (!value || value->empty()) return std::nullopt;
  if (*value != "0" && *value != "1") net::fail_param(std::string(name), fmt::format("{} must be 0 or 1", name) + found_text(*value));
  return *value == "1";
}

std::vector<std::string> Query::all(std::string_view name, std::size_t max_count, std::size_t max_bytes) const {
  std::vector<std::string> values;
  for (const auto& [key, value] : fields_) {
    if (key != name) continue;
    if (values.size() >= max_count || value.size() > max_bytes)
      net::fail_param(std::string(name),
                      fmt::format("at most {} values of {} with up to {} bytes each are taken, found {}", max_count, name, max_bytes,
                                  value.size() > max_bytes ? fmt::format("one of {} bytes", value.size()) : "more"));
    values.push_back(value);
  }
  return values;
}

void put(std::string& out, double value) {
  if (std::isfinite(value))
    fmt::format_to(std::back_inserter(out), "{}", value);
  else
    out += "null";
}
void put(std::string& out, std::int64_t value) { fmt::format_to(std::back_inserter(out), "{}", value); }
void put(std::string& out, std::string_view text) { io::append_json_text(out, text); }
void put_key(std::string& out, std::string_view key) {
  io::append_json_text(out, key);
  out += ':';
}

namespace {
template <typename T>
void put_all(std::string& out, const std::vector<T>& values) {
  out += '[';
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) out += ',';
    put(out, values[i]);
  }
  out += ']';
}
}  // namespace

void put_list(std::string& out, const std::vector<double>& values) { put_all(out, values); }
void put_list(std::string& out, const std::vector<std::int64_t>& values) { put_all(out, values); }

}  // namespace prl::dashboard
