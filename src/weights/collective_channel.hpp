#pragma once

#include <filesystem>
#include <memory>
#include <stop_token>
#include <string>

#include "base/ids.hpp"
#include "weights/weight_channel.hpp"
#include "weights/weight_server.hpp"

namespace prl::weights {

struct CollectiveChannelOptions {
  std::filesystem::path folder;  ///< <run>/broadcasts: manifests and markers, no tensors
  WeightServerOptions server = {};
};

/// From the trainer's memory to the engines', over comm::Communicator between processes, without a file system that both see the tensors
/// on: over NCCL from GPU to GPU where both have one and NCCL, else over Gloo (WeightServer).
///
/// From its first publish() on the trainer holds a store at host:port; a rank that only may come to publish takes no port. A version is
/// announced as files announce it, by a folder with manifest.json and STABLE, which hold no tensors. An adapter goes the same way, as bytes
/// in host memory. publish() needs Publication::flat and returns when the version may be asked for; Error{kIo} naming the address if it is
/// taken.
class CollectiveChannel : public WeightChannel {
 public:
  /// "tcp://host:port", what engines are told; serves from here on.
  virtual std::string address() = 0;
  /// At the end of a run: WeightServer::wait_until_released().
  virtual void wait_until_released(std::stop_token stop) = 0;
};
/// Error{kUnavailable} if this build has no Gloo.
std::shared_ptr<CollectiveChannel> make_collective_channel(CollectiveChannelOptions options);
/// Of one of several policies of a trainer, which engines hold as the adapter `name` each; they ask `server` for all of them. Its
/// publications are adapters.
std::shared_ptr<WeightChannel> make_adapter_channel(std::filesystem::path folder, std::shared_ptr<WeightServer> server, std::string name,
                                                    std::int64_t keep_versions);

/// "tcp://host:port" of a trainer's store, as its configuration names it.
std::string broadcast_address(const std::string& host, int port);

/// The orchestrator's end: it will have no engine ask for weights any more.
/// Errors are logged: the trainer may have ended.
void release_weights(const std::string& address) noexcept;

}  // namespace prl::weights
