#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "weights/device_link.hpp"
#include "weights/held_versions.hpp"
#include "weights/transfer.hpp"

namespace prl::weights {

struct WeightServerOptions {
  std::string host = "localhost";                ///< where engines reach this rank
  int port = 0;                                  ///< of the store in which they ask for weights; 0: any free one
  std::chrono::milliseconds timeout{1'200'000};  ///< of one operation of a transfer
  std::int64_t keep_versions = 2;                ///< newest versions that engines may ask for: HeldVersions
  std::chrono::milliseconds join_timeout = kJoinTimeout;
  DevicePath path = {};        ///< of values that lie on a device; without one they go through host memory
  std::size_t max_links = 64;  ///< engines whose links are kept; further ones get their values through host memory, which is said once
  std::chrono::milliseconds poll{5};
};

/// Gives engines the weights that one rank of a trainer holds, all of them or a part, from memory to memory. From the first call that needs
/// it on it holds a store at host:port. An engine that is told to take a version draws a ticket there (WeightReceiver) and makes a group of
/// two with this rank over host memory, in which they agree on the way of the values: a DeviceLink, which stays, or this group. Several
/// engines are served side by side, and one that is lost in the middle harms no other. Any thread.
class WeightServer {
 public:
  explicit WeightServer(WeightServerOptions options);
  ~WeightServer();
  WeightServer(const WeightServer&) = delete;
  WeightServer& operator=(const WeightServer&) = delete;
  /// "tcp://host:port"; serves from here on. Error{kIo} naming the address if it is taken.
  std::string address();
  /// What engines may ask for; serves from here on. As address().
  HeldVersions& versions();
  /// The same of one of several policies: that which engines hold as the adapter `name`; other names get versions(). From now on those of
  /// an earlier policy of that name are not given any more. Those of a policy whom nobody but this server knows stay, for engines that need
  /// them yet, until there are kMaxPastPolicies of them.
  std::shared_ptr<HeldVersions> versions_of(const std::string& name, std::int64_t num_kept);
  static constexpr std::size_t kMaxPastPolicies = 16;
  /// Until the orchestrator needs no more (release_weights), or `stop` is requested; at once if it never served. Logs who it waits for, and
  /// gives up after the timeout.
  void wait_until_released(std::stop_token stop);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::weights
