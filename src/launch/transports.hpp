#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "config/transport_config.hpp"
#include "rollouts/sample_queue.hpp"
#include "weights/weight_channel.hpp"

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
std::shared_ptr<weights::WeightChannel> make_weight_channel(const config::WeightBroadcast& broadcast,
                                                            const std::filesystem::path& output_dir,
                                                            std::optional<std::int64_t> keep_interval, WeightEnd end = WeightEnd::kTrainer,
                                                            std::int64_t max_async_level = 0, const DeviceRuntime* runtime = nullptr);
/// "tcp://host:port" where engines ask for weights; empty if they read files.
std::string weight_store(const config::WeightBroadcast& broadcast);

}  // namespace prl::launch
