#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <stop_token>

#include "apps/commands.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/log_progress.hpp"
#include "base/output_file.hpp"
#include "base/stop_signal.hpp"
#include "config/tool_config.hpp"
#include "dashboard/page_server.hpp"
#include "dashboard/plot.hpp"
#include "dashboard/report.hpp"
#include "dashboard/run_view.hpp"
#include "dashboard/terminal.hpp"

namespace prl::apps {
namespace {

/// Returns after `seconds`, or when a stop is asked for.
void sleep_until_stop(const std::stop_token& stop, double seconds) {
  std::mutex mutex;
  std::condition_variable_any ended;
  std::unique_lock lock(mutex);
  ended.wait_for(lock, stop, std::chrono::duration<double>(seconds), [] { return false; });
}

dashboard::TerminalOptions terminal_options(bool is_terminal) {
  dashboard::TerminalOptions options;
  winsize size{};
  if (is_terminal && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0) {
    options.columns = size.ws_col;
    // The last line stays empty, so that nothing scrolls.
    options.rows = std::max(2, size.ws_row - 1);
  }
  options.has_color = log::is_colored(is_terminal, std::getenv("NO_COLOR"), std::getenv("TERM"));
  for (const char* const name : {"LC_ALL", "LC_CTYPE", "LANG"})
    if (const char* const value = std::getenv(name); value != nullptr && *value != 0) {
      const std::string locale = value;
      options.has_unicode = locale.find("UTF-8") != std::string::npos || locale.find("utf8") != std::string::npos;
      break;
    }
  return options;
}

double unix_time() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

/// The terminal's other screen for as long as it lives, so that what stood there before comes back.
class OtherScreen {
 public:
  OtherScreen() { fmt::print("\x1b[?1049h\x1b[?25l"); }
  ~OtherScreen() {
    fmt::print("\x1b[?25h\x1b[?1049l");
    std::fflush(stdout);
  }
  OtherScreen(const OtherScreen&) = delete;
  OtherScreen& operator=(const OtherScreen&) = delete;
};

}  // namespace

int run_dashboard(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::DashboardToolConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::DashboardToolConfig& config = loaded.config;
  StopSignal stop;
  dashboard::PageServer page(
      {.host = config.host, .port = config.port, .runs = dashboard::find_runs({config.runs.begin(), config.runs.end()})});
  page.start();
  log::success("{} (Ctrl-C ends it)", page.url());
  std::mutex mutex;
  std::condition_variable_any ended;
  std::unique_lock lock(mutex);
  ended.wait(lock, stop.token(), [] { return false; });
  page.stop();
  return 0;
}

int run_plot(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::PlotConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::PlotConfig& config = loaded.config;
  refuse_overwrite(config.out, config.overwrite);
  dashboard::PlotOptions options;
  options.metrics = config.metric;
  options.smoothing = config.smoothing;
  options.has_log_scale = config.log_scale;
  options.from_step = config.from_step;
  options.to_step = config.to_step;
  options.width = config.width;
  options.height = config.height;
  options.is_png = config.out.extension() == ".png";
  const auto runs = dashboard::find_runs({config.runs.begin(), config.runs.end()});
  write_file_atomic(config.out, dashboard::plot_runs(runs, options));
  log::success("wrote {}", config.out.string());
  return 0;
}

int run_report(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::ReportConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  refuse_overwrite(loaded.config.out, loaded.config.overwrite);
  const auto runs = dashboard::find_runs({loaded.config.run}, 1);
  write_file_atomic(loaded.config.out, dashboard::make_report(runs.front(), loaded.config.num_rollouts));
  log::success("wrote {}", loaded.config.out.string());
  return 0;
}

int run_top(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::TopConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::TopConfig& config = loaded.config;
  const std::filesystem::path folder = dashboard::find_runs({config.run}, 1).front();
  dashboard::RunView run(folder, folder.lexically_normal().string());
  const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  const auto frame = [&] {
    run.read_metrics();
    dashboard::TerminalOptions options = terminal_options(is_terminal);
    options.metrics = config.metric;
    options.now = unix_time();
    return dashboard::draw_run(run, options);
  };
  if (config.once || !is_terminal) {
    fmt::print("{}", frame());
    return 0;
  }
  StopSignal stop;
  const OtherScreen screen;
  while (!stop.token().stop_requested()) {
    // Home, the picture, and what was below it erased; a line that became shorter is erased to its end.
    std::string text = frame();
    for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 4) text.insert(at, "\x1b[K");
    fmt::print("\x1b[H{}\x1b[J", text);
    std::fflush(stdout);
    sleep_until_stop(stop.token(), config.interval);
  }
  return 0;
}

}  // namespace prl::apps
