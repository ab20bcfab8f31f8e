#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "config/bind.hpp"
#include "config/cli.hpp"

namespace prl::config {
namespace {

constexpr std::size_t kMaxFlagColumns = 46;

std::string range_note(const Meta& meta) {
  const bool has_min = std::isfinite(meta.min), has_max = std::isfinite(meta.max);
  if (has_min && has_max) return fmt::format("{}{} to {}", meta.is_open_min ? "above " : "", meta.min, meta.max);
  if (has_min) return fmt::format("{} {}", meta.is_open_min ? ">" : ">=", meta.min);
  if (has_max) return fmt::format("<= {}", meta.max);
  return {};
}

/// "(default: 128, rollouts, >= 1)".
std::string notes(const KeyInfo& info) {
  if (info.is_section && info.default_text.empty()) return {};
  std::string text = fmt::format(" (default: {}", info.is_section && info.default_text == "None" ? "off" : info.default_text);
  if (!info.meta.unit.empty()) text += fmt::format(", {}", info.meta.unit);
  if (const std::string range = range_note(info.meta); !range.empty()) text += ", " + range;
  return text + ")";
}

std::string section_of(const std::string& key) {
  const std::size_t dot = key.rfind('.');
  return dot == std::string::npos ? std::string() : key.substr(0, dot);
}

/// Text in lines of at most `width` bytes, later ones indented. Help text is ASCII.
std::string wrapped(std::string_view text, std::size_t indent, std::size_t width) {
  std::string out;
  std::size_t column = indent;
  while (!text.empty()) {
    const std::size_t space = std::min(text.find(' '), text.size());
    if (column + space > width && column > indent) {
      while (out.ends_with(' ')) out.pop_back();
      out += "\n" + std::string(indent, ' ');
      column = indent;
    }
    out += text.substr(0, space);
    column += space;
    text.remove_prefix(std::min(space + 1, text.size()));
    if (!text.empty() && column < width) {
      out += ' ';
      ++column;
    }
  }
  return out;
}

std::string panel_title(const std::string& title, std::size_t width) {
  std::string line = fmt::format("\u2500\u2500 {} ", title);
  for (std::size_t column = title.size() + 4; column < width; ++column) line += "\u2500";
  return line + "\n";
}

std::string entry(const KeyInfo& info, std::size_t width) {
  std::string left = fmt::format("  {} <{}>", to_flag(info.key), info.type);
  if (left.size() < kMaxFlagColumns) {
    left += std::string(kMaxFlagColumns - left.size(), ' ');
  } else {
    left += "\n" + std::string(kMaxFlagColumns, ' ');
  }
  return left + wrapped(std::string(info.doc) + notes(info), kMaxFlagColumns, width) + "\n";
}

}  // namespace

std::string command_help(Command command, const TypeOps& ops, int width) {
  const std::size_t columns = static_cast<std::size_t>(std::max(width, 80));
  const std::string name(command_name(command));
  std::string text = fmt::format("usage: prl {} [-h] [@ FILE]... [--SECTION @ FILE]... [OPTIONS]\n\n", name);
  for (const CommandInfo& info : all_commands())
    if (info.command == command) text += fmt::format("{}.\n", info.purpose);
  text +=
      "\nSources, lowest first: defaults, variables PRIME_SECTION__KEY, files (.toml, .json) from left to right, options.\n"
      "A bare --key switches on, --no-key switches off, None unsets. In the keys below, env[] stands for the items of a\n"
      "list (--env.0.id x) and optim<sgd> for the keys that go with type = \"sgd\".\n\n";
  const std::vector<KeyInfo> keys = list_keys(ops);
  // Sections come in the order in which they first appear; the command's own keys first.
  std::vector<std::string> sections;
  for (const KeyInfo& info : keys)
    if (const std::string section = section_of(info.key); std::find(sections.begin(), sections.end(), section) == sections.end())
      sections.push_back(section);
  std::stable_sort(sections.begin(), sections.end(), [](const std::string& a, const std::string& b) { return a.empty() && !b.empty(); });
  for (const std::string& section : sections) {
    text += panel_title(section.empty() ? name : section, columns);
    for (const KeyInfo& info : keys)
      if (section_of(info.key) == section) text += entry(info, columns);
    text += "\n";
  }
  return text;
}

std::string program_help() {
  std::string text = "usage: prl COMMAND [@ FILE]... [OPTIONS]\n       prl COMMAND --help | prl --help | prl --version\n\nCommands:\n";
  for (const CommandInfo& info : all_commands()) text += fmt::format("  {:<14}{}\n", info.name, info.purpose);
  return text + "\nThe program answers to the name of a command too, when it is linked under it: `rl @ rl.toml` is `prl rl @ rl.toml`.\n";
}

}  // namespace prl::config
