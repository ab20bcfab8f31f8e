#include "grammar/rule_worker.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.hpp"

namespace prl::grammar {
namespace {

constexpr int kNiceness = 10;
constexpr auto kPollTime = std::chrono::seconds(60);

}  // namespace

struct RuleWorker::Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;  // guarded
  bool is_stopping = false;                // guarded
  std::vector<std::thread> threads;        // of the owner

  void run() {
    log::set_thread_role("rules");
    // Of this thread alone, as Linux counts it. A refusal only makes the thread as important as the others.
    [[maybe_unused]] const int refused = ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kNiceness);
    for (;;) {
      std::function<void()> job;
      {
        std::unique_lock lock(mutex);
        if (!changed.wait_for(lock, kPollTime, [&] { return is_stopping || !jobs.empty(); })) continue;
        if (is_stopping) return;
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      job();
    }
  }
};

RuleWorker::RuleWorker(int num_threads) : shared_(std::make_shared<Shared>()) {
  try {
    for (int i = 0; i < num_threads; ++i) shared_->threads.emplace_back([shared = shared_] { shared->run(); });
  } catch (...) {
    stop();  // those that the system did start
    throw;
  }
}

RuleWorker::~RuleWorker() { stop(); }

void RuleWorker::stop() {
  std::deque<std::function<void()>> dropped;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->is_stopping = true;
    dropped.swap(shared_->jobs);
    shared_->changed.notify_all();
  }
  // A job may hold the last rule, and that the last reference to this: then its own thread ends by itself.
  for (std::thread& thread : std::exchange(shared_->threads, {}))
    thread.get_id() == std::this_thread::get_id() ? thread.detach() : thread.join();
}

void RuleWorker::post(std::function<void()> job) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->is_stopping) return;
  shared_->jobs.push_back(std::move(job));
  shared_->changed.notify_one();
}

}  // namespace prl::grammar
