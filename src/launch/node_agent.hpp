#pragma once

#include <filesystem>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "config/checkpoint_config.hpp"
#include "launch/node_meeting.hpp"

namespace prl::launch {

/// What every rank of a node runs.
struct NodeWork {
  std::string command;            ///< "sft" or "trainer"
  std::vector<std::string> args;  ///< the words after it
  std::filesystem::path output_dir;
  bool uses_gpus = false;
  std::optional<config::HealingConfig> healing;
  std::optional<std::filesystem::path> log_dir;  ///< <command>/ in the attempt's folder if not set
};

/// `prl launch`: starts this node's ranks, watches them and ends all of them when one fails. Node 0 holds the store where the ranks of all
/// nodes meet, until the other nodes have ended. Output of rank R goes to <log_dir>/rank_R.log, that of rank 0 to the console too.
/// Returns the exit status. What NodeMeeting throws.
int run_node(const NodePlace& place, const NodeWork& work, std::stop_token stop);

}  // namespace prl::launch
