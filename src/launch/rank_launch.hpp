#pragma once

#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "comm/store.hpp"
#include "config/sft_config.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {

/// The ranks of one training run that this process starts: all of them, or those of one node.
struct RankLayout {
  int num_nodes = 1, node_rank = 0, ranks_per_node = 1;
  std::string store;                        ///< address where they meet
  std::string host = "127.0.0.1";           ///< at which other nodes reach this one
  std::optional<std::vector<int>> gpu_ids;  ///< one per rank of this node; none: the machine's from `first_gpu` on, if it has any
  int first_gpu = 0;
  bool uses_gpus = true;
  std::optional<config::HealingConfig> healing;

  int num_ranks() const noexcept { return num_nodes * ranks_per_node; }
};

/// The children that run the ranks of this node: `base` with each rank's variables, name and log. Rank 0 keeps the name, the log and
/// the echo of `base`; rank R is "<name>_rank_R" and logs to `logs`/rank_R.log.
/// Error{kInvalidArgument} if the machine has fewer GPUs than are asked for.
std::vector<ChildSpec> rank_children(const RankLayout& layout, const ChildSpec& base, const std::filesystem::path& logs);

/// `prl sft` with deployment.num_gpus above 1 or with [eval]: its ranks as processes of this machine, and the one that evaluates, with the
/// resolved configurations in <output_dir>/configs. Returns the exit status, when the last step is evaluated, too.
int run_sft_ranks(const config::SftConfig& config, std::stop_token stop);

}  // namespace prl::launch
