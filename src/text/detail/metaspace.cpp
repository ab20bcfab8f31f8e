#include "text/detail/metaspace.hpp"

#include "base/error.hpp"
#include "text/detail/json_access.hpp"
#include "text/utf8.hpp"

namespace prl::text::detail {

Metaspace read_metaspace(const boost::json::object& object, const std::string& where) {
  Metaspace out;
  out.replacement = as_string(require(object, "replacement", where), where + ".replacement");
  if (count_code_points(out.replacement) != 1)
    fail(ErrorCode::kCorrupt, "{}.replacement: expected one character, found '{}'", where, out.replacement);
  if (const auto* value = find(object, "prepend_scheme")) {
    const std::string_view name = as_string(*value, where + ".prepend_scheme");
    if (name != "first" && name != "always" && name != "never")
      fail(ErrorCode::kCorrupt, "{}.prepend_scheme: expected first, always or never, found '{}'", where, name);
    out.scheme = name == "first" ? PrependScheme::kFirst : name == "never" ? PrependScheme::kNever : PrependScheme::kAlways;
  }
  if (!bool_or(object, "add_prefix_space", true, where) && out.scheme != PrependScheme::kNever)
    fail(ErrorCode::kCorrupt, "{}.add_prefix_space: false needs \"prepend_scheme\": \"never\"", where);
  out.split = bool_or(object, "split", true, where);
  return out;
}

}  // namespace prl::text::detail
