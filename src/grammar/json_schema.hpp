#pragma once

#include <boost/json/value.hpp>

#include <string_view>

#include "grammar/automaton.hpp"

namespace prl::grammar {

/// Largest schema, as JSON text.
inline constexpr std::size_t kMaxSchemaBytes = 256 << 10;

/// JSON texts that satisfy a JSON schema (the common core of the drafts 7 to 2020-12). Every text validates; not every valid
/// text is among them: members come in the order of `properties`, names and values have one spelling of escapes where they
/// are given (const, enum, names), and an object with `properties` takes others only if additionalProperties says so.
///
/// Supported: type (one or several), properties, required, additionalProperties, items, prefixItems, minItems, maxItems, enum,
/// const, anyOf, oneOf (branches that exclude each other), allOf (see merge_schemas), $ref within the document, minLength, maxLength,
/// pattern, format (see format_pattern; others are annotations), minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf
/// (whole, or up to six digits after the point; numbers are then decimals, so 0.07 is a multiple of 0.01; a divisor whose multiples take
/// too many states to tell apart, such as 99991 without bounds, is refused), minProperties, maxProperties, patternProperties (one pattern),
/// propertyNames (without properties), dependentRequired (of properties), uniqueItems (of at most eight listed values), contains and
/// minContains (of any items), not (of types, const and enum), if, then and else (a condition on const or enum of one member). Annotations
/// and unknown keywords are ignored, as the standard says; a keyword that restricts values and is not in this list is refused.
/// Error{kInvalidArgument} names the place and the keyword. `name` begins the place: "response_format.schema".
NodeId emit_json_schema(AutomatonBuilder& builder, NodeId from, const boost::json::value& schema, std::string_view name);

/// The same, but only the objects among them: arguments of a call, whose schema may be {} or say nothing of its type.
NodeId emit_json_object_schema(AutomatonBuilder& builder, NodeId from, const boost::json::value& schema, std::string_view name);

/// The regular expression of a `format`; empty for those that are only annotations.
std::string_view format_pattern(std::string_view format);

}  // namespace prl::grammar
