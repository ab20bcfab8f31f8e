#include "weights/version_feed.hpp"

#include <algorithm>
#include <utility>

namespace prl::weights {

std::optional<PublishedWeights> VersionFeed::take(PolicyVersion after) {
  std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  while (!kept_.empty() && kept_.front().manifest.version <= after && kept_.size() > 1) kept_.pop_front();
  if (!kept_.empty() && kept_.front().manifest.version > after) return kept_.front();
  return std::nullopt;
}

asio::awaitable<std::optional<PublishedWeights>> VersionFeed::wait_newer(PolicyVersion after, net::TimePoint deadline) {
  for (;;) {
    if (auto newest = take(after)) co_return newest;
    if (!co_await changed_.wait_until(deadline)) co_return take(after);
  }
}

std::optional<PolicyVersion> VersionFeed::newest() const {
  std::lock_guard lock(mutex_);
  if (kept_.empty()) return std::nullopt;
  return kept_.back().manifest.version;
}

void VersionFeed::push(PublishedWeights newest) {
  {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(newest));
    while (kept_.size() > max_kept_) kept_.pop_front();
  }
  changed_.notify();
}

void VersionFeed::keep(std::size_t count) {
  std::lock_guard lock(mutex_);
  max_kept_ = std::max<std::size_t>(1, count);
}

void VersionFeed::push_error(std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    error_ = std::move(error);
  }
  changed_.notify();
}

PollingFeed::PollingFeed(std::string source, std::chrono::milliseconds period, Find find) : VersionFeed(std::move(source)) {
  thread_ = std::jthread([this, period, find = std::move(find)](std::stop_token stop) {
    PolicyVersion last{-1};
    std::mutex mutex;
    std::condition_variable_any never;
    while (!stop.stop_requested()) {
      try {
        while (auto found = find(last)) {
          last = found->manifest.version;
          push(std::move(*found));
        }
      } catch (const std::exception&) {
        push_error(std::current_exception());
      }
      std::unique_lock lock(mutex);
      never.wait_for(lock, stop, period, [] { return false; });
    }
  });
}

}  // namespace prl::weights
