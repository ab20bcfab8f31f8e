#pragma once

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace prl::text {

/// The arguments of Python's json.dumps that change its output.
struct JsonDumpOptions {
  bool ensure_ascii = false;          ///< true: every non-ASCII character as \uXXXX (Python's own default is true)
  bool sort_keys = false;             ///< by code point, at every level
  int indent = -1;                    ///< spaces per level; negative: one line
  std::string item_separator = ", ";  ///< Python drops the trailing space when indent is given; dump_python does too
  std::string key_separator = ": ";
};

/// What json.dumps(value, ...) writes: key order kept, floats as float.__repr__, NaN and Infinity spelt as Python does.
std::string dump_python(const boost::json::value& value, const JsonDumpOptions& options = {});
/// repr(float): the shortest digits that read back as `number`, "1e+16" and "1e-05" with Python's switch points, "nan", "inf".
std::string python_float_repr(double number);
/// Appends the quoted JSON form of UTF-8 `text` to `out`.
void append_json_string(std::string& out, std::string_view text, bool ensure_ascii);

/// Nesting that parse_json takes unless it is told otherwise.
inline constexpr std::size_t kJsonDepth = 200;

/// Numbers that a boost::json::value has no form for: integers beyond 64 bits, and 1e400 or 1e-400, which as doubles are infinity and 0.
enum class LargeNumbers : std::uint8_t {
  kAsDoubles,      ///< as JavaScript reads them
  kKeepText,       ///< see kept_number; an integer of more than 4300 digits is no JSON, as in Python
  kKeepInRequest,  ///< of a request: kept in what goes to the template or to a schema (messages, tools, ...); elsewhere doubles
};
/// The text of a number that parse_json kept. The value is a string that no JSON text makes, so what reads values read that way asks
/// is_text before it takes a string for one. nullopt for any other value. dump_python, to_json_text and templates write the text.
std::optional<std::string_view> kept_number(const boost::json::value& value) noexcept;
/// A string, and no number that was kept.
bool is_text(const boost::json::value& value) noexcept;
/// The number as a double, a kept one as the nearest; nullopt for what is no number.
std::optional<double> as_double(const boost::json::value& value) noexcept;
/// json::serialize, but kept numbers are written as they were read.
std::string to_json_text(const boost::json::value& value);
std::string to_json_text(const boost::json::object& object);
std::string to_json_text(const boost::json::array& items);
/// The value with kept numbers as doubles, but for those below members of the names in `kept`.
void make_doubles(boost::json::value& value, std::initializer_list<std::string_view> kept = {});

/// Strict JSON to a value, with every double correctly rounded (Boost 1.81's own parser may be off by one unit in the last
/// place, which would show in a re-rendered prompt) and key order kept. Duplicate keys: the last value wins.
/// Nesting is limited to `max_depth`. Error{kInvalidArgument} with the byte offset.
boost::json::value parse_json(std::string_view text, std::size_t max_depth = kJsonDepth,
                              LargeNumbers large_numbers = LargeNumbers::kAsDoubles);

}  // namespace prl::text
