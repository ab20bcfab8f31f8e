#include "net/worker_pool.hpp"

#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/queue.hpp"

namespace prl::net {
namespace {
constexpr auto kPollTime = std::chrono::seconds(60);
}

struct WorkerPool::Impl {
  explicit Impl(Options given) : options(std::move(given)), jobs(options.max_queued) {}
  const Options options;
  BoundedQueue<std::function<void()>> jobs;
  std::vector<std::thread> threads;

  void run() {
    log::set_thread_role(options.name);
    constexpr std::size_t kLongestName = 15;  // of Linux
    (void)::pthread_setname_np(::pthread_self(), options.name.substr(0, kLongestName).c_str());
    // Of this thread alone, as Linux counts it; a system that refuses only makes the thread as important as the others.
    if (options.niceness > 0 &&
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), ::getpriority(PRIO_PROCESS, 0) + options.niceness) != 0)
      log::debug("{}: cannot lower the priority of a thread: {}", options.name, std::strerror(errno));
    for (;;) {
      auto job = jobs.pop(kPollTime);
      if (!job) {
        if (jobs.is_closed()) return;
        continue;
      }
      (*job)();
      job.reset();  // with what it held
      if (options.gives_back) ::malloc_trim(0);
    }
  }
};

WorkerPool::WorkerPool(Options options) : impl_(std::make_shared<Impl>(std::move(options))) {
  try {
    for (int i = 0; i < std::max(1, impl_->options.num_threads); ++i) impl_->threads.emplace_back([impl = impl_] { impl->run(); });
  } catch (...) {
    stop();  // those that the system did start
    throw;
  }
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() {
  impl_->jobs.close();
  for (std::thread& thread : std::exchange(impl_->threads, {}))
    thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
}

void WorkerPool::post(std::function<void()> job) {
  if (impl_->jobs.try_push(job)) return;
  if (impl_->jobs.is_closed()) fail(ErrorCode::kUnavailable, "the server is stopping");
  fail(ErrorCode::kOverloaded, "{}: the queue is full; try again later", impl_->options.name);
}

}  // namespace prl::net
