#include "text/detail/json_access.hpp"

#include <boost/json/kind.hpp>
#include <boost/json/parser.hpp>

#include "base/error.hpp"

namespace prl::text::detail {
namespace {

namespace json = boost::json;

std::string_view kind_name(const json::value& value) {
  const json::string_view name = json::to_string(value.kind());
  return {name.data(), name.size()};
}

}  // namespace

const json::object& as_object(const json::value& value, const std::string& where) {
  if (!value.is_object()) fail(ErrorCode::kCorrupt, "{}: expected an object, found {}", where, kind_name(value));
  return value.get_object();
}

const json::array& as_array(const json::value& value, const std::string& where) {
  if (!value.is_array()) fail(ErrorCode::kCorrupt, "{}: expected a list, found {}", where, kind_name(value));
  return value.get_array();
}

std::string_view as_string(const json::value& value, const std::string& where) {
  if (!value.is_string()) fail(ErrorCode::kCorrupt, "{}: expected a string, found {}", where, kind_name(value));
  return {value.get_string().data(), value.get_string().size()};
}

std::int64_t as_int(const json::value& value, const std::string& where) {
  if (!value.is_int64()) fail(ErrorCode::kCorrupt, "{}: expected an integer, found {}", where, kind_name(value));
  return value.get_int64();
}

const json::value* find(const json::object& object, std::string_view key) noexcept {
  const json::value* value = object.if_contains({key.data(), key.size()});
  return value == nullptr || value->is_null() ? nullptr : value;
}

const json::value& require(const json::object& object, std::string_view key, const std::string& where) {
  const json::value* value = find(object, key);
  if (value == nullptr) fail(ErrorCode::kCorrupt, "{}.{}: missing", where, key);
  return *value;
}

bool bool_or(const json::object& object, std::string_view key, bool fallback, const std::string& where) {
  const json::value* value = find(object, key);
  if (value == nullptr) return fallback;
  if (!value->is_bool()) fail(ErrorCode::kCorrupt, "{}.{}: expected true or false, found {}", where, key, kind_name(*value));
  return value->get_bool();
}

json::value parse_document(std::string_view text, const std::string& where) {
  json::parse_options options;
  options.max_depth = 64;
  json::parser parser({}, options);
  json::error_code error;
  const std::size_t consumed = parser.write_some({text.data(), text.size()}, error);
  if (!error && consumed < text.size() && text.substr(consumed).find_first_not_of(" \t\r\n") != std::string_view::npos)
    fail(ErrorCode::kCorrupt, "{}: text after the JSON document, at byte {}", where, consumed);
  if (error)
    fail(ErrorCode::kCorrupt, "{}: not valid JSON near byte {} of {}: {}; the file may be truncated", where, consumed, text.size(),
         error.message());
  return parser.release();
}

}  // namespace prl::text::detail
