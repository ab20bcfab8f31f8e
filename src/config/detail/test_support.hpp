#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "config/cli.hpp"

/// For tests: whole command lines, without the environment of the machine.
namespace prl::config::testing {

inline Context plain_context() { return {}; }

inline std::vector<std::string> split(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> words;
  for (std::string word; in >> word;)
    if (word != "\\") words.push_back(word);
  return words;
}

inline ParsedCommand parse_line(const std::string& line) {
  const std::vector<std::string> words = split("prl " + line);
  std::vector<const char*> argv;
  for (const std::string& word : words) argv.push_back(word.c_str());
  return parse_command(static_cast<int>(argv.size()), argv.data());
}

/// The configuration that a command line such as "uv run rl @ rl.toml --ckpt" resolves to.
template <class C>
Loaded<C> load_line(const std::string& line, const Context& context = plain_context()) {
  const ParsedCommand parsed = parse_line(line);
  PRL_CHECK(parsed.command.has_value(), "no command in {}", line);
  return load<C>(*parsed.command, parsed.args, context);
}

/// The text of the error that a command line ends in; empty if it resolves.
template <class C>
std::string error_of(const std::string& line, const Context& context = plain_context()) {
  try {
    load_line<C>(line, context);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// True if a feature that mentions `text` is reported as not built.
inline bool is_not_built(const std::vector<NotBuilt>& entries, std::string_view text) {
  for (const NotBuilt& entry : entries)
    if (entry.feature.find(text) != std::string::npos) return true;
  return false;
}

/// How a command line of `prl rl` begins that needs no more.
inline const std::string kRlLine = "rl --model.name ./m --inference ";

}  // namespace prl::config::testing
