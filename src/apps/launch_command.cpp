#include <algorithm>

#include "apps/commands.hpp"
#include "base/error.hpp"
#include "base/stop_signal.hpp"
#include "config/sft_config.hpp"
#include "config/tool_config.hpp"
#include "config/trainer_config.hpp"
#include "launch/dry_run.hpp"
#include "launch/model_setup.hpp"
#include "launch/node_agent.hpp"

namespace prl::apps {
namespace {

using config::Command;

/// Fills in what the launcher needs to know of the command that it starts; false if there is nothing to start.
template <typename Config>
bool look_at(Command command, const config::LaunchConfig& launcher, launch::NodeWork& work, launch::NodesWanted& wanted) {
  const auto loaded = config::load<Config>(command, work.args);
  work.output_dir = loaded.config.output_dir;
  work.healing = loaded.config.healing;
  if constexpr (requires { loaded.config.deployment; })
    if (const auto* nodes = std::get_if<config::SftMultiNode>(&loaded.config.deployment))
      wanted = {.num_nodes = nodes->num_nodes, .per_node = nodes->gpus_per_node};
  const auto check = [&] {
    const launch::NodePlace place = launch::find_node(launcher, wanted);
    launch::check_dry_run(loaded.config, place.num_nodes * place.per_node);
  };
  if (config::finish_early(command, loaded, check)) return false;
  work.uses_gpus = launch::device_kind(loaded.config.compute) == DeviceKind::kCuda;
  return true;
}

}  // namespace

int run_launch(const config::ParsedCommand& parsed) {
  const auto command = std::ranges::find_if(
      parsed.args, [](const std::string& word) { return word == "sft" || word == "trainer" || word == "rl" || word == "inference"; });
  const auto loaded = config::load<config::LaunchConfig>(*parsed.command, {parsed.args.begin(), command});
  if (config::finish_early(*parsed.command, loaded)) return 0;
  const config::LaunchConfig& config = loaded.config;
  if (command == parsed.args.end())
    fail(ErrorCode::kInvalidArgument, "what is to be launched is missing: `prl launch --nproc-per-node {} sft @ sft.toml`",
         config.nproc_per_node.value_or(8));
  config::ParsedCommand rest = parsed;
  rest.args.assign(command + 1, parsed.args.end());
  if (*command == "rl") return run_rl_of_node(rest, config);
  if (*command == "inference") return run_inference_of_node(rest, config);
  launch::NodeWork work;
  work.command = *command;
  work.args.assign(command + 1, parsed.args.end());
  work.log_dir = config.log_dir;
  launch::NodesWanted wanted;
  const bool goes_on = work.command == "sft" ? look_at<config::SftConfig>(Command::kSft, config, work, wanted)
                                             : look_at<config::TrainerConfig>(Command::kTrainer, config, work, wanted);
  if (!goes_on) return 0;
  const launch::NodePlace place = launch::find_node(config, wanted);
  const StopSignal stop;
  const int status = launch::run_node(place, work, stop.token());
  return stop.was_interrupted() && status == 0 ? 130 : status;
}

}  // namespace prl::apps
