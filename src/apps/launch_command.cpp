#include <algorithm>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/stop_signal.hpp"
#include "config/sft_config.hpp"
#include "config/tool_config.hpp"
#include "config/trainer_config.hpp"
#include "launch/model_setup.hpp"
#include "launch/node_agent.hpp"

namespace prl::apps {
namespace {

using config::Command;

/// Fills in what the launcher needs to know of the command that it starts; false if there is nothing to start.
template <typename Config>
bool look_at(Command command, launch::NodeWork& work) {
  const auto loaded = config::load<Config>(command, work.args);
  if (config::finish_early(command, loaded, {})) return false;
  work.output_dir = loaded.config.output_dir;
  work.healing = loaded.config.healing;
  work.uses_gpus = launch::device_kind(loaded.config.compute) == DeviceKind::kCuda;
  return true;
}

}  // namespace

int run_launch(const config::ParsedCommand& parsed) {
  const auto command = std::ranges::find_if(parsed.args, [](const std::string& word) { return word == "sft" || word == "trainer"; });
  const auto loaded = config::load<config::LaunchConfig>(*parsed.command, {parsed.args.begin(), command});
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::LaunchConfig& config = loaded.config;
  if (command == parsed.args.end())
    fail(ErrorCode::kInvalidArgument, "what is to be launched is missing: `prl launch --nproc-per-node {} sft @ sft.toml`",
         config.nproc_per_node);
  launch::NodeWork work;
  work.command = *command;
  work.args.assign(command + 1, parsed.args.end());
  const bool goes_on =
      work.command == "sft" ? look_at<config::SftConfig>(Command::kSft, work) : look_at<config::TrainerConfig>(Command::kTrainer, work);
  if (!goes_on) return 0;
  const StopSignal stop;
  const int status = launch::run_node(config, work, stop.token());
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

}  // namespace prl::apps
