#include "grammar/schema_view.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "text/json_python.hpp"

namespace prl::grammar {
namespace {

namespace json = boost::json;

constexpr std::string_view kUnsupported[] = {"dependentSchemas",      "dependencies", "unevaluatedItems", "additionalItems",
                                             "unevaluatedProperties", "$dynamicRef",  "$recursiveRef"};
constexpr std::string_view kRestricting[] = {"$ref",
                                             "if",
                                             "allOf",
                                             "anyOf",
                                             "oneOf",
                                             "type",
                                             "properties",
                                             "required",
                                             "additionalProperties",
                                             "items",
                                             "prefixItems",
                                             "minItems",
                                             "maxItems",
                                             "enum",
                                             "const",
                                             "pattern",
                                             "format",
                                             "minimum",
                                             "maximum",
                                             "exclusiveMinimum",
                                             "exclusiveMaximum",
                                             "minLength",
                                             "maxLength",
                                             "not",
                                             "multipleOf",
                                             "uniqueItems",
                                             "contains",
                                             "minContains",
                                             "maxContains",
                                             "minProperties",
                                             "maxProperties",
                                             "propertyNames",
                                             "patternProperties",
                                             "dependentRequired"};
constexpr std::string_view kTypes[] = {"null", "boolean", "integer", "number", "string", "array", "object"};

std::string_view view_of(const json::string& text) { return {text.data(), text.size()}; }

/// Values that a const or enum allows; nullopt without one.
std::optional<std::vector<std::string>> fixed_values(const SchemaView& view) {
  std::vector<std::string> out;
  // 1 and 1.0 are one value.
  const auto spell = [](const json::value& value) {
    const auto number = text::as_double(value);
    return number ? fmt::format("{}", *number) : text::to_json_text(value);
  };
  if (const json::value* one = view.find("const"))
    out.push_back(spell(*one));
  else if (view.find("enum"))
    for (const json::value& value : *view.array("enum")) out.push_back(spell(value));
  else
    return std::nullopt;
  return out;
}

bool are_disjoint(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  return std::none_of(a.begin(), a.end(), [&](const std::string& value) { return std::find(b.begin(), b.end(), value) != b.end(); });
}

/// Follows $ref and allOf of one, a few steps.
const json::value& look_through(const json::value& root, const json::value& schema, const std::string& place) {
  const json::value* at = &schema;
  for (int i = 0; i < 16 && at->is_object(); ++i) {
    const SchemaView view(*at, place);
    const json::array* all = view.find("allOf") ? view.array("allOf") : nullptr;
    if (const json::value* ref = view.find("$ref"))
      at = &resolve_ref(root, *ref, place);
    else if (all && all->size() == 1)
      at = &all->front();
    else
      break;
  }
  return *at;
}

bool exclude_each_other(const json::value& root, const json::value& first, const json::value& second, const std::string& place) {
  const json::value& a = look_through(root, first, place);
  const json::value& b = look_through(root, second, place);
  if (!a.is_object() || !b.is_object()) return false;
  const SchemaView view_a(a, place), view_b(b, place);
  for (const SchemaView* view : {&view_a, &view_b})
    if (view->find("anyOf") || view->find("oneOf") || view->find("allOf") || view->find("$ref")) return false;
  const auto values_a = fixed_values(view_a), values_b = fixed_values(view_b);
  if (values_a && values_b) return are_disjoint(*values_a, *values_b);
  auto types_a = view_a.types(), types_b = view_b.types();
  for (auto* types : {&types_a, &types_b})
    for (std::string& type : *types)
      if (type == "integer") type = "number";
  if (are_disjoint(types_a, types_b)) return true;
  const std::vector<std::string> only_object{"object"};
  if (types_a != only_object || types_b != only_object) return false;
  const Members members_a(view_a), members_b(view_b);
  for (const auto& [name, schema_a] : members_a.properties) {
    if (!members_a.required.count(name) || !members_b.required.count(name)) continue;
    for (const auto& [other_name, schema_b] : members_b.properties) {
      const json::value& value_a = look_through(root, *schema_a, place);
      const json::value& value_b = look_through(root, *schema_b, place);
      if (other_name != name || !value_a.is_object() || !value_b.is_object()) continue;
      const auto fixed_a = fixed_values(SchemaView(value_a, place)), fixed_b = fixed_values(SchemaView(value_b, place));
      if (fixed_a && fixed_b && are_disjoint(*fixed_a, *fixed_b)) return true;
    }
  }
  return false;
}

}  // namespace

SchemaView::SchemaView(const json::value& schema, std::string place) : object_(schema.if_object()), place_(std::move(place)) {
  if (!object_)
    fail(ErrorCode::kInvalidArgument, "{}: wanted a schema (an object, true or false), found {}", place_, text::to_json_text(schema));
}

std::string SchemaView::place(std::string_view keyword) const { return place_ + "." + std::string(keyword); }

const json::value* SchemaView::find(std::string_view keyword) const {
  return object_->if_contains(json::string_view(keyword.data(), keyword.size()));
}

void SchemaView::refuse(std::string_view keyword, std::string_view why) const {
  fail(ErrorCode::kInvalidArgument, "{}: {}", place(keyword), why);
}

std::optional<std::string> SchemaView::string(std::string_view keyword) const {
  const json::value* value = find(keyword);
  if (!value) return std::nullopt;
  if (!text::is_text(*value)) refuse(keyword, "wanted a string, found " + text::to_json_text(*value));
  return std::string(view_of(value->get_string()));
}

std::optional<double> SchemaView::number(std::string_view keyword) const {
  const json::value* value = find(keyword);
  if (!value) return std::nullopt;
  const std::optional<double> number = text::as_double(*value);
  if (!number) refuse(keyword, "wanted a number, found " + text::to_json_text(*value));
  return number;
}

std::optional<std::int64_t> SchemaView::count(std::string_view keyword, std::int64_t max) const {
  const std::optional<double> value = number(keyword);
  if (!value) return std::nullopt;
  if (!(*value >= 0 && *value <= static_cast<double>(max)) || *value != std::floor(*value))
    refuse(keyword, fmt::format("wanted a whole number from 0 to {}, found {}", max, *value));
  return static_cast<std::int64_t>(*value);
}

const json::array* SchemaView::array(std::string_view keyword) const {
  const json::value* value = find(keyword);
  if (!value) return nullptr;
  if (!value->is_array() || value->get_array().empty())
    refuse(keyword, "wanted a list with at least one entry, found " + text::to_json_text(*value));
  return &value->get_array();
}

const json::object* SchemaView::object(std::string_view keyword) const {
  const json::value* value = find(keyword);
  if (!value) return nullptr;
  if (!value->is_object()) refuse(keyword, "wanted an object, found " + text::to_json_text(*value));
  return &value->get_object();
}

std::vector<std::string> SchemaView::types() const {
  std::vector<std::string> out;
  const json::value* type = find("type");
  if (!type) {
    const auto has_any = [&](std::initializer_list<std::string_view> keywords) {
      return std::any_of(keywords.begin(), keywords.end(), [&](std::string_view keyword) { return find(keyword); });
    };
    if (has_any({"properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
                 "dependentRequired"}))
      out.push_back("object");
    if (has_any({"items", "prefixItems", "minItems", "maxItems", "contains", "uniqueItems"})) out.push_back("array");
    if (has_any({"minLength", "maxLength", "pattern", "format"})) out.push_back("string");
    if (has_any({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})) out.push_back("number");
    if (out.empty()) out = {"null", "boolean", "number", "string", "array", "object"};
    return out;
  }
  const json::array names = type->is_array() ? type->get_array() : json::array{*type};
  for (const json::value& name : names) {
    const std::string_view text = text::is_text(name) ? view_of(name.get_string()) : std::string_view();
    if (std::find(std::begin(kTypes), std::end(kTypes), text) == std::end(kTypes))
      refuse("type", fmt::format("wanted one of {}, found {}", fmt::join(kTypes, ", "), text::to_json_text(name)));
    out.emplace_back(text);
  }
  if (out.empty()) refuse("type", "an empty list");
  if (std::find(out.begin(), out.end(), "number") != out.end()) std::erase(out, "integer");
  return out;
}

void SchemaView::check_keywords() const {
  for (const std::string_view keyword : kUnsupported) {
    const json::value* value = find(keyword);
    if (!value) continue;
    // What restricts nothing may stand there: pydantic and others write it.
    if (keyword.starts_with("unevaluated") && *value == json::value(true)) continue;
    refuse(keyword, "this keyword is not supported");
  }
}

void SchemaView::check_alone(std::string_view keyword, std::initializer_list<std::string_view> allowed) const {
  for (const std::string_view other : kRestricting) {
    if (other == keyword || !find(other) || std::find(allowed.begin(), allowed.end(), other) != allowed.end()) continue;
    refuse(other, fmt::format("beside {} it is not supported", keyword));
  }
}

bool SchemaView::is_alone(std::string_view keyword) const {
  return std::none_of(std::begin(kRestricting), std::end(kRestricting),
                      [&](std::string_view other) { return other != keyword && find(other) != nullptr; });
}

Members::Members(const SchemaView& view) {
  if (const json::object* declared = view.object("properties"))
    for (const auto& [name, schema] : *declared) properties.emplace_back(std::string(name), &schema);
  if (const json::value* names = view.find("required")) {
    if (!names->is_array()) view.refuse("required", "wanted a list of names, found " + text::to_json_text(*names));
    for (const json::value& name : names->get_array()) {
      if (!text::is_text(name)) view.refuse("required", "wanted a list of names, found " + text::to_json_text(*names));
      required.insert(std::string(view_of(name.get_string())));
    }
  }
  const json::value* others = view.find("additionalProperties");
  has_additional_keyword = others != nullptr;
  if (others && !(others->is_bool() && !others->get_bool())) additional = others;
  static const json::value kAnything(true);
  for (const std::string& name : required) {
    const bool is_declared = std::any_of(properties.begin(), properties.end(), [&](const auto& p) { return p.first == name; });
    if (!is_declared) properties.emplace_back(name, others ? others : &kAnything);
  }
}

bool has_type(const json::value& value, std::string_view type) {
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_bool();
  if (type == "string") return text::is_text(value);
  if (type == "array") return value.is_array();
  if (type == "object") return value.is_object();
  const std::optional<double> number = text::as_double(value);
  return number && (type != "integer" || *number == std::floor(*number));
}

const json::value& resolve_ref(const json::value& root, const json::value& ref, const std::string& place) {
  const std::string text = text::is_text(ref) ? std::string(view_of(ref.get_string())) : std::string();
  if (text.empty() || text[0] != '#' || (text.size() > 1 && text[1] != '/'))
    fail(ErrorCode::kInvalidArgument, "{}: only references within the schema (#/...) are supported, found {}", place,
         text::to_json_text(ref));
  boost::system::error_code error;
  const json::value* target = root.find_pointer(json::string_view(text).substr(1), error);
  if (!target) fail(ErrorCode::kInvalidArgument, "{}: '{}' points to nothing", place, text);
  return *target;
}

void check_exclusive(const json::value& root, const json::array& branches, const std::string& place) {
  for (std::size_t i = 0; i < branches.size(); ++i)
    for (std::size_t k = i + 1; k < branches.size(); ++k)
      if (!exclude_each_other(root, branches[i], branches[k], place))
        fail(ErrorCode::kInvalidArgument,
             "{}: one value could match the branches {} and {}; write anyOf, or give a required member of both different const values",
             place, i, k);
}

}  // namespace prl::grammar
