#include "orchestrator/env_activity.hpp"

#include <fmt/core.h>

#include <chrono>
#include <utility>

namespace prl::orchestrator {

using namespace std::chrono_literals;

namespace {

/// A span ends when the rollouts do something else, but is no shorter than this and no longer than that.
constexpr auto kShortest = 100ms;
constexpr auto kLongest = 1s;

double seconds(spans::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

class ModelCall {
 public:
  explicit ModelCall(EnvActivity& activity) : activity_(activity) { activity_.begin_model(); }
  ModelCall(const ModelCall&) = delete;
  ModelCall& operator=(const ModelCall&) = delete;
  ~ModelCall() { activity_.end_model(); }

 private:
  EnvActivity& activity_;
};

class WatchedClient final : public env::ChatClient {
 public:
  WatchedClient(std::unique_ptr<env::ChatClient> client, std::shared_ptr<EnvActivity> activity)
      : client_(std::move(client)), activity_(std::move(activity)) {}
  env::asio::awaitable<env::ChatTurn> complete(const env::ChatRequest& request) override {
    const ModelCall call(*activity_);
    auto asking = client_->complete(request);
    co_return co_await std::move(asking);
  }

 private:
  std::unique_ptr<env::ChatClient> client_;
  std::shared_ptr<EnvActivity> activity_;
};

class WatchedFactory final : public env::ChatClientFactory {
 public:
  WatchedFactory(std::shared_ptr<env::ChatClientFactory> service, std::shared_ptr<EnvActivity> activity)
      : service_(std::move(service)), activity_(std::move(activity)) {}
  std::unique_ptr<env::ChatClient> open(env::ConversationOptions options) override {
    return std::make_unique<WatchedClient>(service_->open(std::move(options)), activity_);
  }
  env::asio::awaitable<void> check_health(net::TimePoint deadline) override { co_await service_->check_health(deadline); }
  std::string describe() const override { return service_->describe(); }

 private:
  std::shared_ptr<env::ChatClientFactory> service_;
  std::shared_ptr<EnvActivity> activity_;
};

}  // namespace

void EnvActivity::change(int own, int model, bool is_end) {
  const std::lock_guard lock(mutex_);
  const auto now = spans::Clock::now();
  const double passed = seconds(now - std::exchange(last_, now));
  if (num_own_ + num_model_ > 0) {
    own_seconds_ += num_own_ * passed;
    model_seconds_ += num_model_ * passed;
  } else {
    begin_ = now;
  }
  const bool was_own = own_seconds_ > model_seconds_;
  num_own_ += own;
  num_model_ += model;
  const bool is_idle = num_own_ + num_model_ == 0;
  const bool is_own = num_own_ > num_model_;
  const auto age = now - begin_;
  if (!is_idle && !is_end && age < kLongest && (age < kShortest || is_own == was_own)) return;
  if (own_seconds_ + model_seconds_ > 0)
    spans::add(spans::Detail::kCoarse, {.lane = lane_,
                                        .name = was_own ? "runs its own code" : "waits for the model",
                                        .begin = begin_,
                                        .end = now,
                                        .note = fmt::format(R"("own":{:.3f},"model":{:.3f})", own_seconds_, model_seconds_)});
  own_seconds_ = model_seconds_ = 0;
  begin_ = now;
}

std::shared_ptr<env::ChatClientFactory> watch_calls(std::shared_ptr<env::ChatClientFactory> service,
                                                    std::shared_ptr<EnvActivity> activity) {
  return std::make_shared<WatchedFactory>(std::move(service), std::move(activity));
}

}  // namespace prl::orchestrator
