#include "weights/weight_receiver.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "base/error.hpp"
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
/// Between two attempts to reach a trainer that fails at once.
constexpr milliseconds kAbsentPoll{1000};

bool is_loopback(const std::string& host) { return host == "localhost" || host == "127.0.0.1" || host == "::1"; }

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
    const std::int64_t ticket = now ? std::stoll(*now) : 0;
    const std::string next = fmt::format("{} {}", ticket + 1, mark);
    if (store.compare_and_set(kNextTicket, now, next) == next) return ticket;
  }
}

double milliseconds_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

}  // namespace

struct WeightReceiver::Wanted {
  std::string address;
  PolicyVersion version;
  DType dtype;
  std::int64_t num_values;
  milliseconds timeout;
};

struct WeightReceiver::Answer {
  std::optional<Tensor> values;
  std::int64_t newest = -1;  ///< that the trainer has, if it has another one
  std::string absence;       ///< why the trainer did not come to the group: one that was lost took the ticket with it
};

void WeightReceiver::open_link(const std::string& token, const std::shared_ptr<comm::Store>& store) {
  if (link_ != nullptr && link_->token() == token) return;
  link_.reset();
  auto link = std::make_unique<DeviceLink>(token);
  link->open(options_.path, 1, store, options_.join_timeout);
  link_ = std::move(link);
}

std::string WeightReceiver::give_up_link(const std::string& reason) {
  if (++num_failed_links_ >= kMaxFailedLinks) {
    log::warning("weights come through host memory from now on: the link to the trainer's device failed {} times", num_failed_links_);
    options_.path = {};
  }
  return "no link to the trainer's device: " + reason;
}

WeightReceiver::Answer WeightReceiver::ask(const Wanted& wanted) {
  Answer answer;
  const auto begin = Clock::now();
  const auto store = comm::make_store(wanted.address, std::min(wanted.timeout, kStoreTimeout));
  const std::string host = own_host(wanted.address);
  std::unique_ptr<comm::Communicator> group;
  Offer offer;
  try {
    const std::int64_t ticket = draw_ticket(*store);
    const Ask ask{.version = wanted.version.value,
                  .engine = options_.engine,
                  .device = options_.path.make_stream ? options_.path.device : "",
                  .link = link_ != nullptr ? link_->token() : ""};
    store->set(ticket_key(ticket), ask.to_text());
    group = comm::make_gloo_communicator({.rank = 1,
                                          .size = 2,
                                          .store = store,
                                          .group = group_name(ticket),
                                          .timeout = std::min(wanted.timeout, options_.patience),
                                          .host = host});
    offer = Offer::parse(group->gather_bytes("", {.what = "what follows"}).front());
  } catch (const Error& error) {
    answer.absence = error.what();
    return answer;
  }
  answer.newest = offer.newest;
  if (!offer.has_version) return answer;
  if (offer.dtype != wanted.dtype || offer.num_values != wanted.num_values)
    fail(ErrorCode::kShape, "the trainer at {} sends {} values of {}, this engine's model has {} of {}", wanted.address, offer.num_values,
         to_string(offer.dtype), wanted.num_values, to_string(wanted.dtype));
  const auto met = Clock::now();
  const bool is_linked = !offer.link.empty();
  if (is_linked) {
    try {
      open_link(offer.link, store);
    } catch (const Error& error) {
      answer.absence = give_up_link(error.what());
      return answer;
    }
  }
  const auto opened = Clock::now();
  Tensor values = Tensor::empty(is_linked ? options_.memory : make_cpu_runtime(), {wanted.num_values}, wanted.dtype);
  if (is_linked) {
    values.runtime()->synchronize();  // the memory is this stream's from now on, and the path's is another
    try {
      link_->copy(values, wanted.timeout);
      num_failed_links_ = 0;
    } catch (...) {
      link_.reset();
      throw;
    }
  } else {
    broadcast_values(*group, values, wanted.timeout);
  }
  group->barrier({.what = "the engine to have all weights", .timeout = wanted.timeout});
  log::debug("policy v{}: met the trainer in {:.1f} ms, {} in {:.1f} ms, {:.3f} GB in {:.1f} ms", wanted.version.value,
             std::chrono::duration<double, std::milli>(met - begin).count(), is_linked ? "linked the devices" : "host memory",
             std::chrono::duration<double, std::milli>(opened - met).count(), 1e-9 * static_cast<double>(values.num_bytes()),
             milliseconds_since(opened));
  answer.values = std::move(values);
  return answer;
}

Tensor WeightReceiver::receive(const std::string& address, PolicyVersion version, DType dtype, std::int64_t num_values,
                               milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  Waiting waiting({.who = "the engine",
                   .what = fmt::format("the trainer at {} to have policy v{} again", address, version.value),
                   .limit = std::min(timeout, kNotYetTimeout)});
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    Answer answer = ask({address, version, dtype, num_values, timeout});
    if (answer.values) return std::move(*answer.values);
    if (!answer.absence.empty()) {
      if (Clock::now() >= deadline)
        fail(ErrorCode::kUnavailable, "the trainer at {} does not send policy v{}: {}", address, version.value, answer.absence);
      log::warning("the trainer at {} did not come to send policy v{} and is asked again: {}", address, version.value, answer.absence);
    } else if (answer.newest > version.value || waiting.is_expired()) {
      fail(ErrorCode::kNotFound, "the trainer at {} has no policy v{} {}; its newest is v{}", address, version.value,
           answer.newest > version.value ? "any more" : "yet", answer.newest);
    }
    waiting.check();
    std::this_thread::sleep_for(answer.absence.empty() ? kNotYetPoll : kAbsentPoll);
  }
}

}  // namespace prl::weights
