#include "grammar/json_schema.hpp"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <boost/json/serialize.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "grammar/char_class.hpp"
#include "grammar/json_text.hpp"
#include "grammar/regex.hpp"
#include "grammar/schema_view.hpp"
#include "text/json_python.hpp"
#include "text/utf8.hpp"

namespace prl::grammar {
namespace {

namespace json = boost::json;

constexpr int kMaxSchemaDepth = 100;
constexpr std::int64_t kMaxCount = 100'000;

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
    if (const json::value* ref = view.find("$ref")) {
      view.check_alone("$ref");
      const json::value& target = resolve_ref(root_, *ref, view.place("$ref"));
      builder_.add_empty(emit_schema(start, target, view.place("$ref")), accept);
    } else if (const json::array* branches = view.array("allOf")) {
      view.check_alone("allOf");
      if (branches->size() != 1) view.refuse("allOf", fmt::format("only one schema is supported, found {}", branches->size()));
      builder_.add_empty(emit_schema(start, branches->front(), view.place("allOf[0]")), accept);
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
    if (type == "array") return emit_array(from, view);
    return emit_object(from, view);
  }

  NodeId emit_numeric(NodeId from, const SchemaView& view, bool is_integer) {
    const std::optional<double> low = view.number("minimum"), high = view.number("maximum");
    const std::optional<double> above = view.number("exclusiveMinimum"), below = view.number("exclusiveMaximum");
    const bool has_bounds = low || high || above || below;
    if (!is_integer && !has_bounds) return text_.emit_number(from);
    // Bounds in units of the last digit that may be written. Exclusive ones are the next unit.
    const double unit = is_integer ? 1.0 : static_cast<double>(JsonText::kFractionUnit);
    const double limit = is_integer ? static_cast<double>(JsonText::kMaxInteger) : static_cast<double>(JsonText::kMaxBoundedNumber) * unit;
    for (const char* keyword : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
      const auto bound = view.number(keyword);
      if (bound && !is_integer && std::abs(*bound * unit) > limit)
        view.refuse(keyword, fmt::format("bounds of numbers beyond {} are not supported", JsonText::kMaxBoundedNumber));
    }
    double low_units = -limit, high_units = limit;
    if (low) low_units = std::max(low_units, std::ceil(*low * unit - 1e-9));
    if (above) low_units = std::max(low_units, std::floor(*above * unit + 1e-9) + 1);
    if (high) high_units = std::min(high_units, std::floor(*high * unit + 1e-9));
    if (below) high_units = std::min(high_units, std::ceil(*below * unit - 1e-9) - 1);
    if (low_units > high_units) fail(ErrorCode::kInvalidArgument, "{}: no number is within the bounds", view.place());
    const auto to_int = [&](double units) { return static_cast<std::int64_t>(std::clamp(units, -limit, limit)); };
    if (is_integer) return text_.emit_integer(from, to_int(low_units), to_int(high_units));
    return text_.emit_number(from, to_int(low_units), to_int(high_units));
  }

  NodeId emit_string(NodeId from, const SchemaView& view) {
    std::string pattern = view.string("pattern").value_or("");
    const bool has_pattern = view.find("pattern") != nullptr;
    const std::string format = view.string("format").value_or("");
    const std::string_view of_format = format_pattern(format);
    const auto min_length = view.count("minLength", kMaxCount), max_length = view.count("maxLength", kMaxCount);
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

  NodeId emit_array(NodeId from, const SchemaView& view) {
    static const json::array kNone;
    const json::value* items = view.find("items");
    const json::array& prefix = view.find("prefixItems") ? *view.array("prefixItems") : kNone;
    const auto min_items = view.count("minItems", kMaxCount), max_items = view.count("maxItems", kMaxCount);
    if (!items && prefix.empty() && !min_items && !max_items) return text_.emit_array(from);
    // With prefixItems but no items, none beyond the prefix are written.
    const bool has_rest = items ? !(items->is_bool() && !items->get_bool()) : prefix.empty();
    const auto num_prefix = static_cast<std::int64_t>(prefix.size());
    const std::int64_t least = min_items.value_or(0);
    const std::optional<std::int64_t> most = has_rest ? max_items : std::min(max_items.value_or(num_prefix), num_prefix);
    if (most && least > *most) fail(ErrorCode::kInvalidArgument, "{}: minItems asks for more items than there may be", view.place());
    const auto emit_item = [&](NodeId node, std::int64_t i) {
      if (i < num_prefix)
        return emit_schema(node, prefix[static_cast<std::size_t>(i)], fmt::format("{}[{}]", view.place("prefixItems"), i));
      return items ? emit_schema(node, *items, view.place("items")) : text_.emit_value(node);
    };
    const NodeId close = builder_.add_node();
    NodeId node = text_.emit_space(builder_.emit_literal(from, "["));
    if (least == 0) builder_.add_empty(node, close);
    // A chain as far as the count matters, then a loop if there is no upper bound.
    const std::int64_t num_chained = most.value_or(std::max({least, num_prefix, std::int64_t{1}}));
    for (std::int64_t i = 0; i < num_chained; ++i) {
      if (i > 0) node = text_.emit_space(builder_.emit_literal(node, ","));
      node = emit_item(node, i);
      if (i + 1 >= least) builder_.add_empty(text_.emit_space(node), close);
    }
    if (!most) {
      const NodeId loop = builder_.add_node();
      builder_.add_empty(node, loop);
      const NodeId next = emit_item(text_.emit_space(builder_.emit_literal(loop, ",")), num_chained);
      builder_.add_empty(next, loop);
      builder_.add_empty(text_.emit_space(next), close);
    }
    return builder_.emit_literal(close, "]");
  }

  NodeId emit_object(NodeId from, const SchemaView& view) {
    const Members members(view);
    if (members.properties.empty() && !members.has_additional_keyword) return text_.emit_object(from);
    const NodeId open = text_.emit_space(builder_.emit_literal(from, "{"));
    // Two tracks: no member so far, and at least one (then a comma comes first).
    NodeId first = builder_.add_node(), rest = builder_.add_node();
    builder_.add_empty(open, first);
    bool can_be_first = true, can_be_rest = false;
    for (const auto& [name, schema] : members.properties) {
      const NodeId next_first = builder_.add_node(), next_rest = builder_.add_node();
      std::string key;
      text::append_json_string(key, name, false);
      const auto add_member = [&](NodeId node) {
        const NodeId value = text_.emit_space(builder_.emit_literal(node, key + ":"));
        builder_.add_empty(emit_schema(value, *schema, view.place("properties") + "." + name), next_rest);
      };
      const bool is_required = members.required.count(name) > 0;
      if (can_be_first) add_member(first);
      if (can_be_rest) add_member(text_.emit_space(builder_.emit_literal(rest, ",")));
      if (!is_required) {
        if (can_be_first) builder_.add_empty(first, next_first);
        if (can_be_rest) builder_.add_empty(rest, next_rest);
      }
      can_be_first = can_be_first && !is_required;
      can_be_rest = true;
      first = next_first;
      rest = next_rest;
    }
    const NodeId close = builder_.add_node();
    if (members.additional) {
      const NodeId more = builder_.add_node();
      const auto add_more = [&](NodeId node) {
        const NodeId value = text_.emit_space(builder_.emit_literal(emit_other_name(node, members), ":"));
        builder_.add_empty(emit_schema(value, *members.additional, view.place("additionalProperties")), more);
      };
      if (can_be_first) add_more(first);
      if (can_be_rest) builder_.add_empty(rest, more);
      add_more(text_.emit_space(builder_.emit_literal(more, ",")));
      builder_.add_empty(text_.emit_space(more), close);
    } else if (can_be_rest) {
      builder_.add_empty(text_.emit_space(rest), close);
    }
    if (can_be_first) builder_.add_empty(first, close);
    return builder_.emit_literal(close, "}");
  }

  /// A quoted name that is none of the declared ones: follows their trie and leaves it by a character that none of them has
  /// there. Until it has left, no escapes, so that no declared name can be spelt another way.
  NodeId emit_other_name(NodeId from, const Members& members) {
    std::vector<std::vector<char32_t>> names;
    for (const auto& [name, schema] : members.properties) names.push_back(text::to_code_points(name));
    const NodeId end = builder_.add_node();
    const NodeId outside = builder_.add_node();
    builder_.add_empty(text_.emit_string_tail(outside), end);
    CharClass plain = CharClass(0x20, CharClass::kLast).intersect(CharClass('"', '"').complement());
    plain = plain.intersect(CharClass('\\', '\\').complement());
    const std::function<void(NodeId, std::size_t, std::vector<std::size_t>)> walk = [&](NodeId node, std::size_t length,
                                                                                        std::vector<std::size_t> alive) {
      std::map<char32_t, std::vector<std::size_t>> next;
      bool is_name = false;
      for (const std::size_t i : alive) {
        if (names[i].size() == length)
          is_name = true;
        else
          next[names[i][length]].push_back(i);
      }
      CharClass others = plain;
      for (const auto& [c, longer] : next) {
        others = others.intersect(CharClass(c, c).complement());
        if (!plain.contains(c)) continue;
        const NodeId child = builder_.add_node();
        add_char(builder_, node, CharClass(c, c), Spelling::kPlain, child);
        walk(child, length + 1, longer);
      }
      add_char(builder_, node, others, Spelling::kPlain, outside);
      if (!is_name) {
        const NodeId quote = builder_.emit_literal(node, "\"");
        builder_.add_empty(quote, end);
      }
    };
    std::vector<std::size_t> all(names.size());
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
    walk(builder_.emit_literal(from, "\""), 0, std::move(all));
    return end;
  }

  AutomatonBuilder& builder_;
  JsonText text_;
  const json::value& root_;
  std::string name_;
  std::map<const json::value*, RuleId> rules_;
  int depth_ = 0;
};

}  // namespace

NodeId emit_json_schema(AutomatonBuilder& builder, NodeId from, const json::value& schema, std::string_view name) {
  return Compiler(builder, schema, name).emit(from);
}

}  // namespace prl::grammar
