#include "config/bind.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "config/merge.hpp"

namespace prl::config {
namespace {

using Kind = TypeOps::Kind;

std::string join(std::string_view path, std::string_view key) { return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key); }

std::optional<bool> parse_bool(const Value& value) {
  if (value.is_bool()) return value.as_bool();
  if (!value.is_loose() || !value.is_string()) return std::nullopt;
  const std::string& text = value.as_string();
  if (text == "true" || text == "True" || text == "1") return true;
  if (text == "false" || text == "False" || text == "0") return false;
  return std::nullopt;
}

std::optional<double> parse_number(const Value& value) {
  if (value.is_int() || value.is_float()) return as_number(value);
  if (!value.is_loose() || !value.is_string() || value.as_string().empty()) return std::nullopt;
  const std::string& text = value.as_string();
  double number = 0;
  const char* first = text.data() + (text.front() == '+' ? 1 : 0);
  const auto [end, error] = std::from_chars(first, text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<std::int64_t> parse_int(const Value& value) {
  if (value.is_int()) return value.as_int();
  if (value.is_loose() && value.is_string()) {
    const std::string& text = value.as_string();
    std::int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) return number;
  }
  // 1e3 and 2.0 are whole numbers too.
  const std::optional<double> number = parse_number(value);
  if (!number || std::trunc(*number) != *number || std::abs(*number) > 9007199254740992.0) return std::nullopt;
  return static_cast<std::int64_t>(*number);
}

/// Text in a free table becomes the type it looks like.
Value tighten(const Value& value) {
  if (value.is_table()) {
    Value table = Value::table();
    for (const Member& member : value.members()) table.set(member.key, tighten(member.value));
    return table;
  }
  if (value.is_list()) {
    Value list = Value(Value::List());
    for (const Value& item : value.items()) list.items().push_back(tighten(item));
    return list;
  }
  if (!value.is_loose() || !value.is_string()) return value;
  if (value.as_string() != "0" && value.as_string() != "1")
    if (const auto boolean = parse_bool(value)) return Value(*boolean);
  std::int64_t integer = 0;
  const std::string& text = value.as_string();
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), integer);
  if (error == std::errc() && end == text.data() + text.size() && !text.empty()) return Value(integer);
  if (const auto number = parse_number(value)) return Value(*number);
  return Value(text);
}

bool has_word(std::string_view words, std::string_view word) {
  while (!words.empty()) {
    const std::size_t bar = words.find('|');
    if (words.substr(0, bar) == word) return true;
    words = bar == std::string_view::npos ? std::string_view() : words.substr(bar + 1);
  }
  return false;
}

std::string range_text(const Meta& meta) {
  const bool has_min = std::isfinite(meta.min), has_max = std::isfinite(meta.max);
  const std::string unit = meta.unit.empty() ? "" : fmt::format(" {}", meta.unit);
  if (has_min && has_max)
    return meta.is_open_min ? fmt::format("above {} and at most {}{}", meta.min, meta.max, unit)
                            : fmt::format("between {} and {}{}", meta.min, meta.max, unit);
  if (has_min) return fmt::format("{} {}{}", meta.is_open_min ? "above" : "at least", meta.min, unit);
  return fmt::format("at most {}{}", meta.max, unit);
}

class Binder {
 public:
  Binder(const TypeOps& root, Report& report) : root_(root), report_(report) {}

  void bind_struct(const Value& table, const TypeOps& ops, void* target, const std::string& path) {
    std::vector<Field> fields;
    ops.fields(target, fields);
    bind_members(table, fields, path, {});
  }

 private:
  /// `union_note` explains keys that are unknown because another variant was chosen.
  void bind_members(const Value& table, const std::vector<Field>& fields, const std::string& path, const std::string& union_note) {
    for (const Member& member : table.members()) {
      const auto field = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.name == member.key; });
      if (field != fields.end()) {
        bind_value(member.value, *field->ops, field->target, field->meta, join(path, member.key));
      } else if (!(member.key == "type" && !union_note.empty())) {
        complain_unknown(member, fields, path, union_note);
      }
    }
  }

  void complain_unknown(const Member& member, const std::vector<Field>& fields, const std::string& path, const std::string& union_note) {
    std::vector<std::string> siblings;
    for (const Field& field : fields) siblings.emplace_back(field.name);
    Problem problem{join(path, member.key), "unknown key", to_display(member.value), leaf_origin(member.value), {}};
    if (!union_note.empty()) problem.message = fmt::format("unknown key {}", union_note);
    // The very name in another section is a better guess than a name that only
    // looks alike.
    const std::string suffix = "." + member.key;
    for (const std::string& key : plain_keys(root_))
      if ((key == member.key || key.ends_with(suffix)) && problem.nearest.size() < 3) problem.nearest.push_back(key);
    if (problem.nearest.empty())
      for (const std::string& name : nearest_names(member.key, siblings)) problem.nearest.push_back(join(path, name));
    if (problem.nearest.empty()) problem.nearest = similar_elsewhere(member.key);
    std::erase(problem.nearest, problem.key);  // a key of another variant is there under the very name
    report_.problems.push_back(std::move(problem));
  }

  /// Keys of other sections whose last part is nearly the same.
  std::vector<std::string> similar_elsewhere(const std::string& name) const {
    std::vector<std::string> names, keys = plain_keys(root_), found;
    for (const std::string& key : keys) names.push_back(key.substr(key.rfind('.') + 1));
    for (const std::string& nearest : nearest_names(name, names, 1))
      for (std::size_t i = 0; i < keys.size() && found.size() < 3; ++i)
        if (names[i] == nearest) found.push_back(keys[i]);
    return found;
  }

  /// Tables made by a dotted flag know the flag only in their leaves.
  static Origin leaf_origin(const Value& value) {
    const Value* node = &value;
    while (node->is_table() && node->members().size() == 1 && node->origin().kind == Origin::Kind::kDefault)
      node = &node->members().front().value;
    return node->origin();
  }

  void complain(const std::string& path, std::string message, const Value& value) {
    report_.add(path, std::move(message), &value);
    report_.problems.back().origin = leaf_origin(value);
  }

  void bind_value(const Value& value, const TypeOps& ops, void* target, const Meta& meta, const std::string& path) {
    if (value.is_loose() && value.is_bool() && value.as_bool() && ops.kind != Kind::kBool && ops.kind != Kind::kFree && !takes_switch(ops))
      return complain(path, switch_message(ops, path), value);
    switch (ops.kind) {
      case Kind::kStruct: return bind_section(value, ops, target, path);
      case Kind::kOptional: return bind_optional(value, ops, target, meta, path);
      case Kind::kList: return bind_list(value, ops, target, meta, path);
      case Kind::kUnion: return bind_union(value, ops, target, path);
      default: return bind_scalar(value, ops, target, meta, path);
    }
  }

  /// Types for which a bare `--key` means something.
  static bool takes_switch(const TypeOps& ops) {
    if (ops.kind == Kind::kList) return true;
    if (ops.kind != Kind::kOptional) return false;
    return ops.inner->kind == Kind::kStruct || ops.inner->kind == Kind::kUnion || ops.inner->kind == Kind::kBool ||
           ops.inner->kind == Kind::kList;
  }

  static std::string switch_message(const TypeOps& ops, const std::string& path) {
    if (ops.kind != Kind::kStruct && ops.kind != Kind::kUnion) return fmt::format("{} requires a value", to_flag(path));
    const bool is_union = ops.kind == Kind::kUnion;
    std::string leaves = is_union ? to_flag(join(path, "type")) : "";
    std::size_t count = 0;
    for (const KeyInfo& info : list_keys(is_union ? *ops.alternatives().front().ops : ops))
      if (!info.is_section && info.key.find_first_of("[<") == std::string::npos && count++ < 5)
        leaves += fmt::format("{}{}", leaves.empty() ? "" : ", ", to_flag(join(path, info.key)));
    return fmt::format("{} is a group of keys, such as {}", to_flag(path), leaves);
  }

  void bind_section(const Value& value, const TypeOps& ops, void* target, const std::string& path) {
    if (!value.is_table()) {
      complain(path, fmt::format("expects a table: write its keys under [{}]", path), value);
      for (const KeyInfo& info : list_keys(ops))
        if (value.is_string() && (info.key == "name" || info.key == "id")) report_.problems.back().nearest = {join(path, info.key)};
      return;
    }
    bind_struct(value, ops, target, path);
  }

  void bind_optional(const Value& value, const TypeOps& ops, void* target, const Meta& meta, const std::string& path) {
    const Kind inner = ops.inner->kind;
    const bool is_block = inner == Kind::kStruct || inner == Kind::kUnion;
    const bool is_off = value.is_bool() && !value.as_bool() && (is_block || (value.is_loose() && inner != Kind::kBool));
    if (value.is_null() || is_off) return ops.clear(target);
    void* held = ops.emplace(target);
    if (is_block && value.is_bool()) return;
    if (is_block && parse_bool(value)) {
      if (!*parse_bool(value)) ops.clear(target);
      return;
    }
    bind_value(value, *ops.inner, held, meta, path);
  }

  void bind_union(const Value& value, const TypeOps& ops, void* target, const std::string& path) {
    const auto alternatives = ops.alternatives();
    const Value* type = value.is_string() ? &value : value.find("type");
    if (!value.is_table() && !value.is_string())
      return complain(path, fmt::format("expects a table: write its keys under [{}]", path), value);
    if (type) {
      std::vector<std::string> known;
      for (const auto& alternative : alternatives) known.emplace_back(alternative.type_name);
      const std::string wanted = type->is_string() ? type->as_string() : to_display(*type);
      const auto found = std::find(known.begin(), known.end(), wanted);
      if (found == known.end()) {
        complain(join(path, "type"), fmt::format("must be one of {}", fmt::join(known, ", ")), *type);
        report_.problems.back().nearest = nearest_names(wanted, known);
        return;
      }
      const std::size_t index = static_cast<std::size_t>(found - known.begin());
      if (ops.index(target) != index) alternatives[index].emplace(target);
    }
    if (!value.is_table()) return;
    const auto& held = alternatives[ops.index(target)];
    std::vector<Field> fields;
    held.ops->fields(ops.peek(target), fields);
    const Value rest = type && type->origin().kind == Origin::Kind::kFlag ? without_former_keys(value, *type, ops, path) : value;
    bind_members(rest, fields, path, fmt::format("of type {}{}", held.type_name, other_owners(rest, ops, held.type_name)));
  }

  /// Without the keys that a file, such as the resolved one of an earlier run, has for a type that a flag replaces: they are told as inert.
  Value without_former_keys(const Value& table, const Value& type, const TypeOps& ops, const std::string& path) {
    const std::vector<std::string> own = root_keys(*find_alternative(ops, type.as_string()));
    Value rest = table;
    for (const Member& member : table.members()) {
      if (leaf_origin(member.value).kind == Origin::Kind::kFlag || std::ranges::find(own, member.key) != own.end()) continue;
      for (const auto& alternative : ops.alternatives()) {
        const std::vector<std::string> names = root_keys(*alternative.ops);
        if (std::ranges::find(names, member.key) == names.end()) continue;
        report_.inert.push_back({join(path, member.key),
                                 fmt::format("it belongs to type {}, and the type is now {}", alternative.type_name, type.as_string()),
                                 leaf_origin(member.value)});
        rest.erase(member.key);
        break;
      }
    }
    return rest;
  }

  /// ", which type sgd has" for a key of another variant.
  static std::string other_owners(const Value& value, const TypeOps& ops, std::string_view held) {
    for (const auto& alternative : ops.alternatives()) {
      if (alternative.type_name == held) continue;
      const std::vector<std::string> names = root_keys(*alternative.ops);
      const std::vector<std::string> own = root_keys(*find_alternative(ops, held));
      for (const Member& member : value.members())
        if (std::find(names.begin(), names.end(), member.key) != names.end() && std::find(own.begin(), own.end(), member.key) == own.end())
          return fmt::format("; {} belongs to type {}", member.key, alternative.type_name);
    }
    return {};
  }
  static const TypeOps* find_alternative(const TypeOps& ops, std::string_view name) {
    for (const auto& alternative : ops.alternatives())
      if (alternative.type_name == name) return alternative.ops;
    return nullptr;
  }

  void bind_list(const Value& value, const TypeOps& ops, void* target, const Meta& meta, const std::string& path) {
    if (value.is_null()) return complain(path, "cannot be None", value);
    ops.clear(target);
    const bool is_scalar = ops.inner->kind != Kind::kStruct && ops.inner->kind != Kind::kUnion;
    std::vector<Value> items;
    const std::optional<Value> entries = is_scalar ? std::nullopt : as_entries(value);
    if (value.is_list()) {
      items = value.items();
    } else if (entries) {
      for (const Member& member : entries->members()) items.push_back(member.value);
    } else if (is_indexed(value)) {
      for (const Member& member : value.members()) items.push_back(member.value);
    } else if (!(value.is_bool() && value.is_loose())) {
      items.push_back(value);
    }
    if (value.is_table() && is_scalar && !is_indexed(value)) return complain(path, "expects a list", value);
    if (is_scalar && value.is_loose()) items = split_commas(items);
    for (std::size_t i = 0; i < items.size(); ++i)
      bind_value(items[i], *ops.inner, ops.append(target), meta, fmt::format("{}[{}]", path, i));
  }

  static std::vector<Value> split_commas(const std::vector<Value>& items) {
    std::vector<Value> parts;
    for (const Value& item : items) {
      if (!item.is_string() || !item.is_loose()) {
        parts.push_back(item);
        continue;
      }
      std::string_view rest = item.as_string();
      while (!rest.empty()) {
        const std::size_t comma = rest.find(',');
        Value part(rest.substr(0, comma));
        part.set_origin(item.origin());
        part.set_loose(true);
        if (comma != 0) parts.push_back(std::move(part));
        rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
      }
    }
    return parts;
  }

  void bind_scalar(const Value& value, const TypeOps& ops, void* target, const Meta& meta, const std::string& path) {
    if (value.is_null() && ops.kind == Kind::kFree) return ops.write(target, value);
    if (value.is_null() && ops.kind == Kind::kIntOrWord) return;  // the default word
    if (value.is_null()) return complain(path, "cannot be None", value);
    if (value.is_list() && value.is_loose() && ops.kind != Kind::kFree && ops.kind != Kind::kStringMap)
      return complain(path, fmt::format("takes one value, got {}", value.items().size()), value);
    switch (ops.kind) {
      case Kind::kBool:
        if (const auto parsed = parse_bool(value)) return ops.write(target, Value(*parsed));
        return complain(path, "expects true or false", value);
      case Kind::kInt:
        if (const auto parsed = parse_int(value)) return write_number(Value(*parsed), value, ops, target, meta, path);
        return complain(path, wanted(value, "a whole number"), value);
      case Kind::kFloat:
        if (const auto parsed = parse_number(value)) return write_number(Value(*parsed), value, ops, target, meta, path);
        return complain(path, wanted(value, "a number"), value);
      case Kind::kString:
      case Kind::kPath:
        if (value.is_string()) return ops.write(target, value);
        return complain(path, "expects a string", value);
      case Kind::kEnum: return bind_enum(value, ops, target, path);
      case Kind::kIntOrWord: return bind_int_or_word(value, ops, target, meta, path);
      case Kind::kStringMap: return bind_string_map(value, ops, target, path);
      default: return ops.write(target, tighten(value));
    }
  }

  static std::string wanted(const Value& value, std::string_view what) {
    Value loose = value;
    loose.set_loose(true);
    if (value.is_string() && parse_number(loose)) return fmt::format("expects {}, written without quotes", what);
    return fmt::format("expects {}", what);
  }

  void write_number(const Value& number, const Value& found, const TypeOps& ops, void* target, const Meta& meta, const std::string& path) {
    const double x = as_number(number);
    const bool is_in_range = x <= meta.max && (meta.is_open_min ? x > meta.min : x >= meta.min);
    if (!std::isfinite(x)) return complain(path, "must be a finite number", found);
    if (!is_in_range) return complain(path, fmt::format("must be {}", range_text(meta)), found);
    ops.write(target, number);
    // A narrow integer field would have kept only the low bits.
    if (number.is_int() && ops.kind == Kind::kInt && ops.read(target).as_int() != number.as_int()) complain(path, "is too large", found);
  }

  void bind_enum(const Value& value, const TypeOps& ops, void* target, const std::string& path) {
    std::vector<std::string> known;
    for (const EnumEntry& entry : ops.entries()) known.emplace_back(entry.name);
    if (value.is_string()) {
      std::string text = value.as_string();
      if (std::find(known.begin(), known.end(), text) == known.end())
        std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      if (std::find(known.begin(), known.end(), text) != known.end()) return ops.write(target, Value(text));
    }
    complain(path, fmt::format("must be one of {}", fmt::join(known, ", ")), value);
    if (value.is_string()) report_.problems.back().nearest = nearest_names(value.as_string(), known);
  }

  void bind_int_or_word(const Value& value, const TypeOps& ops, void* target, const Meta& meta, const std::string& path) {
    if (const auto parsed = parse_int(value)) return write_number(Value(*parsed), value, ops, target, meta, path);
    if (value.is_string() && has_word(meta.words, value.as_string())) return ops.write(target, value);
    std::string words(meta.words);
    for (std::size_t bar = words.find('|'); bar != std::string::npos; bar = words.find('|', bar)) words.replace(bar, 1, " or ");
    complain(path, fmt::format("expects a whole number or {}", words), value);
  }

  /// "A=1" or ["A=1", "B=2"], as command lines say it, as a table; nothing if it is something else.
  static std::optional<Value> table_of_pairs(const Value& value) {
    const Value::List items = value.is_list() ? value.items() : Value::List{value};
    Value table = Value::table();
    for (const Value& item : items) {
      if (!item.is_string()) return std::nullopt;
      const std::string& text = item.as_string();
      const std::size_t equals = text.find('=');
      if (equals == std::string::npos || equals == 0) return std::nullopt;
      table.set(text.substr(0, equals), Value(text.substr(equals + 1)));
    }
    return table;
  }
  void bind_string_map(const Value& given, const TypeOps& ops, void* target, const std::string& path) {
    const std::optional<Value> pairs = table_of_pairs(given);
    const Value& value = pairs ? *pairs : given;
    if (!value.is_table()) return complain(path, "expects a table of strings, or NAME=VALUE for each", given);
    Value strings = Value::table();
    for (const Member& member : value.members()) {
      if (member.value.is_table() || member.value.is_list() || member.value.is_null()) {
        complain(join(path, member.key), "expects a string", member.value);
      } else {
        strings.set(member.key, member.value.is_string() ? member.value : Value(to_display(member.value)));
      }
    }
    ops.write(target, strings);
  }

  const TypeOps& root_;
  Report& report_;
};

}  // namespace

void bind(const Value& table, const TypeOps& ops, void* target, Report& report) { Binder(ops, report).bind_struct(table, ops, target, {}); }

}  // namespace prl::config
