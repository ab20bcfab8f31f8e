#include "server/worker_pool.hpp"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.hpp"
#include "base/queue.hpp"

namespace prl::server {
namespace {
constexpr auto kPollTime = std::chrono::seconds(60);
}

struct WorkerPool::Impl {
  Impl(std::size_t max_queued, std::string pool_name) : name(std::move(pool_name)), jobs(max_queued) {}
  std::string name;
  BoundedQueue<std::function<void()>> jobs;
  std::vector<std::thread> threads;

  void run() {
    log::set_thread_role(name);
    for (;;) {
      auto job = jobs.pop(kPollTime);
      if (job)
        (*job)();
      else if (jobs.is_closed())
        return;
    }
  }
};

WorkerPool::WorkerPool(int num_threads, std::size_t max_queued, std::string name)
    : impl_(std::make_shared<Impl>(max_queued, std::move(name))) {
  for (int i = 0; i < std::max(1, num_threads); ++i) impl_->threads.emplace_back([impl = impl_] { impl->run(); });
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
  fail(ErrorCode::kOverloaded, "{}: the queue is full; try again later", impl_->name);
}

}  // namespace prl::server
