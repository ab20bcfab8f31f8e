#include "config/merge.hpp"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "base/ascii.hpp"
#include "base/error.hpp"

namespace prl::config {
namespace {

/// More than any list of environments needs, and less than an accident could fill memory with.
constexpr std::size_t kMaxIndexDigits = 6;

bool is_index(std::string_view key) {
  return !key.empty() && key.size() <= kMaxIndexDigits && std::all_of(key.begin(), key.end(), is_ascii_digit);
}

void merge_items(Value& list, const Value& over) {
  for (const Member& member : over.members()) {
    std::size_t index = 0;
    std::from_chars(member.key.data(), member.key.data() + member.key.size(), index);
    Value::List& items = list.items();
    if (index > items.size())
      fail(ErrorCode::kInvalidArgument, "index {} is beyond the end of a list of {} items [{}]", member.key, items.size(),
           member.value.origin().describe());
    if (index == items.size()) items.emplace_back();
    merge(items[index], member.value);
  }
}

/// A table that says itself which entry it is takes the place of the list.
bool is_whole_entry(const Value& table) { return table.find("id") || table.find("type"); }

/// `--env.args {...}` changes the only entry of [[env]] in a file.
void merge_only_item(Value& list, const Value& over) {
  if (list.items().size() != 1) {
    const Member& first = over.members().front();
    fail(ErrorCode::kInvalidArgument, "{}: there are {} entries; say which one it is for by its number, 0 being the first [{}]", first.key,
         list.items().size(), first.value.origin().describe());
  }
  merge(list.items().front(), over);
}

}  // namespace

bool is_indexed(const Value& value) {
  return value.is_table() && !value.members().empty() &&
         std::all_of(value.members().begin(), value.members().end(), [](const Member& member) { return is_index(member.key); });
}

std::optional<Value> as_entries(const Value& table) {
  if (!table.is_table() || is_indexed(table)) return std::nullopt;
  Value entries = Value::table(), first = Value::table();
  for (const Member& member : table.members()) (is_index(member.key) ? entries : first).set(member.key, member.value);
  if (entries.members().empty()) return std::nullopt;
  if (const Value* zero = entries.find("0")) merge(first, *zero);
  entries.set("0", std::move(first));
  std::sort(entries.members().begin(), entries.members().end(), [](const Member& a, const Member& b) {
    return std::pair(a.key.size(), std::string_view(a.key)) < std::pair(b.key.size(), std::string_view(b.key));
  });
  return entries;
}

void merge(Value& base, const Value& over) {
  if (base.is_list())
    if (const std::optional<Value> entries = as_entries(over)) return merge_items(base, *entries);
  if (over.is_table() && base.is_list() && is_indexed(over)) return merge_items(base, over);
  if (over.is_table() && base.is_list() && !base.items().empty() && base.items().front().is_table() && !over.members().empty() &&
      !is_whole_entry(over))
    return merge_only_item(base, over);
  if (over.is_bool() && over.as_bool() && base.is_table()) return;
  if (!over.is_table() || !base.is_table()) {
    base = over;
    return;
  }
  for (const Member& member : over.members()) {
    if (Value* present = base.find(member.key)) {
      merge(*present, member.value);
    } else {
      base.set(member.key, member.value);
    }
  }
}

void none_to_null(Value& value) {
  if (value.is_string() && value.as_string() == "None") {
    Value null;
    null.set_origin(value.origin());
    value = std::move(null);
  } else if (value.is_list()) {
    for (Value& item : value.items()) none_to_null(item);
  } else if (value.is_table()) {
    for (Member& member : value.members()) none_to_null(member.value);
  }
}

}  // namespace prl::config
