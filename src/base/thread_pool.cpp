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
#include <utility>
#include <vector>

namespace prl {
namespace {
thread_local bool inside_pool = false;

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // "yield" does nothing on most cores; a flushed pipeline takes about as long as a pause
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

/// One loop at a time, described by `body`, `count` and `next`. `state` says whether it is open and how many workers are in it:
/// a worker may enter while it is open, and the caller, once no item is left, closes it and waits for those inside only. So a
/// worker that the kernel has not scheduled yet delays no other.
struct ThreadPool::Impl {
  static constexpr std::uint64_t kInside = 0xffff;  ///< bits that count the workers inside
  static constexpr std::uint64_t kOpen = 1u << 16;
  static constexpr int kGenerationShift = 17;
  /// Pauses before sleeping, about 100 microseconds: decode steps issue many tiny loops, and a futex wake for each would cost more.
  static constexpr int kSpins = 2000;

  std::vector<std::jthread> workers;
  std::mutex caller_mutex;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable finished;
  // One cache line holds all that a worker needs to begin.
  alignas(64) std::atomic<std::uint64_t> state{0};
  std::atomic<std::int64_t> next{0};
  // Written while the loop is closed and nobody is inside.
  const std::function<void(std::int64_t)>* body = nullptr;
  std::int64_t count = 0;
  ReadAhead ahead, next_ahead;  ///< of this loop; of the next, which the caller alone knows
  alignas(64) std::atomic<int> num_asleep{0};
  std::atomic<bool> is_caller_asleep{false};
  std::atomic<bool> stopping{false};
  std::exception_ptr error;

  template <typename Condition>
  static bool spin_until(int spins, Condition condition) {
    for (int i = 0; i < spins; ++i) {
      if (condition()) return true;
      cpu_relax();
    }
    return condition();
  }

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

  bool enter(std::uint64_t& seen) {
    std::uint64_t now = state.load(std::memory_order_acquire);
    const std::uint64_t generation = now >> kGenerationShift;
    seen = generation;
    while ((now & kOpen) != 0 && now >> kGenerationShift == generation)
      if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
    return false;
  }
  void leave() {
    const std::uint64_t before = state.fetch_sub(1, std::memory_order_seq_cst);
    if ((before & kInside) == 1 && (before & kOpen) == 0 && is_caller_asleep.load(std::memory_order_seq_cst)) {
      std::lock_guard lock(mutex);
      finished.notify_all();
    }
  }

  template <typename Condition>
  static void read(const ReadAhead& ahead, std::size_t worker, Condition is_news) {
    constexpr std::size_t kLine = 64, kLines = 8;
    const char* at = ahead.data + worker * ahead.stride;
    for (const char* end = at + ahead.bytes; at < end && !is_news(); at += kLines * kLine)
      for (std::size_t i = 0; i < kLines; ++i) __builtin_prefetch(at + i * kLine, 0, 2);
  }

  void work(std::size_t worker) {
    std::uint64_t seen = 0;
    auto is_news = [&] { return state.load(std::memory_order_seq_cst) >> kGenerationShift != seen; };
    for (;;) {
      if (!spin_until(kSpins, is_news)) {
        std::unique_lock lock(mutex);
        num_asleep.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(lock, [&] { return stopping.load() || is_news(); });
        num_asleep.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (stopping.load()) return;
      if (!enter(seen)) continue;
      drain();
      const ReadAhead mine = ahead;
      leave();
      read(mine, worker, is_news);
    }
  }

  void run(std::int64_t num_items, const std::function<void(std::int64_t)>& items) {
    body = &items;
    count = num_items;
    ahead = std::exchange(next_ahead, {});
    error = nullptr;
    next.store(0, std::memory_order_relaxed);
    const std::uint64_t generation = (state.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
    state.store(generation << kGenerationShift | kOpen, std::memory_order_seq_cst);
    if (num_asleep.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard lock(mutex);
      wake.notify_all();
    }
    drain();
    state.fetch_and(~kOpen, std::memory_order_seq_cst);
    auto is_empty = [&] { return (state.load(std::memory_order_seq_cst) & kInside) == 0; };
    if (!spin_until(2 * kSpins, is_empty)) {
      std::unique_lock lock(mutex);
      is_caller_asleep.store(true, std::memory_order_seq_cst);
      finished.wait(lock, is_empty);
      is_caller_asleep.store(false, std::memory_order_seq_cst);
    }
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  if (num_threads <= 0) num_threads = num_available_cores();
  for (int i = 1; i < num_threads; ++i) impl_->workers.emplace_back([impl = impl_.get(), i] { impl->work(static_cast<std::size_t>(i)); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  impl_->workers.clear();  // joins, before what they use goes away
}

int ThreadPool::num_threads() const noexcept { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::read_ahead(const ReadAhead& ahead) noexcept {
  if (!inside_pool) impl_->next_ahead = ahead;
}

void ThreadPool::parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  if (count <= 0) return;
  if (count == 1 || inside_pool || impl_->workers.empty()) {
    for (std::int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::lock_guard caller(impl_->caller_mutex);
  impl_->run(count, body);
}

}  // namespace prl
