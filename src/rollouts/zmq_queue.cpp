#include "rollouts/zmq_queue.hpp"

#include <zmq.hpp>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "net/port_owner.hpp"

namespace prl::rollouts {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kStepPoll{5};  // how soon the sender's thread sees a new step
constexpr milliseconds kAnnounceEvery{500};
/// A rank that has taken a step may die before another one has it; whoever takes samples in its place asks for that step again.
constexpr std::int64_t kKeepTaken = 2;
constexpr milliseconds kRepeatAfter{400};  // a step asked for again later than this was lost

/// Topics and requests carry the run's id, so that roles of two runs that were given the same port do not hear each other.
std::string topic_of(const std::string& run_id, std::int64_t rank) { return fmt::format("data_rank|{}|{}|", run_id, rank); }
std::string endpoint(const std::string& host, int port) {
  return fmt::format("tcp://{}:{}", host == "localhost" ? "127.0.0.1" : host, port);
}

void send_frames(zmq::socket_t& socket, const std::string& topic, const std::string& kind, const std::string& payload) {
  // PUB never blocks: a frame beyond the high-water mark is lost here and repeated when the rank asks again.
  if (!socket.send(zmq::buffer(topic), zmq::send_flags::sndmore | zmq::send_flags::dontwait)) return;
  if (!socket.send(zmq::buffer(kind), zmq::send_flags::sndmore | zmq::send_flags::dontwait)) return;
  static_cast<void>(socket.send(zmq::buffer(payload), zmq::send_flags::dontwait));
}

class ZmqSender final : public SampleSender {
 public:
  explicit ZmqSender(ZmqSenderOptions options)
      : options_(std::move(options)),
        ranks_(static_cast<std::size_t>(std::max<std::int64_t>(1, options_.num_ranks))),
        last_step_(options_.first_step - 1) {
    if (options_.num_ranks < 1 || options_.capacity < 1)
      fail(ErrorCode::kInvalidArgument, "sample queue: num_ranks {} and capacity {} must be at least 1", options_.num_ranks,
           options_.capacity);
    data_.set(zmq::sockopt::sndhwm, options_.hwm);
    data_.set(zmq::sockopt::linger, 1000);
    requests_.set(zmq::sockopt::linger, 0);
    bind(data_, options_.port);
    bind(requests_, options_.port + 1);
    thread_ = std::jthread([this](std::stop_token stop) { serve(stop); });
  }

  ~ZmqSender() override { thread_.request_stop(); }

  bool push(const wire::TrainingBatch& batch, milliseconds timeout) override {
    if (static_cast<std::int64_t>(batch.ranks.size()) != options_.num_ranks)
      fail(ErrorCode::kInvalidArgument, "sample queue: step {} has micro-batches for {} ranks, the queue has {}", batch.step,
           batch.ranks.size(), options_.num_ranks);
    std::unique_lock lock(mutex_);
    if (is_closed_) fail(ErrorCode::kUnavailable, "sample queue: step {} pushed after the queue was closed", batch.step);
    const bool has_room = changed_.wait_for(lock, timeout, [&] {
      const bool all_here = std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.is_announced; });
      const auto num_waiting = std::count_if(steps_.begin(), steps_.end(), [&](const Step& step) { return !is_taken(step); });
      return all_here && num_waiting < options_.capacity;
    });
    if (!has_room) return false;
    Step step;
    step.number = batch.step;
    for (const auto& micro_batches : batch.ranks) {
      wire::TrainingBatch one;
      one.step = batch.step;
      one.ranks.push_back(micro_batches);
      step.payloads.push_back(wire::encode(one));
      step.sent_at.emplace_back();
    }
    steps_.push_back(std::move(step));
    last_step_ = batch.step;
    return true;
  }
  std::int64_t num_ranks() const noexcept override { return options_.num_ranks; }
  void close() override {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }
  bool drain(milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    PRL_CHECK(is_closed_, "drain comes after close");
    const auto knows_end = [](const Rank& rank) { return !rank.is_announced || rank.knows_end; };
    return changed_.wait_for(lock, timeout, [&] { return std::all_of(ranks_.begin(), ranks_.end(), knows_end); });
  }
  std::string describe() const override {
    std::lock_guard lock(mutex_);
    std::string text = fmt::format("ZeroMQ at {}, last step sent {}, per rank:", endpoint(options_.host, options_.port), last_step_);
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      text += ranks_[r].is_announced ? fmt::format(" rank {} wants step {}", r, ranks_[r].next_step)
                                     : fmt::format(" rank {} has not announced itself", r);
    return text;
  }

 private:
  struct Rank {
    bool is_announced = false;
    std::int64_t next_step = 0;
    bool knows_end = false;
  };
  struct Step {
    std::int64_t number = 0;
    std::vector<std::string> payloads;                      ///< per rank
    std::vector<std::optional<Clock::time_point>> sent_at;  ///< per rank
  };

  bool is_taken(const Step& step) const {
    return std::ranges::all_of(ranks_, [&](const Rank& rank) { return rank.is_announced && rank.next_step > step.number; });
  }

  void bind(zmq::socket_t& socket, int port) {
    try {
      socket.bind(endpoint(options_.host, port));
    } catch (const zmq::error_t& error) {
      fail(ErrorCode::kIo, "sample queue: {} could not be bound: {}{}; rollout_transport.port takes two ports",
           endpoint(options_.host, port), error.what(), error.num() == EADDRINUSE ? net::port_taken_hint(port) : "");
    }
  }

  // The only thread that touches the sockets.
  void serve(std::stop_token stop) {
    zmq::pollitem_t items[] = {{requests_.handle(), 0, ZMQ_POLLIN, 0}};
    while (!stop.stop_requested()) {
      zmq::poll(items, 1, kStepPoll);
      std::lock_guard lock(mutex_);
      zmq::message_t message;
      while (requests_.recv(message, zmq::recv_flags::dontwait)) on_request(message.to_string());
      for (Step& step : steps_)
        for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
          if (!step.sent_at[rank]) send_step(step, rank);
      // A rank that took its last step before close() may never ask again: it is told unasked.
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
        if (is_closed_ && !ranks_[rank].knows_end && ranks_[rank].is_announced && ranks_[rank].next_step > last_step_) send_end(rank);
    }
  }

  void send_end(std::size_t rank) {
    send_frames(data_, topic_of(options_.run_id, static_cast<std::int64_t>(rank)), "end", std::to_string(last_step_));
    ranks_[rank].knows_end = true;
    changed_.notify_all();
  }

  void send_step(Step& step, std::size_t rank) {
    send_frames(data_, topic_of(options_.run_id, static_cast<std::int64_t>(rank)), "batch", step.payloads[rank]);
    step.sent_at[rank] = Clock::now();
  }

  void on_request(const std::string& text) {
    const std::size_t bar = text.find('|');
    if (bar == std::string::npos || text.substr(0, bar) != options_.run_id) {
      if (!std::exchange(has_warned_of_stranger_, true))
        log::warning("sample queue: a trainer of another run asks at {} and is ignored; give each run its own rollout_transport.port",
                     endpoint(options_.host, options_.port));
      return;
    }
    std::istringstream in(text.substr(bar + 1));
    std::int64_t rank = -1;
    std::int64_t next_step = -1;
    in >> rank >> next_step;
    if (!in || rank < 0 || rank >= options_.num_ranks) {
      log::warning("sample queue: a request '{}' is not '<rank> <next step>' of {} ranks; ignored", text.substr(0, 64), options_.num_ranks);
      return;
    }
    Rank& asking = ranks_[static_cast<std::size_t>(rank)];
    asking.is_announced = true;
    asking.next_step = next_step;
    while (static_cast<std::int64_t>(steps_.size()) > kKeepTaken && is_taken(steps_[kKeepTaken])) steps_.pop_front();
    for (Step& step : steps_) {
      auto& sent_at = step.sent_at[static_cast<std::size_t>(rank)];
      if (step.number >= next_step && sent_at && Clock::now() - *sent_at > kRepeatAfter) send_step(step, static_cast<std::size_t>(rank));
    }
    if (is_closed_ && next_step > last_step_) send_end(static_cast<std::size_t>(rank));
    changed_.notify_all();
  }

  const ZmqSenderOptions options_;
  zmq::context_t context_{1};
  zmq::socket_t data_{context_, zmq::socket_type::pub};
  zmq::socket_t requests_{context_, zmq::socket_type::pull};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Rank> ranks_;
  std::deque<Step> steps_;  ///< not yet taken by every rank, and the last kKeepTaken that are
  std::int64_t last_step_;
  bool is_closed_ = false;
  bool has_warned_of_stranger_ = false;  ///< of thread_ alone
  std::jthread thread_;                  ///< last member: it stops before the sockets go
};

class ZmqReceiver final : public SampleReceiver {
 public:
  explicit ZmqReceiver(ZmqReceiverOptions options) : options_(std::move(options)), next_step_(options_.first_step) {
    data_.set(zmq::sockopt::rcvhwm, options_.hwm);
    data_.set(zmq::sockopt::linger, 0);
    data_.set(zmq::sockopt::subscribe, topic_of(options_.run_id, options_.rank));
    data_.connect(endpoint(options_.host, options_.port));
    requests_.set(zmq::sockopt::linger, 1000);
    requests_.set(zmq::sockopt::sndhwm, 100);
    requests_.connect(endpoint(options_.host, options_.port + 1));
  }

  std::optional<RankBatch> pop(milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    // Who only looks in does so often, and asks no more often than one who waits.
    if (timeout > milliseconds(0) || Clock::now() - announced_at_ >= kAnnounceEvery) announce();
    while (!is_closed()) {
      const auto now = Clock::now();
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - now);
      zmq::pollitem_t items[] = {{data_.handle(), 0, ZMQ_POLLIN, 0}};
      zmq::poll(items, 1, std::clamp(left, milliseconds(0), kAnnounceEvery));
      if (auto batch = receive()) return batch;
      if (Clock::now() >= deadline) return std::nullopt;
      if (Clock::now() - announced_at_ >= kAnnounceEvery) announce();
    }
    return std::nullopt;
  }

  bool is_closed() const override { return last_step_ && next_step_ > *last_step_; }
  std::string describe() const override {
    return fmt::format("ZeroMQ at {}, rank {}, waiting for step {}", endpoint(options_.host, options_.port), options_.rank, next_step_);
  }

 private:
  void announce() {
    const std::string text = fmt::format("{}|{} {}", options_.run_id, options_.rank, next_step_);
    static_cast<void>(requests_.send(zmq::buffer(text), zmq::send_flags::dontwait));
    announced_at_ = Clock::now();
  }

  /// One message if it is the step that is due; repeated and early ones are dropped (the sender repeats early ones).
  std::optional<RankBatch> receive() {
    zmq::message_t frames[3];
    std::size_t count = 0;
    if (!data_.recv(frames[0], zmq::recv_flags::dontwait)) return std::nullopt;
    for (count = 1; frames[count - 1].more() && count < 3; ++count)
      if (!data_.recv(frames[count], zmq::recv_flags::dontwait)) break;
    if (count != 3 || frames[2].more()) fail(ErrorCode::kCorrupt, "sample queue: {}: a message has {} frames, wanted 3", describe(), count);
    const std::string kind = frames[1].to_string();
    if (kind == "end") {
      last_step_ = std::stoll(frames[2].to_string());
      return std::nullopt;
    }
    wire::TrainingBatch batch = wire::decode_training_batch(frames[2].to_string_view());
    if (batch.ranks.size() != 1)
      fail(ErrorCode::kCorrupt, "sample queue: {}: step {} holds {} ranks, wanted one", describe(), batch.step, batch.ranks.size());
    if (batch.step != next_step_) return std::nullopt;
    ++next_step_;
    announce();
    return RankBatch{batch.step, std::move(batch.ranks.front())};
  }

  const ZmqReceiverOptions options_;
  zmq::context_t context_{1};
  zmq::socket_t data_{context_, zmq::socket_type::sub};
  zmq::socket_t requests_{context_, zmq::socket_type::push};
  std::int64_t next_step_;
  std::optional<std::int64_t> last_step_;
  Clock::time_point announced_at_{};
};

}  // namespace

std::unique_ptr<SampleSender> make_zmq_sender(ZmqSenderOptions options) { return std::make_unique<ZmqSender>(std::move(options)); }
std::unique_ptr<SampleReceiver> make_zmq_receiver(ZmqReceiverOptions options) { return std::make_unique<ZmqReceiver>(std::move(options)); }

}  // namespace prl::rollouts
