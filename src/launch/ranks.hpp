#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/mesh.hpp"
#include "device/device.hpp"

namespace prl::launch {

/// Which rank of a training run this process is, as whoever started it says in the environment.
struct RankEnv {
  int rank = 0, size = 1;
  std::string store;               ///< PRL_STORE: "file:<folder>" or "tcp://<host>:<port>"; a folder or server of this run alone
  std::string host = "127.0.0.1";  ///< PRL_HOST: where the other ranks reach this one
};

/// From PRL_RANK, PRL_WORLD_SIZE, PRL_STORE and PRL_HOST; without PRL_WORLD_SIZE one rank. Error{kInvalidArgument} naming the variable.
RankEnv rank_env();

/// Waits until all ranks are there, at most `timeout`, which is also the longest wait for another rank later on. PeerLost naming those that
/// do not come.
comm::Mesh make_mesh(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout);

}  // namespace prl::launch
