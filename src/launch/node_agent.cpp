#include "launch/node_agent.hpp"

#include <fmt/format.h>

#include <chrono>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

#include "base/error.hpp"
#include "base/log.hpp"
#include "launch/log_folder.hpp"
#include "launch/rank_launch.hpp"
#include "launch/supervisor.hpp"

namespace prl::launch {
namespace fs = std::filesystem;

namespace {

/// Requests `gone` when the other nodes have left, or node 0 is lost with its store.
void look_for_others(const NodeMeeting& meeting, std::stop_source& gone, const std::stop_token& end) {
  if (meeting.place().num_nodes == 1) return;
  try {
    const std::shared_ptr<comm::Store> store = meeting.make_store();
    while (!end.stop_requested() && !meeting.are_others_gone(*store)) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  } catch (const Error& error) {
    if (!end.stop_requested()) log::warning("{}", error.what());
  }
  if (!end.stop_requested()) gone.request_stop();
}

/// The ranks of all nodes log into one attempt, which node 0 begins.
fs::path share_attempt(NodeMeeting& meeting, const fs::path& output_dir, const std::string& command) {
  constexpr const char* kKey = "launch/attempt";
  constexpr std::chrono::seconds kPatience{60};
  if (meeting.place().rank == 0) {
    meeting.store().set(kKey, join_attempt(output_dir, command).filename().string());
  } else {
    enter_attempt(output_dir, meeting.store().wait(kKey, kPatience, "node 0"));
  }
  return log_file(output_dir, command);
}

}  // namespace

int run_node(const NodePlace& place, const NodeWork& work, std::stop_token stop) {
  NodeMeeting meeting(place);
  if (!meeting.meet(stop)) return 0;
  RankLayout layout;
  layout.num_nodes = place.num_nodes;
  layout.node_rank = place.rank;
  layout.ranks_per_node = place.per_node;
  layout.store = meeting.address();
  layout.host = meeting.host();
  layout.uses_gpus = work.uses_gpus;
  layout.healing = work.healing;
  const fs::path logs = work.log_dir ? *work.log_dir : share_attempt(meeting, work.output_dir, work.command);
  ChildSpec base;
  base.name = work.command;
  base.argv = {fs::read_symlink("/proc/self/exe").string(), work.command};
  base.argv.insert(base.argv.end(), work.args.begin(), work.args.end());
  base.log_file = logs / "rank_0.log";
  base.echo = true;
  log::info("node {} of {}: {} of {} ranks, meeting at {}", place.rank, place.num_nodes, place.per_node, layout.num_ranks(), layout.store);
  std::optional<std::string> failure;
  {
    std::stop_source gone;
    const std::jthread looking([&](std::stop_token end) { look_for_others(meeting, gone, end); });
    Supervisor supervisor;
    supervisor.set_others_gone(gone.get_token());
    for (ChildSpec& child : rank_children(layout, base, logs)) supervisor.start(std::move(child));
    failure = supervisor.run(stop);
    if (failure) log::error("{}: {}{}", work.command, *failure, stop.stop_requested() ? "" : ". Ending the other ranks of this node");
    supervisor.terminate_all(std::chrono::seconds(20));
  }
  meeting.leave(stop);
  return failure ? 1 : 0;
}

}  // namespace prl::launch
