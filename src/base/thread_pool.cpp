#include "base/thread_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace prl {
namespace {
thread_local bool inside_pool = false;

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}
}  // namespace

int num_available_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (file >> quota >> period && quota != "max" && period > 0)
    cores = std::min(cores, std::max(1, static_cast<int>(std::stod(quota) / period)));
  return std::max(1, cores);
}

struct ThreadPool::Impl {
  std::vector<std::jthread> workers;
  std::mutex caller_mutex;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable finished;
  std::atomic<std::uint64_t> generation{0};
  std::atomic<bool> stopping{false};
  // The current loop. Workers read it under `active`, which the caller waits to reach zero before it returns.
  const std::function<void(std::int64_t)>* body = nullptr;
  std::int64_t count = 0;
  std::atomic<std::int64_t> next{0};
  std::atomic<int> active{0};
  std::exception_ptr error;

  void drain() {
    inside_pool = true;
    for (;;) {
      const std::int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) break;
      try {
        (*body)(i);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
    inside_pool = false;
  }

  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      // A short spin keeps decode steps, which issue many tiny loops, from paying a futex wake for each.
      for (int spin = 0; spin < 2000 && generation.load(std::memory_order_acquire) == seen; ++spin) cpu_relax();
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stopping.load() || generation.load(std::memory_order_acquire) != seen; });
        if (stopping) return;
        seen = generation.load(std::memory_order_acquire);
      }
      drain();
      if (active.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard lock(mutex);
        finished.notify_all();
      }
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  if (num_threads <= 0) num_threads = num_available_cores();
  for (int i = 1; i < num_threads; ++i) impl_->workers.emplace_back([impl = impl_.get()] { impl->work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
}

int ThreadPool::num_threads() const noexcept { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  if (count <= 0) return;
  if (count == 1 || inside_pool || impl_->workers.empty()) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::lock_guard caller(impl_->caller_mutex);
  {
    std::lock_guard lock(impl_->mutex);
    impl_->body = &body;
    impl_->count = count;
    impl_->next.store(0);
    impl_->error = nullptr;
    impl_->active.store(static_cast<int>(impl_->workers.size()));
    impl_->generation.fetch_add(1, std::memory_order_release);
  }
  impl_->wake.notify_all();
  impl_->drain();
  for (int spin = 0; spin < 4000 && impl_->active.load(std::memory_order_acquire) != 0; ++spin) cpu_relax();
  std::unique_lock lock(impl_->mutex);
  impl_->finished.wait(lock, [&] { return impl_->active.load(std::memory_order_acquire) == 0; });
  if (impl_->error) std::rethrow_exception(impl_->error);
}

}  // namespace prl
