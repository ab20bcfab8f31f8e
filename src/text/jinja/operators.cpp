#include "text/jinja/operators.hpp"

#include <algorithm>
#include <cmath>

#include "text/jinja/iterator.hpp"
#include "text/jinja/markup.hpp"
#include "text/utf8.hpp"

namespace prl::text::jinja {
namespace {

constexpr std::size_t kMaxItems = 4'000'000;

void require_defined(const Interpreter& interpreter, const Value& value) {
  if (value.is_undefined()) interpreter.fail(value.undefined_message());
}

// A list or tuple, neither a range nor a view.
bool is_plain_list(const Value& value) { return value.is_list() && value.list().flavor != ListFlavor::kRange && !is_view(value); }

Value repeat(Interpreter& interpreter, const Value& sequence, Int times) {
  const auto count = static_cast<std::size_t>(std::clamp<Int>(times, 0, Int{1} << 40));
  if (sequence.is_string()) {
    const std::string& unit = sequence.string();
    if (unit.empty() || count == 0) return make_text("", sequence.is_markup());
    if (count > (std::size_t{1} << 40) / unit.size()) interpreter.fail("the repeated string is too long");
    interpreter.charge_bytes(unit.size() * count);
    std::string out;
    out.reserve(unit.size() * count);
    for (std::size_t i = 0; i < count; ++i) out += unit;
    return make_text(std::move(out), sequence.is_markup());
  }
  const std::vector<Value>& unit = sequence.list().items;
  if (!unit.empty() && count > kMaxItems / unit.size()) interpreter.fail("the repeated list is too long");
  interpreter.charge_bytes(unit.size() * count * sizeof(Value));
  std::vector<Value> out;
  for (std::size_t i = 0; i < count && !unit.empty(); ++i) out.insert(out.end(), unit.begin(), unit.end());
  return make_list(std::move(out), sequence.list().flavor);
}

Int floor_divide(Int a, Int b) {
  const Int quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

Value power(const Interpreter& interpreter, const Value& left, const Value& right) {
  if (left.is_float() || right.is_float() || right.integer() < 0) {
    if (left.number() == 0 && right.number() < 0) interpreter.fail("0.0 cannot be raised to a negative power");
    const double result = std::pow(left.number(), right.number());
    if (std::isnan(result) && left.number() < 0) interpreter.fail("a negative number to a broken power is a complex number");
    return Value(result);
  }
  Int result = 1;
  const Int base = left.integer();
  for (Int i = 0; i < right.integer(); ++i) {
    if (base == 0 || base == 1) return Value(right.integer() == 0 ? Int{1} : base);
    if (base == -1) return Value(right.integer() % 2 == 0 ? Int{1} : Int{-1});
    if (__builtin_mul_overflow(result, base, &result)) interpreter.fail("the integer result is too large");
  }
  return Value(result);
}

Value arithmetic(const Interpreter& interpreter, char op, bool is_double_op, const Value& left, const Value& right) {
  const bool is_float = left.is_float() || right.is_float();
  if (is_double_op && op == '*') return power(interpreter, left, right);
  if ((op == '/' || op == '%') && right.number() == 0) interpreter.fail(is_float ? "float division by zero" : "division by zero");
  if (op == '/' && !is_double_op) return Value(left.number() / right.number());
  if (is_float) {
    const double a = left.number(), b = right.number();
    switch (op) {
      case '+': return Value(a + b);
      case '-': return Value(a - b);
      case '*': return Value(a * b);
      case '/': return Value(std::floor(a / b));
      default: {
        double rest = std::fmod(a, b);
        if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
        return Value(rest);
      }
    }
  }
  const Int a = left.integer(), b = right.integer();
  Int result = 0;
  bool overflow = false;
  switch (op) {
    case '+': overflow = __builtin_add_overflow(a, b, &result); break;
    case '-': overflow = __builtin_sub_overflow(a, b, &result); break;
    case '*': overflow = __builtin_mul_overflow(a, b, &result); break;
    case '/': result = floor_divide(a, b); break;
    default: result = a - floor_divide(a, b) * b; break;
  }
  if (overflow) interpreter.fail("the integer result is too large");
  return Value(result);
}

/// Arithmetic with an integer wider than Int: with a float it is one.
Value big_arithmetic(const Interpreter& interpreter, std::string_view op, const Value& left, const Value& right) {
  if (!left.is_float() && !right.is_float())
    interpreter.fail("integers beyond 128 bits are printed and compared as they are, but '" + std::string(op) + "' of them is not built");
  const auto as_float = [&](const Value& value) {
    if (!value.big_integer()) return Value(value.number());
    const double number = to_float(*value.big_integer());
    if (std::isinf(number)) interpreter.fail("int too large to convert to float");
    return Value(number);
  };
  return arithmetic(interpreter, op.front(), op.size() == 2, as_float(left), as_float(right));
}

bool is_any_number(const Value& value) { return value.is_number() || value.big_integer(); }

// Python's slice.indices.
struct SliceRange {
  std::int64_t begin, end, step;
};

std::int64_t index_of(const Interpreter& interpreter, const Value& value) {
  require_defined(interpreter, value);
  if (!value.is_int() && !value.is_bool()) interpreter.fail("slice indices must be integers or None or have an __index__ method");
  return static_cast<std::int64_t>(std::clamp<Int>(value.integer(), -(Int{1} << 60), Int{1} << 60));
}

SliceRange resolve_slice(const Interpreter& interpreter, const Value& begin, const Value& end, const Value& step, std::int64_t length) {
  SliceRange range{0, 0, 1};
  if (!step.is_none()) range.step = index_of(interpreter, step);
  if (range.step == 0) interpreter.fail("slice step cannot be zero");
  const std::int64_t low = range.step > 0 ? 0 : -1, high = range.step > 0 ? length : length - 1;
  const auto bound = [&](const Value& value, std::int64_t fallback) {
    if (value.is_none()) return fallback;
    std::int64_t index = index_of(interpreter, value);
    if (index < 0) index += length;
    return std::clamp(index, low, high);
  };
  range.begin = bound(begin, range.step > 0 ? low : high);
  range.end = bound(end, range.step > 0 ? high : low);
  return range;
}

}  // namespace

Value binary(Interpreter& interpreter, std::string_view op, const Value& left, const Value& right) {
  require_defined(interpreter, left);
  if (op == "%" && left.is_string()) return percent_format(interpreter, left, right);
  require_defined(interpreter, right);
  if (left.is_number() && right.is_number()) return arithmetic(interpreter, op.front(), op.size() == 2, left, right);
  if (is_any_number(left) && is_any_number(right)) return big_arithmetic(interpreter, op, left, right);
  if (op == "+") {
    if (left.is_string() && right.is_string()) {
      const bool is_markup = left.is_markup() || right.is_markup();
      const auto part = [is_markup](const Value& value) {
        return is_markup && !value.is_markup() ? escape_html(value.string()) : value.string();
      };
      std::string text = part(left) + part(right);
      interpreter.charge_bytes(text.size());
      return make_text(std::move(text), is_markup);
    }
    if (is_plain_list(left) && is_plain_list(right) && left.type_name() == right.type_name()) {
      std::vector<Value> items = left.list().items;
      items.insert(items.end(), right.list().items.begin(), right.list().items.end());
      interpreter.charge_bytes(items.size() * sizeof(Value));
      return make_list(std::move(items), left.list().flavor);
    }
    if (left.is_string()) interpreter.fail("can only concatenate str (not \"" + right.type_name() + "\") to str");
  }
  if (op == "*") {
    if ((left.is_string() || is_plain_list(left)) && (right.is_int() || right.is_bool())) return repeat(interpreter, left, right.integer());
    if ((right.is_string() || is_plain_list(right)) && (left.is_int() || left.is_bool())) return repeat(interpreter, right, left.integer());
  }
  interpreter.fail("unsupported operand type(s) for " + std::string(op) + ": '" + left.type_name() + "' and '" + right.type_name() + "'");
}

int order(Interpreter& interpreter, const Value& left, const Value& right, std::string_view op) {
  require_defined(interpreter, left);
  require_defined(interpreter, right);
  if (left.is_number() && right.is_number()) {
    if (!left.is_float() && !right.is_float()) return left.integer() < right.integer() ? -1 : left.integer() > right.integer();
    return left.number() < right.number() ? -1 : left.number() > right.number();
  }
  if (left.big_integer() && is_any_number(right)) return compare_big(left, right);
  if (right.big_integer() && is_any_number(left)) return -compare_big(right, left);
  if (left.is_string() && right.is_string()) {  // UTF-8 order is code point order
    const int result = left.string().compare(right.string());
    return result < 0 ? -1 : result > 0;
  }
  if (is_plain_list(left) && is_plain_list(right) && left.type_name() == right.type_name()) {
    const Interpreter::Depth guard(interpreter);
    const std::vector<Value>&a = left.list().items, &b = right.list().items;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      interpreter.charge_step();
      if (!a[i].equals(b[i])) return order(interpreter, a[i], b[i], op);
    }
    return a.size() < b.size() ? -1 : a.size() > b.size();
  }
  interpreter.fail("'" + std::string(op) + "' not supported between instances of '" + left.type_name() + "' and '" + right.type_name() +
                   "'");
}

bool contains(Interpreter& interpreter, const Value& container, const Value& item) {
  if (container.is_string()) {
    if (item.is_undefined() || !item.is_string())
      interpreter.fail("'in <string>' requires string as left operand, not " + item.type_name());
    return container.string().find(item.string()) != std::string::npos;
  }
  if (container.is_dict()) {
    check_hashable(interpreter, item);
    return container.dict().find(item) != nullptr;
  }
  if (container.is_list()) {
    const std::vector<Value>& items = container.list().items;
    interpreter.charge_step(items.size() / 16);
    return std::any_of(items.begin(), items.end(), [&](const Value& value) { return value.equals(item); });
  }
  if (container.is_undefined()) return false;
  if (Iterator* iterator = as_iterator(container)) {
    while (const std::optional<Value> value = iterator->next(interpreter))
      if (value->equals(item)) return true;
    return false;
  }
  interpreter.fail("argument of type '" + container.type_name() + "' is not iterable");
}

std::vector<Value> iterate(Interpreter& interpreter, const Value& value) {
  std::vector<Value> items;
  if (value.is_list()) {
    items = value.list().items;
  } else if (value.is_dict()) {
    for (const auto& entry : value.dict().entries) items.push_back(entry.first);
  } else if (value.is_string()) {
    const std::string& text = value.string();
    interpreter.charge_bytes(text.size() * 8);
    for (std::size_t i = 0; i < text.size();) {
      const std::size_t begin = i;
      next_code_point(text, i);
      items.emplace_back(text.substr(begin, i - begin));
    }
  } else if (Iterator* iterator = as_iterator(value)) {
    while (std::optional<Value> item = iterator->next(interpreter)) {
      interpreter.charge_bytes(sizeof(Value));
      items.push_back(std::move(*item));
    }
  } else if (!value.is_undefined()) {
    interpreter.fail("'" + value.type_name() + "' object is not iterable");
  }
  interpreter.charge_bytes(items.size() * sizeof(Value));
  return items;
}

void check_hashable(const Interpreter& interpreter, const Value& value) {
  const bool is_tuple = value.is_list() && (value.list().flavor == ListFlavor::kTuple || value.list().flavor == ListFlavor::kGroup);
  if (value.is_dict() || (value.is_list() && !is_tuple && value.list().flavor != ListFlavor::kRange))
    interpreter.fail("unhashable type: '" + value.type_name() + "'");
  if (!is_tuple) return;
  for (const Value& item : value.list().items) check_hashable(interpreter, item);
}

bool is_view(const Value& value) {
  if (!value.is_list()) return false;
  const ListFlavor flavor = value.list().flavor;
  return flavor == ListFlavor::kItems || flavor == ListFlavor::kKeys || flavor == ListFlavor::kValues;
}

std::size_t length(Interpreter& interpreter, const Value& value) {
  if (value.is_string()) return count_code_points(value.string());
  if (value.is_list()) return value.list().items.size();
  if (value.is_dict()) return value.dict().entries.size();
  if (value.is_undefined()) return 0;
  interpreter.fail("object of type '" + value.type_name() + "' has no len()");
}

Value get_attribute(Interpreter& interpreter, const Value& object, std::string_view name) {
  if (object.is_undefined()) interpreter.fail(object.undefined_message());
  if (object.is_object()) {
    if (auto value = object.object().attribute(name)) return *value;
  } else if (auto method = find_method(object, name)) {
    return *method;
  }
  if (object.is_dict())
    if (const Value* value = object.dict().get(name)) return *value;
  if (object.is_list() && object.list().flavor == ListFlavor::kGroup) {
    if (name == "grouper") return object.list().items[0];
    if (name == "list") return object.list().items[1];
  }
  if (object.is_none()) return make_undefined("'None' has no attribute '" + std::string(name) + "'");
  return make_undefined("'" + object.type_name() + " object' has no attribute '" + std::string(name) + "'");
}

Value get_item(Interpreter& interpreter, const Value& object, const Value& key) {
  if (object.is_undefined()) interpreter.fail(object.undefined_message());
  if (key.is_undefined() && !object.is_dict()) return make_undefined(key.undefined_message());
  if (object.is_dict()) {
    if (const Value* value = object.dict().find(key)) return *value;
  } else if (((object.is_list() && !is_view(object)) || object.is_string()) && (key.is_int() || key.is_bool())) {
    const auto size = static_cast<Int>(length(interpreter, object));
    const Int index = key.integer() < 0 ? key.integer() + size : key.integer();
    if (index >= 0 && index < size) {
      if (object.is_list()) return object.list().items[static_cast<std::size_t>(index)];
      const std::string& text = object.string();
      std::size_t end = byte_of_code_point(text, static_cast<std::size_t>(index));
      interpreter.charge_step(end / 64);
      const std::size_t begin = end;
      next_code_point(text, end);
      return make_text(text.substr(begin, end - begin), object.is_markup());
    }
  }
  if (key.is_string()) {
    if (object.is_object()) {
      if (auto value = object.object().attribute(key.string())) return *value;
    } else if (auto method = find_method(object, key.string())) {
      return *method;
    }
    return make_undefined("'" + object.type_name() + " object' has no attribute '" + key.string() + "'");
  }
  return make_undefined(object.type_name() + " object has no element " + repr(key));
}

Value slice(Interpreter& interpreter, const Value& object, const Value& begin, const Value& end, const Value& step) {
  if (object.is_undefined()) interpreter.fail(object.undefined_message());
  if (!object.is_string() && (!object.is_list() || is_view(object)))
    interpreter.fail(object.is_dict() ? "unhashable type: 'slice'" : "'" + object.type_name() + "' object is not subscriptable");
  const SliceRange range = resolve_slice(interpreter, begin, end, step, static_cast<std::int64_t>(length(interpreter, object)));
  const auto for_each = [&range](const auto& visit) {
    for (std::int64_t i = range.begin; range.step > 0 ? i < range.end : i > range.end; i += range.step) visit(static_cast<std::size_t>(i));
  };
  if (object.is_list()) {
    std::vector<Value> items;
    for_each([&](std::size_t i) { items.push_back(object.list().items[i]); });
    interpreter.charge_bytes(items.size() * sizeof(Value));
    const List& list = object.list();
    if (list.flavor == ListFlavor::kRange)
      return make_range(std::move(items), list.begin + list.step * range.begin, list.begin + list.step * range.end, list.step * range.step);
    const bool is_tuple = list.flavor == ListFlavor::kTuple || list.flavor == ListFlavor::kGroup;
    return make_list(std::move(items), is_tuple ? ListFlavor::kTuple : ListFlavor::kList);
  }
  const std::string& text = object.string();
  interpreter.charge_bytes(text.size());
  if (range.step == 1) {
    if (range.end <= range.begin) return make_text("", object.is_markup());
    const std::size_t first = byte_of_code_point(text, static_cast<std::size_t>(range.begin));
    const std::string_view rest = std::string_view(text).substr(first);
    return make_text(std::string(rest.substr(0, byte_of_code_point(rest, static_cast<std::size_t>(range.end - range.begin)))),
                     object.is_markup());
  }
  const std::vector<char32_t> points = to_code_points(text);
  std::string out;
  for_each([&](std::size_t i) { append_code_point(out, points[i]); });
  return make_text(std::move(out), object.is_markup());
}

}  // namespace prl::text::jinja
