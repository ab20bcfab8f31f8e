#include "launch/health_watch.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "net/http_client.hpp"

namespace prl::launch {

using std::chrono::milliseconds;

namespace {
constexpr milliseconds kLongestPause{5'000}, kLongestRequest{10'000};
}  // namespace

HealthWatch::HealthWatch(std::string url, milliseconds limit)
    : url_(std::move(url)), limit_(limit), thread_([this](const std::stop_token& stop) { watch(stop); }) {}

milliseconds HealthWatch::unwell() const {
  const Clock::time_point last = last_well_;
  return last == Clock::time_point::min() ? milliseconds(0) : std::chrono::duration_cast<milliseconds>(Clock::now() - last);
}

bool HealthWatch::is_well() const noexcept {
  try {
    net::BlockingHttpClient client({});
    net::HttpCall call;
    call.url = url_;
    call.timeout = std::min(limit_ / 4, kLongestRequest);
    call.max_retries = 0;
    return client.call(std::move(call)).status == 200;
  } catch (const std::exception&) {
    return false;
  }
}

void HealthWatch::watch(const std::stop_token& stop) noexcept {
  std::mutex mutex;
  std::condition_variable_any wakes;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    if (is_well()) last_well_ = Clock::now();
    (void)wakes.wait_for(lock, stop, std::min(limit_ / 8, kLongestPause), [] { return false; });
  }
}

}  // namespace prl::launch
