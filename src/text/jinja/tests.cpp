#include <algorithm>

#include "text/jinja/interpreter.hpp"
#include "text/jinja/iterator.hpp"
#include "text/jinja/operators.hpp"
#include "text/utf8.hpp"

// The tests behind `is`. Source: jinja2/tests.py.
namespace prl::text::jinja {
namespace {

const Value& operand(Interpreter& interpreter, Args& args, std::string_view name) {
  if (args.positional.size() != 1 || !args.keyword.empty()) interpreter.fail("test '" + std::string(name) + "' takes one argument");
  return args.positional[0];
}

Value remainder(Interpreter& interpreter, const Value& value, Int by) { return binary(interpreter, "%", value, Value(by)); }

bool is_lower_or_upper(const Value& value, bool wants_upper) {
  const std::string text = value.str();
  const std::string mapped = wants_upper ? to_upper(text) : to_lower(text);
  return mapped == text && to_upper(text) != to_lower(text);
}

struct TestEntry {
  std::string_view name;
  TestFunction test;
};

bool ordered(Interpreter& i, const Value& v, Args& a, std::string_view op) {
  const int sign = order(i, v, operand(i, a, op), op);
  return op == "<" ? sign < 0 : op == ">" ? sign > 0 : op == "<=" ? sign <= 0 : sign >= 0;
}
bool equal(Interpreter& i, const Value& v, Args& a) { return v.equals(operand(i, a, "eq")); }
bool not_equal(Interpreter& i, const Value& v, Args& a) { return !v.equals(operand(i, a, "ne")); }
bool less(Interpreter& i, const Value& v, Args& a) { return ordered(i, v, a, "<"); }
bool greater(Interpreter& i, const Value& v, Args& a) { return ordered(i, v, a, ">"); }
bool less_equal(Interpreter& i, const Value& v, Args& a) { return ordered(i, v, a, "<="); }
bool greater_equal(Interpreter& i, const Value& v, Args& a) { return ordered(i, v, a, ">="); }

constexpr TestEntry kTests[] = {
    {"defined", [](Interpreter&, const Value& v, Args&) { return !v.is_undefined(); }},
    {"undefined", [](Interpreter&, const Value& v, Args&) { return v.is_undefined(); }},
    {"none", [](Interpreter&, const Value& v, Args&) { return v.is_none(); }},
    {"string", [](Interpreter&, const Value& v, Args&) { return v.is_string(); }},
    {"mapping", [](Interpreter&, const Value& v, Args&) { return v.is_dict(); }},
    {"sequence",
     [](Interpreter&, const Value& v, Args&) { return v.is_string() || v.is_dict() || (v.is_list() && !is_view(v)) || v.is_undefined(); }},
    {"iterable", [](Interpreter&, const Value& v,
                    Args&) { return v.is_string() || v.is_dict() || v.is_list() || v.is_undefined() || as_iterator(v) != nullptr; }},
    {"boolean", [](Interpreter&, const Value& v, Args&) { return v.is_bool(); }},
    {"true", [](Interpreter&, const Value& v, Args&) { return v.is_bool() && v.integer() != 0; }},
    {"false", [](Interpreter&, const Value& v, Args&) { return v.is_bool() && v.integer() == 0; }},
    {"integer", [](Interpreter&, const Value& v, Args&) { return v.is_int() || v.big_integer(); }},
    {"float", [](Interpreter&, const Value& v, Args&) { return v.is_float(); }},
    {"number", [](Interpreter&, const Value& v, Args&) { return v.is_number() || v.big_integer(); }},
    {"callable", [](Interpreter&, const Value& v, Args&) { return v.is_undefined() || (v.is_object() && v.object().is_callable()); }},
    {"escaped", [](Interpreter&, const Value& v, Args&) { return v.is_markup(); }},
    {"sameas", [](Interpreter& i, const Value& v, Args& a) { return is_same(v, operand(i, a, "sameas")); }},
    {"odd", [](Interpreter& i, const Value& v, Args&) { return remainder(i, v, 2).equals(Value(1)); }},
    {"even", [](Interpreter& i, const Value& v, Args&) { return remainder(i, v, 2).equals(Value(0)); }},
    {"divisibleby",
     [](Interpreter& i, const Value& v, Args& a) { return binary(i, "%", v, operand(i, a, "divisibleby")).equals(Value(0)); }},
    {"lower", [](Interpreter&, const Value& v, Args&) { return is_lower_or_upper(v, false); }},
    {"upper", [](Interpreter&, const Value& v, Args&) { return is_lower_or_upper(v, true); }},
    {"in", [](Interpreter& i, const Value& v, Args& a) { return contains(i, operand(i, a, "in"), v); }},
    {"filter",
     [](Interpreter& i, const Value& v, Args&) {
       check_hashable(i, v);
       return v.is_string() && (find_filter(v.string()) != nullptr || find_sequence_filter(v.string()) != nullptr ||
                                find_text_filter(v.string()) != nullptr);
     }},
    {"test",
     [](Interpreter& i, const Value& v, Args&) {
       check_hashable(i, v);
       return v.is_string() && find_test(v.string()) != nullptr;
     }},
    {"==", equal},
    {"eq", equal},
    {"equalto", equal},
    {"!=", not_equal},
    {"ne", not_equal},
    {"<", less},
    {"lt", less},
    {"lessthan", less},
    {">", greater},
    {"gt", greater},
    {"greaterthan", greater},
    {"<=", less_equal},
    {"le", less_equal},
    {">=", greater_equal},
    {"ge", greater_equal},
};

}  // namespace

TestFunction find_test(std::string_view name) {
  const auto* entry = std::find_if(std::begin(kTests), std::end(kTests), [name](const TestEntry& e) { return e.name == name; });
  return entry == std::end(kTests) ? nullptr : entry->test;
}

}  // namespace prl::text::jinja
