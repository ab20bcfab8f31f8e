#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace prl::text::jinja {

class Value;
class Interpreter;

/// Wider than 64 bits, so that template arithmetic cannot overflow unseen. What is wider still is a LargeNumber.
using Int = __int128;

/// A number that neither Int nor double has a place for, as it was written.
struct LargeNumber {
  std::string text;  ///< of an integer: digits, of which the first is not 0, behind a minus perhaps
  /// Of a float such as 1e400 or 1e-400: infinity or 0, as which it counts. Absent: an integer, which is compared as Python does and mixes
  /// with floats; other arithmetic is refused.
  std::optional<double> as_float;
};

/// Arguments of a call.
struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
};

/// Everything that is not plain data: namespaces, macros, loop variables, bound methods, global functions.
class Object {
 public:
  virtual ~Object() = default;
  /// What Python's type(x).__name__ would say.
  virtual std::string type_name() const = 0;
  virtual std::optional<Value> attribute(std::string_view name) const;
  virtual bool is_callable() const { return false; }
  virtual Value call(Interpreter& interpreter, Args& args) const;
  /// {% set object.name = value %}; false if the object does not take attributes.
  virtual bool set_attribute(std::string_view name, Value value);
  /// Drops what it holds; called at the end of a rendering so that rings of references do not leak.
  virtual void release() {}
  /// Nesting of the values it holds for good.
  virtual int depth() const { return 0; }
};

/// A name that was not there. Printing and testing it is fine, anything else is an error that says what was missing.
struct Undefined {
  std::string message;
};

/// Lists differ in how Python would show them, hardly in what templates do with them.
enum class ListFlavor : std::uint8_t { kList, kTuple, kGroup, kRange, kItems, kKeys, kValues };

struct List;
struct Dict;

/// A str, or a Markup: text that counts as escaped already and escapes what is joined to it.
struct Text {
  std::string text;
  bool is_markup = false;
};

/// A value of the template language, with Python's meaning. Cheap to copy; data is shared and immutable.
class Value {
 public:
  // Kept out of line: values are copied and destroyed everywhere, and the variant's own code is large.
  Value();
  Value(const Value& other);
  Value(Value&& other) noexcept;
  Value& operator=(const Value& other);
  Value& operator=(Value&& other) noexcept;
  ~Value();
  Value(std::nullptr_t);
  Value(bool value);
  Value(int value);
  Value(Int value);
  Value(std::int64_t value);
  Value(std::size_t value);
  Value(double value);
  Value(std::string value);
  Value(std::string_view value);
  Value(const char* value);
  Value(std::shared_ptr<Object> object);
  Value(std::shared_ptr<const LargeNumber> number);
  Value(std::shared_ptr<const Undefined> undefined);
  Value(std::shared_ptr<const Text> text);
  Value(std::shared_ptr<const List> list);
  Value(std::shared_ptr<const Dict> dict);

  bool is_undefined() const noexcept { return std::holds_alternative<std::shared_ptr<const Undefined>>(data_); }
  bool is_none() const noexcept { return std::holds_alternative<std::nullptr_t>(data_); }
  bool is_bool() const noexcept { return std::holds_alternative<bool>(data_); }
  bool is_int() const noexcept { return std::holds_alternative<Int>(data_); }
  bool is_float() const noexcept { return std::holds_alternative<double>(data_) || far_float(*this) != nullptr; }
  /// Of those that integer() or number() give.
  bool is_number() const noexcept { return is_bool() || is_int() || is_float(); }
  bool is_string() const noexcept { return std::holds_alternative<std::shared_ptr<const Text>>(data_); }
  bool is_markup() const noexcept { return is_string() && std::get<std::shared_ptr<const Text>>(data_)->is_markup; }
  bool is_list() const noexcept { return std::holds_alternative<std::shared_ptr<const List>>(data_); }
  bool is_dict() const noexcept { return std::holds_alternative<std::shared_ptr<const Dict>>(data_); }
  bool is_object() const noexcept { return std::holds_alternative<std::shared_ptr<Object>>(data_); }

  /// An integer beyond Int; nullptr for any other value.
  const LargeNumber* big_integer() const noexcept {
    const auto* large = std::get_if<std::shared_ptr<const LargeNumber>>(&data_);
    return large == nullptr || (*large)->as_float ? nullptr : large->get();
  }
  /// A float beyond double, which is_float() too; nullptr for any other value.
  friend const LargeNumber* far_float(const Value& value) noexcept {
    const auto* large = std::get_if<std::shared_ptr<const LargeNumber>>(&value.data_);
    return large == nullptr || !(*large)->as_float ? nullptr : large->get();
  }

  // Each needs the matching is_...; integer() also takes bool.
  const std::string& undefined_message() const { return std::get<std::shared_ptr<const Undefined>>(data_)->message; }
  Int integer() const { return is_bool() ? Int{std::get<bool>(data_)} : std::get<Int>(data_); }
  double number() const {
    if (const LargeNumber* far = far_float(*this)) return *far->as_float;
    return is_float() ? std::get<double>(data_) : static_cast<double>(integer());
  }
  const std::string& string() const { return std::get<std::shared_ptr<const Text>>(data_)->text; }
  const List& list() const { return *std::get<std::shared_ptr<const List>>(data_); }
  const Dict& dict() const { return *std::get<std::shared_ptr<const Dict>>(data_); }
  Object& object() const { return *std::get<std::shared_ptr<Object>>(data_); }

  /// bool(x)
  bool truthy() const;
  /// type(x).__name__
  std::string type_name() const;
  /// x == y
  bool equals(const Value& other) const;
  /// str(x)
  std::string str() const;

 private:
  std::variant<std::nullptr_t, bool, Int, double, std::shared_ptr<const Undefined>, std::shared_ptr<const Text>,
               std::shared_ptr<const List>, std::shared_ptr<const Dict>, std::shared_ptr<Object>, std::shared_ptr<const LargeNumber>>
      data_;
};

struct List {
  std::vector<Value> items;
  ListFlavor flavor = ListFlavor::kList;
  int depth = 1;
  Int begin = 0, end = 0, step = 1;  ///< of a range
};

/// Insertion-ordered; keys compare as in Python (1 == 1.0 == True).
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int depth = 1;
  std::unordered_map<std::string_view, std::size_t> by_string;  // only when there are many entries

  const Value* find(const Value& key) const;
  const Value* get(std::string_view key) const;
};

// What is not plain data has makers of its own: they see to the depth of what is nested.
Value make_text(std::string text, bool is_markup);
inline Value make_markup(std::string text) { return make_text(std::move(text), true); }
Value make_undefined(std::string message);
Value make_list(std::vector<Value> items, ListFlavor flavor = ListFlavor::kList);
inline Value make_tuple(std::vector<Value> items) { return make_list(std::move(items), ListFlavor::kTuple); }
/// The numbers `items`, which are those of range(begin, end, step).
Value make_range(std::vector<Value> items, Int begin, Int end, Int step);
/// A repeated key keeps its first place and takes the last value.
Value make_dict(std::vector<std::pair<Value, Value>> entries);
Value from_json(const boost::json::value& json);
/// The integer that decimal digits, behind a sign perhaps, stand for: an Int where it fits.
Value make_integer(std::string_view digits);
/// The nearest float; infinity beyond all of them.
double to_float(const LargeNumber& integer);
/// -1, 0 or 1 as `big`, a big integer, is less than, equal to or greater than `other`, a number or big integer. NaN counts as less.
int compare_big(const Value& big, const Value& other);

/// Levels of lists and dicts; make_list() and make_dict() fail beyond a fixed number.
int depth_of(const Value& value);

/// repr(x)
std::string repr(const Value& value);
/// x is y, near enough: identity for shared data, equality for numbers and None
bool is_same(const Value& a, const Value& b);
std::string int_to_string(Int value);
/// Error{kInvalidArgument} if values nest deeper than what recursion over them could bear.
void check_depth(int depth);

struct ToJsonOptions {
  bool ensure_ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;  ///< one level
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
/// json.dumps; nullopt with `problem` set for a value JSON has no form for.
std::optional<std::string> to_json(const Value& value, const ToJsonOptions& options, std::string& problem);

}  // namespace prl::text::jinja
