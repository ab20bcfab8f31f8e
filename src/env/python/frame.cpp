#include "env/python/frame.hpp"

#include <boost/json/array.hpp>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/json_together.hpp"

namespace prl::env::python {

namespace json = boost::json;

namespace {

constexpr unsigned char kJson = 'J';

std::string_view type_of(const json::object& message) {
  const json::value* type = message.if_contains("t");
  return type != nullptr && text::is_text(*type) ? std::string_view(type->get_string()) : std::string_view("?");
}

/// Null if absent or null.
const json::value* find(const json::object& message, std::string_view key) {
  const json::value* value = message.if_contains(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

[[noreturn]] void wrong(const json::object& message, std::string_view key, std::string_view wanted) {
  const json::value* found = message.if_contains(key);
  const std::string text = found != nullptr ? text::to_json_text(*found).substr(0, 100) : std::string("nothing");
  fail(ErrorCode::kCorrupt, "message '{}' of a Python worker: {} is {}, wanted {}", type_of(message), key, text, wanted);
}

bool is_integer(const json::value& value) noexcept { return value.is_int64(); }
bool is_object(const json::value& value) noexcept { return value.is_object(); }
bool is_array(const json::value& value) noexcept { return value.is_array(); }

/// `value`, which is what was found at `key` of the message, if it is of the type.
const json::value& wanted_at(const json::object& message, std::string_view key, const json::value* value,
                             bool (*is_wanted)(const json::value&) noexcept, std::string_view wanted) {
  if (value == nullptr || !is_wanted(*value)) wrong(message, key, wanted);
  return *value;
}

}  // namespace

std::string encode_frame(const json::object& message, std::size_t max_bytes, std::initializer_list<std::string_view> more) {
  const std::string text = text::to_json_text(message);
  std::size_t size = text.size();
  if (more.size() > 0) ++size;
  for (const std::string_view piece : more) size += piece.size();
  std::string frame(kFrameHeaderBytes, '\0');
  frame.reserve(kFrameHeaderBytes + size);
  frame += text;
  if (more.size() > 0) {
    frame.back() = ',';  // messages have a type, so this is no empty object
    for (const std::string_view piece : more) frame += piece;
    frame += '}';
  }
  if (size > max_bytes)
    fail(ErrorCode::kInvalidArgument, "message '{}' to a Python worker has {} bytes, at most {} fit into a frame", type_of(message), size,
         max_bytes);
  for (int i = 0; i < 4; ++i) frame[static_cast<std::size_t>(i)] = static_cast<char>((size >> (8 * i)) & 0xff);
  frame[4] = static_cast<char>(kJson);
  return frame;
}

std::size_t decode_header(const FrameHeader& header, std::size_t max_bytes) {
  std::size_t size = 0;
  for (int i = 3; i >= 0; --i) size = (size << 8) | header[static_cast<std::size_t>(i)];
  if (header[4] != kJson) fail(ErrorCode::kCorrupt, "a frame of a Python worker has codec {}, wanted 'J'", static_cast<int>(header[4]));
  if (size > max_bytes) fail(ErrorCode::kCorrupt, "a frame of a Python worker has {} bytes, at most {} are taken", size, max_bytes);
  return size;
}

json::object decode_payload(std::string_view payload) {
  try {
    json::value parsed = text::parse_json_together(payload, text::kJsonDepth, text::LargeNumbers::kKeepText);
    if (json::object* object = parsed.if_object(); object != nullptr && type_of(*object) != "?") return std::move(*object);
  } catch (const Error& error) {
    fail(ErrorCode::kCorrupt, "a frame of a Python worker is no JSON: {}", error.what());
  }
  fail(ErrorCode::kCorrupt, "a frame of a Python worker is no object with a text 't'");
}

std::string text_member(const json::object& message, std::string_view key) {
  return std::string(wanted_at(message, key, find(message, key), &text::is_text, "a text").get_string());
}

std::int64_t integer_member(const json::object& message, std::string_view key) {
  return wanted_at(message, key, find(message, key), &is_integer, "an integer").get_int64();
}

const json::object& object_member(const json::object& message, std::string_view key) {
  return wanted_at(message, key, find(message, key), &is_object, "an object").get_object();
}

const json::array& array_member(const json::object& message, std::string_view key) {
  return wanted_at(message, key, find(message, key), &is_array, "a list").get_array();
}

std::string optional_text(const json::object& message, std::string_view key) {
  const json::value* value = find(message, key);
  return value != nullptr ? std::string(wanted_at(message, key, value, &text::is_text, "a text").get_string()) : std::string();
}

std::int64_t optional_integer(const json::object& message, std::string_view key, std::int64_t fallback) {
  const json::value* value = find(message, key);
  return value != nullptr ? wanted_at(message, key, value, &is_integer, "an integer").get_int64() : fallback;
}

double optional_number(const json::object& message, std::string_view key, double fallback) {
  const json::value* value = find(message, key);
  if (value == nullptr) return fallback;
  const std::optional<double> number = text::as_double(*value);
  if (!number) wrong(message, key, "a number");
  return *number;
}

bool optional_bool(const json::object& message, std::string_view key, bool fallback) {
  const json::value* value = find(message, key);
  if (value == nullptr) return fallback;
  if (!value->is_bool()) wrong(message, key, "true or false");
  return value->get_bool();
}

const json::object& optional_object(const json::object& message, std::string_view key) {
  static const json::object kNone;
  const json::value* value = find(message, key);
  return value != nullptr ? wanted_at(message, key, value, &is_object, "an object").get_object() : kNone;
}

const json::array& optional_array(const json::object& message, std::string_view key) {
  static const json::array kNone;
  const json::value* value = find(message, key);
  return value != nullptr ? wanted_at(message, key, value, &is_array, "a list").get_array() : kNone;
}

}  // namespace prl::env::python
