#include "net/task_group.hpp"

#include <boost/asio/bind_cancellation_slot.hpp>
#include <boost/asio/cancellation_signal.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>

#include <condition_variable>
#include <list>
#include <mutex>
#include <utility>

#include "base/log.hpp"
#include "net/errors.hpp"
#include "net/signal.hpp"
#include "net/strand.hpp"

namespace prl::net {
namespace {

struct Task {
  explicit Task(Strand s) : strand(std::move(s)) {}
  Strand strand;
  asio::cancellation_signal signal;  // touched on the strand only
};

}  // namespace

struct TaskGroup::State {
  asio::any_io_executor executor;
  std::string name;
  std::function<void(const Error&)> on_error;
  mutable std::mutex mutex;
  std::condition_variable all_ended;
  Signal all_ended_signal;
  std::list<std::shared_ptr<Task>> tasks;
  Stats stats;
  bool cancelled = false;

  void end_task(std::list<std::shared_ptr<Task>>::iterator place, const std::string& what, const std::exception_ptr& exception) {
    bool failed = false;
    Error error(ErrorCode::kInternal, "");
    if (exception) {
      error = to_error(exception);
      failed = error.code() != ErrorCode::kCancelled;
    }
    if (failed) {
      log::error("{}: task {} failed: {} ({})", name, what, error.what(), to_string(error.code()));
      if (on_error) on_error(error);
    }
    std::lock_guard lock(mutex);
    tasks.erase(place);
    --stats.num_running;
    if (!exception)
      ++stats.num_finished;
    else if (failed)
      ++stats.num_failed;
    else
      ++stats.num_cancelled;
    if (stats.num_running == 0) {
      all_ended.notify_all();
      all_ended_signal.notify();
    }
  }
};

TaskGroup::TaskGroup(asio::any_io_executor executor, std::string name, std::function<void(const Error&)> on_error)
    : state_(std::make_shared<State>()) {
  state_->executor = std::move(executor);
  state_->name = std::move(name);
  state_->on_error = std::move(on_error);
}

TaskGroup::~TaskGroup() { cancel(); }

void TaskGroup::spawn(std::string what, asio::awaitable<void> task) {
  auto state = state_;
  auto entry = std::make_shared<Task>(new_strand(state->executor));
  std::list<std::shared_ptr<Task>>::iterator place;
  {
    std::lock_guard lock(state->mutex);
    if (state->cancelled) {
      ++state->stats.num_cancelled;
      return;
    }
    place = state->tasks.insert(state->tasks.end(), entry);
    ++state->stats.num_running;
  }
  auto done = [state, place, entry, what = std::move(what)](std::exception_ptr exception) { state->end_task(place, what, exception); };
  asio::co_spawn(entry->strand, std::move(task), asio::bind_cancellation_slot(entry->signal.slot(), std::move(done)));
}

void TaskGroup::cancel() {
  std::list<std::shared_ptr<Task>> tasks;
  {
    std::lock_guard lock(state_->mutex);
    state_->cancelled = true;
    tasks = state_->tasks;
  }
  for (const auto& task : tasks) asio::post(task->strand, [task] { task->signal.emit(asio::cancellation_type::terminal); });
}

asio::awaitable<bool> TaskGroup::join(TimePoint deadline) {
  const auto state = state_;
  for (;;) {
    {
      std::lock_guard lock(state->mutex);
      if (state->stats.num_running == 0) co_return true;
    }
    const bool notified = co_await state->all_ended_signal.wait_until(deadline);
    if (!notified && Clock::now() >= deadline) co_return false;
  }
}

bool TaskGroup::join_blocking(std::chrono::milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  return state_->all_ended.wait_for(lock, timeout, [&] { return state_->stats.num_running == 0; });
}

TaskGroup::Stats TaskGroup::stats() const {
  std::lock_guard lock(state_->mutex);
  return state_->stats;
}

}  // namespace prl::net
