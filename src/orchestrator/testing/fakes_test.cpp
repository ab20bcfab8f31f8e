#include "orchestrator/testing/fakes.hpp"

#include <boost/json/object.hpp>

#include <random>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "env/registry.hpp"
#include "net/deadline.hpp"

namespace prl::orchestrator::testing {

namespace json = boost::json;
using namespace std::chrono_literals;

namespace {

std::int64_t random_below(std::int64_t bound) {
  // Seeded by the machine on purpose: no result may depend on it.
  thread_local std::mt19937_64 engine{std::random_device{}()};
  return bound <= 0 ? 0 : static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(bound));
}

}  // namespace

class FakeConversation final : public env::ChatClient {
 public:
  explicit FakeConversation(FakeChat& owner) : owner_(owner) {}

  asio::awaitable<env::ChatTurn> complete(const env::ChatRequest& request) override {
    const std::chrono::microseconds extra = owner_.num_requests_++ == 0 ? owner_.options_.first_delay : std::chrono::milliseconds(0);
    owner_.max_running_ = std::max(owner_.max_running_, ++owner_.running_);
    const std::int64_t version = owner_.weights_->loaded + owner_.options_.version_offset;
    std::exception_ptr failure;
    try {
      co_await net::sleep_for(std::chrono::microseconds(random_below(owner_.options_.max_delay.count())) + extra);
      if (owner_.options_.before_reply) owner_.options_.before_reply();
      if (owner_.options_.is_invalid && owner_.options_.is_invalid(request.sampling.seed.value()))
        fail(ErrorCode::kCorrupt, "the reply is not valid");
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    --owner_.running_;
    if (failure) std::rethrow_exception(failure);
    co_return reply(request, version);
  }

 private:
  env::ChatTurn reply(const env::ChatRequest& request, std::int64_t version) const {
    const std::string text(request.messages.back().at("content").as_string());
    Rng rng(request.sampling.seed.value(), static_cast<std::uint64_t>(version));
    std::string answer(text.rbegin(), text.rend());
    for (char& c : answer)
      if (owner_.options_.always_wrong || rng.next_below(3) == 0)
        c = owner_.options_.always_wrong ? '#' : static_cast<char>('a' + rng.next_below(26));
    const std::string content = "<reversed_text>" + answer + "</reversed_text>";
    env::ChatTurn turn;
    turn.message = json::object{{"role", "assistant"}, {"content", content}};
    turn.finish_reason = "stop";
    for (const char c : text) turn.tokens.prompt_ids.push_back(static_cast<unsigned char>(c));
    for (const char c : content) {
      turn.tokens.completion_ids.push_back(static_cast<unsigned char>(c));
      turn.tokens.logprobs.push_back(-static_cast<float>(rng.next_double()));
      turn.tokens.versions.push_back(version);
    }
    turn.has_tokens = true;
    turn.num_prompt_tokens = static_cast<std::int64_t>(turn.tokens.prompt_ids.size());
    turn.num_completion_tokens = static_cast<std::int64_t>(content.size());
    turn.has_versions = true;
    turn.version_start = turn.version_end = PolicyVersion{version};
    return turn;
  }

  FakeChat& owner_;
};

std::unique_ptr<env::ChatClient> FakeChat::open(env::ConversationOptions) { return std::make_unique<FakeConversation>(*this); }

asio::awaitable<void> FakeChat::check_health(net::TimePoint) { co_await net::sleep_for(options_.health_delay); }

asio::awaitable<std::optional<PolicyVersion>> FakePolicySource::wait_newer(PolicyVersion than, net::TimePoint deadline) {
  for (;;) {
    const PolicyVersion newest{weights_->published};
    if (newest > than) co_return num_kept_ > 1 ? PolicyVersion{than.value + 1} : newest;
    if (net::Clock::now() >= deadline) co_return std::nullopt;
    co_await net::sleep_for(1ms);
  }
}

asio::awaitable<void> FakePolicySource::apply(PolicyVersion version, net::TimePoint) {
  co_await net::sleep_for(apply_time_);
  weights_->loaded = version.value;
  ++weights_->num_updates;
}

FakeTrainer::FakeTrainer(std::unique_ptr<rollouts::SampleReceiver> receiver, std::shared_ptr<FakeWeights> weights,
                         std::chrono::milliseconds step_time)
    : receiver_(std::move(receiver)) {
  thread_ = std::jthread([this, weights = std::move(weights), step_time](std::stop_token stop) {
    while (!stop.stop_requested() && !receiver_->is_closed()) {
      auto batch = receiver_->pop(20ms);
      if (!batch) continue;
      std::this_thread::sleep_for(step_time);
      wire::TrainingBatch whole;
      whole.step = batch->step;
      whole.ranks.push_back(std::move(batch->micro_batches));
      std::lock_guard lock(mutex_);
      batches_.push_back(wire::encode(whole));
      weights->published = whole.step;
    }
  });
}

FakeTrainer::~FakeTrainer() { thread_.request_stop(); }

std::vector<std::string> FakeTrainer::batches() {
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  return batches_;
}

env::EnvironmentPtr tiny_environment(const std::string& name, std::int64_t num_train) {
  env::EnvSpec spec;
  spec.id = "reverse-text";
  spec.name = name;
  spec.args = json::object{{"mode", "tiny"}, {"system_prompt", nullptr}, {"num_train", num_train}, {"num_eval", 8}};
  return env::make_environment(spec);
}

}  // namespace prl::orchestrator::testing
