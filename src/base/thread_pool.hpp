#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace prl {

/// Workers for compute loops. One pool per role; made in main and passed down.
class ThreadPool {
 public:
  /// `num_threads` counts the caller, who works too; 0 means one per available core (affinity and cgroup respected).
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept;
  /// Runs body(i) for i in [0, count), in any order and on any thread, and returns when all are done. Which thread runs
  /// which i is not fixed, so results must not depend on it. Not re-entrant from inside body (runs inline there). One
  /// caller at a time per pool; a second caller waits. The first exception thrown by body is rethrown here.
  void parallel_for(std::int64_t count, const std::function<void(std::int64_t)>& body);
  /// What worker i (1 to num_threads - 1) may prefetch into its second-level cache once it has no item of the next loop left, until another
  /// loop begins: `bytes` from data + i * stride on. A hint; the memory is not read, so it may be any. By the caller of that loop.
  struct ReadAhead {
    const char* data = nullptr;
    std::size_t stride = 0, bytes = 0;
  };
  void read_ahead(const ReadAhead& ahead) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Cores this process may use: affinity mask and cgroup CPU quota, at least 1.
int num_available_cores();

}  // namespace prl
