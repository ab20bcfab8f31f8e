#include "net/io_runtime.hpp"

#include <sys/resource.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "base/log.hpp"
#include "net/errors.hpp"
#include "net/task_group.hpp"

namespace prl::net {

std::uint64_t raise_fd_limit(std::uint64_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const rlim_t target = std::min<rlim_t>(static_cast<rlim_t>(wanted), limit.rlim_max);
  if (limit.rlim_cur < target) {
    rlimit raised = limit;
    raised.rlim_cur = target;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<std::uint64_t>(limit.rlim_cur);
}

struct IoRuntime::Impl {
  explicit Impl(int num_threads, std::string runtime_name)
      : name(std::move(runtime_name)), context(num_threads), work(asio::make_work_guard(context)), tasks(context.get_executor(), name) {}

  std::string name;
  asio::io_context context;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  TaskGroup tasks;
  std::vector<std::thread> threads;
  std::atomic<bool> stopped{false};

  void run() {
    log::set_thread_role(name);
    for (;;) {
      try {
        context.run();
        return;
      } catch (const std::exception& error) {
        // Only plain posted functions get here (coroutines end in their task group); one bad one must not end the thread.
        log::error("{}: a posted function threw: {}", name, error.what());
      }
    }
  }
};

IoRuntime::IoRuntime(int num_threads, std::string name) {
  const int count = std::max(1, num_threads);
  impl_ = std::make_unique<Impl>(count, std::move(name));
  try {
    for (int i = 0; i < count; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->run(); });
  } catch (...) {
    stop(std::chrono::milliseconds(0));  // those that the system did start
    throw;
  }
}

IoRuntime::~IoRuntime() { stop(std::chrono::seconds(2)); }

asio::any_io_executor IoRuntime::executor() const { return impl_->context.get_executor(); }

void IoRuntime::post(std::function<void()> work) { asio::post(impl_->context, std::move(work)); }

void IoRuntime::spawn(std::string what, asio::awaitable<void> task) { impl_->tasks.spawn(std::move(what), std::move(task)); }

TaskGroup& IoRuntime::tasks() { return impl_->tasks; }

void IoRuntime::stop(std::chrono::milliseconds drain) {
  if (impl_->stopped.exchange(true)) return;
  impl_->tasks.cancel();
  if (!impl_->tasks.join_blocking(drain))
    log::warning("{}: {} tasks did not end within {} ms", impl_->name, impl_->tasks.stats().num_running, drain.count());
  impl_->work.reset();
  impl_->context.stop();
  for (std::thread& thread : impl_->threads) thread.join();
}

}  // namespace prl::net
