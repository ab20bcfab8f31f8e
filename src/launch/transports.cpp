#include "launch/transports.hpp"

#include <algorithm>
#include <chrono>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "launch/run_identity.hpp"
#include "rollouts/file_queue.hpp"
#include "rollouts/zmq_queue.hpp"
#include "weights/collective_channel.hpp"

namespace prl::launch {
namespace {

[[noreturn]] void refuse_local(const char* key) {
  fail(ErrorCode::kInvalidArgument,
       "{} = \"local\" works only within one process (`prl rl` with deployment.type = \"colocated\"); use \"filesystem\"{}", key,
       std::string_view(key) == "rollout_transport.type" ? " or \"zmq\"" : "");
}

weights::WeightServerOptions server_options(const config::NcclBroadcast& nccl, const std::string& host, int port,
                                            std::int64_t max_async_level, const DeviceRuntime* runtime) {
  return {.host = host,
          .port = port,
          .timeout = std::chrono::seconds(nccl.timeout),
          .keep_versions = max_async_level + 2,
          .path = runtime != nullptr ? weights::make_device_path(*runtime) : weights::DevicePath{}};
}

}  // namespace

std::unique_ptr<rollouts::SampleReceiver> make_sample_receiver(const config::RolloutTransport& transport,
                                                               const std::filesystem::path& output_dir, std::int64_t first_step) {
  if (const auto* zmq = std::get_if<config::ZmqRollouts>(&transport))
    return rollouts::make_zmq_receiver(
        {.host = zmq->host, .port = zmq->port, .hwm = zmq->hwm, .rank = 0, .first_step = first_step, .run_id = run_identity()});
  if (std::holds_alternative<config::LocalRollouts>(transport)) refuse_local("rollout_transport.type");
  return rollouts::make_file_receiver({.folder = output_dir / "rollouts", .rank = 0, .first_step = first_step});
}

std::unique_ptr<rollouts::SampleSender> make_sample_sender(const config::RolloutTransport& transport,
                                                           const std::filesystem::path& output_dir, std::int64_t num_ranks,
                                                           std::int64_t first_step) {
  if (const auto* zmq = std::get_if<config::ZmqRollouts>(&transport))
    return rollouts::make_zmq_sender({.host = zmq->host,
                                      .port = zmq->port,
                                      .hwm = zmq->hwm,
                                      .num_ranks = num_ranks,
                                      .first_step = first_step,
                                      .run_id = run_identity()});
  if (std::holds_alternative<config::LocalRollouts>(transport)) refuse_local("rollout_transport.type");
  return rollouts::make_file_sender({.folder = output_dir / "rollouts", .num_ranks = num_ranks, .first_step = first_step});
}

BroadcastRetention::BroadcastRetention(const std::optional<trainer::CheckpointOptions>& checkpoint) {
  if (!checkpoint) return;
  interval = checkpoint->interval;
  checkpoints = {checkpoint->keep_last, checkpoint->keep_interval};
}

std::shared_ptr<weights::WeightChannel> make_weight_channel(const config::WeightBroadcast& broadcast,
                                                            const std::filesystem::path& output_dir, const BroadcastRetention& retention,
                                                            WeightEnd end, std::int64_t max_async_level, const DeviceRuntime* runtime) {
  const auto* nccl = std::get_if<config::NcclBroadcast>(&broadcast);
  if (nccl && end == WeightEnd::kTrainer)
    return weights::make_collective_channel(
        {.folder = output_dir / "broadcasts", .server = server_options(*nccl, nccl->host, nccl->port, max_async_level, runtime)});
  if (std::holds_alternative<config::NixlBroadcast>(broadcast))
    fail(ErrorCode::kNotImplemented, "weight_broadcast.type = \"nixl\" is not built");
  if (std::holds_alternative<config::LocalBroadcast>(broadcast)) refuse_local("weight_broadcast.type");
  // With a strict lag the engines read a version while the trainer writes one that is max_async_level + 1 newer.
  return weights::make_file_channel({.folder = output_dir / "broadcasts",
                                     .keep_versions = std::max<std::int64_t>(2, max_async_level + 2),
                                     .keep_interval = retention.interval,
                                     .retention = retention.checkpoints});
}

int num_senders(const config::WeightBroadcast& broadcast, int num_ranks) {
  const auto* nccl = std::get_if<config::NcclBroadcast>(&broadcast);
  if (nccl == nullptr) return 1;
  return std::min(num_ranks, nccl->num_senders.value_or(is_loopback(nccl->host) ? 1 : num_ranks));
}

std::shared_ptr<weights::WeightServer> make_part_server(const config::WeightBroadcast& broadcast, const std::string& host,
                                                        std::int64_t max_async_level, const DeviceRuntime& runtime) {
  return std::make_shared<weights::WeightServer>(
      server_options(std::get<config::NcclBroadcast>(broadcast), host, 0, max_async_level, &runtime));
}

std::shared_ptr<weights::WeightServer> make_adapter_server(const config::WeightBroadcast& broadcast) {
  const auto* nccl = std::get_if<config::NcclBroadcast>(&broadcast);
  if (nccl == nullptr) return nullptr;
  auto server = std::make_shared<weights::WeightServer>(server_options(*nccl, nccl->host, nccl->port, 0, nullptr));
  log::info("engines get adapters from {}", server->address());
  return server;
}

std::shared_ptr<weights::WeightChannel> make_run_channel(const config::TrainerConfig& run, const std::string& adapter,
                                                         const BroadcastRetention& retention,
                                                         const std::shared_ptr<weights::WeightServer>& server) {
  if (server == nullptr)
    return make_weight_channel(run.weight_broadcast, run.output_dir, retention, WeightEnd::kTrainer, run.max_async_level);
  return weights::make_adapter_channel(run.output_dir / "broadcasts", server, adapter, run.max_async_level + 2);
}

std::string weight_store(const config::WeightBroadcast& broadcast) {
  const auto* nccl = std::get_if<config::NcclBroadcast>(&broadcast);
  return nccl ? weights::broadcast_address(nccl->host, nccl->port) : "";
}

}  // namespace prl::launch
