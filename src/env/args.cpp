#include "env/args.hpp"

#include <fmt/format.h>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::env {

namespace json = boost::json;

Args::Args(std::string env_id, json::object values) : env_id_(std::move(env_id)), values_(std::move(values)) {}

const json::value* Args::take(const std::string& key) {
  known_.push_back(key);
  return values_.if_contains(key);
}

void Args::wrong(const std::string& key, const json::value& found, const std::string& wanted) const {
  fail(ErrorCode::kInvalidArgument, "environment {}: args.{} = {}, wanted {}", env_id_, key, json::serialize(found), wanted);
}

std::int64_t Args::integer(const std::string& key, std::int64_t fallback, std::int64_t min, std::int64_t max) {
  const json::value* value = take(key);
  if (value == nullptr || value->is_null()) return fallback;
  const std::string wanted = fmt::format("an integer in [{}, {}]", min, max);
  std::int64_t number = 0;
  if (value->is_int64())
    number = value->get_int64();
  else if (value->is_uint64() && value->get_uint64() <= static_cast<std::uint64_t>(max))
    number = static_cast<std::int64_t>(value->get_uint64());
  else
    wrong(key, *value, wanted);
  if (number < min || number > max) wrong(key, *value, wanted);
  return number;
}

double Args::number(const std::string& key, double fallback, double min, double max) {
  const json::value* value = take(key);
  if (value == nullptr || value->is_null()) return fallback;
  const std::string wanted = fmt::format("a number in [{}, {}]", min, max);
  if (!value->is_number()) wrong(key, *value, wanted);
  const double found = value->to_number<double>();
  if (!(found >= min && found <= max)) wrong(key, *value, wanted);
  return found;
}

bool Args::boolean(const std::string& key, bool fallback) {
  const json::value* value = take(key);
  if (value == nullptr || value->is_null()) return fallback;
  if (!value->is_bool()) wrong(key, *value, "true or false");
  return value->get_bool();
}

std::string Args::string(const std::string& key, const std::string& fallback) { return optional_string(key, fallback).value_or(fallback); }

std::optional<std::string> Args::optional_string(const std::string& key, const std::optional<std::string>& fallback) {
  const json::value* value = take(key);
  if (value == nullptr) return fallback;
  if (value->is_null()) return std::nullopt;
  if (!value->is_string()) wrong(key, *value, "a text");
  return std::string(value->get_string());
}

std::string Args::choice(const std::string& key, const std::string& fallback, const std::vector<std::string>& choices) {
  const std::string found = string(key, fallback);
  if (std::find(choices.begin(), choices.end(), found) == choices.end())
    wrong(key, json::value(found), fmt::format("one of {}", fmt::join(choices, ", ")));
  return found;
}

void Args::finish() const {
  for (const auto& member : values_)
    if (std::find(known_.begin(), known_.end(), std::string(member.key())) == known_.end())
      fail(ErrorCode::kInvalidArgument, "environment {}: args.{} is not known; it has {}", env_id_, std::string(member.key()),
           fmt::join(known_, ", "));
}

}  // namespace prl::env
