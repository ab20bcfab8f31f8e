#include "weights/weight_server.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <random>
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

}  // namespace

struct WeightServer::Impl {
  explicit Impl(WeightServerOptions given)
      : options(std::move(given)), versions(options.keep_versions, options.path.make_stream ? options.path.make_stream() : nullptr) {}
  ~Impl() {
    thread.request_stop();
    if (thread.joinable()) thread.join();
  }

  /// One engine that is served.
  struct Transfer {
    std::mutex mutex;
    std::unique_ptr<comm::Communicator> group;  ///< once both have met
    std::shared_ptr<DeviceLink> link;           ///< over which the values go
    std::atomic<bool> is_done{false};
    std::jthread thread;  ///< last: it uses the others
    void close() {
      std::unique_ptr<comm::Communicator> closing;
      const std::lock_guard lock(mutex);
      closing.swap(group);
    }
  };

  /// A ticket that was drawn, behind which nothing is yet.
  struct Drawn {
    std::int64_t ticket = 0;
    std::chrono::steady_clock::time_point since;
  };

  /// The next ticket that something is behind. An engine may die between the two: others do not wait for its ticket.
  std::optional<std::pair<std::int64_t, std::string>> next_ticket(comm::Store& store, std::int64_t& num_seen,
                                                                  std::list<Drawn>& drawn) const {
    const auto now = std::chrono::steady_clock::now();
    for (auto it = drawn.begin(); it != drawn.end();) {
      const std::int64_t ticket = it->ticket;
      const std::optional<std::string> wanted = store.get(ticket_key(ticket));
      it = wanted || now - it->since > options.join_timeout ? drawn.erase(it) : std::next(it);
      if (wanted) return std::pair(ticket, *wanted);
    }
    for (const std::int64_t num = num_tickets(store.get(kNextTicket)).value_or(num_seen); num_seen < num;) {
      const std::int64_t ticket = num_seen++;
      if (const std::optional<std::string> wanted = store.get(ticket_key(ticket))) return std::pair(ticket, *wanted);
      drawn.push_back({ticket, now});
    }
    return std::nullopt;
  }

  /// Looks for tickets, and has a thread of its own serve each.
  void serve(std::stop_token stop, comm::Store& store) {
    std::list<Transfer> transfers;
    std::list<Drawn> drawn;
    std::int64_t num_seen = 0;
    while (!stop.stop_requested()) {
      transfers.remove_if([](const Transfer& transfer) { return transfer.is_done.load(); });
      const auto next = transfers.size() < kMaxTransfers ? next_ticket(store, num_seen, drawn) : std::nullopt;
      if (!next) {
        std::this_thread::sleep_for(options.poll);
        continue;
      }
      Transfer& transfer = transfers.emplace_back();
      transfer.thread = std::jthread([this, &transfer, ticket = next->first, wanted = next->second] {
        send(transfer, ticket, wanted);
        transfer.close();  // which waits for the engine to do so too, a little: here, so that others are served meanwhile
        transfer.is_done = true;
      });
    }
    for (Transfer& transfer : transfers) {
      std::lock_guard lock(transfer.mutex);
      if (transfer.group != nullptr) transfer.group->abort("the trainer has ended");
      if (transfer.link != nullptr) transfer.link->abort("the trainer has ended");
    }
  }

  /// The link to the engine, new unless it has the one that was made for it. nullptr if the values must go through host memory.
  std::shared_ptr<DeviceLink> link_to(const Ask& ask) {
    if (!options.path.make_stream || ask.device.empty() || ask.device == options.path.device) return nullptr;
    std::vector<std::shared_ptr<DeviceLink>> former;  // closed after the lock is released
    const std::lock_guard lock(mutex);
    for (auto it = links.begin(); it != links.end();) {
      if (it->first == ask.engine || it->second.version + kIdleVersions > ask.version) {
        ++it;
        continue;
      }
      it->second.link->abort("its engine has asked for no version for long");
      former.push_back(std::move(it->second.link));
      it = links.erase(it);
    }
    if (links.size() >= options.max_links && !links.contains(ask.engine)) {
      if (!std::exchange(is_limit_told, true))
        log::warning(
            "{} engines have links to this trainer's device, which is the most that are kept: engine {} and further ones get their "
            "weights through host memory",
            links.size(), ask.engine);
      return nullptr;
    }
    auto& [link, version] = links[ask.engine];
    version = std::max(version, ask.version);
    if (link == nullptr || link->token() != ask.link) former.push_back(std::exchange(link, std::make_shared<DeviceLink>(draw_token())));
    return link;
  }
  void forget(const std::string& engine, const std::shared_ptr<DeviceLink>& link) {
    const std::lock_guard lock(mutex);
    if (const auto found = links.find(engine); found != links.end() && found->second.link == link) links.erase(found);
  }

  /// What is held of the policy that an engine asks for, and its newest version.
  struct Found {
    std::shared_ptr<const HeldVersions::Held> held;
    std::int64_t newest = -1;
  };
  Found find(const Ask& ask) {
    std::shared_ptr<HeldVersions> named;
    if (const std::lock_guard lock(mutex); !ask.adapter.empty())
      for (const Policy& policy : policies)
        if (policy.name == ask.adapter) named = policy.versions;
    const HeldVersions& of = named != nullptr ? *named : versions;
    return {of.find(ask.version), of.newest()};
  }

  std::shared_ptr<HeldVersions> add(const std::string& name, std::int64_t num_kept) {
    const std::lock_guard lock(mutex);
    std::erase_if(policies, [&](const Policy& policy) { return policy.name == name; });
    const auto is_past = [](const Policy& policy) { return policy.versions.use_count() == 1; };
    for (auto num_past = std::ranges::count_if(policies, is_past); num_past > static_cast<std::ptrdiff_t>(kMaxPastPolicies); --num_past)
      policies.erase(std::ranges::find_if(policies, is_past));
    return policies.emplace_back(Policy{name, std::make_shared<HeldVersions>(num_kept, nullptr)}).versions;
  }

  static Offer offer_to(const Ask& ask, const HeldVersions::Held* held, const DeviceLink* link, std::int64_t newest) {
    Offer offer{.has_version = held != nullptr, .newest = newest};
    if (held == nullptr) return offer;
    offer.dtype = held->values.dtype();
    offer.num_values = held->num_all;
    offer.is_adapter = held->is_adapter;
    if (link != nullptr) offer.link = link->token();
    if (!ask.ranges.empty()) {
      if (contains(held->ranges, ask.ranges)) offer.ranges = ask.ranges;
      return offer;
    }
    offer.ranges = held->others.empty() ? held->ranges : without(held->num_all, held->others);
    offer.others = held->others;
    return offer;
  }

  void send_through_host(comm::Communicator& group, const HeldVersions::Held& held, const ValueRanges& ranges) {
    std::vector<Tensor> pieces = pieces_of(held.values, held.ranges, ranges);
    if (held.is_on_device)
      for (const std::shared_ptr<DeviceRuntime> stream = options.path.make_stream(); Tensor & piece : pieces)
        piece = in_host_memory(piece, *stream);
    broadcast_values(group, pieces, options.timeout);
  }

  void send(Transfer& transfer, std::int64_t ticket, const std::string& wanted) noexcept {
    std::string version = "?";
    try {
      const Ask ask = Ask::parse(wanted);
      version = std::to_string(ask.version);
      const auto [held, newest] = find(ask);
      const std::shared_ptr<DeviceLink> link = held != nullptr && held->is_on_device && !held->is_adapter ? link_to(ask) : nullptr;
      const Offer offer = offer_to(ask, held.get(), link.get(), newest);
      const std::shared_ptr<comm::Store> store = make_store();
      auto made = comm::make_gloo_communicator({.rank = 0,
                                                .size = 2,
                                                .store = store,
                                                .group = group_name(ticket),
                                                .timeout = options.join_timeout,
                                                .host = bind_host(options.host),
                                                .connect_timeout = kConnectTimeout});
      comm::Communicator& group = *made;
      {
        std::lock_guard lock(transfer.mutex);
        transfer.group = std::move(made);
        transfer.link = link;
      }
      group.gather_bytes(offer.to_text(), {.what = "what follows"});
      // Whoever asked for nothing in particular waits for the end even where all values come from others.
      if (offer.ranges.empty() && (!offer.has_version || !ask.ranges.empty())) return;
      if (link != nullptr)
        send_over(link, ask.engine, store, pieces_of(held->values, held->ranges, offer.ranges));
      else
        send_through_host(group, *held, offer.ranges);
      group.barrier({.what = "the engine to have all weights", .timeout = options.timeout});
    } catch (const std::exception& error) {
      // The engine is told by its own end, and asks anew when it is brought up.
      log::warning("a transfer of policy v{} to an engine ended early: {}", version, error.what());
    }
  }
  void send_over(const std::shared_ptr<DeviceLink>& link, const std::string& engine, const std::shared_ptr<comm::Store>& store,
                 const std::vector<Tensor>& pieces) {
    try {
      link->open(options.path, 0, store, options.join_timeout);
      link->copy(pieces, options.timeout);
    } catch (...) {
      forget(engine, link);
      throw;
    }
  }

  /// Begins to serve, if it does not yet.
  void open() {
    const std::lock_guard lock(mutex);
    if (server != nullptr) return;
    try {
      server = std::make_unique<comm::StoreServer>(bind_host(options.host), options.port);
    } catch (const Error& error) {
      throw error.with_context("weight_broadcast.port");
    }
    thread = std::jthread([this, store = make_store()](std::stop_token stop) { serve(stop, *store); });
  }
  std::shared_ptr<comm::Store> make_store() const { return comm::make_tcp_store(bind_host(options.host), server->port(), kStoreTimeout); }

  const WeightServerOptions options;
  std::unique_ptr<comm::StoreServer> server;  ///< once it serves; never changes then
  HeldVersions versions;
  std::mutex mutex;
  /// One of several, whose versions engines ask for by its name.
  struct Policy {
    std::string name;
    std::shared_ptr<HeldVersions> versions;
  };
  std::vector<Policy> policies;  ///< the oldest first
  struct Linked {
    std::shared_ptr<DeviceLink> link;
    std::int64_t version = 0;  ///< the newest that went over it
  };
  std::map<std::string, Linked> links;  ///< by engine
  bool is_limit_told = false;
  std::jthread thread;
};

WeightServer::WeightServer(WeightServerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
WeightServer::~WeightServer() = default;

std::string WeightServer::address() {
  impl_->open();
  return fmt::format("tcp://{}:{}", bind_host(impl_->options.host), impl_->server->port());
}

HeldVersions& WeightServer::versions() {
  impl_->open();
  return impl_->versions;
}

std::shared_ptr<HeldVersions> WeightServer::versions_of(const std::string& name, std::int64_t num_kept) {
  PRL_CHECK(!name.empty(), "one of several policies has no name");
  impl_->open();
  return impl_->add(name, num_kept);
}

void WeightServer::wait_until_released(std::stop_token stop) {
  {
    const std::lock_guard lock(impl_->mutex);
    if (impl_->server == nullptr) return;  // nobody was told to ask here
  }
  Waiting waiting({.who = "the trainer", .what = "the orchestrator to need its weights no more", .limit = impl_->options.timeout});
  const auto store = impl_->make_store();
  while (!stop.stop_requested() && !store->get(kReleased) && !waiting.is_expired()) {
    waiting.check();
    std::this_thread::sleep_for(milliseconds(20));
  }
}

}  // namespace prl::weights
