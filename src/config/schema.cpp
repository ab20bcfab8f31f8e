#include "config/schema.hpp"

namespace prl::config::detail {

Value read_string_map(const std::map<std::string, std::string>& map) {
  Value table = Value::table();
  for (const auto& [key, value] : map) table.set(key, Value(value));
  return table;
}

void write_string_map(std::map<std::string, std::string>& map, const Value& value) {
  map.clear();
  for (const Member& member : value.members()) map[member.key] = member.value.as_string();
}

Value read_int_or_word(const IntOrWord& value) { return value.number ? Value(*value.number) : Value(value.word); }

void write_int_or_word(IntOrWord& target, const Value& value) {
  target.number.reset();
  if (value.is_int()) {
    target.number = value.as_int();
  } else {
    target.word = value.as_string();
  }
}

}  // namespace prl::config::detail
