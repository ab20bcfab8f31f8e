#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

#include "net/asio.hpp"
#include "net/signal.hpp"
#include "weights/manifest.hpp"

namespace prl::weights {

namespace asio = boost::asio;

/// What a version is and where its tensors lie; the tensors themselves stay there.
struct PublishedWeights {
  WeightManifest manifest;
  std::shared_ptr<const void> handle;  ///< in-process transport only
  std::filesystem::path folder;        ///< filesystem transport only: broadcasts/step_K
};

/// The control side of weights: the versions that a trainer publishes, as a coroutine can await them: the newest only, or after keep() each
/// in its turn. Whoever learns of one calls push(); nothing is polled on the awaiting thread.
class VersionFeed {
 public:
  explicit VersionFeed(std::string source) : source_(std::move(source)) {}
  virtual ~VersionFeed() = default;
  VersionFeed(const VersionFeed&) = delete;
  VersionFeed& operator=(const VersionFeed&) = delete;

  /// The newest version above `after`; nullopt when `deadline` passed first. Throws what push_error() was given. One waiter at a time.
  asio::awaitable<std::optional<PublishedWeights>> wait_newer(PolicyVersion after, net::TimePoint deadline);
  /// The newest version so far, whether or not somebody waits for it or has had it. Any thread.
  std::optional<PolicyVersion> newest() const;
  /// From now on up to `count` versions that nobody has asked beyond stay, and wait_newer answers the oldest of them above `after`; a
  /// version that comes on top of them pushes the oldest out. Any thread.
  void keep(std::size_t count);
  /// One line for messages about waits: which transport, and where.
  const std::string& describe() const noexcept { return source_; }

  /// A version is whole and visible. Any thread.
  void push(PublishedWeights newest);
  /// The source is damaged: the next wait throws this. Any thread.
  void push_error(std::exception_ptr error);

 private:
  std::optional<PublishedWeights> take(PolicyVersion after);

  std::string source_;
  mutable std::mutex mutex_;
  std::deque<PublishedWeights> kept_;  ///< ascending
  std::size_t max_kept_ = 1;
  std::exception_ptr error_;
  net::Signal changed_;
};

/// A feed for sources that tell nobody: a thread of its own asks `find` for a version above the one that it has, every `period`.
class PollingFeed final : public VersionFeed {
 public:
  using Find = std::function<std::optional<PublishedWeights>(PolicyVersion after)>;
  PollingFeed(std::string source, std::chrono::milliseconds period, Find find);

 private:
  std::jthread thread_;
};

}  // namespace prl::weights
