#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "env/python/child_process.hpp"
#include "env/python/frame.hpp"
#include "env/python/worker_log.hpp"
#include "net/asio.hpp"
#include "net/signal.hpp"
#include "net/task_group.hpp"

namespace prl::env::python {

namespace asio = boost::asio;

/// What a link tells its owner, on the thread of its executor. None is called after close().
struct LinkEvents {
  std::function<void(boost::json::object)> on_message;
  std::function<void(const std::string& reason)> on_end;  ///< once: connection or process ended, or a frame was broken
};

/// One worker: its connection, and its process if it is ours. Everything happens on one thread, that of `executor`.
class WorkerLink {
 public:
  struct Limits {
    std::size_t max_frame_bytes = kDefaultMaxFrameBytes;
    std::size_t max_unsent_bytes = std::size_t{256} << 20;  ///< a worker that does not read them is dead
  };

  /// A process started here.
  WorkerLink(asio::any_io_executor executor, ChildProcess child, std::shared_ptr<WorkerLog> log, std::string name, Limits limits,
             LinkEvents events);
  /// A worker elsewhere, "host:port"; what is sent before it is connected waits. `deadline` is of the connecting.
  WorkerLink(asio::any_io_executor executor, std::string address, net::TimePoint deadline, std::shared_ptr<WorkerLog> log, std::string name,
             Limits limits, LinkEvents events);
  /// close().
  ~WorkerLink();
  WorkerLink(const WorkerLink&) = delete;
  WorkerLink& operator=(const WorkerLink&) = delete;

  /// Queues a message. A message that is too long throws Error{kInvalidArgument}; too many unsent bytes end the link.
  void send(const boost::json::object& message) { send(encode_frame(message, max_frame_bytes())); }
  /// The same for its frame.
  void send(std::string frame);
  /// The same with copies of descriptors for the peer, a process of this machine, sent at once. False if the socket does not take all of it
  /// now, or frames are unsent.
  [[nodiscard]] bool send_with(const std::string& frame, std::span<const int> descriptors);
  std::size_t max_frame_bytes() const;
  /// Kills the process and ends the connection, silently.
  void close();
  /// The process that was closed has been waited for; true for a worker elsewhere.
  bool is_gone();
  std::optional<pid_t> pid() const;
  /// How the process ended, once it is gone, and the last line it wrote.
  std::string describe_end() const;

 private:
  struct State;
  static asio::awaitable<void> connect(std::shared_ptr<State> state, std::string address, net::TimePoint deadline);
  static void take_frames(const std::shared_ptr<State>& state, std::string& bytes);
  static asio::awaitable<void> read_frames(std::shared_ptr<State> state);
  static asio::awaitable<void> read_output(std::shared_ptr<State> state);
  static asio::awaitable<void> write_frames(std::shared_ptr<State> state);
  static void end(const std::shared_ptr<State>& state, const std::string& reason);
  void start();

  std::shared_ptr<State> state_;
  net::TaskGroup tasks_;
};

}  // namespace prl::env::python
