#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/kv_desk.hpp"
#include "transfer/kv_link.hpp"

namespace prl::transfer {

struct KvServerOptions {
  std::string host = "127.0.0.1";
  int port = 0;  ///< 0: any free one
  std::string key;
  std::size_t max_connections = 64;                ///< more are closed at once
  std::chrono::milliseconds timeout{30'000};       ///< of one answer, its way included
  std::chrono::milliseconds idle_time{120'000};    ///< after which a silent connection is closed
  std::size_t max_bytes = std::size_t{256} << 20;  ///< of the blocks of one answer, one block at least
};

/// Gives blocks of an engine to others that ask for them: a thread for those that come, and one for each connection. A connection that
/// sends nonsense, is too slow or does not know the key is closed; the engine is not touched by it.
class KvServer {
 public:
  /// Error{kIo} naming the port.
  KvServer(engine::KvDesk& desk, KvServerOptions options);
  /// Closes all connections.
  ~KvServer();
  int port() const noexcept { return listener_.port(); }
  std::int64_t num_blocks_given() const noexcept { return num_blocks_.load(std::memory_order_relaxed); }
  std::int64_t num_bytes_given() const noexcept { return num_blocks_given() * static_cast<std::int64_t>(desk_.block_bytes()); }

 private:
  struct Connection {
    Socket socket;
    std::thread thread;
    std::atomic<bool> has_ended{false};
  };
  void accept_all();
  void serve(Connection& connection);
  /// Answers one question; the blocks are let go whatever happens.
  void answer(Socket& socket, Ask ask);
  /// Joins the threads of connections that have ended.
  void sweep();

  engine::KvDesk& desk_;
  const KvServerOptions options_;
  Listener listener_;
  std::atomic<std::int64_t> num_blocks_{0};
  std::atomic<bool> is_stopping_{false};
  std::mutex mutex_;
  std::list<Connection> connections_;  ///< guarded
  std::thread thread_;
};

}  // namespace prl::transfer
