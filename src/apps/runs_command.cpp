#include <fmt/core.h>

#include <cstdio>

#include "apps/commands.hpp"
#include "base/log.hpp"
#include "config/tool_config.hpp"
#include "launch/run_admin.hpp"

namespace prl::apps {

int run_runs(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::RunsToolConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const std::string said = launch::run_admin(loaded.config);
  std::fputs((said + "\n").c_str(), stdout);
  return 0;
}

}  // namespace prl::apps
