#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <stop_token>
#include <string>

#include "base/ids.hpp"
#include "weights/device_link.hpp"
#include "weights/transfer.hpp"
#include "weights/weight_channel.hpp"

namespace prl::weights {

struct CollectiveChannelOptions {
  std::filesystem::path folder;                  ///< <run>/broadcasts: manifests and markers, no tensors
  std::string host = "localhost";                ///< where engines reach the trainer
  int port = 29501;                              ///< of the store in which they ask for weights; 0: any free one
  std::chrono::milliseconds timeout{1'200'000};  ///< of one operation of a transfer
  std::int64_t keep_versions = 2;                ///< newest versions that engines may ask for: HeldVersions
  std::chrono::milliseconds join_timeout = kJoinTimeout;
  DevicePath path = {};        ///< of values that lie on a device; without one they go through host memory
  std::size_t max_links = 64;  ///< engines whose links are kept; further ones get their values through host memory, which is said once
  std::chrono::milliseconds poll{5};
};

/// From the trainer's memory to the engines', over comm::Communicator between processes, without a file system that both see the tensors
/// on: over NCCL from GPU to GPU where both have one and NCCL, else over Gloo.
///
/// From its first publish() on the trainer holds a store at host:port; a rank that only may come to publish takes no port. An engine that
/// is told to take a version draws a ticket there (WeightReceiver) and makes a group of two with the trainer over host memory, in which
/// they agree on the way of the values: a DeviceLink, which stays, or this group. Several engines are served side by side, and one that is
/// lost in the middle harms no other. A version is announced as files announce it, by a folder with manifest.json and STABLE, which hold no
/// tensors. publish() needs Publication::flat and returns when the version may be asked for; Error{kIo} naming the address if it is taken.
class CollectiveChannel : public WeightChannel {
 public:
  /// "tcp://host:port", what engines are told; serves from here on.
  virtual std::string address() = 0;
  /// At the end of a run: serves the last version until the orchestrator needs
  /// no more (release_weights), or `stop` is requested; at once if it never
  /// published. Logs who it waits for,
  /// and gives up after the timeout.
  virtual void wait_until_released(std::stop_token stop) = 0;
};
/// Error{kUnavailable} if this build has no Gloo.
std::shared_ptr<CollectiveChannel> make_collective_channel(CollectiveChannelOptions options);

/// "tcp://host:port" of a trainer's store, as its configuration names it.
std::string broadcast_address(const std::string& host, int port);

/// The orchestrator's end: it will have no engine ask for weights any more.
/// Errors are logged: the trainer may have ended.
void release_weights(const std::string& address) noexcept;

}  // namespace prl::weights
