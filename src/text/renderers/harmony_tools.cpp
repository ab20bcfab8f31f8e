#include "text/renderers/harmony_tools.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "base/error.hpp"
#include "text/json_python.hpp"
#include "text/renderers/message_view.hpp"

namespace prl::text::renderers {
namespace {

namespace json = boost::json;

std::string_view view(const json::string& text) noexcept { return {text.data(), text.size()}; }

const json::value* member(const json::value& schema, std::string_view key) noexcept {
  const json::object* object = schema.if_object();
  return object == nullptr ? nullptr : object->if_contains({key.data(), key.size()});
}

std::optional<std::string_view> text_member(const json::value& schema, std::string_view key) noexcept {
  const json::value* value = member(schema, key);
  if (value == nullptr || !is_text(*value)) return std::nullopt;
  return view(value->get_string());
}

const json::array* list_member(const json::value& schema, std::string_view key) noexcept {
  const json::value* value = member(schema, key);
  return value == nullptr ? nullptr : value->if_array();
}

bool is_nullable(const json::value& schema) noexcept {
  const json::value* value = member(schema, "nullable");
  return value != nullptr && value->is_bool() && value->get_bool();
}

bool has_choices(const json::value& schema) noexcept {
  const json::array* choices = list_member(schema, "enum");
  return choices != nullptr && !choices->empty();
}

// Shortest digits that read back, with a point unless the first digit's place is beyond 10^15 or below 10^-5: how harmony's encoder, which
// is written in Rust, shows numbers. Python has other switch points and pads exponents.
std::string rust_number(double number) {
  if (number == 0) return std::signbit(number) ? "-0.0" : "0.0";
  std::array<char, 64> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number, std::chars_format::scientific).ptr;
  const std::string_view shortest(buffer.data(), static_cast<std::size_t>(end - buffer.data()));
  const std::size_t e = shortest.find('e');
  std::string digits, sign;
  for (const char c : shortest.substr(0, e)) {
    if (c == '-') sign = "-";
    if (c >= '0' && c <= '9') digits += c;
  }
  int exponent = 0;
  const std::string_view power = shortest.substr(shortest[e + 1] == '+' ? e + 2 : e + 1);
  std::from_chars(power.data(), power.data() + power.size(), exponent);
  const int num_digits = static_cast<int>(digits.size()), point = exponent + 1;
  constexpr int kLastPoint = 16, kFirstPoint = -5;
  if (point > kLastPoint || point <= kFirstPoint) {
    if (num_digits > 1) digits.insert(1, ".");
    return sign + digits + "e" + std::to_string(exponent);
  }
  if (point <= 0) return sign + "0." + std::string(static_cast<std::size_t>(-point), '0') + digits;
  if (point >= num_digits) return sign + digits + std::string(static_cast<std::size_t>(point - num_digits), '0') + ".0";
  return sign + digits.insert(static_cast<std::size_t>(point), ".");
}

// A value as JSON without white space.
void append_json(std::string& out, const json::value& value) {
  if (kept_number(value).has_value() || value.is_double()) {
    out += rust_number(as_double(value).value_or(0));
  } else if (const json::array* items = value.if_array()) {
    out += '[';
    for (std::size_t i = 0; i < items->size(); ++i) {
      if (i > 0) out += ',';
      append_json(out, (*items)[i]);
    }
    out += ']';
  } else if (const json::object* object = value.if_object()) {
    out += '{';
    bool is_first = true;
    for (const auto& pair : *object) {
      if (!is_first) out += ',';
      is_first = false;
      append_json_string(out, {pair.key().data(), pair.key().size()}, false);
      out += ':';
      append_json(out, pair.value());
    }
    out += '}';
  } else {
    out += dump_python(value);
  }
}

std::string type_of(const json::value& schema, const std::string& indent);

std::string nullable_type_of(const json::value& schema, const std::string& indent) {
  std::string type = type_of(schema, indent);
  if (is_nullable(schema) && type.find("null") == std::string::npos) type += " | null";
  return type;
}

// "default: VALUE"; a text is quoted unless it is one of an enum and `bare_choices`.
std::optional<std::string> default_of(const json::value& schema, bool bare_choices = true) {
  const json::value* value = member(schema, "default");
  if (value == nullptr) return std::nullopt;
  std::string out = "default: ";
  const bool is_choice = has_choices(schema);
  if (!is_text(*value) || (is_choice && !bare_choices)) {
    append_json(out, *value);
    return out;
  }
  const std::string_view text = view(value->get_string());
  return is_choice ? out.append(text) : out.append("\"").append(text).append("\"");
}

void append_comment(std::string& out, const std::string& indent, std::string_view text) {
  out.append(indent).append("// ").append(text) += '\n';
}

// What stands behind an alternative: its description and its default.
void append_remarks(std::string& out, std::optional<std::string_view> description, const std::optional<std::string>& preset) {
  if (!description && !preset) return;
  out += " // ";
  if (description) out += *description;
  if (description && preset) out += ' ';
  if (preset) out += *preset;
}

// Alternatives in the place of a type.
std::string union_of(const json::array& variants, const std::string& indent) {
  std::string out;
  for (const json::value& variant : variants) {
    out.append("\n").append(indent).append(" | ").append(nullable_type_of(variant, indent + "   "));
    append_remarks(out, text_member(variant, "description"), default_of(variant, false));
  }
  return out;
}

// A property that is one of several types, each on a line of its own.
void append_union_property(std::string& out, const std::string& name, const json::value& schema, const json::array& variants,
                           const std::string& indent) {
  const auto description = text_member(schema, "description");
  const bool repeats = description && !variants.empty() && text_member(variants.front(), "description") == description;
  const bool stands_above = description && !repeats;
  if (stands_above) append_comment(out, indent, *description);
  if (const auto preset = default_of(schema)) append_comment(out, indent, *preset);
  out.append(indent).append(name).append(":\n");
  for (std::size_t i = 0; i < variants.size(); ++i) {
    const json::value& variant = variants[i];
    out.append(indent).append(" | ").append(nullable_type_of(variant, indent + "   "));
    auto remark = text_member(variant, "description");
    if ((i == 0 && stands_above) || remark == description) remark.reset();
    append_remarks(out, remark, default_of(variant));
    out += '\n';
  }
  out.append(indent).append(",\n");
}

void append_property(std::string& out, std::string_view key, const json::value& schema, bool is_required, const std::string& indent) {
  const bool is_union = member(schema, "oneOf") != nullptr;
  if (const auto title = text_member(schema, "title")) {
    append_comment(out, indent, *title);
    out.append(indent).append("//\n");
  }
  if (const auto description = text_member(schema, "description"); description && !is_union) append_comment(out, indent, *description);
  if (const json::array* examples = list_member(schema, "examples"); examples != nullptr && !examples->empty()) {
    append_comment(out, indent, "Examples:");
    for (const json::value& example : *examples)
      if (is_text(example)) append_comment(out, indent, "- \"" + std::string(view(example.get_string())) + "\"");
  }
  const std::string name = std::string(key) + (is_required ? "" : "?");
  if (const json::array* variants = list_member(schema, "oneOf")) return append_union_property(out, name, schema, *variants, indent);
  out.append(indent).append(name).append(": ").append(nullable_type_of(schema, indent + "    ")) += ',';
  if (!is_union) append_remarks(out, std::nullopt, default_of(schema));
  out += '\n';
}

std::string object_type(const json::value& schema, const std::string& indent) {
  std::string out;
  if (const auto description = text_member(schema, "description")) append_comment(out, indent, *description);
  out += "{\n";
  const json::value* properties = member(schema, "properties");
  if (properties != nullptr && properties->is_object()) {
    const json::array* required = list_member(schema, "required");
    for (const auto& property : properties->get_object()) {
      const std::string_view key(property.key().data(), property.key().size());
      bool is_required = false;
      if (required != nullptr)
        for (const json::value& name : *required) is_required |= is_text(name) && view(name.get_string()) == key;
      append_property(out, key, property.value(), is_required, indent);
    }
  }
  return out + indent + "}";
}

std::string text_type(const json::value& schema) {
  std::string out;
  if (const json::array* choices = list_member(schema, "enum"))
    for (const json::value& choice : *choices)
      if (is_text(choice)) out.append(out.empty() ? "\"" : " | \"").append(view(choice.get_string())) += '"';
  return out.empty() ? "string" : out;
}

std::string type_of(const json::value& schema, const std::string& indent) {
  if (const json::array* variants = list_member(schema, "oneOf")) return union_of(*variants, indent);
  if (const json::array* types = list_member(schema, "type")) {
    std::string out;
    for (const json::value& type : *types) {
      if (!is_text(type)) continue;
      const std::string_view name = view(type.get_string());
      out.append(out.empty() ? "" : " | ").append(name == "integer" ? "number" : name);
    }
    return out.empty() ? "any" : out;
  }
  const std::string_view type = text_member(schema, "type").value_or("");
  if (type == "object") return object_type(schema, indent);
  if (type == "string") return text_type(schema);
  if (type == "number" || type == "integer") return "number";
  if (type == "boolean") return "boolean";
  if (type != "array") return "any";
  const json::value* items = member(schema, "items");
  return items == nullptr ? "Array<any>" : type_of(*items, indent) + "[]";
}

// Python's truth of a value.
bool is_empty(const json::value& value) noexcept {
  if (kept_number(value)) return false;
  if (const json::object* object = value.if_object()) return object->empty();
  if (const json::array* items = value.if_array()) return items->empty();
  if (const json::string* text = value.if_string()) return text->empty();
  if (value.is_number()) return as_double(value) == 0;
  return !value.is_bool() || !value.get_bool();
}

void append_tool(std::string& out, const json::value& tool, std::size_t index) {
  const json::object* function = tool_function(tool);
  if (function == nullptr) fail(ErrorCode::kInvalidArgument, "tools[{}]: expected an object", index);
  const auto text_of = [&](const char* key) -> std::string_view {
    const json::value* value = function->if_contains(key);
    if (value == nullptr) return {};
    if (!is_text(*value)) fail(ErrorCode::kInvalidArgument, "tools[{}].function.{}: expected a string", index, key);
    return view(value->get_string());
  };
  std::string_view rest = text_of("description");
  while (!rest.empty()) {
    const std::size_t end = rest.find('\n');
    std::string_view line = rest.substr(0, end);
    if (end != std::string_view::npos && line.ends_with('\r')) line.remove_suffix(1);
    append_comment(out, "", line);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  const json::value* parameters = function->if_contains("parameters");
  const bool has_parameters = parameters != nullptr && !is_empty(*parameters);
  if (has_parameters && !parameters->is_object())
    fail(ErrorCode::kInvalidArgument, "tools[{}].function.parameters: expected an object", index);
  out.append("type ").append(text_of("name")).append(" = (_: ");
  out.append(has_parameters ? type_of(*parameters, "") : "any").append(") => any;\n\n");
}

}  // namespace

std::string harmony_tools(const json::array& tools) {
  std::string out = "# Tools\n\n## functions\n\nnamespace functions {\n\n";
  for (std::size_t i = 0; i < tools.size(); ++i) append_tool(out, tools[i], i);
  return out + "} // namespace functions";
}

}  // namespace prl::text::renderers
