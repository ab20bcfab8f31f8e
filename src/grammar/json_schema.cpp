#include "grammar/json_schema.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "grammar/json_text.hpp"
#include "grammar/number_bounds.hpp"
#include "grammar/regex.hpp"
#include "grammar/schema_merge.hpp"
#include "grammar/schema_parts.hpp"
#include "grammar/schema_view.hpp"
#include "text/json_python.hpp"

namespace prl::grammar {
namespace {

namespace json = boost::json;

constexpr int kMaxSchemaDepth = 100;

/// 1 and 1.0 are one value.
bool is_same_value(const json::value& a, const json::value& b) {
  if (const auto x = text::as_double(a), y = text::as_double(b); x && y) return *x == *y;
  return a == b;
}

class Compiler {
 public:
  Compiler(AutomatonBuilder& builder, const json::value& root, std::string_view name)
      : builder_(builder), text_(builder), root_(root), name_(name) {}

  NodeId emit(NodeId from) { return emit_schema(from, root_, name_); }

 private:
  /// Calls the rule of one subschema; made once, so that references may form loops.
  NodeId emit_schema(NodeId from, const json::value& schema, const std::string& place) {
    const auto found = rules_.find(&schema);
    if (found != rules_.end()) return builder_.emit_call(from, found->second);
    if (depth_ >= kMaxSchemaDepth) fail(ErrorCode::kInvalidArgument, "{}: schemas nest deeper than {} levels", place, kMaxSchemaDepth);
    const RuleId rule = builder_.add_rule();
    rules_.emplace(&schema, rule);
    ++depth_;
    fill(builder_.rule_start(rule), schema, place, builder_.rule_accept(rule));
    --depth_;
    return builder_.emit_call(from, rule);
  }

  void fill(NodeId start, const json::value& schema, const std::string& place, NodeId accept) {
    if (schema.is_bool()) {
      if (schema.get_bool()) builder_.add_empty(text_.emit_value(start), accept);
      return;  // false: no value at all
    }
    const SchemaView view(schema, place);
    view.check_keywords();
    if (view.find("if")) {
      fill_condition(start, schema, view, accept);
    } else if (view.find("not")) {
      fill_not(start, schema, view, accept);
    } else if (const json::value* ref = view.find("$ref")) {
      view.check_alone("$ref");
      const json::value& target = resolve_ref(root_, *ref, view.place("$ref"));
      builder_.add_empty(emit_schema(start, target, view.place("$ref")), accept);
    } else if (const json::array* branches = view.array("allOf")) {
      if (branches->size() == 1 && view.is_alone("allOf"))
        builder_.add_empty(emit_schema(start, branches->front(), view.place("allOf[0]")), accept);
      else
        builder_.add_empty(emit_schema(start, merged(schema, *branches, view), view.place("allOf")), accept);
    } else if (view.find("anyOf") || view.find("oneOf")) {
      const char* keyword = view.find("anyOf") ? "anyOf" : "oneOf";
      view.check_alone(keyword);
      branches = view.array(keyword);
      if (std::string_view(keyword) == "oneOf") check_exclusive(root_, *branches, view.place(keyword));
      for (std::size_t i = 0; i < branches->size(); ++i)
        builder_.add_empty(emit_schema(start, (*branches)[i], fmt::format("{}[{}]", view.place(keyword), i)), accept);
    } else if (view.find("const") || view.find("enum")) {
      fill_values(start, view, accept);
    } else {
      for (const std::string& type : view.types()) builder_.add_empty(emit_type(start, view, type), accept);
    }
  }

  /// `if` that asks for values of one member: two kinds of objects, with these values and with others.
  void fill_condition(NodeId start, const json::value& schema, const SchemaView& view, NodeId accept) {
    json::object rest = schema.get_object();
    json::value when_true = true, when_false = true;
    for (auto [keyword, branch] : {std::pair{"then", &when_true}, {"else", &when_false}})
      if (const json::value* found = view.find(keyword)) *branch = *found;
    for (const char* keyword : {"if", "then", "else"}) rest.erase(keyword);
    const SchemaView condition(*view.find("if"), view.place("if"));
    condition.check_keywords();
    const Members members(condition);
    if (condition.find("properties") == nullptr || members.properties.size() != 1)
      view.refuse("if", "only a condition on the value of one member is supported: {\"properties\": {NAME: {\"const\": ...}}}");
    condition.check_alone("properties", {"required", "type"});
    const auto& [name, wanted] = members.properties.front();
    const SchemaView value(*wanted, condition.place("properties." + name));
    const char* keyword = value.find("const") ? "const" : "enum";
    if (!value.find(keyword)) value.refuse("const", "a condition needs const or enum");
    value.check_alone(keyword, {"type"});
    // Where the member need not be there, the condition holds for objects without it.
    const bool is_required = members.required.count(name) > 0;
    const auto add = [&](const json::value& member, bool needs_member, const json::value& branch) {
      json::object kind{{"type", "object"}, {"properties", json::object{{name, member}}}};
      if (needs_member) kind["required"] = json::array{json::string(name)};
      json::object whole{{"allOf", json::array{rest, std::move(kind), branch}}};
      const auto [at, is_new] = merged_.try_emplace("kind " + text::to_json_text(whole));
      if (is_new) at->second = std::move(whole);
      builder_.add_empty(emit_schema(start, at->second, view.place("if")), accept);
    };
    json::object values;
    values[keyword] = *value.find(keyword);
    add(values, is_required, when_true);
    add(json::object{{"not", values}}, !is_required, when_false);
  }

  /// The schema without allOf. One for all copies of the same text, so that schemas which refer to themselves end.
  const json::value& merged(const json::value& schema, const json::array& branches, const SchemaView& view) {
    const auto [at, is_new] = merged_.try_emplace(text::to_json_text(schema));
    if (!is_new) return at->second;
    json::object rest = schema.get_object();
    rest.erase("allOf");
    at->second = merge_schemas(root_, branches, rest, view.place("allOf"));
    return at->second;
  }

  void fill_values(NodeId start, const SchemaView& view, NodeId accept) {
    const char* keyword = view.find("const") ? "const" : "enum";
    view.check_alone(keyword, {"type"});
    json::array values;
    if (const json::value* one = view.find("const"))
      values.push_back(*one);
    else
      values = *view.array("enum");
    const std::vector<std::string> types = view.types();
    for (const json::value& value : values) {
      if (value.is_double() && !std::isfinite(value.get_double()))
        view.refuse(keyword, "a number beyond doubles cannot be written back as it was given");
      const bool is_wanted = std::any_of(types.begin(), types.end(), [&](const std::string& type) { return has_type(value, type); });
      if (is_wanted) builder_.add_empty(builder_.emit_literal(start, text::dump_python(value)), accept);
    }
  }

  NodeId emit_type(NodeId from, const SchemaView& view, const std::string& type) {
    if (type == "null") return builder_.emit_literal(from, "null");
    if (type == "boolean") {
      const NodeId end = builder_.add_node();
      for (const char* word : {"true", "false"}) builder_.add_empty(builder_.emit_literal(from, word), end);
      return end;
    }
    if (type == "integer" || type == "number") return emit_numeric(from, view, type == "integer");
    if (type == "string") return emit_string(from, view);
    if (type == "array") return emit_array_schema(builder_, text_, from, view, emit_);
    return emit_object_schema(builder_, text_, from, view, emit_);
  }

  /// multipleOf as units of the last of num_digits digits after the point.
  struct Divisor {
    std::int64_t units = 0;
    int num_digits = 0;
  };
  static std::optional<Divisor> read_divisor(const SchemaView& view) {
    const std::optional<double> number = view.number("multipleOf");
    if (!number) return std::nullopt;
    if (*number <= 0) view.refuse("multipleOf", fmt::format("wanted a number above 0, found {}", *number));
    Decimal decimal = decimal_of(*view.find("multipleOf"));
    for (; decimal.exponent < 0 && decimal.digits % 10 == 0; ++decimal.exponent) decimal.digits /= 10;
    for (; decimal.exponent > 0 && decimal.digits <= JsonText::kMaxDivisor; --decimal.exponent) decimal.digits *= 10;
    if (decimal.digits > JsonText::kMaxDivisor || -decimal.exponent > JsonText::kMaxDivisorDigits)
      view.refuse("multipleOf", fmt::format("supported are divisors of at most {} digits, {} of them after the point, found {}",
                                            JsonText::kMaxBoundedDigits, JsonText::kMaxDivisorDigits, *number));
    return Divisor{decimal.digits, -decimal.exponent};
  }

  NodeId emit_multiple(NodeId from, const SchemaView& view, const NumberBounds& bounds, std::int64_t divisor, int num_digits) {
    if (const std::int64_t states = JsonText::count_multiple_states(bounds.low(), bounds.high(), divisor);
        states > JsonText::kMaxMultipleStates)
      view.refuse("multipleOf",
                  fmt::format("to tell multiples of {} apart takes {} states, of which {} are supported; set minimum and maximum "
                              "to numbers of fewer digits, or choose a divisor with more factors 2 and 5",
                              *view.number("multipleOf"), states, JsonText::kMaxMultipleStates));
    return text_.emit_multiple(from, bounds.low(), bounds.high(), divisor, num_digits);
  }

  NodeId emit_numeric(NodeId from, const SchemaView& view, bool is_integer) {
    if (const std::optional<Divisor> divisor = read_divisor(view)) {
      if (!is_integer && divisor->num_digits > 0) {
        const NumberBounds units(view, divisor->num_digits);
        return emit_multiple(from, view, units, divisor->units, divisor->num_digits);
      }
      // A whole number is a multiple of D / 10^k where it is one of D without the factors that 10^k has.
      std::int64_t whole_divisor = divisor->units;
      for (int i = 0; i < divisor->num_digits; ++i) whole_divisor /= std::gcd(whole_divisor, std::int64_t{10});
      const NumberBounds whole(view, true);
      return emit_multiple(from, view, whole, whole_divisor, 0);
    }
    const NumberBounds bounds(view, is_integer);
    if (!is_integer && !bounds.has_any()) return text_.emit_number(from);
    if (is_integer) return text_.emit_integer(from, bounds.low(), bounds.high());
    return text_.emit_number(from, bounds.low(), bounds.high(), bounds.num_digits());
  }

  NodeId emit_string(NodeId from, const SchemaView& view) {
    std::string pattern = view.string("pattern").value_or("");
    const bool has_pattern = view.find("pattern") != nullptr;
    const std::string format = view.string("format").value_or("");
    const std::string_view of_format = format_pattern(format);
    const auto min_length = view.count("minLength", kMaxSchemaCount), max_length = view.count("maxLength", kMaxSchemaCount);
    if (has_pattern && !of_format.empty()) view.refuse("format", "together with pattern it is not supported");
    if (has_pattern || !of_format.empty()) {
      for (const char* keyword : {"minLength", "maxLength"})
        if (view.find(keyword))
          view.refuse(keyword, "together with pattern or format it is not supported; write the length into the pattern");
      try {
        const Regex regex = parse_regex(has_pattern ? std::string_view(pattern) : of_format);
        const NodeId open = builder_.emit_literal(from, "\"");
        return builder_.emit_literal(emit_regex(builder_, open, regex, Spelling::kJsonString, Anchoring::kSearch), "\"");
      } catch (const Error& error) {
        throw error.with_context(view.place(has_pattern ? "pattern" : "format"));
      }
    }
    if (!min_length && !max_length) return text_.emit_string(from);
    if (max_length && min_length.value_or(0) > *max_length)
      fail(ErrorCode::kInvalidArgument, "{}: minLength is above maxLength", view.place());
    return text_.emit_string(from, min_length.value_or(0), max_length);
  }

  /// Schemas with `not`: those of types and of values, where the rest of the schema lists what remains.
  void fill_not(NodeId start, const json::value& schema, const SchemaView& view, NodeId accept) {
    const json::value& negated = *view.find("not");
    json::object rest = schema.get_object();
    rest.erase("not");
    if (negated.is_bool() && !negated.get_bool()) return fill_rest(start, std::move(rest), view, accept);
    if (negated.is_bool() || (negated.is_object() && negated.get_object().empty())) return;  // nothing is left
    const SchemaView inner(negated, view.place("not"));
    const bool has_values = inner.find("const") || inner.find("enum");
    if (has_values)
      inner.check_alone(inner.find("const") ? "const" : "enum");
    else if (inner.find("type"))
      inner.check_alone("type");
    else
      view.refuse("not", "only type, const and enum are supported in it");
    for (const char* keyword : {"$ref", "allOf", "anyOf", "oneOf"})
      if (view.find(keyword)) view.refuse("not", fmt::format("beside {} it is not supported", keyword));
    if (!has_values) return fill_other_types(start, std::move(rest), view, inner.types(), accept);
    json::array excluded;
    if (const json::value* one = inner.find("const"))
      excluded.push_back(*one);
    else
      excluded = *inner.array("enum");
    fill_other_values(start, std::move(rest), view, excluded, accept);
  }

  void fill_other_types(NodeId start, json::object rest, const SchemaView& view, const std::vector<std::string>& excluded, NodeId accept) {
    const auto is_excluded = [&](std::string_view type) { return std::find(excluded.begin(), excluded.end(), type) != excluded.end(); };
    json::array types;
    for (const std::string& type : view.types()) {
      if (is_excluded(type) || (type == "integer" && is_excluded("number"))) continue;
      if (type == "number" && is_excluded("integer")) view.refuse("not", "numbers that are not whole are not supported");
      types.push_back(json::string(type));
    }
    if (types.empty()) return;
    rest["type"] = std::move(types);
    fill_rest(start, std::move(rest), view, accept);
  }

  void fill_other_values(NodeId start, json::object rest, const SchemaView& view, const json::array& excluded, NodeId accept) {
    const auto is_excluded = [&](const json::value& value) {
      return std::any_of(excluded.begin(), excluded.end(), [&](const json::value& other) { return is_same_value(value, other); });
    };
    const auto keep = [&](const json::array& values) {
      json::array kept;
      for (const json::value& value : values)
        if (!is_excluded(value)) kept.push_back(value);
      return kept;
    };
    if (view.find("const") || view.find("enum")) {
      json::array kept = keep(view.find("const") ? json::array{*view.find("const")} : *view.array("enum"));
      if (kept.empty()) return;
      rest.erase("const");
      rest["enum"] = std::move(kept);
      return fill_rest(start, std::move(rest), view, accept);
    }
    for (const std::string& type : view.types()) {
      const bool has_such = std::any_of(excluded.begin(), excluded.end(), [&](const json::value& value) { return has_type(value, type); });
      if (!has_such) {
        rest["type"] = json::string(type);
        fill_rest(start, rest, view, accept);
      } else if (type == "null" || type == "boolean") {
        for (const json::value& value : keep(type == "null" ? json::array{nullptr} : json::array{true, false}))
          builder_.add_empty(builder_.emit_literal(start, text::dump_python(value)), accept);
      } else if (type == "string") {
        for (const char* keyword : {"pattern", "format", "minLength", "maxLength"})
          if (view.find(keyword))
            view.refuse("not", fmt::format("values beside {} are not supported; write them into the pattern", keyword));
        std::vector<std::string> texts;
        for (const json::value& value : excluded)
          if (text::is_text(value)) texts.emplace_back(value.get_string().data(), value.get_string().size());
        builder_.add_empty(text_.emit_string_except(start, texts), accept);
      } else {
        view.refuse("not", fmt::format("values of type {} are not supported in it", type));
      }
    }
  }

  /// A schema made here; kept as long as rules may refer to it.
  void fill_rest(NodeId start, json::object schema, const SchemaView& view, NodeId accept) {
    made_.push_back(std::make_unique<json::value>(std::move(schema)));
    builder_.add_empty(emit_schema(start, *made_.back(), view.place()), accept);
  }

  AutomatonBuilder& builder_;
  JsonText text_;
  const json::value& root_;
  std::string name_;
  EmitSchema emit_ = [this](NodeId from, const json::value& schema, const std::string& place) { return emit_schema(from, schema, place); };
  std::map<const json::value*, RuleId> rules_;
  std::map<std::string, json::value> merged_;  ///< by the text of what they stand for
  std::vector<std::unique_ptr<const json::value>> made_;
  int depth_ = 0;
};

}  // namespace

NodeId emit_json_schema(AutomatonBuilder& builder, NodeId from, const json::value& schema, std::string_view name) {
  return Compiler(builder, schema, name).emit(from);
}

NodeId emit_json_object_schema(AutomatonBuilder& builder, NodeId from, const json::value& schema, std::string_view name) {
  if (schema.is_bool() && schema.get_bool()) return JsonText(builder).emit_object(from);
  if (!schema.is_object()) return emit_json_schema(builder, from, schema, name);
  const SchemaView view(schema, std::string(name));
  const bool is_combined =
      view.find("$ref") || view.find("allOf") || view.find("anyOf") || view.find("oneOf") || view.find("enum") || view.find("const");
  const std::vector<std::string> types = view.types();
  if (std::find(types.begin(), types.end(), "object") == types.end() && !is_combined)
    view.refuse("type", "arguments are an object, and no object fits this schema");
  if (is_combined) return emit_json_schema(builder, from, schema, name);
  json::object narrowed = schema.get_object();
  narrowed["type"] = "object";
  return emit_json_schema(builder, from, json::value(std::move(narrowed)), name);
}

}  // namespace prl::grammar
