#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "base/waiting.hpp"
#include "comm/communicator.hpp"
#include "comm/meeting.hpp"
#include "comm/nccl/nccl_api.hpp"
#include "comm/nccl/nccl_peers.hpp"

namespace prl::comm {

inline constexpr int kCudaNotReady = 600;
/// How often what is under way is looked at by whoever does not wait for it.
inline constexpr std::chrono::milliseconds kWatchPause{2};
/// How often the store is asked for word of the others.
inline constexpr std::chrono::milliseconds kAskPause{500};
/// How long an operation that is being queued is looked at without a pause.
inline constexpr std::chrono::microseconds kSpin{300};
/// For kernels to end once the group has been taken apart.
inline constexpr std::chrono::milliseconds kAftermath{10'000};

/// A moment of a stream.
class Event {
 public:
  explicit Event(const NcclApi& api) : api_(api) {
    constexpr unsigned kNoTiming = 2;
    if (const int result = api_.event_create(&event_, kNoTiming); result != 0)
      fail(ErrorCode::kUnavailable, "[nccl] an event cannot be made (driver error {})", result);
  }
  ~Event() { (void)api_.event_destroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(void* stream) const {
    if (const int result = api_.event_record(event_, stream); result != 0)
      fail(ErrorCode::kInternal, "[nccl] an event cannot be recorded (driver error {})", result);
  }
  void hold(void* stream) const {
    if (const int result = api_.stream_wait_event(stream, event_, 0); result != 0)
      fail(ErrorCode::kInternal, "[nccl] a stream cannot wait for an event (driver error {})", result);
  }
  /// An error of the device counts as passed: whoever waits for the device meets it.
  bool has_passed() const noexcept { return api_.event_query(event_) != kCudaNotReady; }

 private:
  const NcclApi& api_;
  void* event_ = nullptr;
};

/// An operation that was queued.
struct Queued {
  std::shared_ptr<Event> begun, ended;  ///< what was queued before it is done, it is done itself
  std::string doing;
  std::chrono::milliseconds timeout{};
  std::optional<std::chrono::steady_clock::time_point> since = {};  ///< begun was seen to have passed
};

/// A group of ranks over NCCL, in which operations are queued, and what is under way looked after until it ends. One thread queues, gives
/// up and settles; any thread aborts.
class NcclGroup {
 public:
  using Clock = std::chrono::steady_clock;
  explicit NcclGroup(const CommOptions& options) : options_(options), api_(NcclApi::get()), peers_(options) {
    if (!api_.missing.empty()) fail(ErrorCode::kUnavailable, "[nccl] {}", api_.missing);
    if (options_.runtime == nullptr || options_.runtime->device().kind != DeviceKind::kCuda)
      fail(ErrorCode::kUnavailable, "[nccl] a rank needs a GPU of its own");
    if (api_.primary_context_retain(&context_, options_.runtime->device().index) != 0)
      fail(ErrorCode::kUnavailable, "[nccl] {} cannot be used", to_string(options_.runtime->device()));
    use_device();
    init();
    watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
  }
  ~NcclGroup() {
    watcher_ = {};
    use_device();
    if (comm_ != nullptr) {
      // A group that is whole is taken apart together; the others need not wait for a rank that failed.
      int state = is_closed_ ? kNcclSystemError : api_.comm_finalize(comm_);
      if (state == kNcclInProgress) state = poll(Clock::now() + std::chrono::seconds(5), "closing the group");
      (void)(state == kNcclSuccess ? api_.comm_destroy(comm_) : api_.comm_abort(comm_));
    }
    if (side_stream_ != nullptr) (void)api_.stream_destroy(side_stream_);
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  const NcclApi& api() const noexcept { return api_; }
  NcclComm* comm() const noexcept { return comm_; }
  std::vector<int> gone() { return is_closed_ ? std::vector<int>{} : peers_.dead(); }
  std::vector<int> lost_ranks() const {
    const std::lock_guard lock(loss_mutex_);
    return loss_ != nullptr ? loss_->ranks() : std::vector<int>{};
  }
  void abort(std::string_view reason) noexcept {
    if (is_closed_.exchange(true)) return;
    peers_.say("left", reason);
  }
  void give_up_on(const PeerLost& lost) noexcept {
    if (std::ranges::count(lost.ranks(), options_.rank) > 0 || is_closed_) return;
    const std::lock_guard lock(loss_mutex_);
    if (loss_ != nullptr) return;
    peers_.say("waits", lost.what());
    end(lost);
  }
  void* stream() const noexcept { return options_.runtime->stream(); }
  /// Where operations run beside the caller's work, before it where both could: each waits for ranks that have begun already.
  void* side_stream() {
    if (side_stream_ != nullptr) return side_stream_;
    constexpr unsigned kNonBlocking = 1;
    int least = 0, greatest = 0;
    (void)api_.stream_priority_range(&least, &greatest);
    if (const int result = api_.stream_create(&side_stream_, kNonBlocking, greatest); result != 0)
      fail(ErrorCode::kUnavailable, "[nccl] a stream cannot be made (driver error {})", result);
    return side_stream_;
  }
  /// Queues what `calls` asks of NCCL on `on`, as one group. The event is that of its end.
  std::shared_ptr<Event> enqueue(const char* op, const Call& call, void* on, const std::function<int()>& calls) {
    throw_if_lost(op);
    const auto started = Clock::now();
    last_ = call.what.empty() ? fmt::format("{} {}", op, ++num_operations_) : fmt::format("{} {} ({})", op, ++num_operations_, call.what);
    use_device();
    Queued queued{std::make_shared<Event>(api_), std::make_shared<Event>(api_), last_, call.timeout.value_or(options_.timeout)};
    queued.begun->record(on);
    int asked = kNcclSuccess, ended = kNcclSuccess;
    if (const std::lock_guard lock(comm_mutex_); comm_ != nullptr) {  // else poll() finds that it is gone
      check(api_.group_start(), "start a group");
      asked = calls();
      ended = api_.group_end();
    }
    if (asked != kNcclSuccess && asked != kNcclInProgress) check(asked, last_.c_str());
    if (ended != kNcclInProgress && ended != kNcclSuccess) check(ended, last_.c_str());
    settle_result(poll(started + call.timeout.value_or(options_.timeout), last_), last_, started);
    queued.ended->record(on);
    const std::shared_ptr<Event> end = queued.ended;
    {
      const std::lock_guard lock(queue_mutex_);
      queue_.push_back(std::move(queued));
    }
    has_work_.notify_one();
    return end;
  }
  /// Waits for what was queued on the compute stream.
  void settle(const Call& call) {
    throw_if_lost("settle");
    const auto started = Clock::now();
    const auto deadline = started + call.timeout.value_or(options_.timeout);
    use_device();
    for (;;) {
      const int state = api_.stream_query(stream());
      if (state == 0) return throw_if_lost("settle");  // kernels end when the group does, too
      if (state != kCudaNotReady) fail(ErrorCode::kInternal, "[nccl] the GPU's work failed (driver error {}) in {}", state, last_);
      const int error = async_state();
      if ((error != kNcclSuccess && error != kNcclInProgress) || Clock::now() >= deadline || is_closed_)
        settle_result(error == kNcclSuccess ? kNcclInProgress : error, last_, started);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  /// The side stream, on which what is queued next begins when the work queued on the compute stream so far is done.
  void* begin_beside() {
    throw_if_lost("an operation");
    use_device();
    void* const side = side_stream();
    const Event ready(api_);
    ready.record(stream());
    ready.hold(side);
    return side;
  }
  /// The operation on the side stream that ends with `ended`.
  std::unique_ptr<Started> started(std::shared_ptr<Event> ended);

 private:
  class Beside;
  void use_device() const { (void)api_.context_set_current(context_); }
  /// What is under way, as NCCL sees it.
  int async_state() const {
    const std::lock_guard lock(comm_mutex_);
    int state = kNcclSuccess;
    if (comm_ == nullptr || api_.comm_get_async_error(comm_, &state) != kNcclSuccess) return kNcclSystemError;
    return state;
  }
  void throw_if_lost(const char* op) const {
    const std::lock_guard lock(loss_mutex_);
    if (loss_ != nullptr) throw PeerLost(*loss_);
    if (is_closed_) throw PeerLost({options_.rank}, fmt::format("[nccl] rank {} has left, {} cannot run", options_.rank, op));
  }

  void init() {
    wait_for_all(options_);
    const auto started = Clock::now();
    const auto limit = time_to_connect(options_);
    NcclUniqueId id{};
    if (options_.rank == 0) {
      check(api_.get_unique_id(&id), "get a unique id");
      options_.store->set(fmt::format("{}/g{}/nccl-id", options_.group, options_.generation), {id.bytes, sizeof id.bytes});
    } else {
      std::string bytes;
      try {
        bytes = options_.store->wait(fmt::format("{}/g{}/nccl-id", options_.group, options_.generation), limit, "rank 0");
      } catch (const Error& error) {
        throw PeerLost({0}, error.what());
      }
      if (bytes.size() != sizeof id.bytes) fail(ErrorCode::kCorrupt, "[nccl] an id of {} bytes", bytes.size());
      std::memcpy(id.bytes, bytes.data(), sizeof id.bytes);
    }
    NcclConfig config;
    if (options_.max_channels > 0) config.max_ctas = options_.max_channels;
    const int result = api_.comm_init_rank_config(&comm_, options_.size, id, options_.rank, &config);
    if (result != kNcclInProgress) check(result, "connect");
    settle_result(poll(started + limit, "connecting"), "connecting", started);
    peers_.connect_watch();
  }

  void check(int result, const char* what) const {
    if (result != kNcclSuccess)
      fail(ErrorCode::kInternal, "[nccl] rank {} cannot {}: {}", options_.rank, what, api_.get_error_string(result));
  }

  /// The state of what was started without blocking; kNcclInProgress after the deadline.
  int poll(Clock::time_point deadline, const std::string& doing) {
    std::optional<Waiting> waiting;
    const auto begun = Clock::now();
    int state = kNcclInProgress;
    while ((state = async_state()) == kNcclInProgress && Clock::now() < deadline && !is_closed_) {
      // What NCCL only has to queue takes less than a thread's way to sleep and back.
      if (Clock::now() - begun < kSpin) {
        std::this_thread::yield();
        continue;
      }
      is_polling_ = true;
      report(waiting, deadline, doing);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    is_polling_ = false;
    return state;
  }

  /// Says after 10 s, and then less and less often, that this rank waits for the others. NCCL does not tell for which of them.
  void report(std::optional<Waiting>& waiting, Clock::time_point deadline, const std::string& doing) const {
    if (!waiting)
      waiting.emplace(Waiting::Options{.who = fmt::format("rank {} of {} (group '{}', generation {})", options_.rank, options_.size,
                                                          options_.group, options_.generation),
                                       .what = "the others in " + doing,
                                       .limit = deadline - Clock::now(),
                                       .detail = [this] { return peers_.others(); }});
    waiting->check();
  }

  void settle_result(int state, const std::string& doing, Clock::time_point started) {
    if (state != kNcclSuccess || is_closed_) lose(state, doing, started);
  }

  /// The end of the group, for whoever notices first; who comes later is told the same.
  [[noreturn]] void lose(int state, const std::string& doing, Clock::time_point started) {
    const std::lock_guard lock(loss_mutex_);
    if (loss_ == nullptr && is_closed_)
      end(PeerLost({options_.rank}, fmt::format("[nccl] rank {} was told to leave in {}", options_.rank, doing)));
    if (loss_ == nullptr) {
      std::unique_lock queue_lock(queue_mutex_);
      const std::string completed = completed_;
      queue_lock.unlock();
      end(peers_.call_the_roll(state == kNcclInProgress ? "nothing came" : api_.get_error_string(state), doing, completed, started));
    }
    throw PeerLost(*loss_);
  }
  /// With loss_mutex_ held.
  void end(const PeerLost& loss) {
    loss_ = std::make_unique<PeerLost>(loss);
    is_closed_ = true;
    const std::lock_guard lock(comm_mutex_);
    (void)api_.comm_abort(comm_);  // kernels that wait on the GPU end
    comm_ = nullptr;
  }

  /// Looks after what is queued, so that whoever waits for the device need not: an operation that could begin and does not end in its time
  /// is the end of the group, and of the kernels that wait; and so is a rank that has died, noticed a loss, or left.
  void watch(const std::stop_token& stop) noexcept {
    use_device();
    std::optional<Waiting> waiting;
    std::optional<DeathCheck> death;  // while this rank waits
    auto asked = Clock::now();
    while (!stop.stop_requested()) {
      try {
        Queued* const first = first_queued(stop, waiting);
        const auto now = Clock::now();
        if (first != nullptr) {
          if (!first->since && first->begun->has_passed()) first->since = now;
          const int state = async_state();
          const bool has_failed = state != kNcclSuccess && state != kNcclInProgress;
          if (has_failed || is_closed_ || (first->since && now >= *first->since + first->timeout))
            lose(has_failed ? state : kNcclInProgress, first->doing, first->since.value_or(now));
          if (first->since) report(waiting, *first->since + first->timeout, first->doing);
        }
        // Who does not wait says nothing for the others: it may be the one that they wait for.
        if (const bool waits = is_polling_ || (first != nullptr && first->since); !waits) {
          death.reset();
          asked = now;
        } else if (!death) {
          death.emplace();
        }
        const bool asks = death && now - asked >= kAskPause;
        if (asks) asked = now;
        if ((death && death->has_lost_a_rank([this] { return peers_.gone(); })) || (asks && peers_.has_word_of_others()))
          lose(kNcclInProgress, first != nullptr ? first->doing : "the start of an operation", now);
      } catch (const std::exception&) {
        return;  // the next operation throws it again
      }
      std::this_thread::sleep_for(kWatchPause);
    }
  }
  /// The oldest operation under way, which stays where it is, as nobody else takes from the queue; nullptr after a while without any.
  Queued* first_queued(const std::stop_token& stop, std::optional<Waiting>& waiting) {
    std::unique_lock lock(queue_mutex_);
    while (!queue_.empty() && queue_.front().ended->has_passed()) {
      completed_ = std::move(queue_.front().doing);
      queue_.pop_front();
      waiting.reset();
    }
    if (queue_.empty()) (void)has_work_.wait_for(lock, stop, kAskPause, [this] { return !queue_.empty(); });
    return queue_.empty() ? nullptr : &queue_.front();
  }
  /// Returns when the event has passed, as what is watched does sooner or later.
  void await(const Event& event) noexcept {
    use_device();
    std::optional<Clock::time_point> closed;
    while (!event.has_passed()) {
      if (is_closed_ && !closed) closed = Clock::now();
      if (closed && Clock::now() > *closed + kRollCall + kAftermath) return;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  const CommOptions& options_;
  const NcclApi& api_;
  NcclPeers peers_;  ///< its watch is closed after the group, so that a rank that ends in order is not missed
  void* context_ = nullptr;
  NcclComm* comm_ = nullptr;
  mutable std::mutex comm_mutex_;  ///< whoever calls NCCL about comm_; taken after loss_mutex_
  mutable std::mutex loss_mutex_;
  std::unique_ptr<PeerLost> loss_;
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> is_polling_{false};  ///< an operation is being queued, which may need the others too
  std::uint64_t num_operations_ = 0;
  std::string last_ = "nothing";
  void* side_stream_ = nullptr;
  std::mutex queue_mutex_;
  std::condition_variable_any has_work_;
  std::deque<Queued> queue_;                  ///< what is under way, oldest first
  std::string completed_ = "the connection";  ///< what was first in it last
  std::jthread watcher_;
};

/// On the side stream; the compute stream waits for it when it is joined.
class NcclGroup::Beside final : public Started {
 public:
  Beside(NcclGroup& group, std::shared_ptr<Event> ended) : group_(group), ended_(std::move(ended)) {}
  ~Beside() override {
    if (!is_joined_) group_.await(*ended_);
  }
  void join() override {
    group_.throw_if_lost("the end of an operation");
    group_.use_device();
    ended_->hold(group_.stream());
    is_joined_ = true;
  }

 private:
  NcclGroup& group_;
  std::shared_ptr<Event> ended_;
  bool is_joined_ = false;
};

inline std::unique_ptr<Started> NcclGroup::started(std::shared_ptr<Event> ended) {
  return std::make_unique<Beside>(*this, std::move(ended));
}

}  // namespace prl::comm
