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
Value::Value(List items) : data_(std::move(items)) {}
Value::Value(const Value&) = default;
Value::Value(Value&&) noexcept = default;
Value& Value::operator=(Value other) noexcept {
  data_.swap(other.data_);
  std::swap(origin_, other.origin_);
  is_loose_ = other.is_loose_;
  return *this;
}
Value::~Value() = default;

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

void Value::set_origin(const Origin& origin) {
  origin_ = origin;
  if (List* list = std::get_if<List>(&data_))
    for (Value& item : *list) item.set_origin(origin);
  if (Table* table = std::get_if<Table>(&data_))
    for (Member& member : *table) member.value.set_origin(origin);
}

double as_number(const Value& value) {
  PRL_CHECK(value.is_int() || value.is_float(), "value is {}", kind_name(value));
  return value.is_int() ? static_cast<double>(value.as_int()) : std::get<double>(value.data_);
}

const Value* find_path(const Value& tree, std::string_view dotted) noexcept {
  const Value* node = &tree;
  while (node && !dotted.empty()) {
    const std::string_view head = next_segment(dotted);
    if (node->is_list()) {
      const std::size_t index = list_index(head, node->items().size());
      node = index < node->items().size() ? &node->items()[index] : nullptr;
    } else {
      node = node->find(head);
    }
  }
  return node;
}
Value* find_path(Value& tree, std::string_view dotted) noexcept { return const_cast<Value*>(find_path(std::as_const(tree), dotted)); }

Value& set_path(Value& tree, std::string_view dotted, Value value) {
  Value* node = &tree;
  while (true) {
    const std::string_view head = next_segment(dotted);
    if (node->is_list() && list_index(head, node->items().size()) < node->items().size()) {
      node = &node->items()[list_index(head, node->items().size())];
      if (dotted.empty()) return *node = std::move(value);
      continue;
    }
    if (!node->is_table()) {
      Value fresh = Value::table();
      fresh.set_origin(value.origin());
      *node = std::move(fresh);
    }
    if (dotted.empty()) return node->set(head, std::move(value));
    Value* child = node->find(head);
    if (!child) {
      child = &node->set(head, Value::table());
      child->set_origin(value.origin());
    }
    node = child;
  }
}

bool erase_path(Value& tree, std::string_view dotted) {
  std::string_view rest = dotted;
  const std::string_view head = next_segment(rest);
  if (rest.empty()) return tree.erase(head);
  Value* child = tree.find(head);
  if (!child || !erase_path(*child, rest)) return false;
  if (child->is_table() && child->members().empty()) tree.erase(head);
  return true;
}

bool equals(const Value& a, const Value& b) noexcept {
  if (a.is_list() && b.is_list()) return std::ranges::equal(a.items(), b.items(), equals);
  if (a.is_table() && b.is_table()) {
    if (a.members().size() != b.members().size()) return false;
    return std::ranges::all_of(a.members(), [&](const Member& member) {
      const Value* found = b.find(member.key);
      return found && equals(member.value, *found);
    });
  }
  if ((a.is_int() || a.is_float()) && (b.is_int() || b.is_float()))
    return a.is_int() && b.is_int() ? a.as_int() == b.as_int() : as_number(a) == as_number(b);
  if (a.kind() != b.kind()) return false;
  if (a.is_bool()) return a.as_bool() == b.as_bool();
  if (a.is_string()) return a.as_string() == b.as_string();
  return true;
}

std::string to_display(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNull: return "null";
    case Value::Kind::kBool: return value.as_bool() ? "true" : "false";
    case Value::Kind::kInt: return fmt::format("{}", value.as_int());
    case Value::Kind::kFloat: return fmt::format("{}", as_number(value));
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
