#include "weights/collective_channel.hpp"

#include <fmt/format.h>

#include <algorithm>
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
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/communicator.hpp"
#include "comm/store.hpp"
#include "weights/held_versions.hpp"
#include "weights/transfer.hpp"

namespace prl::weights {
namespace {

using std::chrono::milliseconds;

/// Transfers that run at one time; further engines wait for their turn.
constexpr std::size_t kMaxTransfers = 64;
/// A link over which so many versions in a row have not gone is closed: its engine has left, and it takes memory of the device.
constexpr std::int64_t kIdleVersions = 16;

/// Of a link: no other trainer has drawn it.
std::string draw_token() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

class Channel final : public CollectiveChannel {
 public:
  explicit Channel(CollectiveChannelOptions options)
      : options_(std::move(options)),
        files_(make_file_channel({.folder = options_.folder, .keep_versions = options_.keep_versions, .keep_interval = {}})),
        versions_(options_.keep_versions, options_.path.make_stream ? options_.path.make_stream() : nullptr) {}

  ~Channel() override {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
  }

  void publish(Publication publication) override {
    PRL_CHECK(publication.flat != nullptr, "a publication to engines over a group needs the values");
    open();
    versions_.hold(publication.manifest.version.value, publication.flat());
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
    std::shared_ptr<DeviceLink> link;           ///< over which the values go
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
      transfer.thread = std::jthread([this, &transfer, ticket, wanted = *wanted] {
        send(transfer, ticket, wanted);
        transfer.is_done = true;
      });
      ++ticket;
    }
    for (Transfer& transfer : transfers) {
      std::lock_guard lock(transfer.mutex);
      if (transfer.group != nullptr) transfer.group->abort("the trainer has ended");
      if (transfer.link != nullptr) transfer.link->abort("the trainer has ended");
    }
  }

  /// The link to the engine, new unless it has the one that was made for it. nullptr if the values must go through host memory.
  std::shared_ptr<DeviceLink> link_to(const Ask& ask) {
    if (!options_.path.make_stream || ask.device.empty() || ask.device == options_.path.device) return nullptr;
    std::vector<std::shared_ptr<DeviceLink>> former;  // closed after the lock is released
    const std::lock_guard lock(mutex_);
    for (auto it = links_.begin(); it != links_.end();) {
      if (it->first == ask.engine || it->second.version + kIdleVersions > ask.version) {
        ++it;
        continue;
      }
      it->second.link->abort("its engine has asked for no version for long");
      former.push_back(std::move(it->second.link));
      it = links_.erase(it);
    }
    if (links_.size() >= options_.max_links && !links_.contains(ask.engine)) {
      if (!std::exchange(is_limit_told_, true))
        log::warning(
            "{} engines have links to this trainer's device, which is the most that are kept: engine {} and further ones get their "
            "weights through host memory",
            links_.size(), ask.engine);
      return nullptr;
    }
    auto& [link, version] = links_[ask.engine];
    version = std::max(version, ask.version);
    if (link == nullptr || link->token() != ask.link) former.push_back(std::exchange(link, std::make_shared<DeviceLink>(draw_token())));
    return link;
  }
  void forget(const std::string& engine, const std::shared_ptr<DeviceLink>& link) {
    const std::lock_guard lock(mutex_);
    if (const auto found = links_.find(engine); found != links_.end() && found->second.link == link) links_.erase(found);
  }

  void send(Transfer& transfer, std::int64_t ticket, const std::string& wanted) noexcept {
    std::string version = "?";
    try {
      const Ask ask = Ask::parse(wanted);
      version = std::to_string(ask.version);
      const std::shared_ptr<const HeldVersions::Held> held = versions_.find(ask.version);
      const std::shared_ptr<DeviceLink> link = held != nullptr && held->is_on_device ? link_to(ask) : nullptr;
      Offer offer{.has_version = held != nullptr, .newest = versions_.newest()};
      if (held != nullptr) {
        offer.dtype = held->values.dtype();
        offer.num_values = held->values.num_elements();
      }
      if (link != nullptr) offer.link = link->token();
      const std::shared_ptr<comm::Store> store = make_store();
      auto made = comm::make_gloo_communicator({.rank = 0,
                                                .size = 2,
                                                .store = store,
                                                .group = group_name(ticket),
                                                .timeout = options_.join_timeout,
                                                .host = bind_host(options_.host)});
      comm::Communicator& group = *made;
      {
        std::lock_guard lock(transfer.mutex);
        transfer.group = std::move(made);
        transfer.link = link;
      }
      group.gather_bytes(offer.to_text(), {.what = "what follows"});
      if (held == nullptr) return;
      if (link != nullptr)
        send_over(link, ask.engine, store, held->values);
      else
        broadcast_values(group, held->is_on_device ? in_host_memory(held->values, *options_.path.make_stream()) : held->values,
                         options_.timeout);
      group.barrier({.what = "the engine to have all weights", .timeout = options_.timeout});
    } catch (const std::exception& error) {
      // The engine is told by its own end, and asks anew when it is brought up.
      log::warning("a transfer of policy v{} to an engine ended early: {}", version, error.what());
    }
  }
  void send_over(const std::shared_ptr<DeviceLink>& link, const std::string& engine, const std::shared_ptr<comm::Store>& store,
                 const Tensor& values) {
    try {
      link->open(options_.path, 0, store, options_.join_timeout);
      link->copy(values, options_.timeout);
    } catch (...) {
      forget(engine, link);
      throw;
    }
  }

  CollectiveChannelOptions options_;
  std::shared_ptr<WeightChannel> files_;
  std::unique_ptr<comm::StoreServer> server_;  ///< once it serves; never changes then
  HeldVersions versions_;
  std::mutex mutex_;
  struct Linked {
    std::shared_ptr<DeviceLink> link;
    std::int64_t version = 0;  ///< the newest that went over it
  };
  std::map<std::string, Linked> links_;  ///< by engine
  bool is_limit_told_ = false;
  std::jthread thread_;
};

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

}  // namespace prl::weights
