#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "config/tool_config.hpp"
#include "eval/browser.hpp"
#include "eval/results_file.hpp"

namespace prl::apps {
namespace {

std::size_t terminal_width() {
  winsize size{};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 120;
}

eval::RowOrder order_of(config::ResultsOrder order) {
  switch (order) {
    case config::ResultsOrder::kFile: return eval::RowOrder::kFile;
    case config::ResultsOrder::kRewardUp: return eval::RowOrder::kRewardUp;
    case config::ResultsOrder::kRewardDown: return eval::RowOrder::kRewardDown;
  }
  return eval::RowOrder::kFile;
}

}  // namespace

int run_results(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::ResultsConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::ResultsConfig& config = loaded.config;
  std::vector<eval::ResultsFolder> folders = eval::find_results(config.path);
  const bool asks = config.show || config.min_reward || config.max_reward || config.sort != config::ResultsOrder::kFile;
  if (!asks && isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0 && !folders.empty()) {
    eval::Browser browser(std::move(folders), terminal_width());
    std::string line;
    do {
      std::fputs(("\n" + browser.screen() + "> ").c_str(), stdout);
      std::fflush(stdout);
    } while (std::getline(std::cin, line) && browser.feed(line));
    return 0;
  }
  if (folders.size() != 1) {
    if (asks)
      fail(ErrorCode::kInvalidArgument, "results: {} holds {} evaluations; give the folder of one (`prl results` lists them)",
           config.path.string(), folders.size());
    std::fputs(eval::list_folders(folders).c_str(), stdout);
    return 0;
  }
  const auto rows = eval::select_rows(eval::read_result_rows(folders[0].path / "results.jsonl"), order_of(config.sort), config.min_reward,
                                      config.max_reward);
  if (!config.show) {
    std::fputs((eval::list_folders(folders) + "\n" + eval::list_rows(rows, terminal_width())).c_str(), stdout);
    return 0;
  }
  if (*config.show > static_cast<std::int64_t>(rows.size()))
    fail(ErrorCode::kInvalidArgument, "results: --show {}: there are {} rollouts", *config.show, rows.size());
  std::fputs(eval::show_row(rows[static_cast<std::size_t>(*config.show - 1)]).c_str(), stdout);
  return 0;
}

}  // namespace prl::apps
