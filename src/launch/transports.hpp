#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "config/trainer_config.hpp"
#include "config/transport_config.hpp"
#include "io/checkpoint_dir.hpp"
#include "rollouts/sample_queue.hpp"
#include "trainer/checkpoint.hpp"
#include "weights/weight_channel.hpp"
#include "weights/weight_server.hpp"

namespace prl::launch {

/// Queue ends and weight channels between processes. Error{kInvalidArgument} for "local", which only works within one process.
std::unique_ptr<rollouts::SampleReceiver> make_sample_receiver(const config::RolloutTransport& transport,
                                                               const std::filesystem::path& output_dir, std::int64_t first_step);
std::unique_ptr<rollouts::SampleSender> make_sample_sender(const config::RolloutTransport& transport,
                                                           const std::filesystem::path& output_dir, std::int64_t num_ranks,
                                                           std::int64_t first_step);
/// The trainer's end; the orchestrator's learns of versions alone and starts no server. The trainer may be `max_async_level` versions ahead
/// of the one that engines ask for. `runtime`: the trainer's, from whose device engines may get weights.
enum class WeightEnd { kTrainer, kOrchestrator };
/// Which files of weights stay when engines have read them: those of steps with a checkpoint, as long as the checkpoints do.
struct BroadcastRetention {
  BroadcastRetention() = default;
  explicit BroadcastRetention(const std::optional<trainer::CheckpointOptions>& checkpoint);
  std::optional<std::int64_t> interval;
  io::CheckpointRetention checkpoints;
};
std::shared_ptr<weights::WeightChannel> make_weight_channel(const config::WeightBroadcast& broadcast,
                                                            const std::filesystem::path& output_dir, const BroadcastRetention& retention,
                                                            WeightEnd end = WeightEnd::kTrainer, std::int64_t max_async_level = 0,
                                                            const DeviceRuntime* runtime = nullptr);
/// Of `num_ranks` ranks, how many send engines a part of new weights each: weight_broadcast.num_senders, else all if engines are elsewhere
/// (weight_broadcast.host is another machine as seen from them), where the network between machines is what takes time. 1 if engines read
/// files.
int num_senders(const config::WeightBroadcast& broadcast, int num_ranks);
/// What a rank beside the first serves its part with, at `host`.
std::shared_ptr<weights::WeightServer> make_part_server(const config::WeightBroadcast& broadcast, const std::string& host,
                                                        std::int64_t max_async_level, const DeviceRuntime& runtime);
/// With which a trainer of several runs serves engines all of their adapters; nullptr if they read files. Error{kIo} naming the address if
/// it is taken.
std::shared_ptr<weights::WeightServer> make_adapter_server(const config::WeightBroadcast& broadcast);
/// The trainer's end of one of several runs, whose adapter engines hold as `adapter`.
std::shared_ptr<weights::WeightChannel> make_run_channel(const config::TrainerConfig& run, const std::string& adapter,
                                                         const BroadcastRetention& retention,
                                                         const std::shared_ptr<weights::WeightServer>& server);
/// "tcp://host:port" where engines ask for weights; empty if they read files.
std::string weight_store(const config::WeightBroadcast& broadcast);

}  // namespace prl::launch
