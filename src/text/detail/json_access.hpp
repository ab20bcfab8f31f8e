#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace prl::text::detail {

/// Typed access to members of tokenizer files. Each throws Error{kCorrupt} with "where.key: expected ..., found ...".
const boost::json::object& as_object(const boost::json::value& value, const std::string& where);
const boost::json::array& as_array(const boost::json::value& value, const std::string& where);
std::string_view as_string(const boost::json::value& value, const std::string& where);
std::int64_t as_int(const boost::json::value& value, const std::string& where);

/// The member, or null when absent or JSON null.
const boost::json::value* find(const boost::json::object& object, std::string_view key) noexcept;
const boost::json::value& require(const boost::json::object& object, std::string_view key, const std::string& where);
bool bool_or(const boost::json::object& object, std::string_view key, bool fallback, const std::string& where);
/// Whole document; Error{kCorrupt} naming `where` and the byte offset.
boost::json::value parse_document(std::string_view text, const std::string& where);

}  // namespace prl::text::detail
