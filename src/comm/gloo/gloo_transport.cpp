#include "comm/loss_watch.hpp"
#include "comm/meeting.hpp"
#include "comm/transport.hpp"

#if defined(PRL_WITH_GLOO)
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <string>
#endif

namespace prl::comm {

#if defined(PRL_WITH_GLOO)

namespace {

/// Gloo writes to connections that a peer may have closed; the error it then gets is what we want, not the signal's end of the process.
void ignore_sigpipe() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction current {};
    if (::sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) (void)::signal(SIGPIPE, SIG_IGN);
  });
}

/// Gloo's thread of events asks again without a pause while another thread holds the lock of a connection. When it preempts that thread, as
/// one does that is woken by a message, it takes the processor from what it waits for. So it runs as a thread of SCHED_BATCH, which
/// preempts none; threads inherit this from the one that starts them.
std::shared_ptr<gloo::transport::Device> make_device(const std::string& host) {
  return std::async(std::launch::async,
                    [&host] {
                      const sched_param any{};
                      (void)::sched_setscheduler(0, SCHED_BATCH, &any);  // where it may not, it only takes more time
                      return gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(host.c_str()));
                    })
      .get();
}

/// Gloo's addresses go through our store.
class AddressBook final : public gloo::rendezvous::Store {
 public:
  /// Borrows `options`. Their timeout is that of a wait for which Gloo names none, or a longer one.
  explicit AddressBook(const CommOptions& options)
      : options_(options), prefix_(fmt::format("{}/g{}/gloo/", options.group, options.generation)) {}
  void set(const std::string& key, const std::vector<char>& data) override {
    options_.store->set(prefix_ + key, {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    const std::string value = await_word(options_, prefix_ + key, options_.timeout);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, options_.timeout); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    for (const std::string& key : keys) (void)await_word(options_, prefix_ + key, std::min(timeout, options_.timeout));
  }

 private:
  const CommOptions& options_;
  std::string prefix_;
};

/// A full mesh of TCP connections. Only Gloo's messages are used: collectives built from them know which rank they wait for, where Gloo's
/// own report a timeout of the group.
class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(const CommOptions& options) {
    ignore_sigpipe();
    try {
      auto device = make_device(options.host);
      context_ = std::make_shared<gloo::rendezvous::Context>(options.rank, options.size);
      context_->setTimeout(options.timeout);
      AddressBook book(options);
      context_->connectFullMesh(book, device);
      for (int peer = 0; peer < options.size; ++peer) {
        watches_.push_back(peer == options.rank ? nullptr : context_->createUnboundBuffer(&never_, sizeof never_));
        if (watches_.back()) watches_.back()->recv(peer, kNoMessage);
      }
    } catch (const std::exception& error) {
      throw TransportError(true, error.what());
    }
  }

  std::unique_ptr<Pending> start_send(int to, std::uint64_t tag, const void* data, std::size_t bytes) override {
    return start(to, const_cast<void*>(data), bytes, true, [&](auto& buffer) { buffer.send(to, tag); });
  }
  std::unique_ptr<Pending> start_recv(int from, std::uint64_t tag, void* data, std::size_t bytes) override {
    return start(from, data, bytes, false, [&](auto& buffer) { buffer.recv(from, tag); });
  }
  void wake_lost() noexcept override {
    try {
      for (const int peer : waits_->peers())
        if (is_gone(peer)) waits_->wake(peer);
    } catch (const std::exception&) {
      // The context is being closed, which ends every wait.
    }
  }
  std::vector<int> gone() override {
    std::vector<int> ranks;
    for (int peer = 0; peer < context_->size; ++peer)
      if (peer != context_->rank && is_gone(peer)) ranks.push_back(peer);
    return ranks;
  }
  /// Whether the connection to `peer`, another rank, was lost: what waits for a message that nobody sends is told of it.
  bool is_gone(int peer) {
    const std::lock_guard lock(watch_mutex_);
    gloo::transport::UnboundBuffer& watch = *watches_[static_cast<std::size_t>(peer)];
    watch.abortWaitRecv();  // so that the wait does not wait
    try {
      (void)watch.waitRecv(std::chrono::hours(1));
      return false;
    } catch (const std::exception&) {
      return true;
    }
  }
  void close() noexcept override {
    waits_->abort();  // closing does not wake a thread that waits for a message
    try {
      context_->closeConnections();
    } catch (const std::exception&) {
      // They were closed already.
    }
  }

 private:
  /// The messages that somebody may wait for.
  class Waits {
   public:
    bool add(gloo::transport::UnboundBuffer* buffer, int peer) {
      const std::lock_guard lock(mutex_);
      if (!is_aborted_) buffers_.emplace(buffer, peer);
      return !is_aborted_;
    }
    bool is_aborted() const {
      const std::lock_guard lock(mutex_);
      return is_aborted_;
    }
    std::set<int> peers() const {
      const std::lock_guard lock(mutex_);
      std::set<int> peers;
      for (const auto& [buffer, peer] : buffers_) peers.insert(peer);
      return peers;
    }
    void remove(gloo::transport::UnboundBuffer* buffer) {
      const std::lock_guard lock(mutex_);
      buffers_.erase(buffer);
    }
    void abort() {
      const std::lock_guard lock(mutex_);
      is_aborted_ = true;
      for (const auto& [buffer, of] : buffers_) wake(*buffer);
    }
    /// Those for `peer` look again whether their message is there.
    void wake(int peer) {
      const std::lock_guard lock(mutex_);
      for (const auto& [buffer, of] : buffers_)
        if (of == peer) wake(*buffer);
    }

   private:
    static void wake(gloo::transport::UnboundBuffer& buffer) {
      buffer.abortWaitRecv();
      buffer.abortWaitSend();
    }

    mutable std::mutex mutex_;
    std::map<gloo::transport::UnboundBuffer*, int> buffers_;
    bool is_aborted_ = false;
  };

  class Message final : public Pending {
   public:
    Message(std::shared_ptr<Waits> waits, std::unique_ptr<gloo::transport::UnboundBuffer> buffer, int peer, bool is_send)
        : waits_(std::move(waits)), buffer_(std::move(buffer)), is_send_(is_send), is_open_(waits_->add(buffer_.get(), peer)) {}
    ~Message() override { waits_->remove(buffer_.get()); }
    gloo::transport::UnboundBuffer& buffer() { return *buffer_; }
    void wait(Clock::time_point deadline) override {
      if (is_open_ && is_through(deadline)) return;
      if (!is_open_ || waits_->is_aborted()) throw TransportError(false, "the message was given up");
      // Woken because the peer has gone. The message may have come before that.
      bool is_there = false;
      try {
        is_there = is_through(Clock::now());
      } catch (const TransportError&) {
      }
      if (!is_there) throw TransportError(false, "its connection is closed");
    }

   private:
    /// False if the wait was woken.
    bool is_through(Clock::time_point deadline) {
      // Zero would mean no limit.
      const auto left =
          std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()), std::chrono::milliseconds(1));
      try {
        return is_send_ ? buffer_->waitSend(left) : buffer_->waitRecv(left);
      } catch (const std::exception& error) {
        throw TransportError(Clock::now() >= deadline, error.what());
      }
    }

    std::shared_ptr<Waits> waits_;
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer_;
    bool is_send_, is_open_;
  };

  template <typename Post>
  std::unique_ptr<Pending> start(int peer, void* data, std::size_t bytes, bool is_send, Post post) {
    try {
      auto message = std::make_unique<Message>(waits_, context_->createUnboundBuffer(data, bytes), peer, is_send);
      post(message->buffer());
      return message;
    } catch (const std::exception& error) {
      throw TransportError(false, error.what());
    }
  }

  static constexpr std::uint64_t kNoMessage = ~std::uint64_t{0};
  std::shared_ptr<Waits> waits_ = std::make_shared<Waits>();
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::mutex watch_mutex_;
  char never_ = 0;
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> watches_;  ///< per peer: receives a message that is never sent
};

class GlooWatch final : public LossWatch {
 public:
  explicit GlooWatch(const CommOptions& options) : transport_(options) {}
  ~GlooWatch() override { transport_.close(); }
  std::vector<int> gone() override { return transport_.gone(); }

 private:
  GlooTransport transport_;
};

std::unique_ptr<Transport> connect_gloo(const CommOptions& options) {
  const std::shared_ptr<SlowLink> link = link_of_this_process();
  auto transport = std::make_unique<GlooTransport>(options);
  return link != nullptr ? limit_bandwidth(std::move(transport), link) : std::move(transport);
}

}  // namespace

bool has_gloo() noexcept { return true; }

std::unique_ptr<Communicator> make_gloo_communicator(CommOptions options) {
  if (options.size == 1) return make_local_communicator(std::move(options));
  return make_peer_communicator("gloo", &connect_gloo, std::move(options));
}

std::unique_ptr<LossWatch> make_loss_watch(CommOptions options) {
  if (options.size == 1) return nullptr;
  options.group += "/watch";
  try {
    return std::make_unique<GlooWatch>(options);
  } catch (const TransportError& error) {
    fail(ErrorCode::kUnavailable, "[comm] {}", error.what());
  }
}

#else

bool has_gloo() noexcept { return false; }
std::unique_ptr<LossWatch> make_loss_watch(CommOptions) { return nullptr; }

std::unique_ptr<Communicator> make_gloo_communicator(CommOptions) {
  fail(ErrorCode::kUnavailable, "[comm] this build has no Gloo: install libgloo-dev (tools/setup.sh) and configure again");
}

#endif

}  // namespace prl::comm
