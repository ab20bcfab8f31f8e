#include "launch/rank_launch.hpp"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <span>

#include "base/error.hpp"
#include "base/log.hpp"
#include "config/cli.hpp"
#include "config/secrets.hpp"
#include "launch/eval_child.hpp"
#include "launch/log_folder.hpp"
#include "launch/model_setup.hpp"
#include "launch/ranks.hpp"
#include "launch/run_folder.hpp"
#include "launch/visible_gpus.hpp"

namespace prl::launch {
namespace fs = std::filesystem;
namespace {

/// What the ranks of this node see as their GPUs, as CUDA_VISIBLE_DEVICES names them; empty where they compute on the CPU.
std::vector<std::string> visible_gpus(const RankLayout& layout) {
  std::vector<std::string> gpus;
  if (layout.gpu_ids) {
    for (const int id : *layout.gpu_ids) gpus.push_back(visible_devices_of(std::span(&id, 1)));
  } else if (layout.uses_gpus) {
    const auto num_devices = static_cast<int>(list_cuda_devices().devices.size());
    if (num_devices == 0) return {};
    for (int id = layout.first_gpu; id < num_devices; ++id) gpus.push_back(visible_devices_of(std::span(&id, 1)));
  } else {
    return {};
  }
  if (static_cast<int>(gpus.size()) < layout.ranks_per_node)
    fail(ErrorCode::kInvalidArgument, "{} ranks need a GPU each, but there are {} for them; ask for fewer, or set compute.device = \"cpu\"",
         layout.ranks_per_node, gpus.size());
  return gpus;
}

}  // namespace

std::vector<ChildSpec> rank_children(const RankLayout& layout, const ChildSpec& base, const fs::path& logs) {
  const std::vector<std::string> gpus = visible_gpus(layout);
  std::vector<ChildSpec> children;
  for (int local = 0; local < layout.ranks_per_node; ++local) {
    const int rank = layout.node_rank * layout.ranks_per_node + local;
    ChildSpec& child = children.emplace_back(base);
    child.env["PRL_RANK"] = std::to_string(rank);
    child.env["PRL_WORLD_SIZE"] = std::to_string(layout.num_ranks());
    child.env["PRL_LOCAL_WORLD_SIZE"] = std::to_string(layout.ranks_per_node);
    child.env["PRL_STORE"] = layout.store;
    child.env["PRL_HOST"] = layout.host;
    child.group = base.name;
    child.has_members_elsewhere = layout.num_nodes > 1;
    if (layout.healing) {
      child.max_losses = layout.healing->max_restarts;
      child.has_met = [store = layout.store] { return have_met(store); };
      child.backoff = std::chrono::milliseconds(std::llround(1000 * layout.healing->backoff_seconds));
    }
    if (!gpus.empty()) child.env["CUDA_VISIBLE_DEVICES"] = gpus[static_cast<std::size_t>(local)];
    if (rank == 0) continue;
    child.name = fmt::format("{}_rank_{}", base.name, rank);
    child.log_file = logs / fmt::format("rank_{}.log", rank);
    child.echo = false;
  }
  return children;
}

int run_sft_ranks(const config::SftConfig& config, std::stop_token stop) {
  const comm::StoreServer store;
  RankLayout layout;
  layout.ranks_per_node = std::get<config::SftSingleNode>(config.deployment).num_gpus;
  layout.store = store.address();
  layout.uses_gpus = device_kind(config.compute) == DeviceKind::kCuda;
  layout.healing = config.healing;
  ChildSpec base;
  base.name = "sft";
  base.argv = {fs::read_symlink("/proc/self/exe").string(), "sft", "@", (config.output_dir / "configs" / "sft.json").string()};
  base.env[kRunFolderVariable] = fs::absolute(config.output_dir).string();
  if (const std::string secrets = config::secrets_of(config); !secrets.empty()) base.env[config::kSecretsVariable] = secrets;
  base.log_file = log_file(config.output_dir, "sft.log");
  base.echo = true;
  Supervisor supervisor;
  if (config.eval) supervisor.start(eval_child(config));
  for (ChildSpec& child : rank_children(layout, base, log_file(config.output_dir, "sft"))) supervisor.start(std::move(child));
  const std::optional<std::string> failure = supervisor.run(stop);
  if (failure) log::error("sft: {}{}", *failure, stop.stop_requested() ? "" : ". Ending the other ranks");
  supervisor.terminate_all(std::chrono::seconds(20));
  if (config.eval && holds_broadcasts(config.output_dir))
    log::warning("weights in {} are not evaluated yet: `prl evals @ {}` does it{}", (config.output_dir / "broadcasts").string(),
                 (config.output_dir / "configs" / "evals.json").string(), config.ckpt ? ", and so does --ckpt.resume-step -1" : "");
  return failure ? 1 : 0;
}

}  // namespace prl::launch
