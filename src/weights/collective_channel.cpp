#include "weights/collective_channel.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/communicator.hpp"
#include "comm/store.hpp"

namespace prl::weights {
namespace {

using std::chrono::milliseconds;

constexpr const char* kNextTicket = "weights/next";
constexpr const char* kReleased = "weights/released";
constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;
constexpr milliseconds kStoreTimeout{10'000};
/// For an engine that has drawn a ticket to join its group: it has nothing else to do.
constexpr milliseconds kJoinTimeout{30'000};
/// A trainer whose rank 0 was lost computes the newest version again, to the same bits, before it has it.
constexpr milliseconds kNotYetTimeout{120'000}, kNotYetPoll{100};
/// Between two attempts to reach a trainer that fails at once.
constexpr milliseconds kAbsentPoll{1000};
/// Transfers that run at one time; further engines wait for their turn.
constexpr std::size_t kMaxTransfers = 64;

std::string ticket_key(std::int64_t ticket) { return fmt::format("weights/ticket/{}", ticket); }
std::string group_name(std::int64_t ticket) { return fmt::format("weights-{}", ticket); }

bool is_loopback(const std::string& host) { return host == "localhost" || host == "127.0.0.1" || host == "::1"; }
std::string bind_host(const std::string& host) { return host == "localhost" ? "127.0.0.1" : host; }

/// Where the trainer reaches this process, if it is not on the same machine.
std::string own_host(const std::string& address) {
  const std::string rest = address.substr(address.find("://") + 3);
  if (is_loopback(rest.substr(0, rest.rfind(':')))) return "127.0.0.1";
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0)
    fail(ErrorCode::kIo,
         "this machine's name is not known, so the trainer "
         "cannot be told where it is");
  return name.data();
}

/// What the trainer says before the tensors.
struct Header {
  std::int64_t has_version = 0, newest = 0, dtype = 0, num_values = 0;
};

std::array<std::int64_t, 4> pack(const Header& header) { return {header.has_version, header.newest, header.dtype, header.num_values}; }

void broadcast_header(comm::Communicator& group, std::array<std::int64_t, 4>& values) {
  const auto runtime = make_cpu_runtime();
  const Tensor tensor = Tensor::empty(runtime, {4}, DType::kI64);
  std::copy(values.begin(), values.end(), tensor.as<std::int64_t>());
  group.broadcast(tensor.view(), 0, {.what = "what follows"});
  std::copy_n(tensor.as<std::int64_t>(), 4, values.begin());
}

/// Like at both ends.
void broadcast_values(comm::Communicator& group, const Tensor& values, milliseconds timeout) {
  const std::int64_t chunk = kChunkBytes / static_cast<std::int64_t>(size_of(values.dtype()));
  for (std::int64_t begin = 0; begin < values.num_elements(); begin += chunk)
    group.broadcast(values.slice(begin, std::min(chunk, values.num_elements() - begin)).view(), 0, {.what = "weights", .timeout = timeout});
}

class Channel final : public CollectiveChannel {
 public:
  explicit Channel(CollectiveChannelOptions options)
      : options_(std::move(options)),
        files_(make_file_channel({.folder = options_.folder, .keep_versions = options_.keep_versions, .keep_interval = {}})) {}

  ~Channel() override {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
  }

  void publish(Publication publication) override {
    PRL_CHECK(publication.flat != nullptr, "a publication to engines over a group needs the values");
    open();
    const PolicyVersion version = publication.manifest.version;
    const Tensor values = publication.flat();
    {
      std::lock_guard lock(mutex_);
      held_[version.value] = values;
      while (static_cast<std::int64_t>(held_.size()) > options_.keep_versions) held_.erase(held_.begin());
    }
    publication.save = [](const std::filesystem::path& folder) { std::filesystem::create_directories(folder); };
    files_->publish(std::move(publication));
  }
  std::optional<PublishedWeights> latest() override { return files_->latest(); }
  std::shared_ptr<VersionFeed> follow() override { return files_->follow(); }
  std::string describe() const override { return "weights from " + broadcast_address(options_.host, options_.port); }
  void wait_until_released(std::stop_token stop) override {
    {
      std::lock_guard lock(mutex_);
      if (server_ == nullptr) return;  // nobody was told to ask here
    }
    Waiting waiting({.who = "the trainer", .what = "the orchestrator to need its weights no more", .limit = options_.timeout});
    const auto store = make_store();
    while (!stop.stop_requested() && !store->get(kReleased) && !waiting.is_expired()) {
      waiting.check();
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
  std::string address() override {
    open();
    return broadcast_address(options_.host, server_->port());
  }

 private:
  /// Begins to serve, if it does not yet.
  void open() {
    std::lock_guard lock(mutex_);
    if (server_ != nullptr) return;
    server_ = std::make_unique<comm::StoreServer>(bind_host(options_.host), options_.port);
    thread_ = std::jthread([this, store = make_store()](std::stop_token stop) { serve(stop, *store); });
  }
  std::shared_ptr<comm::Store> make_store() const { return comm::make_tcp_store(bind_host(options_.host), server_->port(), kStoreTimeout); }

  /// One engine that is served.
  struct Transfer {
    std::mutex mutex;
    std::unique_ptr<comm::Communicator> group;  ///< once both have met
    std::atomic<bool> is_done{false};
    std::jthread thread;  ///< last: it uses the others
  };

  /// Looks for tickets, and has a thread of its own serve each.
  void serve(std::stop_token stop, comm::Store& store) {
    std::list<Transfer> transfers;
    std::int64_t ticket = 0;
    while (!stop.stop_requested()) {
      transfers.remove_if([](const Transfer& transfer) { return transfer.is_done.load(); });
      const std::optional<std::string> wanted = transfers.size() < kMaxTransfers ? store.get(ticket_key(ticket)) : std::nullopt;
      if (!wanted) {
        std::this_thread::sleep_for(options_.poll);
        continue;
      }
      Transfer& transfer = transfers.emplace_back();
      transfer.thread = std::jthread([this, &transfer, ticket, version = std::stoll(*wanted)] {
        send(transfer, ticket, version);
        transfer.is_done = true;
      });
      ++ticket;
    }
    for (Transfer& transfer : transfers) {
      std::lock_guard lock(transfer.mutex);
      if (transfer.group != nullptr) transfer.group->abort("the trainer has ended");
    }
  }

  void send(Transfer& transfer, std::int64_t ticket, std::int64_t version) noexcept {
    try {
      Tensor values;
      Header header;
      {
        std::lock_guard lock(mutex_);
        if (const auto it = held_.find(version); it != held_.end()) values = it->second;
        header.newest = held_.empty() ? -1 : held_.rbegin()->first;
      }
      header.has_version = values.defined() ? 1 : 0;
      header.dtype = values.defined() ? static_cast<std::int64_t>(values.dtype()) : 0;
      header.num_values = values.defined() ? values.num_elements() : 0;
      auto made = comm::make_gloo_communicator({.rank = 0,
                                                .size = 2,
                                                .store = make_store(),
                                                .group = group_name(ticket),
                                                .timeout = kJoinTimeout,
                                                .host = bind_host(options_.host)});
      comm::Communicator& group = *made;
      {
        std::lock_guard lock(transfer.mutex);
        transfer.group = std::move(made);
      }
      std::array<std::int64_t, 4> packed = pack(header);
      broadcast_header(group, packed);
      if (!values.defined()) return;
      broadcast_values(group, values, options_.timeout);
      group.barrier({.what = "the engine to have all weights", .timeout = options_.timeout});
    } catch (const std::exception& error) {
      // The engine is told by its own end, and asks anew when it is brought up.
      log::warning("a transfer of policy v{} to an engine ended early: {}", version, error.what());
    }
  }

  CollectiveChannelOptions options_;
  std::shared_ptr<WeightChannel> files_;
  std::unique_ptr<comm::StoreServer> server_;  ///< once it serves; never changes then
  std::mutex mutex_;
  std::map<std::int64_t, Tensor> held_;
  std::jthread thread_;
};

/// The next ticket; each is drawn once.
std::int64_t draw_ticket(comm::Store& store) {
  // Tells this draw from one of another process that happens to draw the same
  // number.
  const std::string mark = fmt::format("{:016x}", std::random_device()() * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(::getpid()));
  for (;;) {
    const std::optional<std::string> now = store.get(kNextTicket);
    const std::int64_t ticket = now ? std::stoll(*now) : 0;
    const std::string next = fmt::format("{} {}", ticket + 1, mark);
    if (store.compare_and_set(kNextTicket, now, next) == next) return ticket;
  }
}

/// nullopt if the trainer does not hold the version; then the newest that it has, or why the trainer did not come to the group: one that
/// was lost took the ticket with it, and whoever takes its place at the same address does not know of it.
std::optional<Tensor> ask(const std::string& address, PolicyVersion version, DType dtype, std::int64_t num_values, milliseconds timeout,
                          milliseconds patience, std::int64_t& newest, std::string& absence) {
  const auto store = comm::make_store(address, std::min(timeout, kStoreTimeout));
  const std::string host = own_host(address);
  std::unique_ptr<comm::Communicator> group;
  std::array<std::int64_t, 4> packed{};
  absence.clear();
  try {
    const std::int64_t ticket = draw_ticket(*store);
    store->set(ticket_key(ticket), std::to_string(version.value));
    group = comm::make_gloo_communicator(
        {.rank = 1, .size = 2, .store = store, .group = group_name(ticket), .timeout = std::min(timeout, patience), .host = host});
    broadcast_header(*group, packed);
  } catch (const Error& error) {
    absence = error.what();
    return std::nullopt;
  }
  const auto [has_version, newest_held, sent_dtype, sent_values] = packed;
  newest = newest_held;
  if (has_version == 0) return std::nullopt;
  if (sent_dtype != static_cast<std::int64_t>(dtype) || sent_values != num_values)
    fail(ErrorCode::kShape,
         "the trainer at {} sends {} values of {}, this engine's model has {} "
         "of {}",
         address, sent_values, to_string(static_cast<DType>(sent_dtype)), num_values, to_string(dtype));
  Tensor values = Tensor::empty(make_cpu_runtime(), {num_values}, dtype);
  broadcast_values(*group, values, timeout);
  group->barrier({.what = "the engine to have all weights", .timeout = timeout});
  return values;
}

}  // namespace

std::string broadcast_address(const std::string& host, int port) { return fmt::format("tcp://{}:{}", bind_host(host), port); }

std::shared_ptr<CollectiveChannel> make_collective_channel(CollectiveChannelOptions options) {
  if (!comm::has_gloo())
    fail(ErrorCode::kUnavailable,
         "weight_broadcast.type = \"nccl\" needs a "
         "build with Gloo (libgloo-dev)");
  return std::make_shared<Channel>(std::move(options));
}

void release_weights(const std::string& address) noexcept {
  try {
    comm::make_store(address, milliseconds(1000))->set(kReleased, "1");
  } catch (const std::exception& error) {
    log::debug("the trainer at {} is not there any more: {}", address, error.what());
  }
}

Tensor receive_weights(const std::string& address, PolicyVersion version, DType dtype, std::int64_t num_values, milliseconds timeout,
                       milliseconds patience) {
  Waiting waiting({.who = "the engine",
                   .what = fmt::format("the trainer at {} to have policy v{} again", address, version.value),
                   .limit = std::min(timeout, kNotYetTimeout)});
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (;;) {
    std::int64_t newest = 0;
    std::string absence;
    if (std::optional<Tensor> values = ask(address, version, dtype, num_values, timeout, patience, newest, absence))
      return std::move(*values);
    if (!absence.empty()) {
      if (std::chrono::steady_clock::now() >= deadline)
        fail(ErrorCode::kUnavailable, "the trainer at {} does not send policy v{}: {}", address, version.value, absence);
      log::warning("the trainer at {} did not come to send policy v{} and is asked again: {}", address, version.value, absence);
    } else if (newest > version.value || waiting.is_expired()) {
      fail(ErrorCode::kNotFound, "the trainer at {} has no policy v{} {}; its newest is v{}", address, version.value,
           newest > version.value ? "any more" : "yet", newest);
    }
    waiting.check();
    std::this_thread::sleep_for(absence.empty() ? kNotYetPoll : kAbsentPoll);
  }
}

}  // namespace prl::weights
