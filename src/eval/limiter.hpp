#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "net/asio.hpp"
#include "net/signal.hpp"

namespace prl::eval {

namespace asio = boost::asio;

/// Rollouts at once where the configuration does not say.
constexpr int kDefaultConcurrent = 128;

/// Bounds how many rollouts run at once, over all environments that share it. First come, first served. Any thread.
class Limiter {
 public:
  /// The right to run; given back on destruction.
  class Permit {
   public:
    Permit() = default;
    explicit Permit(std::shared_ptr<Limiter> owner) : owner_(std::move(owner)) {}
    ~Permit() {
      if (owner_) owner_->release();
    }
    Permit(Permit&&) noexcept = default;
    Permit& operator=(Permit&& other) noexcept {
      std::swap(owner_, other.owner_);
      return *this;
    }

   private:
    std::shared_ptr<Limiter> owner_;
  };

  explicit Limiter(std::int64_t num_permits);
  /// Waits for a permit. Error{kDeadline}; Error{kCancelled} if the awaiting coroutine is cancelled.
  static asio::awaitable<Permit> acquire(std::shared_ptr<Limiter> limiter, net::TimePoint deadline);
  std::int64_t num_free() const;

 private:
  void release();
  bool forget(std::uint64_t id);  ///< false: the permit was handed over already

  mutable std::mutex mutex_;
  std::int64_t num_free_;
  std::uint64_t next_id_ = 0;
  std::deque<std::pair<std::uint64_t, net::Signal>> waiting_;
};

}  // namespace prl::eval
