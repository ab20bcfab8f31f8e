#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "comm/transport.hpp"

namespace prl::comm {

namespace {

/// Messages between the threads of one group. A message is copied when it is sent, so that a send never waits.
class Hub {
 public:
  void send(int from, int to, std::uint64_t tag, const void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (closed_.contains(to)) throw TransportError(false, "it has left");
    const char* begin = static_cast<const char*>(data);
    messages_[{from, to, tag}].assign(begin, begin + bytes);
    changed_.notify_all();
  }
  void receive(int from, int to, std::uint64_t tag, void* data, std::size_t bytes, Transport::Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    const std::tuple key{from, to, tag};
    const bool is_done =
        changed_.wait_until(lock, deadline, [&] { return messages_.contains(key) || closed_.contains(from) || closed_.contains(to); });
    const auto it = messages_.find(key);
    if (it == messages_.end()) throw TransportError(!is_done, is_done ? "it has left" : "nothing came");
    if (it->second.size() != bytes)
      throw TransportError(false, fmt::format("a message of {} bytes, {} were wanted", it->second.size(), bytes));
    std::memcpy(data, it->second.data(), bytes);
    messages_.erase(it);
  }
  void close(int rank) {
    const std::lock_guard lock(mutex_);
    closed_.insert(rank);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<int, int, std::uint64_t>, std::vector<char>> messages_;
  std::set<int> closed_;
};

/// The hub of a group, found by its store and name: whoever comes first makes it, and it lives as long as one rank does.
std::shared_ptr<Hub> hub_of(const CommOptions& options) {
  static std::mutex mutex;
  static std::map<std::tuple<const Store*, std::string, std::int64_t>, std::weak_ptr<Hub>> hubs;
  const std::lock_guard lock(mutex);
  std::erase_if(hubs, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Hub>& place = hubs[{options.store.get(), options.group, options.generation}];
  std::shared_ptr<Hub> hub = place.lock();
  if (hub == nullptr) place = hub = std::make_shared<Hub>();
  return hub;
}

class ThreadsTransport final : public Transport {
 public:
  explicit ThreadsTransport(const CommOptions& options) : rank_(options.rank), hub_(hub_of(options)) {}

  std::unique_ptr<Pending> start_send(int to, std::uint64_t tag, const void* data, std::size_t bytes) override {
    hub_->send(rank_, to, tag, data, bytes);
    return std::make_unique<Sent>();
  }
  std::unique_ptr<Pending> start_recv(int from, std::uint64_t tag, void* data, std::size_t bytes) override {
    return std::make_unique<Awaited>(*hub_, from, rank_, tag, data, bytes);
  }
  void close() noexcept override { hub_->close(rank_); }

 private:
  struct Sent final : Pending {
    void wait(Clock::time_point) override {}
  };
  class Awaited final : public Pending {
   public:
    Awaited(Hub& hub, int from, int to, std::uint64_t tag, void* data, std::size_t bytes)
        : hub_(hub), from_(from), to_(to), tag_(tag), data_(data), bytes_(bytes) {}
    void wait(Clock::time_point deadline) override { hub_.receive(from_, to_, tag_, data_, bytes_, deadline); }

   private:
    Hub& hub_;
    int from_, to_;
    std::uint64_t tag_;
    void* data_;
    std::size_t bytes_;
  };

  int rank_;
  std::shared_ptr<Hub> hub_;
};

std::unique_ptr<Transport> connect_threads(const CommOptions& options) { return std::make_unique<ThreadsTransport>(options); }

}  // namespace

std::unique_ptr<Communicator> make_threads_communicator(CommOptions options) {
  if (options.size == 1) return make_local_communicator(std::move(options));
  return make_peer_communicator("threads", &connect_threads, std::move(options));
}

}  // namespace prl::comm
