#include "launch/run_admin.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <vector>

#include "base/error.hpp"
#include "base/files.hpp"
#include "config/cli.hpp"
#include "launch/run_folders.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kMaxConfigBytes = 1 << 20;

std::string full_name(const std::string& name) { return name.starts_with(kRunPrefix) ? name : kRunPrefix + name; }

/// A name that stays inside the output folder.
void check_name(const std::string& name) {
  const bool is_plain = std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.'; });
  if (!is_plain || name.size() > 200) fail(ErrorCode::kInvalidArgument, "run: wanted letters, digits, '_', '-' and '.', found '{}'", name);
}

RunFolder find_run(const config::RunsToolConfig& config) {
  const std::vector<RunFolder> runs = find_run_folders(config.output_dir);
  const std::string name = full_name(config.run);
  std::string known;
  for (const RunFolder& run : runs) {
    if (run.name == name) return run;
    known += (known.empty() ? "" : ", ") + run.name;
  }
  fail(ErrorCode::kNotFound, "there is no run '{}' below {}; {}", name, config.output_dir.string(),
       known.empty() ? std::string("there is none at all") : "there are " + known);
}

std::string list(const config::RunsToolConfig& config) {
  std::map<std::string, RunReport> reports;
  for (RunReport& report : read_runs_file(config.output_dir)) reports[report.name] = std::move(report);
  std::string out = fmt::format("{:<24} {:<10} {:>4} {:>8} {:>14} {:>7}  {}", "RUN", "STATE", "SLOT", "STEP", "TOKENS", "WEIGHT", "");
  for (const RunFolder& run : find_run_folders(config.output_dir)) {
    const auto found = reports.find(run.name);
    RunReport report;
    if (found != reports.end()) report = found->second;
    const auto number = [](const std::optional<std::int64_t>& value) { return value ? std::to_string(*value) : std::string("-"); };
    const RunState asked = read_control(run.folder).state;
    std::string note = report.detail.substr(0, report.detail.find('\n'));
    if (asked != RunState::kRun && report.state == "training") note = fmt::format("asked to {}", to_string(asked));
    out += fmt::format("\n{:<24} {:<10} {:>4} {:>8} {:>14} {:>7.3g}  {}", run.name, report.state, number(report.slot), number(report.step),
                       number(report.tokens), report.weight, note);
    while (out.ends_with(' ')) out.pop_back();
  }
  return out;
}

std::string add(const config::RunsToolConfig& config) {
  const std::string name = full_name(config.run);
  check_name(name);
  const fs::path folder = config.output_dir / name;
  if (fs::exists(folder))
    fail(ErrorCode::kAlreadyExists, "{} is there already; choose another name or `prl runs remove` it", folder.string());
  const std::string text = read_file(*config.config, kMaxConfigBytes);
  // Refused here rather than in the trainer's log.
  config::load<config::OrchestratorConfig>(config::Command::kOrchestrator, {"@", config.config->string(), "--output-dir", folder.string()});
  fs::create_directories(folder / "configs");
  if (config.weight) write_control(folder, {.state = RunState::kRun, .weight = config.weight});
  write_file_atomic(folder / "configs/orch.toml", text);
  return fmt::format(
      "added {}. `prl rl` starts its orchestrator; beside a trainer that was started alone: prl orchestrator @ {}/configs/orch.toml "
      "--output-dir {}",
      name, folder.string(), folder.string());
}

std::string ask_for(const config::RunsToolConfig& config, RunState state) {
  const RunFolder run = find_run(config);
  RunControlFile control = read_control(run.folder);
  control.state = state;
  if (config.weight) control.weight = config.weight;
  write_control(run.folder, control);
  return fmt::format("{}: {}", run.name, to_string(state));
}

std::string remove(const config::RunsToolConfig& config) {
  const RunFolder run = find_run(config);
  // Under another name first: nobody finds a run that is half there.
  const fs::path doomed = run.folder.parent_path() / ("." + run.name + ".removed");
  fs::remove_all(doomed);
  fs::rename(run.folder, doomed);
  fs::remove_all(doomed);
  return fmt::format("removed {} with all its files", run.name);
}

}  // namespace

std::string run_admin(const config::RunsToolConfig& config) {
  switch (config.action) {
    case config::RunsAction::kList: return list(config);
    case config::RunsAction::kAdd: return add(config);
    case config::RunsAction::kPause: return ask_for(config, RunState::kPause);
    case config::RunsAction::kResume: return ask_for(config, RunState::kRun);
    case config::RunsAction::kDrain: return ask_for(config, RunState::kDrain);
    case config::RunsAction::kStop: return ask_for(config, RunState::kStop);
    case config::RunsAction::kRemove: return remove(config);
  }
  return {};
}

}  // namespace prl::launch
