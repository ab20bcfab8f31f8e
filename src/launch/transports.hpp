#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

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
std::shared_ptr<weights::WeightChannel> make_weight_channel(const config::WeightBroadcast& broadcast,
                                                            const std::filesystem::path& output_dir,
                                                            std::optional<std::int64_t> keep_interval);

}  // namespace prl::launch
