#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace prl::comm {

/// Small values under names that all ranks of a run see: the meeting place where ranks exchange addresses, agree on who goes on after a
/// loss, and say why they gave up.
///
/// Keys are at most kMaxKeyBytes of printable ASCII, values at most kMaxValueBytes. Any thread.
/// Errors  Error{kInvalidArgument} for a key or value beyond the limits, Error{kUnavailable} if the store cannot be reached.
class Store {
 public:
  static constexpr std::size_t kMaxKeyBytes = 80, kMaxValueBytes = std::size_t{1} << 20;

  virtual ~Store() = default;
  virtual void set(const std::string& key, std::string_view value) = 0;
  virtual std::optional<std::string> get(const std::string& key) = 0;
  /// Sets `key` to `value` if it holds `expected` (nullopt: if it is absent), in one step for all ranks. What the key holds afterwards.
  virtual std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected, std::string_view value) = 0;

  /// The value of the rank that came first.
  std::string set_once(const std::string& key, std::string_view value) { return compare_and_set(key, std::nullopt, value); }
  /// Waits until `key` exists. Error{kDeadline}: which key, and `who` should have set it.
  std::string wait(const std::string& key, std::chrono::milliseconds timeout, std::string_view who = "another rank");
  /// Counts the groups of a run: 0 for the first, one more after each regrouping. Never goes back.
  std::int64_t generation();
  void advance_generation(std::int64_t to);

 protected:
  static void check(const std::string& key, std::string_view value = {});
};

/// For the threads of one process.
std::shared_ptr<Store> make_memory_store();
/// One file per key in `folder`, which is made if need be: ranks that share a file system.
std::shared_ptr<Store> make_file_store(const std::filesystem::path& folder);
/// A client of a StoreServer. Waits up to `timeout` for the server to come up, and as long for each answer; one that was there and is gone
/// is looked for during 2 s, and then for 0.1 s at each call.
std::shared_ptr<Store> make_tcp_store(const std::string& host, int port, std::chrono::milliseconds timeout);
/// "file:<folder>" or "tcp://<host>:<port>" ([v6 address]:port too). Error{kInvalidArgument} naming what is understood.
std::shared_ptr<Store> make_store(const std::string& address, std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Holds the values of TCP clients in memory; one thread. At most kMaxClients at a time.
class StoreServer {
 public:
  static constexpr int kMaxClients = 4096;
  /// Port 0 takes a free one. Error{kIo} if the address cannot be bound.
  explicit StoreServer(const std::string& host = "127.0.0.1", int port = 0);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  int port() const noexcept;
  /// "tcp://host:port".
  std::string address() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace prl::comm
