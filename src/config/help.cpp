#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <set>

#include "config/bind.hpp"
#include "config/cli.hpp"
#include "config/detail/help_guide.hpp"
#include "config/status.hpp"

namespace prl::config {
namespace {

constexpr std::size_t kMaxFlagColumns = 46;
/// A section with more keys than this in all its subsections is shown without them, and they are listed.
constexpr std::size_t kMostKeysOfASection = 60;

std::string range_note(const Meta& meta) {
  const bool has_min = std::isfinite(meta.min), has_max = std::isfinite(meta.max);
  if (has_min && has_max) return fmt::format("{}{} to {}", meta.is_open_min ? "above " : "", meta.min, meta.max);
  if (has_min) return fmt::format("{} {}", meta.is_open_min ? ">" : ">=", meta.min);
  if (has_max) return fmt::format("<= {}", meta.max);
  return {};
}

/// "(default: 128, rollouts, >= 1)".
std::string default_note(const KeyInfo& info) {
  if (info.is_section && info.default_text.empty()) return {};
  std::string text = fmt::format(" (default: {}", info.is_section && info.default_text == "None" ? "off" : info.default_text);
  if (!info.meta.unit.empty()) text += fmt::format(", {}", info.meta.unit);
  if (const std::string range = range_note(info.meta); !range.empty()) text += ", " + range;
  return text + ")";
}

/// "[not built: quantised weights]".
std::string status_note(Status status) {
  if (status.has_effect()) return {};
  std::string text = fmt::format(" [{}: {}", status_name(status), status.text);
  if (!status.instead.empty()) text += fmt::format("; {}", status.instead);
  return text + "]";
}

std::string section_of(const std::string& key) {
  const std::size_t dot = key.rfind('.');
  return dot == std::string::npos ? std::string() : key.substr(0, dot);
}

/// "train.env.id" for "train.env[].id" and "optim.lr" for "optim<sgd>.lr": how a section or key is asked for.
std::string plain(std::string_view key) {
  std::string text;
  int depth = 0;
  for (const char c : key) {
    depth += c == '<' || c == '[' ? 1 : 0;
    if (depth == 0) text += c;
    depth -= c == '>' || c == ']' ? 1 : 0;
  }
  return text;
}

/// "--train.env.0.id" for "train.env[].id".
std::string typed_flag(const std::string& key) {
  std::string text;
  for (std::size_t i = 0; i < key.size(); ++i) {
    if (key[i] == '<')
      i = std::min(key.find('>', i), key.size() - 1);
    else if (key.compare(i, 2, "[]") == 0)
      text += ".0", ++i;
    else
      text += key[i];
  }
  return to_flag(text);
}

/// What was asked for, in the spelling of plain(): "--trainer.optim", "orchestrator.train.env.0" and "max-steps" are understood.
std::string normal_topic(std::string_view topic) {
  std::string text;
  while (topic.starts_with("-")) topic.remove_prefix(1);
  while (!topic.empty()) {
    const std::size_t dot = std::min(topic.find('.'), topic.size());
    const std::string_view part = topic.substr(0, dot);
    const bool is_index = !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
    if (!is_index && !part.empty()) text += fmt::format("{}{}", text.empty() ? "" : ".", part);
    topic.remove_prefix(std::min(dot + 1, topic.size()));
  }
  std::replace(text.begin(), text.end(), '-', '_');
  return plain(text);
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

std::string two_columns(std::string left, const std::string& right, std::size_t columns, std::size_t width) {
  if (left.size() < columns)
    left += std::string(columns - left.size(), ' ');
  else
    left += "\n" + std::string(columns, ' ');
  return left + wrapped(right, columns, width) + "\n";
}

std::string entry(const KeyInfo& info, std::size_t width) {
  return two_columns(fmt::format("  {} <{}>", to_flag(info.key), info.type),
                     std::string(info.doc) + default_note(info) + status_note(info.status), kMaxFlagColumns, width);
}

class Help {
 public:
  Help(Command command, const TypeOps& ops, std::size_t width) : name_(command_name(command)), width_(width), keys_(list_keys(ops)) {
    for (const CommandInfo& info : all_commands())
      if (info.command == command) purpose_ = info.purpose;
    for (const detail::HelpGuide& guide : detail::help_guides())
      if (guide.command == command) guide_ = guide;
  }

  std::string short_page() const {
    std::string text = fmt::format("usage: prl {} [@ FILE]... [--KEY VALUE]...\n\n{}.\n\n  {}\n\n", name_, purpose_, guide_.example);
    const bool has_all = guide_.keys.empty();
    text += has_all ? "Keys:\n" : "Most used keys:\n";
    for (const KeyInfo& info : keys_)
      if (has_all && !info.is_section && info.key.find('.') == std::string::npos) text += short_entry(info);
    for (const std::string_view key : guide_.keys)
      for (const KeyInfo& info : keys_)
        if (info.key == key) text += short_entry(info);
    text += section_list({}, "Sections");
    if (!guide_.notes.empty()) text += fmt::format("\n{}", guide_.notes);
    return text + fmt::format(
                      "\nprl {} --help SECTION prints the keys of a section, --help all every key (docs/configuration/ too).\n"
                      "Files are TOML or JSON, @ comes before each; later files, then options win. --key alone switches on,\n"
                      "--no-key off, None unsets. PRIME_SECTION__KEY sets a default.\n",
                      name_);
  }

  std::string all() const {
    std::string text = fmt::format("usage: prl {} [@ FILE]... [--SECTION @ FILE]... [--KEY VALUE]...\n\n{}.\n", name_, purpose_);
    text +=
        "\nSources, lowest first: defaults, variables PRIME_SECTION__KEY, files (.toml, .json) from left to right, options.\n"
        "A bare --key switches on, --no-key switches off, None unsets. In the keys below, env[] stands for the items of a\n"
        "list (--env.0.id x) and optim<sgd> for the keys that go with type = \"sgd\". Keys marked inert have no effect here,\n"
        "those marked not built are refused when they are set.\n\n";
    return text + panels([](const KeyInfo&) { return true; });
  }

  /// nullopt if there is no such section or key.
  std::optional<std::string> topic(const std::string& wanted) const {
    const std::string below = wanted + ".";
    std::size_t num_below = 0;
    bool is_known = false;
    std::string text;
    for (const KeyInfo& info : keys_) {
      const std::string key = plain(info.key);
      num_below += key.starts_with(below) && !info.is_section ? 1 : 0;
      if (key != wanted) continue;
      is_known = true;
      text += entry(info, width_);
    }
    if (!is_known) return std::nullopt;
    if (num_below == 0) return text;
    text += "\n";
    if (num_below <= kMostKeysOfASection) return text + panels([&](const KeyInfo& info) { return plain(info.key).starts_with(below); });
    text += panels([&](const KeyInfo& info) { return !info.is_section && plain(section_of(info.key)) == wanted; });
    return text + section_list(wanted, fmt::format("Sections of {}", wanted)) +
           fmt::format("\nprl {} --help SECTION prints the keys of one of them.\n", name_);
  }

  std::vector<std::string> topics() const {
    std::set<std::string> names;
    for (const KeyInfo& info : keys_) names.insert(plain(info.key));
    return {names.begin(), names.end()};
  }

 private:
  template <class Wanted>
  std::string panels(Wanted is_wanted) const {
    // Sections come in the order in which they first appear; the command's own keys first.
    std::vector<std::string> sections;
    for (const KeyInfo& info : keys_)
      if (const std::string section = section_of(info.key);
          is_wanted(info) && std::find(sections.begin(), sections.end(), section) == sections.end())
        sections.push_back(section);
    std::stable_sort(sections.begin(), sections.end(), [](const std::string& a, const std::string& b) { return a.empty() && !b.empty(); });
    std::string text;
    for (const std::string& section : sections) {
      text += panel_title(section.empty() ? name_ : section, width_);
      for (const KeyInfo& info : keys_)
        if (section_of(info.key) == section && is_wanted(info)) text += entry(info, width_);
      text += "\n";
    }
    return text;
  }

  std::string short_entry(const KeyInfo& info) const {
    std::string right = std::string(info.doc) + status_note(info.status);
    if (!info.default_text.empty() && info.default_text != "None") right += fmt::format(" ({})", info.default_text);
    return two_columns("  " + typed_flag(info.key), right, kMaxFlagColumns, width_);
  }

  /// The sections right below `parent`, with the number of keys in them.
  std::string section_list(const std::string& parent, const std::string& title) const {
    std::string text;
    std::set<std::string> seen;
    for (const KeyInfo& info : keys_) {
      const std::string key = plain(info.key);
      if (!info.is_section || section_of(key) != parent || !seen.insert(key).second) continue;
      std::size_t num_keys = 0;
      for (const KeyInfo& other : keys_) num_keys += !other.is_section && plain(other.key).starts_with(key + ".") ? 1 : 0;
      const std::string mark = info.status.has_effect() ? "" : fmt::format(" [{}]", status_name(info.status));
      text += two_columns(fmt::format("  {}", key), fmt::format("{} ({} keys){}", info.doc, num_keys, mark), 30, width_);
    }
    return text.empty() ? text : fmt::format("\n{}:\n{}", title, text);
  }

  std::string name_;
  std::string_view purpose_;
  detail::HelpGuide guide_{};
  std::size_t width_;
  std::vector<KeyInfo> keys_;
};

}  // namespace

std::string command_help(Command command, const TypeOps& ops, std::string_view topic, int width) {
  const Help help(command, ops, static_cast<std::size_t>(std::max(width, 80)));
  if (topic.empty()) return help.short_page();
  if (topic == "all") return help.all();
  const std::string wanted = normal_topic(topic);
  if (auto text = help.topic(wanted)) return *text;
  Problem problem{{},
                  fmt::format("prl {} has no section or key `{}`; `prl {} --help` lists the sections", command_name(command), topic,
                              command_name(command)),
                  {},
                  {},
                  {}};
  const std::vector<std::string> topics = help.topics();
  for (const std::string& name : topics)
    if (name.ends_with("." + wanted) && problem.nearest.size() < 3) problem.nearest.push_back(name);
  if (problem.nearest.empty()) problem.nearest = nearest_names(wanted, topics);
  throw ConfigError(std::string(command_name(command)), {problem});
}

std::string program_help() {
  std::string text =
      "usage: prl COMMAND [@ FILE]... [--KEY VALUE]...\n       prl COMMAND --help | prl help COMMAND | prl --version\n\nCommands:\n";
  for (const CommandInfo& info : all_commands()) text += fmt::format("  {:<14}{}\n", info.name, info.purpose);
  return text +
         "\nFirst steps: `prl doctor` says what this machine can do, `make demo` in the source tree trains a small model, and\n"
         "`prl COMMAND --help` shows an example of each command.\n"
         "The program answers to the name of a command too, when it is linked under it: `rl @ rl.toml` is `prl rl @ rl.toml`.\n";
}

}  // namespace prl::config
