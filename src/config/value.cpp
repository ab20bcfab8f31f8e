#include "config/value.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/error.hpp"

namespace prl::config {
namespace {

constexpr std::size_t kMaxDisplayChars = 80;

/// Splits off the part before the first dot.
std::string_view next_segment(std::string_view& dotted) {
  const std::size_t dot = dotted.find('.');
  const std::string_view head = dotted.substr(0, dot);
  dotted = dot == std::string_view::npos ? std::string_view() : dotted.substr(dot + 1);
  return head;
}

/// The position that a path segment names in a list of `size` items, or size if it is none.
std::size_t list_index(std::string_view segment, std::size_t size) {
  std::size_t index = 0;
  const auto [end, error] = std::from_chars(segment.data(), segment.data() + segment.size(), index);
  return error == std::errc() && end == segment.data() + segment.size() && index < size ? index : size;
}

}  // namespace

std::string Origin::describe() const {
  switch (kind) {
    case Kind::kDefault: return "default";
    case Kind::kEnvironment: return fmt::format("variable {}", where);
    case Kind::kFlag: return fmt::format("flag {}", where);
    case Kind::kFile: return line > 0 ? fmt::format("{}:{}", where, line) : where;
  }
  return "default";
}

Value::Value() = default;
Value::Value(bool value) : data_(value) {}
Value::Value(int value) : data_(static_cast<std::int64_t>(value)) {}
Value::Value(std::int64_t value) : data_(value) {}
Value::Value(double value) : data_(value) {}
Value::Value(const char* value) : data_(std::string(value)) {}
Value::Value(std::string_view value) : data_(std::string(value)) {}
Value::Value(std::string value) : data_(std::move(value)) {}
Value::Value(const Value&) = default;
Value::Value(Value&&) noexcept = default;
Value& Value::operator=(const Value&) = default;
Value& Value::operator=(Value&&) noexcept = default;
Value::~Value() = default;

Value Value::list(List items) {
  Value value;
  value.data_ = std::move(items);
  return value;
}

Value Value::table() {
  Value value;
  value.data_ = Table();
  return value;
}

Value::Kind Value::kind() const noexcept { return static_cast<Kind>(data_.index()); }

bool Value::as_bool() const {
  PRL_CHECK(is_bool(), "value is {}", kind_name(*this));
  return std::get<bool>(data_);
}
std::int64_t Value::as_int() const {
  PRL_CHECK(is_int(), "value is {}", kind_name(*this));
  return std::get<std::int64_t>(data_);
}
double Value::as_number() const {
  PRL_CHECK(is_int() || is_float(), "value is {}", kind_name(*this));
  return is_int() ? static_cast<double>(std::get<std::int64_t>(data_)) : std::get<double>(data_);
}
const std::string& Value::as_string() const {
  PRL_CHECK(is_string(), "value is {}", kind_name(*this));
  return std::get<std::string>(data_);
}
const Value::List& Value::items() const {
  PRL_CHECK(is_list(), "value is {}", kind_name(*this));
  return std::get<List>(data_);
}
Value::List& Value::items() { return const_cast<List&>(std::as_const(*this).items()); }
const Value::Table& Value::members() const {
  PRL_CHECK(is_table(), "value is {}", kind_name(*this));
  return std::get<Table>(data_);
}
Value::Table& Value::members() { return const_cast<Table&>(std::as_const(*this).members()); }

const Value* Value::find(std::string_view key) const noexcept {
  const Table* table = std::get_if<Table>(&data_);
  if (!table) return nullptr;
  for (const Member& member : *table)
    if (member.key == key) return &member.value;
  return nullptr;
}
Value* Value::find(std::string_view key) noexcept { return const_cast<Value*>(std::as_const(*this).find(key)); }

Value& Value::set(std::string_view key, Value value) {
  if (Value* present = find(key)) return *present = std::move(value);
  members().push_back(Member{std::string(key), std::move(value)});
  return members().back().value;
}

bool Value::erase(std::string_view key) {
  Table* table = std::get_if<Table>(&data_);
  if (!table) return false;
  return std::erase_if(*table, [&](const Member& member) { return member.key == key; }) > 0;
}

const Value* Value::find_path(std::string_view dotted) const noexcept {
  const Value* node = this;
  while (node && !dotted.empty()) {
    const std::string_view head = next_segment(dotted);
    if (const List* list = std::get_if<List>(&node->data_)) {
      const std::size_t index = list_index(head, list->size());
      node = index < list->size() ? &(*list)[index] : nullptr;
    } else {
      node = node->find(head);
    }
  }
  return node;
}
Value* Value::find_path(std::string_view dotted) noexcept { return const_cast<Value*>(std::as_const(*this).find_path(dotted)); }

Value& Value::set_path(std::string_view dotted, Value value) {
  Value* node = this;
  while (true) {
    const std::string_view head = next_segment(dotted);
    if (List* list = std::get_if<List>(&node->data_); list && list_index(head, list->size()) < list->size()) {
      node = &(*list)[list_index(head, list->size())];
      if (dotted.empty()) return *node = std::move(value);
      continue;
    }
    if (!node->is_table()) {
      Value fresh = table();
      fresh.origin_ = value.origin_;
      *node = std::move(fresh);
    }
    if (dotted.empty()) return node->set(head, std::move(value));
    Value* child = node->find(head);
    if (!child) {
      child = &node->set(head, table());
      child->origin_ = value.origin_;
    }
    node = child;
  }
}

bool Value::erase_path(std::string_view dotted) {
  std::string_view rest = dotted;
  const std::string_view head = next_segment(rest);
  if (rest.empty()) return erase(head);
  Value* child = find(head);
  if (!child || !child->erase_path(rest)) return false;
  if (child->is_table() && child->members().empty()) erase(head);
  return true;
}

void Value::set_origin(const Origin& origin) {
  origin_ = origin;
  if (List* list = std::get_if<List>(&data_))
    for (Value& item : *list) item.set_origin(origin);
  if (Table* table = std::get_if<Table>(&data_))
    for (Member& member : *table) member.value.set_origin(origin);
}

bool Value::equals(const Value& other) const noexcept {
  if (is_list() && other.is_list()) {
    const List& a = std::get<List>(data_);
    const List& b = std::get<List>(other.data_);
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Value& x, const Value& y) { return x.equals(y); });
  }
  if (is_table() && other.is_table()) {
    const Table& a = std::get<Table>(data_);
    const Table& b = std::get<Table>(other.data_);
    if (a.size() != b.size()) return false;
    return std::all_of(a.begin(), a.end(), [&](const Member& member) {
      const Value* found = other.find(member.key);
      return found && member.value.equals(*found);
    });
  }
  if ((is_int() || is_float()) && (other.is_int() || other.is_float()))
    return is_int() && other.is_int() ? as_int() == other.as_int() : as_number() == other.as_number();
  if (kind() != other.kind()) return false;
  if (is_bool()) return std::get<bool>(data_) == std::get<bool>(other.data_);
  if (is_string()) return std::get<std::string>(data_) == std::get<std::string>(other.data_);
  return is_null();
}

std::string to_display(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNull: return "null";
    case Value::Kind::kBool: return value.as_bool() ? "true" : "false";
    case Value::Kind::kInt: return fmt::format("{}", value.as_int());
    case Value::Kind::kFloat: return fmt::format("{}", value.as_number());
    case Value::Kind::kString: {
      const std::string& text = value.as_string();
      if (text.size() <= kMaxDisplayChars) return fmt::format("\"{}\"", text);
      return fmt::format("\"{}...\"", text.substr(0, kMaxDisplayChars));
    }
    case Value::Kind::kList: {
      const Value::List& items = value.items();
      std::string text = "[";
      for (std::size_t i = 0; i < items.size() && text.size() <= kMaxDisplayChars; ++i) text += (i ? ", " : "") + to_display(items[i]);
      return text.size() <= kMaxDisplayChars ? text + "]" : fmt::format("a list of {}", items.size());
    }
    case Value::Kind::kTable: return fmt::format("a table with {} keys", value.members().size());
  }
  return "?";
}

std::string_view kind_name(const Value& value) noexcept {
  switch (value.kind()) {
    case Value::Kind::kNull: return "null";
    case Value::Kind::kBool: return "true or false";
    case Value::Kind::kInt: return "an integer";
    case Value::Kind::kFloat: return "a number";
    case Value::Kind::kString: return "a string";
    case Value::Kind::kList: return "a list";
    case Value::Kind::kTable: return "a table";
  }
  return "?";
}

}  // namespace prl::config
