#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "net/asio.hpp"

namespace prl::net {

class TaskGroup;

/// Raises the soft limit of open files to min(wanted, hard limit) and returns the limit in force.
std::uint64_t raise_fd_limit(std::uint64_t wanted);

/// One io_context and the threads that run it. Made in main (or by a role) and passed down; nothing here is global.
class IoRuntime {
 public:
  /// Starts `num_threads` (at least 1) threads; `name` is their log role and stands in messages.
  explicit IoRuntime(int num_threads, std::string name = "io");
  /// stop(2 s).
  ~IoRuntime();
  IoRuntime(const IoRuntime&) = delete;
  IoRuntime& operator=(const IoRuntime&) = delete;

  asio::any_io_executor executor() const;
  /// Runs `work` on an I/O thread. It must not block. An exception is logged and dropped.
  void post(std::function<void()> work);
  /// Starts a coroutine on a strand of its own, in this runtime's task group.
  void spawn(std::string what, asio::awaitable<void> task);
  TaskGroup& tasks();
  /// Runs `task` to its end and returns its value or throws its exception. Never from an I/O thread.
  /// Error{kDeadline} naming `what` when `timeout` passes first; the task then goes on until the runtime stops.
  template <typename T>
  T run_blocking(asio::awaitable<T> task, std::chrono::milliseconds timeout, std::string what = "a network task");
  /// Cancels the tasks, waits for them up to `drain`, then stops the threads. Idempotent. Not from an I/O thread.
  void stop(std::chrono::milliseconds drain);

 private:
  template <typename T>
  struct Slot {
    using Value = std::conditional_t<std::is_void_v<T>, std::monostate, T>;
    std::mutex mutex;
    std::condition_variable ready;
    std::optional<Value> value;
    std::exception_ptr exception;
    bool done = false;
  };
  template <typename T>
  static asio::awaitable<void> fill(asio::awaitable<T> task, std::shared_ptr<Slot<T>> slot);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

template <typename T>
asio::awaitable<void> IoRuntime::fill(asio::awaitable<T> task, std::shared_ptr<Slot<T>> slot) {
  std::optional<typename Slot<T>::Value> value;
  std::exception_ptr exception;
  try {
    if constexpr (std::is_void_v<T>) {
      co_await std::move(task);
      value.emplace();
    } else {
      value.emplace(co_await std::move(task));
    }
  } catch (const std::exception&) {
    exception = std::current_exception();
  }
  std::lock_guard lock(slot->mutex);
  slot->value = std::move(value);
  slot->exception = exception;
  slot->done = true;
  slot->ready.notify_all();
}

template <typename T>
T IoRuntime::run_blocking(asio::awaitable<T> task, std::chrono::milliseconds timeout, std::string what) {
  auto slot = std::make_shared<Slot<T>>();
  spawn(what, fill<T>(std::move(task), slot));
  std::unique_lock lock(slot->mutex);
  if (!slot->ready.wait_for(lock, timeout, [&] { return slot->done; }))
    fail(ErrorCode::kDeadline, "waited {} ms for {}: the deadline passed", timeout.count(), what);
  if (slot->exception) std::rethrow_exception(slot->exception);
  if constexpr (!std::is_void_v<T>) return std::move(*slot->value);
}

}  // namespace prl::net
