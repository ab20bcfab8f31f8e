#include "weights/weight_receiver.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/hosts.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/store.hpp"

namespace prl::weights {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

/// A trainer whose rank 0 was lost computes the newest version again, to the same bits, before it has it.
constexpr milliseconds kNotYetTimeout{120'000}, kNotYetPoll{100};
constexpr int kMaxFailedLinks = 2;
/// A rank beside the first has served before it is named, and what it does not send is asked of the first.
constexpr milliseconds kPartStoreTimeout{2'000};
/// Between two attempts to reach a trainer that fails at once.
constexpr milliseconds kAbsentPoll{1000};

/// Where the trainer reaches this process, if it is not on the same machine.
std::string own_host(const std::string& address) {
  const std::string rest = address.substr(address.find("://") + 3);
  if (is_loopback(rest.substr(0, rest.rfind(':')))) return "127.0.0.1";
  return own_machine();
}

/// The next ticket; each is drawn once.
std::int64_t draw_ticket(comm::Store& store) {
  // Tells this draw from one of another process that happens to draw the same number.
  const std::string mark = fmt::format("{:016x}", std::random_device()() * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(::getpid()));
  for (;;) {
    const std::optional<std::string> now = store.get(kNextTicket);
    const std::optional<std::int64_t> ticket = num_tickets(now);
    if (!ticket)
      fail(ErrorCode::kCorrupt, "[weights] key '{}' of the trainer's store: wanted a number, found '{}'", kNextTicket, now->substr(0, 64));
    const std::string next = fmt::format("{} {}", *ticket + 1, mark);
    if (store.compare_and_set(kNextTicket, now, next) == next) return *ticket;
  }
}

double milliseconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

/// Pieces on a device get what came through host memory.
void receive_in_host_memory(comm::Communicator& group, const std::vector<Tensor>& pieces, milliseconds timeout) {
  std::vector<Tensor> host;
  for (const Tensor& piece : pieces) {
    const bool is_here = piece.runtime()->device().kind == DeviceKind::kCpu;
    host.push_back(is_here ? piece : Tensor::empty(make_cpu_runtime(), piece.shape(), piece.dtype()));
  }
  broadcast_values(group, host, timeout);
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (host[i].data() != pieces[i].data()) pieces[i].runtime()->copy_from_host(pieces[i].data(), host[i].data(), pieces[i].num_bytes());
}

}  // namespace

struct WeightReceiver::Wanted {
  std::string address;
  PolicyVersion version;
  Acceptable acceptable;
  milliseconds timeout;
  ValueRanges ranges = {};  ///< none: what is sent unasked
  bool may_link = true;     ///< they may come from device to device
};

/// Trainer and engine in a group of two.
struct WeightReceiver::Met {
  std::shared_ptr<comm::Store> store;
  std::unique_ptr<comm::Communicator> group;
  Offer offer;
  std::string absence;  ///< why the trainer did not come to the group: one that was lost took the ticket with it
  Clock::time_point since = Clock::now();
  bool has_version() const { return absence.empty() && offer.has_version; }
};

void WeightReceiver::open_link(const std::string& token, const std::shared_ptr<comm::Store>& store, Sender& sender) const {
  if (sender.link != nullptr && sender.link->token() == token) return;
  sender.link.reset();
  auto link = std::make_unique<DeviceLink>(token);
  link->open(options_.path, 1, store, options_.join_timeout);
  sender.link = std::move(link);
}

WeightReceiver::Met WeightReceiver::meet(const Wanted& wanted, Sender& sender) const {
  Met met;
  met.store = comm::make_store(wanted.address, std::min(wanted.timeout, wanted.ranges.empty() ? kStoreTimeout : kPartStoreTimeout));
  const bool may_link = wanted.may_link && sender.may_link && options_.path.make_stream;
  try {
    const std::int64_t ticket = draw_ticket(*met.store);
    const Ask ask{.version = wanted.version.value,
                  .engine = options_.engine,
                  .device = may_link ? options_.path.device : "",
                  .link = sender.link != nullptr ? sender.link->token() : "",
                  .ranges = wanted.ranges,
                  .adapter = wanted.acceptable.adapter};
    met.store->set(ticket_key(ticket), ask.to_text());
    met.group = comm::make_gloo_communicator({.rank = 1,
                                              .size = 2,
                                              .store = met.store,
                                              .group = group_name(ticket),
                                              .timeout = std::min(wanted.timeout, options_.patience),
                                              .host = own_host(wanted.address),
                                              .connect_timeout = kConnectTimeout});
    met.offer = Offer::parse(met.group->gather_bytes("", {.what = "what follows"}).front());
  } catch (const Error& error) {
    met.absence = error.what();
    return met;
  }
  if (met.offer.has_version) check_offer(met.offer, wanted);
  return met;
}

void WeightReceiver::check_offer(const Offer& offer, const Wanted& wanted) {
  const Acceptable& fits = wanted.acceptable;
  if (offer.is_adapter) {
    const bool is_whole = offer.link.empty() && offer.others.empty() && offer.ranges == ValueRanges{{0, offer.num_values}};
    if (offer.dtype != DType::kU8 || offer.num_values > fits.max_adapter_bytes || !is_whole)
      fail(ErrorCode::kShape, "the trainer at {} sends an adapter of {} values of {}, this engine takes one of at most {} bytes",
           wanted.address, offer.num_values, to_string(offer.dtype), fits.max_adapter_bytes);
  } else if (!fits.adapter.empty()) {
    fail(ErrorCode::kShape, "the trainer at {} sends a whole model, wanted adapter '{}': it trains none", wanted.address, fits.adapter);
  } else if (offer.dtype != fits.dtype || offer.num_values != fits.num_values) {
    fail(ErrorCode::kShape, "the trainer at {} sends {} values of {}, this engine's model has {} of {}", wanted.address, offer.num_values,
         to_string(offer.dtype), fits.num_values, to_string(fits.dtype));
  }
}

bool WeightReceiver::take(Met& met, Sender& sender, const Tensor& values, const Wanted& wanted, std::string& reason) const {
  const auto met_at = Clock::now();
  const bool is_linked = !met.offer.link.empty();
  if (is_linked) {
    try {
      open_link(met.offer.link, met.store, sender);
    } catch (const Error& error) {
      // The trainer may have been lost, so one more link is tried.
      if (++sender.num_failed_links >= kMaxFailedLinks) {
        log::warning("weights come through host memory from now on: the link to the trainer's device failed {} times",
                     sender.num_failed_links);
        sender.may_link = false;
      }
      reason = std::string("no link to the trainer's device: ") + error.what();
      return false;
    }
  }
  const auto opened = Clock::now();
  const std::vector<Tensor> pieces = pieces_of(values, {{0, values.num_elements()}}, met.offer.ranges);
  if (is_linked) {
    try {
      sender.link->copy(pieces, wanted.timeout);
      sender.num_failed_links = 0;
    } catch (...) {
      sender.link.reset();
      throw;
    }
  } else {
    receive_in_host_memory(*met.group, pieces, wanted.timeout);
  }
  met.group->barrier({.what = "the engine to have all weights", .timeout = wanted.timeout});
  log::debug("policy v{}: met the trainer in {:.1f} ms, {} in {:.1f} ms, {:.3f} GB in {:.1f} ms", wanted.version.value,
             milliseconds_between(met.since, met_at), is_linked ? "linked the devices" : "host memory",
             milliseconds_between(met_at, opened),
             1e-9 * static_cast<double>(num_values(met.offer.ranges)) * static_cast<double>(size_of(values.dtype())),
             milliseconds_between(opened, Clock::now()));
  return true;
}

void WeightReceiver::fetch(const Share& share, Wanted wanted, Sender& sender, const Tensor& values) const {
  wanted.address = share.address;
  wanted.ranges = share.ranges;
  wanted.may_link = values.runtime() == options_.memory;
  Waiting waiting({.who = "the engine",
                   .what = fmt::format("the trainer's rank at {} to have its part of policy v{}", share.address, wanted.version.value),
                   .limit = std::min(wanted.timeout, kNotYetTimeout)});
  for (;;) {
    Met met = meet(wanted, sender);
    std::string reason = met.absence;
    if (met.has_version() && met.offer.ranges == share.ranges && take(met, sender, values, wanted, reason)) return;
    const bool may_come =
        met.absence.empty() && (met.offer.has_version ? !met.offer.ranges.empty() : met.offer.newest < wanted.version.value);
    if (!may_come || waiting.is_expired())
      fail(ErrorCode::kUnavailable, "the trainer's rank at {} does not send its part of policy v{}: {}", share.address,
           wanted.version.value, reason.empty() ? "it does not hold it" : reason);
    met.group.reset();
    waiting.check();
    std::this_thread::sleep_for(kNotYetPoll);
  }
}

Tensor WeightReceiver::make_room(const Met& met) const {
  const Tensor values =
      Tensor::empty(met.offer.link.empty() ? make_cpu_runtime() : options_.memory, {met.offer.num_values}, met.offer.dtype);
  values.runtime()->synchronize();  // the memory is this stream's from now on, and the path's is another
  return values;
}

void WeightReceiver::forget_former_senders(const std::string& address, const std::vector<Share>& others) {
  std::erase_if(senders_, [&](const auto& entry) {
    return entry.first != address && std::ranges::none_of(others, [&](const Share& share) { return share.address == entry.first; });
  });
}

Tensor WeightReceiver::receive(const std::string& address, PolicyVersion version, DType dtype, std::int64_t num_values,
                               milliseconds timeout) {
  return receive(address, version, Acceptable{.dtype = dtype, .num_values = num_values}, timeout).values;
}

Received WeightReceiver::receive(const std::string& address, PolicyVersion version, const Acceptable& acceptable, milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  Waiting waiting({.who = "the engine",
                   .what = fmt::format("the trainer at {} to have policy v{} again", address, version.value),
                   .limit = std::min(timeout, kNotYetTimeout)});
  const auto deadline = Clock::now() + timeout;
  const Wanted wanted{address, version, acceptable, timeout};
  for (;;) {
    Sender& first = senders_[address];
    Met met = meet(wanted, first);
    std::string absence = met.absence;
    if (met.has_version()) {
      const Tensor values = make_room(met);
      forget_former_senders(address, met.offer.others);
      std::vector<std::future<void>> parts;
      for (const Share& share : met.offer.others)
        parts.push_back(std::async(std::launch::async, [&, sender = &senders_[share.address]] { fetch(share, wanted, *sender, values); }));
      const bool is_taken = take(met, first, values, wanted, absence);
      met.group.reset();
      ValueRanges missing;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        try {
          parts[i].get();
        } catch (const Error& error) {
          log::warning("{}; the first rank is asked for it", error.what());
          missing.insert(missing.end(), met.offer.others[i].ranges.begin(), met.offer.others[i].ranges.end());
        }
      }
      std::ranges::sort(missing, {}, &ValueRange::begin);
      if (is_taken && !missing.empty()) fetch({address, missing}, wanted, first, values);
      if (is_taken) return {values, met.offer.is_adapter};
    }
    if (!absence.empty()) {
      if (Clock::now() >= deadline)
        fail(ErrorCode::kUnavailable, "the trainer at {} does not send policy v{}: {}", address, version.value, absence);
      log::warning("the trainer at {} did not come to send policy v{} and is asked again: {}", address, version.value, absence);
    } else if (met.offer.newest > version.value || waiting.is_expired()) {
      const std::string whose = acceptable.adapter.empty() ? "" : fmt::format(" of adapter '{}'", acceptable.adapter);
      // Without any it has only begun.
      if (met.offer.newest < 0)
        fail(ErrorCode::kUnavailable, "the trainer at {} has no policy v{}{} yet; it has none", address, version.value, whose);
      fail(ErrorCode::kNotFound, "the trainer at {} has no policy v{}{} {}; its newest is v{}", address, version.value, whose,
           met.offer.newest > version.value ? "any more" : "yet", met.offer.newest);
    }
    met.group.reset();
    waiting.check();
    std::this_thread::sleep_for(absence.empty() ? kNotYetPoll : kAbsentPoll);
  }
}

}  // namespace prl::weights
