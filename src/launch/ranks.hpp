#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

#include "comm/mesh.hpp"
#include "config/model_config.hpp"
#include "config/shared_config.hpp"
#include "device/device.hpp"
#include "trainer/gradient_step.hpp"

namespace prl::launch {

/// Which rank of a training run this process is, as whoever started it says in the environment.
struct RankEnv {
  int rank = 0, size = 1;
  std::string store;               ///< PRL_STORE: "file:<folder>" or "tcp://<host>:<port>"; a folder or server of this run alone
  std::string host = "127.0.0.1";  ///< PRL_HOST: where the other ranks reach this one
  int local_size = 1;              ///< PRL_LOCAL_WORLD_SIZE: ranks of this machine, which share its cores
  std::string joins_as;            ///< PRL_JOIN: it was started again and joins the others, who go on, under this name
  /// Whether it prepares and writes what is written once; the one that does so may change later.
  bool is_first() const noexcept { return rank == 0 && joins_as.empty(); }
  int num_replicas = 1;  ///< model.dp_replicate, see use_replicas()
  bool is_told = false;  ///< PRL_WORLD_SIZE is set: whoever did so has started all ranks there are
};

/// From PRL_RANK, PRL_WORLD_SIZE, PRL_STORE, PRL_HOST and PRL_LOCAL_WORLD_SIZE; without PRL_WORLD_SIZE one rank. Error{kInvalidArgument}
/// naming the variable.
RankEnv rank_env();

/// `num_replicas` groups of ranks hold a copy of the state each. Error{kInvalidArgument} naming the key if that does not divide their
/// number.
void use_replicas(RankEnv& env, int num_replicas);
/// Error{kInvalidArgument} naming model.cp if so many ranks to a row do not divide their number.
void check_ranks_per_row(const RankEnv& env, int ranks_per_row);
/// What this rank holds of the masters, of layers and of experts. Error{kInvalidArgument}, {kNotImplemented} naming model.ep.
void share_masters(trainer::PolicyOptions& policy, const RankEnv& env, const trainer::GradientStepOptions& step,
                   const config::TrainerModelConfig& model);
/// Error{kInvalidArgument} naming model.ep if it is neither 1 nor the number of ranks.
void check_expert_ranks(const RankEnv& env, const config::TrainerModelConfig& model);

/// `compute` with this rank's share of the cores, unless it says how many threads there are.
config::ComputeConfig rank_compute(const RankEnv& env, config::ComputeConfig compute);

/// Rank 0 makes the output folder ready for all: what came of it goes through the store to the others, which wait for it before they look
/// at the folder.
void tell_start(const RankEnv& env, bool is_finished);
/// Whether rank 0, or one that ran in its place before, has told so.
bool was_start_told(const RankEnv& env);
/// Whether the ranks that meet in the store at this address have done so: each says so when it has the group. True if the store cannot
/// be asked within two seconds.
bool have_met(const std::string& store) noexcept;
/// At rank 0 when it failed.
void tell_failure(const RankEnv& env, std::string_view reason) noexcept;
/// At the others: true if there is nothing left to do. PeerLost if rank 0 failed or says nothing within `timeout`.
bool wait_for_start(const RankEnv& env, std::chrono::milliseconds timeout);

/// While it lives, a stop ends the process with status 130 unless the ranks have met within `grace`. They wait for each other, for minutes
/// if somebody does not come, and for the launcher that keeps their store, which may be gone; and none of them has anything to save yet.
class StopWhileMeeting {
 public:
  explicit StopWhileMeeting(std::stop_token stop, std::chrono::milliseconds grace = std::chrono::seconds(4));

 private:
  std::jthread thread_;
};

/// Waits until all ranks are there, at most `timeout`, which is also the longest wait for another rank later on. PeerLost naming those that
/// do not come.
comm::Mesh make_mesh(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout);
/// Either of both, by `env`; a stop ends the process, see StopWhileMeeting, or the wait to be let in.
std::optional<comm::Mesh> meet(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout,
                               std::stop_token stop);
/// Of a rank that joins: waits until the others let it in. nullopt if `stop` came first.
std::optional<comm::Mesh> join_mesh(const RankEnv& env, const std::shared_ptr<DeviceRuntime>& runtime, std::chrono::milliseconds timeout,
                                    std::stop_token stop);

}  // namespace prl::launch
