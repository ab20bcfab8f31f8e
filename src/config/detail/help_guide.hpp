#pragma once

#include <span>
#include <string_view>

#include "config/command.hpp"

/// Private to config/.
namespace prl::config::detail {

struct HelpGuide {
  Command command;
  std::string_view example;
  std::span<const std::string_view> keys;  ///< as list_keys() writes them; empty for commands that have few
  std::string_view notes = {};             ///< what the output means; ends with a newline
};
/// One for each command.
std::span<const HelpGuide> help_guides();

}  // namespace prl::config::detail
