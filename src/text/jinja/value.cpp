#include "text/jinja/value.hpp"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::text::jinja {
namespace {

namespace json = boost::json;

// Dicts with fewer entries are searched one by one.
constexpr std::size_t kIndexFrom = 9;
constexpr int kMaxDepth = 400;

std::string quote(std::string_view text) {
  const char mark = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, mark);
  for (std::size_t i = 0; i < text.size();) {
    const char32_t c = next_code_point(text, i);
    if (c == static_cast<char32_t>(mark) || c == '\\') {
      out.push_back('\\');
      out.push_back(static_cast<char>(c));
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c < 0x20 || c == 0x7F || (c >= 0x80 && c < 0xA1) || c == 0xAD) {
      constexpr char kHex[] = "0123456789abcdef";
      out += "\\x";
      out.push_back(kHex[c >> 4]);
      out.push_back(kHex[c & 15]);
    } else if (is_python_space(c) && c != ' ') {
      char buffer[16];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<unsigned>(c));
      out += buffer;
    } else {
      append_code_point(out, c);
    }
  }
  out.push_back(mark);
  return out;
}

void append_repr(std::string& out, const Value& value, int depth);

void append_items(std::string& out, const std::vector<Value>& items, int depth) {
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += ", ";
    append_repr(out, items[i], depth + 1);
  }
}

void append_repr(std::string& out, const Value& value, int depth) {
  if (value.is_string()) {
    out += value.is_markup() ? "Markup(" + quote(value.string()) + ")" : quote(value.string());
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else if (value.is_list()) {
    const List& list = value.list();
    if (list.flavor == ListFlavor::kRange) {
      out += "range(" + int_to_string(list.begin) + ", " + int_to_string(list.end);
      out += list.step == 1 ? ")" : ", " + int_to_string(list.step) + ")";
      return;
    }
    const bool is_tuple = list.flavor == ListFlavor::kTuple || list.flavor == ListFlavor::kGroup;
    const std::string_view view = list.flavor == ListFlavor::kItems    ? "dict_items("
                                  : list.flavor == ListFlavor::kKeys   ? "dict_keys("
                                  : list.flavor == ListFlavor::kValues ? "dict_values("
                                                                       : "";
    out += view;
    out += is_tuple ? "(" : "[";
    append_items(out, list.items, depth);
    if (is_tuple && list.items.size() == 1) out += ",";
    out += is_tuple ? ")" : "]";
    if (!view.empty()) out += ")";
  } else if (value.is_dict()) {
    out += "{";
    bool is_first = true;
    for (const auto& [key, member] : value.dict().entries) {
      if (!is_first) out += ", ";
      is_first = false;
      append_repr(out, key, depth + 1);
      out += ": ";
      append_repr(out, member, depth + 1);
    }
    out += "}";
  } else {
    out += value.str();
  }
}

class JsonWriter {
 public:
  JsonWriter(const ToJsonOptions& options, std::string& problem) : options_(options), problem_(problem) {}

  bool write(const Value& value, int depth) {
    if (value.is_none()) {
      out += "null";
    } else if (value.is_bool()) {
      out += value.integer() != 0 ? "true" : "false";
    } else if (value.is_int()) {
      out += int_to_string(value.integer());
    } else if (value.big_integer()) {
      out += value.big_integer()->text;
    } else if (const LargeNumber* far = far_float(value)) {
      out += far->text;
    } else if (value.is_float()) {
      const double number = value.number();
      out += std::isnan(number) ? "NaN" : std::isinf(number) ? (number < 0 ? "-Infinity" : "Infinity") : python_float_repr(number);
    } else if (value.is_string()) {
      append_json_string(out, value.string(), options_.ensure_ascii);
    } else if (value.is_list()) {
      const ListFlavor flavor = value.list().flavor;
      if (flavor != ListFlavor::kList && flavor != ListFlavor::kTuple && flavor != ListFlavor::kGroup)
        return refuse("Object of type " + value.type_name() + " is not JSON serializable");
      return write_list(value.list().items, depth);
    } else if (value.is_dict()) {
      return write_dict(value.dict(), depth);
    } else {
      return refuse("Object of type " + value.type_name() + " is not JSON serializable");
    }
    return true;
  }
  std::string out;

 private:
  bool refuse(std::string why) {
    problem_ = std::move(why);
    return false;
  }
  void new_line(int levels) {
    if (!options_.indent) return;
    out.push_back('\n');
    for (int i = 0; i < levels; ++i) out += *options_.indent;
  }
  bool write_list(const std::vector<Value>& items, int depth) {
    if (items.empty()) return out += "[]", true;
    out.push_back('[');
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out += options_.item_separator;
      new_line(depth + 1);
      if (!write(items[i], depth + 1)) return false;
    }
    new_line(depth);
    return out.push_back(']'), true;
  }
  bool write_dict(const Dict& dict, int depth) {
    if (dict.entries.empty()) return out += "{}", true;
    std::vector<std::pair<std::string, const Value*>> members;
    for (const auto& [key, member] : dict.entries) {
      if (key.is_string())
        members.emplace_back(key.string(), &member);
      else if (key.is_none())
        members.emplace_back("null", &member);
      else if (key.is_bool())
        members.emplace_back(key.integer() != 0 ? "true" : "false", &member);
      else if (key.is_number() || key.big_integer())
        members.emplace_back(key.str(), &member);
      else
        return refuse("keys must be str, int, float, bool or None, not " + key.type_name());
    }
    if (options_.sort_keys)
      std::stable_sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    out.push_back('{');
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (i > 0) out += options_.item_separator;
      new_line(depth + 1);
      append_json_string(out, members[i].first, options_.ensure_ascii);
      out += options_.key_separator;
      if (!write(*members[i].second, depth + 1)) return false;
    }
    new_line(depth);
    return out.push_back('}'), true;
  }

  const ToJsonOptions& options_;
  std::string& problem_;
};

}  // namespace

void check_depth(int depth) {
  if (depth > kMaxDepth) fail(ErrorCode::kInvalidArgument, "[chat template] a value is nested deeper than {} levels", kMaxDepth);
}

std::optional<Value> Object::attribute(std::string_view) const { return std::nullopt; }
Value Object::call(Interpreter&, Args&) const { return Value(); }
bool Object::set_attribute(std::string_view, Value) { return false; }

Value::Value() : data_(nullptr) {}
Value::Value(const Value& other) = default;
Value::Value(Value&& other) noexcept = default;
Value& Value::operator=(const Value& other) = default;
Value& Value::operator=(Value&& other) noexcept = default;
Value::~Value() = default;
Value::Value(std::nullptr_t) : data_(nullptr) {}
Value::Value(bool value) : data_(value) {}
Value::Value(int value) : data_(Int{value}) {}
Value::Value(Int value) : data_(value) {}
Value::Value(std::int64_t value) : data_(Int{value}) {}
Value::Value(std::size_t value) : data_(static_cast<Int>(value)) {}
Value::Value(double value) : data_(value) {}
Value::Value(std::string value) : data_(std::make_shared<const Text>(Text{std::move(value)})) {}
Value::Value(std::string_view value) : Value(std::string(value)) {}
Value::Value(const char* value) : Value(std::string(value)) {}
Value::Value(std::shared_ptr<Object> object) : data_(std::move(object)) {}
Value::Value(std::shared_ptr<const LargeNumber> number) : data_(std::move(number)) {}

Value::Value(std::shared_ptr<const Undefined> undefined) : data_(std::move(undefined)) {}
Value::Value(std::shared_ptr<const Text> text) : data_(std::move(text)) {}
Value::Value(std::shared_ptr<const List> list) : data_(std::move(list)) {}
Value::Value(std::shared_ptr<const Dict> dict) : data_(std::move(dict)) {}

Value make_text(std::string text, bool is_markup) { return Value(std::make_shared<const Text>(Text{std::move(text), is_markup})); }

Value make_undefined(std::string message) { return Value(std::make_shared<const Undefined>(Undefined{std::move(message)})); }

Value make_list(std::vector<Value> items, ListFlavor flavor) {
  int depth = 0;
  for (const Value& item : items) depth = std::max(depth, depth_of(item));
  check_depth(depth + 1);
  return Value(std::make_shared<const List>(List{std::move(items), flavor, depth + 1}));
}

Value make_range(std::vector<Value> items, Int begin, Int end, Int step) {
  return Value(std::make_shared<const List>(List{std::move(items), ListFlavor::kRange, 1, begin, end, step}));
}

Value make_dict(std::vector<std::pair<Value, Value>> entries) {
  auto dict = std::make_shared<Dict>();
  dict->entries.reserve(entries.size());
  const bool is_large = entries.size() >= kIndexFrom;
  for (auto& [key, member] : entries) {
    const Value* known = nullptr;
    if (is_large && key.is_string()) {
      const auto hit = dict->by_string.find(key.string());
      if (hit != dict->by_string.end()) known = &dict->entries[hit->second].second;
    } else {
      for (const auto& entry : dict->entries)
        if (entry.first.equals(key)) known = &entry.second;
    }
    if (known != nullptr) {
      dict->depth = std::max(dict->depth, depth_of(member) + 1);
      check_depth(dict->depth);
      *const_cast<Value*>(known) = std::move(member);
      continue;
    }
    dict->depth = std::max({dict->depth, depth_of(key) + 1, depth_of(member) + 1});
    check_depth(dict->depth);
    dict->entries.emplace_back(std::move(key), std::move(member));
    const Value& stored = dict->entries.back().first;
    if (is_large && stored.is_string()) dict->by_string.emplace(stored.string(), dict->entries.size() - 1);
  }
  return Value(std::shared_ptr<const Dict>(std::move(dict)));
}

namespace {

Value from_kept_number(std::string_view text) {
  if (text.find_first_of(".eE") == std::string_view::npos) return make_integer(text);
  std::string own(text);
  const double number = std::strtod(own.c_str(), nullptr);
  return Value(std::make_shared<const LargeNumber>(LargeNumber{std::move(own), number}));
}

}  // namespace

Value from_json(const json::value& json) {
  switch (json.kind()) {
    case json::kind::null: return Value();
    case json::kind::bool_: return Value(json.get_bool());
    case json::kind::int64: return Value(std::int64_t{json.get_int64()});
    case json::kind::uint64: return Value(static_cast<Int>(json.get_uint64()));
    case json::kind::double_: return Value(json.get_double());
    case json::kind::string:
      if (const auto number = kept_number(json)) return from_kept_number(*number);
      return Value(std::string(json.get_string().data(), json.get_string().size()));
    case json::kind::array: {
      std::vector<Value> items;
      items.reserve(json.get_array().size());
      for (const json::value& item : json.get_array()) items.push_back(from_json(item));
      return make_list(std::move(items));
    }
    case json::kind::object: {
      std::vector<std::pair<Value, Value>> entries;
      entries.reserve(json.get_object().size());
      for (const auto& member : json.get_object())
        entries.emplace_back(Value(std::string(member.key().data(), member.key().size())), from_json(member.value()));
      return make_dict(std::move(entries));
    }
  }
  return Value();
}

Value make_integer(std::string_view text) {
  const bool is_negative = text.starts_with('-');
  if (is_negative || text.starts_with('+')) text.remove_prefix(1);
  while (text.size() > 1 && text.front() == '0') text.remove_prefix(1);
  Int value = 0;
  bool overflow = false;
  for (const char c : text)
    overflow = overflow || __builtin_mul_overflow(value, Int{10}, &value) || __builtin_add_overflow(value, Int{c - '0'}, &value);
  if (!overflow) return Value(is_negative ? -value : value);
  return Value(std::make_shared<const LargeNumber>(LargeNumber{(is_negative ? "-" : "") + std::string(text), {}}));
}

double to_float(const LargeNumber& integer) { return std::strtod(integer.text.c_str(), nullptr); }

int compare_big(const Value& big, const Value& other) {
  if (other.is_float() && !std::isfinite(other.number())) return other.number() < 0 ? 1 : -1;
  // Floats of this size are integers, which are printed whole; smaller ones have fewer digits.
  const std::string left = big.big_integer()->text;
  const std::string right = other.big_integer() ? other.big_integer()->text
                            : other.is_float()  ? fmt::format("{:.0f}", other.number())
                                                : int_to_string(other.integer());
  const bool is_negative = left.front() == '-';
  if (is_negative != (right.front() == '-')) return is_negative ? -1 : 1;
  const int by_size = left.size() < right.size() ? -1 : left.size() > right.size();
  const int by_digits = left.compare(right);
  const int absolute = by_size != 0 ? by_size : by_digits < 0 ? -1 : by_digits > 0;
  return is_negative ? -absolute : absolute;
}

int depth_of(const Value& value) {
  if (value.is_list()) return value.list().depth;
  if (value.is_dict()) return value.dict().depth;
  return value.is_object() ? value.object().depth() : 0;
}

bool Value::truthy() const {
  if (is_none() || is_undefined()) return false;
  if (is_bool() || is_int()) return integer() != 0;
  if (is_float()) return number() != 0;
  if (is_string()) return !string().empty();
  if (is_list()) return !list().items.empty();
  if (is_dict()) return !dict().entries.empty();
  return true;
}

std::string Value::type_name() const {
  if (is_none()) return "NoneType";
  if (is_undefined()) return "Undefined";
  if (is_bool()) return "bool";
  if (is_int() || big_integer()) return "int";
  if (is_float()) return "float";
  if (is_string()) return is_markup() ? "Markup" : "str";
  if (is_dict()) return "dict";
  if (is_list()) {
    switch (list().flavor) {
      case ListFlavor::kList: return "list";
      case ListFlavor::kTuple:
      case ListFlavor::kGroup: return "tuple";
      case ListFlavor::kRange: return "range";
      case ListFlavor::kItems: return "dict_items";
      case ListFlavor::kKeys: return "dict_keys";
      case ListFlavor::kValues: return "dict_values";
    }
  }
  return object().type_name();
}

bool Value::equals(const Value& other) const {
  if (big_integer()) return (other.is_number() || other.big_integer()) && compare_big(*this, other) == 0;
  if (other.big_integer()) return other.equals(*this);
  if (is_number() && other.is_number()) {
    if (is_float() || other.is_float()) return number() == other.number();
    return integer() == other.integer();
  }
  if (is_string() && other.is_string()) return string() == other.string();
  if (is_none() && other.is_none()) return true;
  if (is_undefined() && other.is_undefined()) return true;
  if (is_list() && other.is_list()) {
    const List &a = list(), &b = other.list();
    if (type_name() != other.type_name() || a.flavor == ListFlavor::kValues) return false;
    return std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(),
                      [](const Value& x, const Value& y) { return x.equals(y); });
  }
  if (is_dict() && other.is_dict()) {
    const Dict &a = dict(), &b = other.dict();
    if (a.entries.size() != b.entries.size()) return false;
    for (const auto& [key, member] : a.entries) {
      const Value* match = b.find(key);
      if (match == nullptr || !match->equals(member)) return false;
    }
    return true;
  }
  if (is_object() && other.is_object()) return &object() == &other.object();
  return false;
}

bool is_same(const Value& a, const Value& b) {
  if (a.type_name() != b.type_name()) return false;
  if (a.is_list()) return &a.list() == &b.list();
  if (a.is_dict()) return &a.dict() == &b.dict();
  return a.equals(b);
}

std::string Value::str() const {
  if (is_string()) return string();
  if (is_undefined()) return "";
  if (is_none()) return "None";
  if (is_bool()) return integer() != 0 ? "True" : "False";
  if (is_int()) return int_to_string(integer());
  if (const LargeNumber* far = far_float(*this)) return far->text;
  if (is_float()) return python_float_repr(number());
  if (big_integer()) return big_integer()->text;
  if (is_object()) return "<" + object().type_name() + ">";
  return repr(*this);
}

std::string repr(const Value& value) {
  std::string out;
  append_repr(out, value, 0);
  return out;
}

const Value* Dict::get(std::string_view key) const {
  if (!by_string.empty()) {
    const auto hit = by_string.find(key);
    return hit == by_string.end() ? nullptr : &entries[hit->second].second;
  }
  for (const auto& [name, member] : entries)
    if (name.is_string() && name.string() == key) return &member;
  return nullptr;
}

const Value* Dict::find(const Value& key) const {
  if (key.is_string()) return get(key.string());
  for (const auto& [name, member] : entries)
    if (name.equals(key)) return &member;
  return nullptr;
}

std::string int_to_string(Int value) {
  const bool is_negative = value < 0;
  unsigned __int128 rest = is_negative ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
  std::string digits;
  do {
    digits.push_back(static_cast<char>('0' + static_cast<int>(rest % 10)));
    rest /= 10;
  } while (rest != 0);
  if (is_negative) digits.push_back('-');
  std::reverse(digits.begin(), digits.end());
  return digits;
}

std::optional<std::string> to_json(const Value& value, const ToJsonOptions& options, std::string& problem) {
  JsonWriter writer(options, problem);
  if (!writer.write(value, 0)) return std::nullopt;
  return std::move(writer.out);
}

}  // namespace prl::text::jinja
