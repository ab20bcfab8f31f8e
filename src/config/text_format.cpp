#include "config/text_format.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "base/ascii.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "config/merge.hpp"

namespace prl::config {
namespace {

constexpr std::uint64_t kMaxFileBytes = 16 << 20;
constexpr int kMaxInheritance = 16;

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
  return out + "\"";
}

/// Shortest text that reads back as the same double, with a point or an exponent so that it stays a float.
std::string float_text(double value) {
  std::string text = fmt::format("{}", value);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

void write_json(const Value& value, int indent, bool is_compact, std::string& out) {
  const auto line_break = [&](int depth) {
    if (!is_compact) out += "\n" + std::string(static_cast<std::size_t>(depth) * 2, ' ');
  };
  switch (value.kind()) {
    case Value::Kind::kNull: out += "null"; break;
    case Value::Kind::kBool: out += value.as_bool() ? "true" : "false"; break;
    case Value::Kind::kInt: out += fmt::format("{}", value.as_int()); break;
    case Value::Kind::kFloat: out += std::isfinite(as_number(value)) ? float_text(as_number(value)) : "null"; break;
    case Value::Kind::kString: out += quote(value.as_string()); break;
    case Value::Kind::kList: {
      out += "[";
      for (std::size_t i = 0; i < value.items().size(); ++i) {
        out += i == 0 ? "" : is_compact ? ", " : ",";
        line_break(indent + 1);
        write_json(value.items()[i], indent + 1, is_compact, out);
      }
      if (!value.items().empty()) line_break(indent);
      out += "]";
      break;
    }
    case Value::Kind::kTable: {
      out += "{";
      bool is_first = true;
      for (const Member& member : value.members()) {
        out += is_first ? "" : is_compact ? ", " : ",";
        is_first = false;
        line_break(indent + 1);
        out += quote(member.key) + ": ";
        write_json(member.value, indent + 1, is_compact, out);
      }
      if (!is_first) line_break(indent);
      out += "}";
      break;
    }
  }
}

std::string toml_key(const std::string& key) {
  const bool is_bare =
      !key.empty() && std::all_of(key.begin(), key.end(), [](char c) { return is_ascii_alnum(c) || c == '_' || c == '-'; });
  return is_bare ? key : quote(key);
}

std::string toml_inline(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kNull: return "\"None\"";
    case Value::Kind::kFloat: return float_text(as_number(value));
    case Value::Kind::kList: {
      std::string out = "[";
      for (std::size_t i = 0; i < value.items().size(); ++i) out += (i ? ", " : "") + toml_inline(value.items()[i]);
      return out + "]";
    }
    case Value::Kind::kTable: {
      std::string out = "{";
      for (const Member& member : value.members())
        out += fmt::format("{}{} = {}", out.size() == 1 ? " " : ", ", toml_key(member.key), toml_inline(member.value));
      return out.size() == 1 ? "{}" : out + " }";
    }
    default: return to_compact_json(value);
  }
}

bool is_table_list(const Value& value) {
  return value.is_list() && !value.items().empty() &&
         std::all_of(value.items().begin(), value.items().end(), [](const Value& item) { return item.is_table(); });
}

void write_toml(const Value& table, const std::string& prefix, std::string& out) {
  for (const Member& member : table.members())
    if (!member.value.is_table() && !is_table_list(member.value))
      out += fmt::format("{} = {}\n", toml_key(member.key), toml_inline(member.value));
  for (const Member& member : table.members()) {
    const std::string path = prefix.empty() ? toml_key(member.key) : prefix + "." + toml_key(member.key);
    if (member.value.is_table()) {
      out += fmt::format("\n[{}]\n", path);
      write_toml(member.value, path, out);
    } else if (is_table_list(member.value)) {
      for (const Value& item : member.value.items()) {
        out += fmt::format("\n[[{}]]\n", path);
        write_toml(item, path, out);
      }
    }
  }
}

Value read_at_depth(const std::filesystem::path& path, int depth) {
  if (depth > kMaxInheritance)
    fail(ErrorCode::kInvalidArgument, "{}: toml_files go deeper than {} levels; do two files name each other?", path.string(),
         kMaxInheritance);
  const std::string extension = path.extension().string();
  if (extension == ".yaml" || extension == ".yml")
    fail(ErrorCode::kInvalidArgument, "{}: YAML is not supported; write it as TOML or JSON", path.string());
  if (extension != ".toml" && extension != ".json")
    fail(ErrorCode::kInvalidArgument, "{}: Unsupported file type \"{}\"; configuration files end in .toml or .json", path.string(),
         extension);
  std::error_code error;
  if (!std::filesystem::exists(path, error)) fail(ErrorCode::kNotFound, "Config file not found: {}", path.string());
  if (std::filesystem::is_directory(path, error))
    fail(ErrorCode::kInvalidArgument, "Config file expected, but {} is a folder", path.string());
  const std::string text = read_file(path, kMaxFileBytes);
  Value own = extension == ".toml" ? parse_toml(text, path.string()) : parse_json(text, path.string());
  if (!own.is_table()) fail(ErrorCode::kInvalidArgument, "{} holds {}, not a table of keys", path.string(), kind_name(own));
  const Value* parents = own.find("toml_files");
  if (!parents) return own;
  Value merged = Value::table();
  const Value::List one = {*parents};
  for (const Value& parent : parents->is_list() ? parents->items() : one) {
    if (!parent.is_string())
      fail(ErrorCode::kInvalidArgument, "{}: toml_files must list file names, got {}", path.string(), to_display(parent));
    merge(merged, read_at_depth(path.parent_path() / parent.as_string(), depth + 1));
  }
  own.erase("toml_files");
  merge(merged, own);
  return merged;
}

}  // namespace

Value read_config_file(const std::filesystem::path& path) { return read_at_depth(path, 0); }

std::string to_toml(const Value& table) {
  std::string out;
  write_toml(table, {}, out);
  while (!out.empty() && out.front() == '\n') out.erase(out.begin());
  return out;
}

std::string to_json(const Value& value) {
  std::string out;
  write_json(value, 0, false, out);
  return out + "\n";
}

std::string to_compact_json(const Value& value) {
  std::string out;
  write_json(value, 0, true, out);
  return out;
}

}  // namespace prl::config
