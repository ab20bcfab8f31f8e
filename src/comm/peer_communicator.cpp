#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <stop_token>
#include <thread>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "comm/loss_watch.hpp"
#include "comm/meeting.hpp"
#include "comm/transport.hpp"

namespace prl::comm {

namespace {

using Clock = Transport::Clock;

/// How long a rank that saw silence waits for word from the silent one, which may itself be waiting for somebody.
constexpr std::chrono::milliseconds kReportPatience{500};
/// How long a rank that is done waits for the others to be.
constexpr std::chrono::milliseconds kFarewell{5000};
/// How often a rank that waits looks whether others have left.
constexpr std::chrono::milliseconds kStallInterval{500};
/// From when a wait was noticed until it is reported: ten seconds in all.
constexpr std::chrono::milliseconds kFirstReport{9'000};
/// For ranks that have tried to connect to say so.
constexpr std::chrono::milliseconds kVerdict{1500};
/// Of ranks that have another group, which connect within milliseconds on a machine that is not busy.
constexpr std::chrono::milliseconds kFirstAttempt{1000};
/// Of ranks that have no other group: a program that looks for its own server can have come first to a port on which a rank listened.
constexpr int kMaxAttempts = 3;

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

/// The tag of a message. Ranks that run different operations, or with other sizes, wait for messages that never come instead of taking
/// each other's.
std::uint64_t tag_of(std::string_view op, std::uint64_t number, std::size_t bytes) {
  if (op == "recv") op = "send";
  const std::uint64_t kind = hash_bytes(op, bytes);
  return number << 32 | (kind & 0xffffffffu);
}

std::string name_of(const CommOptions& options) { return fmt::format("group '{}', generation {}", options.group, options.generation); }

struct Message {
  int peer;
  char* data;
  std::size_t bytes;
};

/// One after the other in the order of ranks; `own` is left out.
std::vector<Message> parts_of(void* data, std::span<const std::int64_t> counts, std::size_t element_bytes, int own) {
  std::vector<Message> parts;
  char* at = static_cast<char*>(data);
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const std::size_t bytes = static_cast<std::size_t>(counts[r]) * element_bytes;
    if (static_cast<int>(r) != own && bytes > 0) parts.push_back({static_cast<int>(r), at, bytes});
    at += bytes;
  }
  return parts;
}

std::int64_t offset_of(std::span<const std::int64_t> counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

template <typename T>
void combine(T* out, const T* in, std::int64_t n, ReduceOp op) {
  if (op == ReduceOp::kSum)
    for (std::int64_t i = 0; i < n; ++i) out[i] += in[i];
  else
    for (std::int64_t i = 0; i < n; ++i) out[i] = std::max(out[i], in[i]);
}

/// out = parts[0] op parts[1] op ... element by element, in that order.
void reduce_parts(void* out, const std::vector<const void*>& parts, std::int64_t n, DType dtype, ReduceOp op) {
  if (dtype == DType::kBF16) {
    auto* to = static_cast<BFloat16*>(out);
    for (std::int64_t i = 0; i < n; ++i) {
      float acc = to_f32(static_cast<const BFloat16*>(parts[0])[i]);
      for (std::size_t p = 1; p < parts.size(); ++p) {
        const float x = to_f32(static_cast<const BFloat16*>(parts[p])[i]);
        acc = op == ReduceOp::kSum ? acc + x : std::max(acc, x);
      }
      to[i] = to_bf16(acc);
    }
    return;
  }
  std::memcpy(out, parts[0], static_cast<std::size_t>(n) * size_of(dtype));
  for (std::size_t p = 1; p < parts.size(); ++p) {
    if (dtype == DType::kF32)
      combine(static_cast<float*>(out), static_cast<const float*>(parts[p]), n, op);
    else if (dtype == DType::kI32)
      combine(static_cast<std::int32_t*>(out), static_cast<const std::int32_t*>(parts[p]), n, op);
    else
      combine(static_cast<std::int64_t*>(out), static_cast<const std::int64_t*>(parts[p]), n, op);
  }
}

/// A tensor where the host can read and write it: itself, or a copy of device memory.
class Staged {
 public:
  Staged(ConstTensorView view, DeviceRuntime* runtime, bool is_read) : view_(view), runtime_(runtime) {
    bytes_ = static_cast<std::size_t>(view.shape.num_elements()) * size_of(view.dtype);
    if (view.device.kind == DeviceKind::kCpu) {
      data_ = const_cast<void*>(view.data);
      return;
    }
    if (runtime == nullptr || runtime->device() != view.device)
      fail(ErrorCode::kShape, "[comm] a tensor lies on {}, of which this group has no runtime", to_string(view.device));
    copy_.resize(bytes_);
    data_ = copy_.data();
    if (is_read && bytes_ > 0) runtime->copy_to_host(data_, view.data, bytes_);
  }
  void* data() const noexcept { return data_; }
  std::size_t num_bytes() const noexcept { return bytes_; }
  char* at(std::int64_t element) const noexcept {
    return static_cast<char*>(data_) + static_cast<std::size_t>(element) * size_of(view_.dtype);
  }
  void write_back() const {
    if (!copy_.empty()) runtime_->copy_from_host(const_cast<void*>(view_.data), data_, bytes_);
  }

 private:
  ConstTensorView view_;
  DeviceRuntime* runtime_;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
  std::vector<char> copy_;
};

/// The operation in progress: since when it waits, and for whom.
struct OpenWait {
  std::mutex mutex;
  std::optional<Clock::time_point> since;
  Clock::time_point until;
  std::string doing;
  std::atomic<int> peer{-1};
  void begin(Clock::time_point now, Clock::time_point deadline, const std::string& what) {
    const std::lock_guard lock(mutex);
    since = now;
    until = deadline;
    doing = what;
  }
  void end() {
    const std::lock_guard lock(mutex);
    since.reset();
  }
};

/// A verdict that names those who died; others may just not have come that far.
constexpr std::string_view kFailedWithout = "failed without ";
/// What the first rank that can tell has set, of whether all could connect: "formed", "failed", "again" or kFailedWithout and ranks.
template <typename WordKey>
std::string await_verdict(const CommOptions& options, const WordKey& word_key, const std::string& verdict_key, Clock::time_point deadline,
                          bool is_last) {
  std::vector<std::string> words(static_cast<std::size_t>(options.size));
  Waiting waiting({.who = fmt::format("rank {} of {} ({})", options.rank, options.size, name_of(options)),
                   .what = "all ranks to say that they have connected",
                   .limit = deadline - Clock::now(),
                   .detail = [&words] {
                     std::vector<std::size_t> silent;
                     for (std::size_t r = 0; r < words.size(); ++r)
                       if (words[r].empty()) silent.push_back(r);
                     return fmt::format("nothing has come from the ranks {}", fmt::join(silent, ", "));
                   }});
  DeathCheck death;
  std::optional<Clock::time_point> failed_at;  ///< a rank said that it could not connect
  for (std::chrono::microseconds pause{200};; pause = std::min(2 * pause, std::chrono::microseconds(10'000))) {
    if (const auto verdict = options.store->get(verdict_key)) return *verdict;
    for (int r = 0; r < options.size; ++r)
      if (std::string& word = words[static_cast<std::size_t>(r)]; word.empty()) word = options.store->get(word_key(r)).value_or("");
    const auto now = Clock::now();
    if (!failed_at && std::ranges::count(words, "no") > 0) failed_at = now;
    if (std::ranges::all_of(words, [](const std::string& word) { return word == "yes"; }))
      return options.store->set_once(verdict_key, "formed");
    if (options.gone && death.has_lost_a_rank(options.gone))
      return options.store->set_once(verdict_key, fmt::format("{}{}", kFailedWithout, fmt::join(options.gone(), " ")));
    // Whoever could not connect for a rank that has died is given the time to be told of it, or to see that it says nothing.
    const bool is_over = failed_at && now >= *failed_at + kVerdict;
    const bool have_all_tried = std::ranges::count(words, "") == 0;
    if (failed_at && !options.gone && (is_over || have_all_tried))
      return options.store->set_once(verdict_key, have_all_tried && !is_last ? "again" : "failed");
    if (now >= deadline) return options.store->set_once(verdict_key, "failed");
    if (is_over) return options.store->set_once(verdict_key, "again");
    waiting.check();
    std::this_thread::sleep_for(pause);
  }
}

/// A byte to and from each of the others; TransportError if one does not come. Where another program came first to the port of a rank, and
/// its server to the same port then, the rank and its peer both have a connection, and neither carries anything.
void greet(Transport& transport, int rank, int size, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const std::uint64_t tag = tag_of("greeting", 0, 1);
  const char sent = 1;
  std::vector<char> heard(static_cast<std::size_t>(size));
  std::vector<std::pair<int, std::unique_ptr<Transport::Pending>>> pending;
  int peer = 0;
  try {
    for (peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      pending.emplace_back(peer, transport.start_recv(peer, tag, &heard[static_cast<std::size_t>(peer)], 1));
      pending.emplace_back(peer, transport.start_send(peer, tag, &sent, 1));
    }
    for (auto& [of, message] : pending) {
      peer = of;
      message->wait(deadline);
    }
  } catch (const TransportError& error) {
    throw TransportError(error.is_silent(), fmt::format("the connection to rank {} carries nothing: {}", peer, error.what()));
  }
}

class PeerCommunicator final : public Communicator {
 public:
  PeerCommunicator(std::string_view backend, TransportFactory factory, CommOptions options)
      : Communicator(std::move(options)), backend_(backend), factory_(factory) {
    if (options_.store == nullptr) fail(ErrorCode::kInvalidArgument, "[comm] {} ranks need a store to meet", options_.size);
    last_with_.resize(static_cast<std::size_t>(size()), "the connection");
    num_sent_.resize(static_cast<std::size_t>(size()));
    num_received_.resize(static_cast<std::size_t>(size()));
    connect();
    watch_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }
  ~PeerCommunicator() override {
    watch_ = {};
    leave();
  }

  std::string_view backend() const noexcept override { return backend_; }
  std::vector<int> lost_ranks() const override { return loss_ ? loss_->ranks() : std::vector<int>{}; }
  std::vector<int> gone() override {
    if (is_closed_) return {};
    std::vector<int> ranks = transport_->gone();
    // Who left for another's loss said so first, and is alive.
    std::erase_if(ranks, [this](int r) {
      const auto word = word_of(r, std::chrono::milliseconds(0));
      return word && word->first != kNobody;
    });
    return ranks;
  }

  void abort(std::string_view reason) noexcept override {
    if (is_closed_.exchange(true)) return;
    tell(kNobody, reason);
    transport_->close();
  }
  void give_up_on(const PeerLost& lost) noexcept override {
    const bool is_own_doing = std::ranges::count(lost.ranks(), rank()) > 0;
    if (is_own_doing || is_closed_.exchange(true)) return;
    loss_ = std::make_unique<PeerLost>(lost);
    tell(lost.ranks().empty() ? kOutsider : lost.ranks().front(), lost.what());
    transport_->close();
  }

 private:
  /// A connection that closes may take messages along that the other side has not read, so ranks leave together if they can. A rank whose
  /// stack unwinds leaves at once.
  void leave() noexcept {
    if (is_closed_) return;
    if (std::uncaught_exceptions() > num_exceptions_) return abort("an error ended its work");
    is_leaving_ = true;
    try {
      do_barrier({.what = "leaving", .timeout = std::min(options_.timeout, kFarewell)});
    } catch (const std::exception&) {
      // The others have left, were lost, or are still at work among themselves: this rank has no message in flight any more.
    }
    if (!is_closed_.exchange(true)) transport_->close();
  }

  /// Says in the store why this rank leaves: it lost `accused`, which may be no rank of this group, or (kNobody) something of its own.
  static constexpr int kNobody = -1, kOutsider = -2;
  void tell(int accused, std::string_view why) noexcept {
    try {
      options_.store->set(key(fmt::format("left/{}", rank())), fmt::format("{}\n{}", accused, why.substr(0, 4096)));
    } catch (const std::exception&) {
      // Its peers then only see the connection close.
    }
  }

  /// What `peer` said when it left: whom it lost (perhaps kNobody or kOutsider) and why.
  std::optional<std::pair<int, std::string>> word_of(int peer, std::chrono::milliseconds patience) noexcept {
    const auto deadline = Clock::now() + patience;
    try {
      for (;;) {
        if (const auto value = options_.store->get(key(fmt::format("left/{}", peer)))) {
          const std::size_t end = value->find('\n');
          if (end == std::string::npos) return std::nullopt;
          return std::pair{std::stoi(value->substr(0, end)), value->substr(end + 1)};
        }
        if (Clock::now() >= deadline) return std::nullopt;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  /// A connection does not always tell a rank that waits that its peer has died. wake_lost() asks; and the others who noticed have left.
  void watch(const std::stop_token& stop) {
    std::optional<Clock::time_point> reported;
    std::optional<Waiting> waiting;
    std::unique_lock lock(wait_.mutex);
    while (!watch_wakes_.wait_for(lock, stop, kStallInterval, [&stop] { return stop.stop_requested(); })) {
      if (stop.stop_requested()) return;
      if (reported != wait_.since) waiting.reset();
      if (!wait_.since || Clock::now() - *wait_.since < kStallInterval || is_closed_) continue;
      if (!waiting)
        waiting.emplace(Waiting::Options{.who = fmt::format("rank {} of {} ({})", rank(), size(), name_of(options_)),
                                         .what = "the others in " + wait_.doing,
                                         .limit = wait_.until - Clock::now(),
                                         .detail = [this] { return fmt::format("rank {} first", wait_.peer.load()); },
                                         .first = kFirstReport});
      reported = wait_.since;
      lock.unlock();
      waiting->check();
      transport_->wake_lost();
      int left = -1;
      for (int r = 0; r < size() && left < 0; ++r)
        if (r != rank() && word_of(r, std::chrono::milliseconds(0))) left = r;
      lock.lock();
      if (left < 0 || !wait_.since) continue;
      has_left_ = left;
      transport_->close();  // ends the wait
      return;
    }
  }

  /// Ranks say that they are there before they connect, so that a rank that does not come has a name. They try several times; where
  /// another group tells who has died, longer each time: Gloo cannot be interrupted while it waits for a rank that has died.
  void connect() {
    wait_for_all(options_);
    const auto limit = time_to_connect(options_);
    const auto deadline = Clock::now() + limit + kVerdict;
    for (int attempt = 0;; ++attempt) {
      CommOptions limited = options_;
      limited.timeout = limit / 4;  // Gloo waits several times, for as long as this each, if a rank that was there has gone
      if (options_.gone) limited.timeout = std::min(limited.timeout, kFirstAttempt * (1 << std::min(attempt, 10)));
      if (attempt > 0) limited.group += fmt::format("/attempt{}", attempt);
      std::string reason = "another rank could not connect";
      try {
        transport_ = factory_(limited);
        greet(*transport_, rank(), size(), limited.timeout);
      } catch (const TransportError& error) {
        reason = error.what();
        if (transport_ != nullptr) transport_->close();
        transport_.reset();
      }
      if (agree(attempt, std::max(deadline, Clock::now() + kVerdict), reason)) return;
    }
  }

  /// Every rank has this group or none: if one could not connect, or died before it said that it did, the others learn of it here and can
  /// go on with the group that they had. False if all are to try again.
  bool agree(int attempt, Clock::time_point deadline, const std::string& reason) {
    const auto word_key = [&](int r) { return key(fmt::format("connected{}/{}", attempt, r)); };
    options_.store->set(word_key(rank()), transport_ != nullptr ? "yes" : "no");
    const std::string verdict =
        await_verdict(options_, word_key, key(fmt::format("verdict{}", attempt)), deadline, attempt + 1 >= kMaxAttempts);
    if (verdict == "formed" && transport_ != nullptr) return true;  // not formed by one that was here in place of this rank
    if (transport_ != nullptr) transport_->close();
    transport_.reset();
    if (verdict == "again") return false;
    is_closed_ = true;
    std::vector<int> silent, others;
    if (verdict.starts_with(kFailedWithout)) {
      std::istringstream dead(verdict.substr(kFailedWithout.size()));
      for (int r = 0; dead >> r;) silent.push_back(r);
      throw PeerLost(silent, fmt::format("[comm] {}: the ranks [{}] died while the {} ranks connected; at rank {}: {}", name_of(options_),
                                         fmt::join(silent, ", "), size(), rank(), reason));
    }
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) others.push_back(r);
      if (!options_.store->get(word_key(r))) silent.push_back(r);
    }
    throw PeerLost(silent.empty() ? others : silent,
                   fmt::format("[comm] {}: the {} ranks could not all connect, [{}] say nothing; at rank {}: {}", name_of(options_), size(),
                               fmt::join(silent, ", "), rank(), reason));
  }

  [[noreturn]] void lose(int peer, const std::string& doing, Clock::time_point started, const TransportError& error) {
    std::string message =
        fmt::format("[comm] {}: rank {} of {} {} while rank {} waited {:.2f} s for it in {}; last completed with it: {} ({})",
                    name_of(options_), peer, size(), error.is_silent() ? "is silent" : "is lost", rank(), seconds(Clock::now() - started),
                    doing, last_with_[static_cast<std::size_t>(peer)], error.what());
    int lost = has_left_ >= 0 ? has_left_.load() : peer;
    bool gave_up = false;
    if (is_closed_) {
      lost = rank();
      message = fmt::format("[comm] {}: rank {} was told to leave in {}", name_of(options_), rank(), doing);
    } else {
      // Whoever left because of another says so before its connections close: the one that said nothing is the one that is lost.
      for (int hops = 0; hops < size(); ++hops) {
        const auto word = word_of(lost, error.is_silent() && hops == 0 ? kReportPatience : std::chrono::milliseconds(0));
        if (!word || word->first == rank() || word->first >= size()) break;
        if (word->first == kOutsider) {
          message = fmt::format("[comm] rank {} left, for: {}", lost, word->second);
          lost = kOutsider;
          break;
        }
        if (word->first < 0) {
          gave_up = true;
          message = fmt::format("[comm] {}: rank {} of {} gave up while rank {} waited in {}: {}", name_of(options_), lost, size(), rank(),
                                doing, word->second);
          break;
        }
        message = fmt::format("[comm] rank {} left, for: {}", lost, word->second);
        lost = word->first;
      }
    }
    loss_ = std::make_unique<PeerLost>(lost == kOutsider ? std::vector<int>{} : std::vector<int>{lost}, message, gave_up);
    if (!is_closed_.exchange(true)) {
      // Who is done accuses nobody: that others are slower than a farewell lasts must not end what they wait for from each other.
      if (!is_leaving_) tell(lost, message);
      transport_->close();
    }
    throw PeerLost(*loss_);
  }

  /// Moves all messages, or throws PeerLost.
  void exchange(const char* op, const Call& call, std::uint64_t number, std::span<const Message> sends, std::span<const Message> recvs) {
    if (loss_ != nullptr) throw PeerLost(*loss_);
    if (is_closed_) throw PeerLost({rank()}, fmt::format("[comm] {}: rank {} has left, {} cannot run", name_of(options_), rank(), op));
    const std::string doing =
        call.what.empty() ? fmt::format("{} {}", op, num_operations_) : fmt::format("{} {} ({})", op, num_operations_, call.what);
    const auto started = Clock::now();
    const auto deadline = started + call.timeout.value_or(options_.timeout);
    std::vector<std::pair<int, std::unique_ptr<Transport::Pending>>> pending;
    int peer = -1;
    try {
      for (const Message& m : recvs) {
        peer = m.peer;
        pending.emplace_back(peer, transport_->start_recv(peer, tag_of(op, number, m.bytes), m.data, m.bytes));
      }
      for (const Message& m : sends) {
        peer = m.peer;
        pending.emplace_back(peer, transport_->start_send(peer, tag_of(op, number, m.bytes), m.data, m.bytes));
      }
      wait_.begin(started, deadline, doing);
      for (auto& [of, message] : pending) {
        wait_.peer = peer = of;
        message->wait(deadline);
      }
      wait_.end();
    } catch (const TransportError& error) {
      wait_.end();
      pending.clear();
      lose(peer, doing, started, error);
    }
    for (const auto& [of, message] : pending) last_with_[static_cast<std::size_t>(of)] = doing;
  }
  void exchange(const char* op, const Call& call, std::span<const Message> sends, std::span<const Message> recvs) {
    exchange(op, call, ++num_operations_, sends, recvs);
  }

  Staged stage(ConstTensorView view, bool is_read) const { return Staged(view, options_.runtime.get(), is_read); }

  void do_all_to_all(std::span<const TensorView> outs, std::span<const ConstTensorView> ins, const Call& call) override {
    std::vector<Staged> to, from;
    std::vector<Message> sends, recvs;
    for (int r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      to.push_back(stage(outs[i], false));
      from.push_back(stage(ins[i], true));
      if (r == rank()) continue;
      if (from[i].num_bytes() > 0) sends.push_back({r, from[i].at(0), from[i].num_bytes()});
      if (to[i].num_bytes() > 0) recvs.push_back({r, to[i].at(0), to[i].num_bytes()});
    }
    exchange("all_to_all", call, sends, recvs);
    const auto me = static_cast<std::size_t>(rank());
    if (from[me].num_bytes() > 0) std::memcpy(to[me].at(0), from[me].at(0), from[me].num_bytes());
    for (const Staged& out : to) out.write_back();
  }

  void do_all_gather(TensorView out, Parts parts, ConstTensorView in, const Call& call) override {
    const Staged to = stage(out, false), from = stage(in, true);
    const std::size_t element = size_of(in.dtype), own = static_cast<std::size_t>(in.shape.num_elements()) * element;
    std::vector<Message> sends;
    for (int r = 0; r < size(); ++r)
      if (r != rank() && own > 0) sends.push_back({r, static_cast<char*>(from.data()), own});
    exchange("all_gather", call, sends, parts_of(to.data(), parts.counts, element, rank()));
    char* place = to.at(offset_of(parts.counts, rank()));
    if (own > 0 && place != from.data()) std::memcpy(place, from.data(), own);
    to.write_back();
  }

  void do_broadcast(TensorView data, int root, const Call& call) override {
    const Staged staged = stage(data, rank() == root);
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    std::vector<Message> messages;
    for (int r = 0; r < size() && bytes > 0; ++r)
      if (r != rank() && (rank() == root || r == root)) messages.push_back({r, static_cast<char*>(staged.data()), bytes});
    if (rank() == root) return exchange("broadcast", call, messages, {});
    exchange("broadcast", call, {}, messages);
    staged.write_back();
  }

  /// out = the reduction of part rank() of everyone's `in`, both in host memory.
  void reduce_own_part(const char* op_name, void* out, void* in, std::span<const std::int64_t> counts, DType dtype, ReduceOp op,
                       const Call& call) {
    const std::size_t element = size_of(dtype);
    const std::int64_t own = counts[static_cast<std::size_t>(rank())];
    const std::size_t own_bytes = static_cast<std::size_t>(own) * element;
    std::vector<char> received(own_bytes * static_cast<std::size_t>(size()));
    const std::vector<std::int64_t> alike(static_cast<std::size_t>(size()), own);
    exchange(op_name, call, parts_of(in, counts, element, rank()), parts_of(received.data(), alike, element, rank()));
    if (own == 0) return;
    std::vector<const void*> parts;
    for (int r = 0; r < size(); ++r)
      parts.push_back(r == rank() ? static_cast<char*>(in) + static_cast<std::size_t>(offset_of(counts, r)) * element
                                  : received.data() + static_cast<std::size_t>(r) * own_bytes);
    reduce_parts(out, parts, own, dtype, op);
  }

  void do_reduce_scatter(TensorView out, ConstTensorView in, Parts parts, const Call& call) override {
    const Staged to = stage(out, false), from = stage(in, true);
    reduce_own_part("reduce_scatter", to.data(), from.data(), parts.counts, in.dtype, ReduceOp::kSum, call);
    to.write_back();
  }

  void do_all_reduce(TensorView data, ReduceOp op, const Call& call) override {
    const Staged staged = stage(data, true);
    const std::int64_t n = data.shape.num_elements();
    std::vector<std::int64_t> counts;
    for (int r = 0; r < size(); ++r) counts.push_back(n * (r + 1) / size() - n * r / size());
    const std::int64_t begin = offset_of(counts, rank()), own = counts[static_cast<std::size_t>(rank())];
    const std::size_t element = size_of(data.dtype), own_bytes = static_cast<std::size_t>(own) * element;
    std::vector<char> reduced(own_bytes);
    reduce_own_part("all_reduce", reduced.data(), staged.data(), counts, data.dtype, op, call);
    std::vector<Message> sends;
    for (int r = 0; r < size(); ++r)
      if (r != rank() && own > 0) sends.push_back({r, reduced.data(), own_bytes});
    exchange("all_reduce", call, sends, parts_of(staged.data(), counts, element, rank()));
    if (own > 0) std::memcpy(staged.at(begin), reduced.data(), own_bytes);
    staged.write_back();
  }

  void do_send(ConstTensorView data, int to, const Call& call) override {
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    if (bytes == 0) return;
    const Staged staged = stage(data, true);
    const Message message{to, static_cast<char*>(staged.data()), bytes};
    exchange("send", call, num_sent_[static_cast<std::size_t>(to)]++, std::span(&message, 1), {});
  }

  void do_recv(TensorView data, int from, const Call& call) override {
    const std::size_t bytes = static_cast<std::size_t>(data.shape.num_elements()) * size_of(data.dtype);
    if (bytes == 0) return;
    const Staged staged = stage(data, false);
    const Message message{from, static_cast<char*>(staged.data()), bytes};
    exchange("recv", call, num_received_[static_cast<std::size_t>(from)]++, {}, std::span(&message, 1));
    staged.write_back();
  }

  void do_barrier(const Call& call) override {
    if (options_.runtime != nullptr) options_.runtime->synchronize();
    std::vector<char> bytes(static_cast<std::size_t>(size())), own(static_cast<std::size_t>(size()));
    const std::vector<std::int64_t> ones(static_cast<std::size_t>(size()), 1);
    exchange("barrier", call, parts_of(own.data(), ones, 1, rank()), parts_of(bytes.data(), ones, 1, rank()));
  }

  std::unique_ptr<Communicator> make_another(CommOptions options) const override {
    return std::make_unique<PeerCommunicator>(backend_, factory_, std::move(options));
  }

  std::string_view backend_;
  TransportFactory factory_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<PeerLost> loss_;
  std::atomic<bool> is_closed_{false};
  bool is_leaving_ = false;  ///< its work is done
  int num_exceptions_ = std::uncaught_exceptions();
  std::uint64_t num_operations_ = 0;
  std::vector<std::uint64_t> num_sent_, num_received_;
  std::vector<std::string> last_with_;  ///< per rank
  OpenWait wait_;
  std::condition_variable_any watch_wakes_;
  std::atomic<int> has_left_{-1};  ///< a rank that has left while this one waited
  std::jthread watch_;
};

}  // namespace

std::unique_ptr<Communicator> make_peer_communicator(std::string_view backend, TransportFactory connect, CommOptions options) {
  return std::make_unique<PeerCommunicator>(backend, connect, std::move(options));
}

}  // namespace prl::comm
