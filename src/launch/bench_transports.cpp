#include "launch/bench_transports.hpp"

#include "base/error.hpp"
#include "net/deadline.hpp"

namespace prl::launch {
namespace {

namespace asio = boost::asio;

class StandingPolicy final : public orchestrator::PolicySource {
 public:
  explicit StandingPolicy(PolicyVersion version) : version_(version) {}
  asio::awaitable<std::optional<PolicyVersion>> wait_newer(PolicyVersion than, net::TimePoint deadline) override {
    if (version_ > than) co_return version_;
    co_await net::sleep_for(deadline - net::Clock::now());
    co_return std::nullopt;
  }
  asio::awaitable<void> apply(PolicyVersion, net::TimePoint) override { co_return; }
  // No trainer takes its batches: none of them has been trained on.
  std::optional<PolicyVersion> newest() const override { return std::nullopt; }
  std::string describe() const override { return "the engines' own weights"; }

 private:
  PolicyVersion version_;
};

class DroppingSender final : public rollouts::SampleSender {
 public:
  explicit DroppingSender(std::int64_t num_ranks) : num_ranks_(num_ranks) {}
  bool push(const wire::TrainingBatch&, std::chrono::milliseconds) override {
    if (is_closed_) fail(ErrorCode::kUnavailable, "a batch after the end of the samples");
    return true;
  }
  std::int64_t num_ranks() const noexcept override { return num_ranks_; }
  void close() override { is_closed_ = true; }
  bool drain(std::chrono::milliseconds) override { return true; }
  std::string describe() const override { return "a benchmark that drops its batches"; }

 private:
  std::int64_t num_ranks_;
  bool is_closed_ = false;
};

}  // namespace

std::shared_ptr<orchestrator::PolicySource> make_standing_policy(PolicyVersion version) {
  return std::make_shared<StandingPolicy>(version);
}

std::unique_ptr<rollouts::SampleSender> make_dropping_sender(std::int64_t num_ranks) { return std::make_unique<DroppingSender>(num_ranks); }

}  // namespace prl::launch
