#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "text/jinja/interpreter.hpp"

// Operators, subscripts and iteration, with Python's meaning. What they build counts against the interpreter's limits, and what
// Python would raise fails there.
namespace prl::text::jinja {

/// object.name and object[key], as the environment's getattr and getitem do.
Value get_attribute(Interpreter& interpreter, const Value& object, std::string_view name);
Value get_item(Interpreter& interpreter, const Value& object, const Value& key);
/// The items that iterating gives: characters, keys, elements. Fails for what cannot be iterated.
std::vector<Value> iterate(Interpreter& interpreter, const Value& value);
std::size_t length(Interpreter& interpreter, const Value& value);
Value binary(Interpreter& interpreter, std::string_view op, const Value& left, const Value& right);
bool contains(Interpreter& interpreter, const Value& container, const Value& item);
/// -1, 0, 1; fails for values that Python does not order.
int order(Interpreter& interpreter, const Value& left, const Value& right, std::string_view op = "<");
Value slice(Interpreter& interpreter, const Value& object, const Value& begin, const Value& end, const Value& step);

}  // namespace prl::text::jinja
