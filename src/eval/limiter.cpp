#include "eval/limiter.hpp"

#include <algorithm>
#include <exception>

#include "base/error.hpp"

namespace prl::eval {

Limiter::Limiter(std::int64_t num_permits) : num_free_(num_permits) {
  PRL_CHECK(num_permits > 0, "a limiter needs permits, got {}", num_permits);
}

asio::awaitable<Limiter::Permit> Limiter::acquire(std::shared_ptr<Limiter> limiter, net::TimePoint deadline) {
  const net::Signal signal;
  std::uint64_t id = 0;
  bool is_granted = false;
  {
    std::lock_guard lock(limiter->mutex_);
    is_granted = limiter->num_free_ > 0;
    if (is_granted) {
      --limiter->num_free_;
    } else {
      id = limiter->next_id_++;
      limiter->waiting_.emplace_back(id, signal);
    }
  }
  std::exception_ptr failure;
  if (!is_granted) {
    try {
      is_granted = co_await signal.wait_until(deadline);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    if (!is_granted && !limiter->forget(id)) is_granted = true;  // handed over in the same moment
  }
  if (!is_granted && !failure) fail(ErrorCode::kDeadline, "waited too long for one of the rollouts that run at once to end");
  Permit permit;
  if (is_granted) permit = Permit(std::move(limiter));
  if (failure) std::rethrow_exception(failure);
  co_return permit;
}

std::int64_t Limiter::num_free() const {
  std::lock_guard lock(mutex_);
  return num_free_;
}

void Limiter::release() {
  std::unique_lock lock(mutex_);
  if (waiting_.empty()) {
    ++num_free_;
    return;
  }
  const net::Signal next = waiting_.front().second;
  waiting_.pop_front();
  lock.unlock();
  next.notify();
}

bool Limiter::forget(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto it = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& entry) { return entry.first == id; });
  if (it == waiting_.end()) return false;
  waiting_.erase(it);
  return true;
}

}  // namespace prl::eval
