#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <stop_token>

#include "apps/commands.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/stop_signal.hpp"
#include "config/tool_config.hpp"
#include "dashboard/page_server.hpp"
#include "dashboard/plot.hpp"
#include "dashboard/report.hpp"
#include "dashboard/run_view.hpp"

namespace prl::apps {

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
  dashboard::PlotOptions options;
  options.metrics = config.metric;
  options.smoothing = config.smoothing;
  options.has_log_scale = config.log_scale;
  options.from_step = config.from_step;
  options.to_step = config.to_step;
  options.width = config.width;
  options.height = config.height;
  const auto runs = dashboard::find_runs({config.runs.begin(), config.runs.end()});
  write_file_atomic(config.out, dashboard::plot_runs(runs, options));
  log::success("wrote {}", config.out.string());
  return 0;
}

int run_report(const config::ParsedCommand& parsed) {
  const auto loaded = config::load<config::ReportConfig>(*parsed.command, parsed.args);
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const auto runs = dashboard::find_runs({loaded.config.run}, 1);
  write_file_atomic(loaded.config.out, dashboard::make_report(runs.front(), loaded.config.num_rollouts));
  log::success("wrote {}", loaded.config.out.string());
  return 0;
}

}  // namespace prl::apps
