#include <fmt/core.h>

#include <cmath>
#include <set>

#include "config/bind.hpp"
#include "config/status.hpp"
#include "config/text_format.hpp"

namespace prl::config {
namespace {

using Kind = TypeOps::Kind;

// The operations take a mutable pointer because binding writes through it; dumping never does.
void* unconst(const void* p) { return const_cast<void*>(p); }

Value dump_fields(const TypeOps& ops, const void* source, NullStyle nulls, std::string_view type_name) {
  Value table = Value::table();
  if (!type_name.empty()) table.set("type", Value(type_name));
  const std::shared_ptr<void> fresh = ops.make();
  std::vector<Field> fields, defaults;
  ops.fields(unconst(source), fields);
  ops.fields(fresh.get(), defaults);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    Value value = dump(*fields[i].ops, fields[i].target, nulls);
    const auto is_default_null = [&] { return dump(*defaults[i].ops, defaults[i].target, nulls).is_null(); };
    if (value.is_null() && nulls == NullStyle::kIfNotDefault && is_default_null()) continue;
    table.set(fields[i].name, std::move(value));
  }
  return table;
}

std::string type_text(const TypeOps& ops, const Meta& meta) {
  switch (ops.kind) {
    case Kind::kBool: return "bool";
    case Kind::kInt: return "int";
    case Kind::kFloat: return "float";
    case Kind::kString: return "str";
    case Kind::kPath: return "path";
    case Kind::kFree: return "any";
    case Kind::kStringMap: return "dict";
    case Kind::kStruct: return "section";
    case Kind::kIntOrWord: return fmt::format("int|{}", meta.words);
    case Kind::kOptional: return type_text(*ops.inner, meta) + "?";
    case Kind::kList: return fmt::format("list[{}]", type_text(*ops.inner, meta));
    case Kind::kEnum: {
      std::string text;
      for (const EnumEntry& entry : ops.entries()) text += fmt::format("{}{}", text.empty() ? "" : "|", entry.name);
      return text;
    }
    case Kind::kUnion: {
      std::string text;
      for (const auto& alternative : ops.alternatives()) text += fmt::format("{}{}", text.empty() ? "" : "|", alternative.type_name);
      return fmt::format("section type={}", text);
    }
  }
  return "?";
}

/// The structs below a type, with what is put after the key to reach them.
struct Part {
  std::string suffix;
  const TypeOps* ops;
  Status status = {};
};
std::vector<Part> parts_of(const TypeOps& ops) {
  switch (ops.kind) {
    case Kind::kStruct: return {{"", &ops, {}}};
    case Kind::kOptional: return parts_of(*ops.inner);
    case Kind::kList: {
      std::vector<Part> parts = parts_of(*ops.inner);
      for (Part& part : parts) part.suffix = "[]" + part.suffix;
      return parts;
    }
    case Kind::kUnion: {
      std::vector<Part> parts;
      for (const auto& alternative : ops.alternatives())
        parts.push_back({fmt::format("<{}>", alternative.type_name), alternative.ops, alternative.status});
      return parts;
    }
    default: return {};
  }
}

void collect(const TypeOps& ops, const std::string& prefix, const StatusScope& scope, std::vector<KeyInfo>& out) {
  const std::shared_ptr<void> fresh = ops.make();
  std::vector<Field> fields;
  ops.fields(fresh.get(), fields);
  for (const Field& field : fields) {
    const std::vector<Part> parts = parts_of(*field.ops);
    KeyInfo info{prefix + std::string(field.name), type_text(*field.ops, field.meta), {}, field.doc, field.meta, !parts.empty(), {}, {}};
    info.status = scope.of(info.key, field.meta.status);
    info.owner = ops.struct_name;
    const Value value = dump(*field.ops, field.target, NullStyle::kAlways);
    if (parts.empty()) {
      info.default_text = value.is_null() ? "None" : to_compact_json(value);
    } else if (field.ops->kind == Kind::kOptional) {
      info.default_text = value.is_null() ? "None" : "on";
    } else if (field.ops->kind == Kind::kUnion) {
      info.default_text = value.find("type")->as_string();
    }
    out.push_back(info);
    for (const Part& part : parts) {
      const std::string below = fmt::format("{}{}.", info.key, part.suffix);
      const Status status = part.status.has_effect() ? info.status : part.status;
      collect(*part.ops, below, scope.inside(*part.ops, below, status), out);
    }
  }
}

void collect_plain(const TypeOps& ops, const std::string& prefix, std::vector<std::string>& out) {
  const std::shared_ptr<void> fresh = ops.make();
  std::vector<Field> fields;
  ops.fields(fresh.get(), fields);
  for (const Field& field : fields) {
    const std::string key = prefix + std::string(field.name);
    out.push_back(key);
    for (const Part& part : parts_of(*field.ops))
      if (!part.suffix.starts_with("[")) collect_plain(*part.ops, key + ".", out);
  }
}

}  // namespace

Value dump(const TypeOps& ops, const void* source, NullStyle nulls) {
  switch (ops.kind) {
    case Kind::kStruct: return dump_fields(ops, source, nulls, {});
    case Kind::kOptional: {
      const void* held = ops.peek(unconst(source));
      return held ? dump(*ops.inner, held, nulls) : Value();
    }
    case Kind::kList: {
      Value list = Value(Value::List());
      for (std::size_t i = 0; i < ops.size(source); ++i) list.items().push_back(dump(*ops.inner, ops.at(unconst(source), i), nulls));
      return list;
    }
    case Kind::kUnion: {
      const auto& held = ops.alternatives()[ops.index(source)];
      return dump_fields(*held.ops, ops.peek(unconst(source)), nulls, held.type_name);
    }
    default: return ops.read(source);
  }
}

std::vector<KeyInfo> list_keys(const TypeOps& ops) {
  std::vector<KeyInfo> keys;
  collect(ops, {}, StatusScope().inside(ops, {}, ops.status), keys);
  return keys;
}

std::vector<std::string> plain_keys(const TypeOps& ops) {
  std::vector<std::string> keys;
  collect_plain(ops, {}, keys);
  // Variants of a tagged union share names; the order of first appearance stays.
  std::set<std::string> seen;
  std::erase_if(keys, [&](const std::string& key) { return !seen.insert(key).second; });
  return keys;
}

std::vector<std::string> root_keys(const TypeOps& ops) {
  const std::shared_ptr<void> fresh = ops.make();
  std::vector<Field> fields;
  ops.fields(fresh.get(), fields);
  std::vector<std::string> keys;
  for (const Field& field : fields) keys.emplace_back(field.name);
  return keys;
}

}  // namespace prl::config
