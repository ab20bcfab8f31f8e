#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "env/chat_client.hpp"
#include "env/environment.hpp"
#include "orchestrator/policy_source.hpp"
#include "rollouts/sample_queue.hpp"

/// Stand-ins for engine, trainer and weight channel, for tests.
namespace prl::orchestrator::testing {

/// The version that a fake engine runs and the newest that a fake trainer published.
struct FakeWeights {
  std::atomic<std::int64_t> published{0};
  std::atomic<std::int64_t> loaded{-1};
  std::atomic<std::int64_t> num_updates{0};
};

/// Answers like a policy whose output depends on the request's seed alone: the right tag content with a chance that grows with
/// the seed's bits, wrong letters otherwise. Each request takes a random time, so that the order of completion varies.
struct FakeChatOptions {
  std::chrono::microseconds max_delay{2'000};
  std::chrono::milliseconds first_delay{0};              ///< the first request takes that much longer
  bool always_wrong = false;                             ///< every reward the same
  std::function<void()> before_reply{};                  ///< may throw, to fail a request
  std::function<bool(std::uint64_t seed)> is_invalid{};  ///< whether what this seed samples is no valid reply
  std::chrono::milliseconds health_delay{0};             ///< until check_health answers
  std::int64_t version_offset = 0;                       ///< lies about the version
};

class FakeChat final : public env::ChatClientFactory {
 public:
  FakeChat(std::shared_ptr<FakeWeights> weights, FakeChatOptions options = {})
      : weights_(std::move(weights)), options_(std::move(options)) {}
  std::unique_ptr<env::ChatClient> open(env::ConversationOptions options) override;
  asio::awaitable<void> check_health(net::TimePoint deadline) override;
  std::string describe() const override { return "fake engine"; }
  std::int64_t max_running() const { return max_running_; }
  std::int64_t num_requests() const { return num_requests_; }

 private:
  friend class FakeConversation;
  std::shared_ptr<FakeWeights> weights_;
  FakeChatOptions options_;
  std::int64_t running_ = 0;
  std::int64_t max_running_ = 0;
  std::int64_t num_requests_ = 0;
};

class FakePolicySource final : public PolicySource {
 public:
  explicit FakePolicySource(std::shared_ptr<FakeWeights> weights, std::chrono::milliseconds apply_time = {})
      : weights_(std::move(weights)), apply_time_(apply_time) {}
  asio::awaitable<std::optional<PolicyVersion>> wait_newer(PolicyVersion than, net::TimePoint deadline) override;
  asio::awaitable<void> apply(PolicyVersion version, net::TimePoint deadline) override;
  void keep_versions(std::size_t count) override { num_kept_ = count; }
  std::optional<PolicyVersion> newest() const override { return PolicyVersion{weights_->published}; }
  std::string describe() const override { return "fake trainer"; }

 private:
  std::shared_ptr<FakeWeights> weights_;
  std::chrono::milliseconds apply_time_;
  std::size_t num_kept_ = 1;
};

/// Takes batches, "trains" for a while and publishes the next version, on a thread of its own.
class FakeTrainer {
 public:
  FakeTrainer(std::unique_ptr<rollouts::SampleReceiver> receiver, std::shared_ptr<FakeWeights> weights,
              std::chrono::milliseconds step_time = {});
  ~FakeTrainer();
  /// Encoded batches in order, after the orchestrator has closed the queue.
  std::vector<std::string> batches();

 private:
  std::unique_ptr<rollouts::SampleReceiver> receiver_;
  std::mutex mutex_;
  std::vector<std::string> batches_;
  std::jthread thread_;
};

/// reverse-text with short words.
env::EnvironmentPtr tiny_environment(const std::string& name = "reverse-text", std::int64_t num_train = 64);

}  // namespace prl::orchestrator::testing
