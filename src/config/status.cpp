#include "config/status.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "config/bind.hpp"

namespace prl::config {
namespace {

using Kind = TypeOps::Kind;

/// "optim.lr" for "optim<sgd>.lr".
std::string without_types(std::string_view key) {
  std::string plain;
  int depth = 0;
  for (const char c : key) {
    depth += c == '<' ? 1 : 0;
    if (depth == 0) plain += c;
    depth -= c == '>' ? 1 : 0;
  }
  return plain;
}

/// The keys at which two dumped trees differ.
void collect_differences(const Value& a, const Value& b, const std::string& path, std::vector<std::string>& out) {
  if (equals(a, b)) return;
  if (!a.is_table() || !b.is_table()) return out.push_back(path);
  for (const Member& member : a.members()) {
    const Value* other = b.find(member.key);
    const std::string key = fmt::format("{}.{}", path, member.key);
    if (other)
      collect_differences(member.value, *other, key, out);
    else
      out.push_back(key);
  }
}

class StatusChecker {
 public:
  StatusChecker(const Value& raw, Report& report) : raw_(raw), report_(report) {}

  /// `path` is how the user writes the section, `key` how list_keys() does; both end with a dot unless empty.
  void check_section(const TypeOps& ops, void* config, void* usual, const std::string& path, const std::string& key,
                     const StatusScope& scope) {
    std::vector<Field> fields, defaults;
    ops.fields(config, fields);
    ops.fields(usual, defaults);
    for (std::size_t i = 0; i < fields.size(); ++i) {
      const std::string name(fields[i].name);
      const Status status = scope.of(key + name, fields[i].meta.status);
      if (status.has_effect())
        descend(*fields[i].ops, fields[i].target, defaults[i].target, path + name, key + name, scope, status);
      else
        check_unused(fields[i], defaults[i], path + name, status);
    }
  }

 private:
  void check_unused(const Field& field, const Field& usual, const std::string& path, Status status) {
    const Value chosen = dump(*field.ops, field.target, NullStyle::kAlways);
    const Value other = dump(*usual.ops, usual.target, NullStyle::kAlways);
    if (equals(chosen, other)) return;
    std::vector<std::string> keys;
    collect_differences(chosen, other, path, keys);
    for (std::string& key : keys)
      if (status.kind == Status::Kind::kNotBuilt)
        add_not_built(key, status);
      else if (const Value* written = find_path(raw_, key))
        report_.inert.push_back({std::move(key), std::string(status.text), written->origin()});
  }

  void add_not_built(const std::string& path, Status status) {
    const Value* written = find_path(raw_, path);
    std::string feature(status.text);
    if (!status.instead.empty()) feature += fmt::format("; {}", status.instead);
    report_.not_built.push_back({path, std::move(feature), written ? written->origin() : Origin{}});
  }

  /// `usual` may be null where a default has no such part: a default-made one takes its place.
  void descend(const TypeOps& ops, void* config, void* usual, const std::string& path, const std::string& key, const StatusScope& scope,
               Status status) {
    switch (ops.kind) {
      case Kind::kStruct: {
        const std::shared_ptr<void> fresh = usual ? nullptr : ops.make();
        return check_section(ops, config, usual ? usual : fresh.get(), path + ".", key + ".", scope.inside(ops, key + ".", status));
      }
      case Kind::kOptional: {
        void* held = ops.peek(config);
        if (held) descend(*ops.inner, held, usual ? ops.peek(usual) : nullptr, path, key, scope, status);
        return;
      }
      case Kind::kList:
        for (std::size_t i = 0; i < ops.size(config); ++i)
          descend(*ops.inner, ops.at(config, i), nullptr, fmt::format("{}.{}", path, i), key + "[]", scope, status);
        return;
      case Kind::kUnion: return check_union(ops, config, usual, path, key, scope, status);
      default: return;
    }
  }

  void check_union(const TypeOps& ops, void* config, void* usual, const std::string& path, const std::string& key, const StatusScope& scope,
                   Status status) {
    const auto& held = ops.alternatives()[ops.index(config)];
    const bool is_usual = usual && ops.index(usual) == ops.index(config);
    if (!is_usual && held.status.kind == Status::Kind::kNotBuilt) return add_not_built(path + ".type", held.status);
    descend(*held.ops, ops.peek(config), is_usual ? ops.peek(usual) : nullptr, path, fmt::format("{}<{}>", key, held.type_name), scope,
            status);
  }

  const Value& raw_;
  Report& report_;
};

}  // namespace

StatusScope StatusScope::inside(const TypeOps& section, std::string prefix, Status status) const {
  StatusScope scope = *this;
  scope.section_ = status;
  if (!section.status_below.empty()) scope.around_.emplace_back(without_types(prefix), section.status_below);
  return scope;
}

Status StatusScope::of(std::string_view key, Status own) const {
  const std::string plain = without_types(key);
  for (const auto& [prefix, statuses] : around_)
    for (const StatusBelow& below : statuses)
      if (plain.size() == prefix.size() + below.key.size() && plain.ends_with(below.key)) return below.status;
  return section_.has_effect() ? own : section_;
}

void check_status(const Value& raw, const TypeOps& ops, const void* config, Report& report) {
  const std::shared_ptr<void> usual = ops.make();
  // The operations take a mutable pointer because binding writes through it; reading never does.
  StatusChecker(raw, report).check_section(ops, const_cast<void*>(config), usual.get(), {}, {}, StatusScope().inside(ops, {}, {}));
}

std::string inert_warning(const std::vector<InertKey>& keys) {
  // What one line of a file or one flag set in several roles is named once, by its shortest key.
  std::vector<const InertKey*> kept;
  for (const InertKey& key : keys) {
    const auto same = std::find_if(kept.begin(), kept.end(), [&](const InertKey* other) {
      return key.origin.kind != Origin::Kind::kDefault && other->reason == key.reason && other->origin.where == key.origin.where &&
             other->origin.line == key.origin.line;
    });
    if (same == kept.end())
      kept.push_back(&key);
    else if (key.key.size() < (*same)->key.size())
      *same = &key;
  }
  if (kept.empty()) return {};
  std::string text;
  for (const InertKey* key : kept) text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", key->key, key->reason);
  return fmt::format("{} set without effect here: {}", kept.size() == 1 ? "a key is" : fmt::format("{} keys are", kept.size()), text);
}

std::string_view status_name(Status status) {
  switch (status.kind) {
    case Status::Kind::kBuilt:
    case Status::Kind::kPassedOn: return "built";
    case Status::Kind::kInert: return "inert";
    case Status::Kind::kNotBuilt: return "not built";
  }
  return "?";
}

}  // namespace prl::config
