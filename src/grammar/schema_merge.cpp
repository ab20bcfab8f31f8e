#include "grammar/schema_merge.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "grammar/schema_view.hpp"
#include "text/json_python.hpp"

namespace prl::grammar {
namespace {

namespace json = boost::json;

constexpr int kMaxReferences = 16;

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

/// What says nothing about values.
bool is_annotation(std::string_view keyword) {
  return is_one_of(keyword, {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
                             "$id", "$defs", "definitions", "$anchor"});
}

json::value both(const json::value& a, const json::value& b) { return a == b ? a : json::object{{"allOf", json::array{a, b}}}; }

json::array as_list(const json::value& value) { return value.is_array() ? value.get_array() : json::array{value}; }

class Merger {
 public:
  Merger(const json::value& root, std::string place) : root_(root), place_(std::move(place)) {}

  /// False if no value is left.
  bool add(const json::value& branch, int num_references = 0) {
    if (branch.is_bool()) return branch.get_bool();
    const SchemaView view(branch, place_);
    if (const json::value* ref = view.find("$ref")) {
      view.check_alone("$ref");
      if (num_references >= kMaxReferences) view.refuse("$ref", "references lead in a ring, or too far");
      return add(resolve_ref(root_, *ref, place_), num_references + 1);
    }
    json::object more = branch.get_object();
    if (view.find("allOf")) {
      for (const json::value& inner : *view.array("allOf"))
        if (!add(inner, num_references + 1)) return false;
      more.erase("allOf");
    }
    add_members(more);
    for (auto& [key, value] : more) {
      const std::string_view keyword(key.data(), key.size());
      if (is_annotation(keyword) || is_one_of(keyword, {"properties", "additionalProperties"})) continue;
      json::value* mine = merged_.if_contains(key);
      if (mine == nullptr)
        merged_[key] = std::move(value);
      else if (!combine(keyword, *mine, value))
        return false;
    }
    return true;
  }

  /// False if no value is left.
  json::value take() {
    if (const json::value* one = merged_.if_contains("const"))
      if (const json::value* list = merged_.if_contains("enum"); list != nullptr && list->is_array()) {
        const json::array& values = list->get_array();
        if (std::find(values.begin(), values.end(), *one) == values.end()) return false;
        merged_.erase("enum");
      }
    return std::move(merged_);
  }

 private:
  [[noreturn]] void refuse(std::string_view keyword, const json::value& a, const json::value& b) const {
    fail(ErrorCode::kInvalidArgument, "{}: two schemas have {} and {} for {}, which are not merged; write them as one", place_,
         text::to_json_text(a).substr(0, 60), text::to_json_text(b).substr(0, 60), keyword);
  }

  /// Members of both, and what one branch says about members that only the other names.
  void add_members(const json::object& more) {
    const json::value* others = more.if_contains("additionalProperties");
    const json::value* former_others = merged_.if_contains("additionalProperties");
    const json::object* theirs = more.if_contains("properties") ? more.at("properties").if_object() : nullptr;
    if (more.if_contains("properties") && !theirs)
      fail(ErrorCode::kInvalidArgument, "{}.properties: wanted an object, found {}", place_, text::to_json_text(more.at("properties")));
    json::object members = merged_.if_contains("properties") ? merged_.at("properties").as_object() : json::object();
    const auto restrict = [&](json::value& member, std::string_view name, const json::value* rule) {
      if (rule == nullptr || *rule == json::value(true)) return;
      if (*rule == json::value(false))
        fail(ErrorCode::kInvalidArgument, "{}: additionalProperties of one schema forbids the member '{}' of another", place_, name);
      member = both(member, *rule);
    };
    for (auto& [name, member] : members)
      if (!theirs || !theirs->contains(name)) restrict(member, std::string_view(name.data(), name.size()), others);
    if (theirs)
      for (const auto& [name, member] : *theirs) {
        if (json::value* mine = members.if_contains(name)) {
          *mine = both(*mine, member);
        } else {
          restrict(members[name] = member, std::string_view(name.data(), name.size()), former_others);
        }
      }
    if (!members.empty()) merged_["properties"] = std::move(members);
    if (others == nullptr) return;
    const bool is_closed = *others == json::value(false) || (former_others && *former_others == json::value(false));
    merged_["additionalProperties"] = is_closed ? json::value(false) : former_others ? both(*former_others, *others) : *others;
  }

  /// False if no value is left.
  bool combine(std::string_view keyword, json::value& mine, const json::value& theirs) {
    if (mine == theirs) return true;
    if (is_one_of(keyword, {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"}))
      return take_number(keyword, mine, theirs, [](double a, double b) { return a < b; });
    if (is_one_of(keyword, {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}))
      return take_number(keyword, mine, theirs, [](double a, double b) { return a > b; });
    if (keyword == "type") return combine_types(mine, theirs);
    if (keyword == "required") return add_names(mine, theirs);
    if (keyword == "enum") return keep_common(mine, theirs);
    if (keyword == "const") return false;
    if (keyword == "items" || keyword == "propertyNames") {
      mine = both(mine, theirs);
      return true;
    }
    if (keyword == "uniqueItems") {
      mine = true;
      return true;
    }
    refuse(keyword, mine, theirs);
  }

  template <typename Weaker>
  bool take_number(std::string_view keyword, json::value& mine, const json::value& theirs, Weaker is_weaker) {
    const auto my_number = text::as_double(mine), their_number = text::as_double(theirs);
    if (!my_number || !their_number) refuse(keyword, mine, theirs);
    if (is_weaker(*my_number, *their_number)) mine = theirs;
    return true;
  }

  static bool combine_types(json::value& mine, const json::value& theirs) {
    const json::array a = as_list(mine), b = as_list(theirs);
    const auto has = [](const json::array& types, std::string_view name) {
      return std::any_of(types.begin(), types.end(),
                         [&](const json::value& t) { return t == json::value(json::string_view(name.data(), name.size())); });
    };
    json::array kept;
    for (const json::value& type : a)
      if (std::find(b.begin(), b.end(), type) != b.end() || (type == json::value("integer") && has(b, "number"))) kept.push_back(type);
    if (has(b, "integer") && has(a, "number") && !has(kept, "integer") && !has(kept, "number")) kept.push_back("integer");
    if (kept.empty()) return false;
    mine = kept.size() == 1 ? kept.front() : json::value(std::move(kept));
    return true;
  }

  static bool add_names(json::value& mine, const json::value& theirs) {
    json::array names = as_list(mine);
    for (const json::value& name : as_list(theirs))
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    mine = std::move(names);
    return true;
  }

  static bool keep_common(json::value& mine, const json::value& theirs) {
    const json::array b = as_list(theirs);
    json::array kept;
    for (const json::value& value : as_list(mine))
      if (std::find(b.begin(), b.end(), value) != b.end()) kept.push_back(value);
    const bool has_any = !kept.empty();
    if (has_any) mine = std::move(kept);
    return has_any;
  }

  const json::value& root_;
  std::string place_;
  json::object merged_;
};

}  // namespace

json::value merge_schemas(const json::value& root, const json::array& branches, const json::object& rest, const std::string& place) {
  Merger merger(root, place);
  for (const json::value& branch : branches)
    if (!merger.add(branch)) return false;
  if (!rest.empty() && !merger.add(rest)) return false;
  return merger.take();
}

}  // namespace prl::grammar
