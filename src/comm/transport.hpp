#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/communicator.hpp"

namespace prl::comm {

/// A message between two ranks did not get through.
class TransportError : public std::runtime_error {
 public:
  TransportError(bool is_silent, const std::string& message) : std::runtime_error(message), is_silent_(is_silent) {}
  /// The deadline passed; false: the other side is gone.
  bool is_silent() const noexcept { return is_silent_; }

 private:
  bool is_silent_;
};

/// Messages between the ranks of a group; what PeerCommunicator builds collectives from. A message has at least one byte; sender and
/// receiver know its size and its tag, which is used once. One thread but for close() and wake_lost().
class Transport {
 public:
  using Clock = std::chrono::steady_clock;
  /// A message in flight. Its memory is in use until wait() has returned or this is destroyed.
  class Pending {
   public:
    virtual ~Pending() = default;
    /// TransportError.
    virtual void wait(Clock::time_point deadline) = 0;
  };
  virtual ~Transport() = default;
  virtual std::unique_ptr<Pending> start_send(int to, std::uint64_t tag, const void* data, std::size_t bytes) = 0;
  virtual std::unique_ptr<Pending> start_recv(int from, std::uint64_t tag, void* data, std::size_t bytes) = 0;
  /// Ends waits for peers that have gone, where their connections did not: a message of which a part has gone or come hears nothing of
  /// the loss in some of them. Any thread, as often as one likes.
  virtual void wake_lost() noexcept {}
  /// Ranks whose connections are closed, where a transport can tell. Any thread, until close().
  virtual std::vector<int> gone() { return {}; }
  /// Ends all messages: here, and at ranks that wait for this one. Any thread.
  virtual void close() noexcept = 0;
};

/// Connects the ranks that `options` name; TransportError with the reason if one does not come.
using TransportFactory = std::unique_ptr<Transport> (*)(const CommOptions& options);

/// A link of so many bytes per second in each direction, which the groups that use it share.
class SlowLink;
std::shared_ptr<SlowLink> make_slow_link(double bytes_per_s);
/// That of all groups of this process, if PRL_COMM_BANDWIDTH is set when it is first asked for; else nullptr. Error{kInvalidArgument}.
std::shared_ptr<SlowLink> link_of_this_process();
/// Sends and receives no faster than the link would, for trials of what a slow one costs: start_send() waits until it has carried the
/// message, and a message has come when it has carried it and those before it.
std::unique_ptr<Transport> limit_bandwidth(std::unique_ptr<Transport> inner, std::shared_ptr<SlowLink> link);
/// What PRL_COMM_BANDWIDTH asks for, in bytes per second; nullopt if it is not set. Error{kInvalidArgument}.
std::optional<double> wanted_bandwidth();

/// Collectives over `connect(options)`. PeerLost naming the ranks that did not come.
std::unique_ptr<Communicator> make_peer_communicator(std::string_view backend, TransportFactory connect, CommOptions options);

}  // namespace prl::comm
