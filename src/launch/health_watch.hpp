#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace prl::launch {

/// Asks a server for its health, by a thread of its own, and knows for how long it has not said that it is well.
class HealthWatch {
 public:
  /// `url` answers with status 200 when all is well. It is asked several times within `limit`, which is how long the caller is patient; a
  /// request ends within a quarter of it.
  HealthWatch(std::string url, std::chrono::milliseconds limit);
  HealthWatch(const HealthWatch&) = delete;
  HealthWatch& operator=(const HealthWatch&) = delete;

  /// Since it was last well; 0 until it was once, since an address at which nothing ever answered says nothing of the server. Any thread.
  std::chrono::milliseconds unwell() const;

 private:
  using Clock = std::chrono::steady_clock;
  void watch(const std::stop_token& stop) noexcept;
  bool is_well() const noexcept;

  const std::string url_;
  const std::chrono::milliseconds limit_;
  std::atomic<Clock::time_point> last_well_ = Clock::time_point::min();
  std::jthread thread_;
};

}  // namespace prl::launch
