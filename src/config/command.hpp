#pragma once

#include <optional>
#include <span>
#include <string_view>

namespace prl::config {

/// The commands of `prl`.
enum class Command {
  kRl,
  kTrainer,
  kLaunch,
  kOrchestrator,
  kInference,
  kSft,
  kEval,
  kSynthesize,
  kResults,
  kInitModel,
  kMakeData,
  kConvert,
  kChat,
  kBench,
  kPlan,
  kDoctor,
  kEnv,
  kEnvServer,
  kRouter,
  kK8s,
  kRuns,
  kDashboard,
  kPlot,
  kReport,
  kReplay,
  kTop,
  kEvals,
};

/// Name, as typed, and purpose in one line.
struct CommandInfo {
  Command command;
  std::string_view name;
  std::string_view purpose;
};
/// All commands in the order of --help.
std::span<const CommandInfo> all_commands();
std::string_view command_name(Command command);
std::optional<Command> find_command(std::string_view name);

}  // namespace prl::config
