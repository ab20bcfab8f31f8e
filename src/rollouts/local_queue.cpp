#include "rollouts/local_queue.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "base/error.hpp"

namespace prl::rollouts {

// One mutex over all ranks: a step is given to every rank or to none, so a full rank cannot split a step.
struct LocalSampleQueue::State {
  State(std::int64_t num_ranks, std::int64_t capacity_steps)
      : capacity(static_cast<std::size_t>(capacity_steps)), queues(static_cast<std::size_t>(num_ranks)) {}

  bool has_room() const {
    for (const auto& queue : queues)
      if (queue.size() >= capacity) return false;
    return true;
  }

  const std::size_t capacity;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<RankBatch>> queues;
  std::int64_t last_step = 0;
  bool closed = false;
};

namespace {

template <typename State>
class LocalSender final : public SampleSender {
 public:
  explicit LocalSender(std::shared_ptr<State> state) : state_(std::move(state)) {}
  ~LocalSender() override { close(); }

  bool push(const wire::TrainingBatch& batch, std::chrono::milliseconds timeout) override {
    if (static_cast<std::int64_t>(batch.ranks.size()) != num_ranks())
      fail(ErrorCode::kInvalidArgument, "sample queue: step {} has micro-batches for {} ranks, the queue has {}", batch.step,
           batch.ranks.size(), num_ranks());
    std::unique_lock lock(state_->mutex);
    const bool ready = state_->changed.wait_for(lock, timeout, [&] { return state_->closed || state_->has_room(); });
    if (state_->closed) fail(ErrorCode::kUnavailable, "sample queue: step {} pushed after the queue was closed", batch.step);
    if (!ready) return false;
    for (std::size_t rank = 0; rank < batch.ranks.size(); ++rank) state_->queues[rank].push_back(RankBatch{batch.step, batch.ranks[rank]});
    state_->last_step = batch.step;
    state_->changed.notify_all();
    return true;
  }
  std::int64_t num_ranks() const noexcept override { return static_cast<std::int64_t>(state_->queues.size()); }
  void close() override {
    std::lock_guard lock(state_->mutex);
    state_->closed = true;
    state_->changed.notify_all();
  }
  bool drain(std::chrono::milliseconds) override { return true; }
  std::string describe() const override {
    std::lock_guard lock(state_->mutex);
    std::string text = fmt::format("in-process sample queue, last step sent {}, waiting per rank:", state_->last_step);
    for (const auto& queue : state_->queues) text += fmt::format(" {}", queue.size());
    return text;
  }

 private:
  std::shared_ptr<State> state_;
};

template <typename State>
class LocalReceiver final : public SampleReceiver {
 public:
  LocalReceiver(std::shared_ptr<State> state, std::size_t rank) : state_(std::move(state)), rank_(rank) {}

  std::optional<RankBatch> pop(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(state_->mutex);
    auto& queue = state_->queues[rank_];
    state_->changed.wait_for(lock, timeout, [&] { return state_->closed || !queue.empty(); });
    if (queue.empty()) return std::nullopt;
    std::optional<RankBatch> batch(std::move(queue.front()));
    queue.pop_front();
    state_->changed.notify_all();
    return batch;
  }
  bool is_closed() const override {
    std::lock_guard lock(state_->mutex);
    return state_->closed && state_->queues[rank_].empty();
  }
  std::string describe() const override { return fmt::format("in-process sample queue, rank {}", rank_); }

 private:
  std::shared_ptr<State> state_;
  const std::size_t rank_;
};

}  // namespace

LocalSampleQueue::LocalSampleQueue(std::int64_t num_ranks, std::int64_t capacity) {
  if (num_ranks < 1 || capacity < 1)
    fail(ErrorCode::kInvalidArgument, "sample queue: num_ranks {} and capacity {} must be at least 1", num_ranks, capacity);
  state_ = std::make_shared<State>(num_ranks, capacity);
}

std::unique_ptr<SampleSender> LocalSampleQueue::make_sender() const { return std::make_unique<LocalSender<State>>(state_); }

std::unique_ptr<SampleReceiver> LocalSampleQueue::make_receiver(std::int64_t rank) const {
  if (rank < 0 || rank >= static_cast<std::int64_t>(state_->queues.size()))
    fail(ErrorCode::kInvalidArgument, "sample queue: rank {} of {}", rank, state_->queues.size());
  return std::make_unique<LocalReceiver<State>>(state_, static_cast<std::size_t>(rank));
}

}  // namespace prl::rollouts
