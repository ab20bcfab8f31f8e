#include "router/routed_generate_client.hpp"

#include <fmt/core.h>
#include <boost/asio/experimental/awaitable_operators.hpp>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/log.hpp"
#include "base/waiting.hpp"
#include "env/http_generate_client.hpp"
#include "net/deadline.hpp"
#include "net/errors.hpp"
#include "router/prefill_orders.hpp"

namespace prl::router {

using namespace std::chrono_literals;

namespace {

/// Times that one request may begin anew before its error is the caller's.
constexpr int kMaxReplays = 8;
/// What engines get after the first is ready before the run begins without them.
constexpr auto kLateEngines = 10s;

/// What becomes of a request that failed.
enum class Verdict { kGiveUp, kEngineLost, kEngineBusy };

Verdict judge(const Error& error, net::TimePoint deadline) {
  switch (error.code()) {
    case ErrorCode::kUnavailable:
    case ErrorCode::kIo:
    case ErrorCode::kCorrupt:
    case ErrorCode::kInternal:
    case ErrorCode::kOutOfSync: return Verdict::kEngineLost;
    case ErrorCode::kOverloaded: return Verdict::kEngineBusy;
    case ErrorCode::kDeadline: return net::Clock::now() < deadline ? Verdict::kEngineLost : Verdict::kGiveUp;
    default: return Verdict::kGiveUp;
  }
}

/// Why an answer that came cannot be used; empty if it can.
std::string flaw(const wire::GenerateOutput& output, const Lease& lease) {
  if (output.finish_reason == wire::FinishReason::kAbort) return "it aborted a request";
  if (output.finish_reason == wire::FinishReason::kError) return fmt::format("it failed a request: {}", output.error);
  if (lease.version() && !output.versions.empty() && output.version_start < *lease.version())
    return fmt::format("it samples with policy v{} although it had proven v{}", output.version_start.value, lease.version()->value);
  return {};
}

class RoutedGenerateClient final : public env::GenerateClient {
 public:
  RoutedGenerateClient(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client, RoutedClientOptions options)
      : fleet_(std::move(fleet)), client_(std::move(client)), options_(std::move(options)) {}

  asio::awaitable<wire::GenerateOutput> generate(wire::GenerateRequest request, net::TimePoint deadline) override {
    RequestShape shape{.session = request.session_id,
                       .num_prompt_tokens = static_cast<std::int64_t>(request.prompt_ids.size()),
                       .max_new_tokens = request.sampling.max_tokens.value_or(0)};
    if (fleet_->wants_prefixes()) shape.prefixes = hash_prefixes(request.prompt_ids, hash_bytes(request.cache_salt));
    for (int attempt = 0;; ++attempt) {
      shape.is_replay = attempt > 0;
      auto acquiring = fleet_->acquire(shape, deadline);
      Lease lease = co_await std::move(acquiring);
      std::optional<wire::GenerateOutput> output;
      std::exception_ptr failure;
      try {
        auto trying = try_with_prefill(&lease, &request, shape, deadline);
        output = co_await std::move(trying);
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
      if (output) {
        const std::string problem = flaw(*output, lease);
        if (problem.empty()) {
          lease.finish(static_cast<std::int64_t>(output->token_ids.size()));
          co_return std::move(*output);
        }
        lease.report_lost(problem);
        shape.failed_on = lease.engine();
        if (attempt >= kMaxReplays) co_return std::move(*output);
        continue;
      }
      const Error error = net::to_error(failure);
      const bool lacks_adapter = !options_.adapter.empty() && error.code() == ErrorCode::kNotFound;
      const Verdict verdict = lacks_adapter ? Verdict::kEngineLost : judge(error, deadline);
      if (verdict == Verdict::kGiveUp || attempt >= kMaxReplays) throw error;
      if (verdict == Verdict::kEngineLost) {
        lease.report_lost(error.what());
        shape.failed_on = lease.engine();
      }
      if (verdict == Verdict::kEngineBusy) co_await net::sleep_until(std::min(deadline, net::Clock::now() + 200ms * (1 << attempt)));
    }
  }

  asio::awaitable<void> check_health(net::TimePoint deadline) override {
    const std::size_t num_engines = fleet_->engines().size();
    Waiting waiting({.who = "this process",
                     .what = "an inference server to be ready",
                     .limit = deadline - net::Clock::now(),
                     .detail = [fleet = fleet_] { return fleet->describe(); }});
    net::TimePoint limit = deadline;
    for (;;) {
      const auto engines = fleet_->engines();
      const auto num_ready = static_cast<std::size_t>(
          std::count_if(engines.begin(), engines.end(), [](const EngineView& e) { return e.state == EngineState::kReady; }));
      if (num_ready == num_engines) break;
      if (num_ready > 0 && limit == deadline) limit = std::min(deadline, net::Clock::now() + kLateEngines);
      if (num_ready > 0 && net::Clock::now() >= limit) {
        log::warning("{} of {} engines are ready; the others join when they are: {}", num_ready, num_engines, fleet_->describe());
        break;
      }
      waiting.check();
      if (waiting.is_expired()) waiting.fail_expired();
      co_await net::sleep_until(std::min(deadline, net::Clock::now() + 50ms));
    }
    for (const EngineView& engine : fleet_->engines()) {
      if (engine.state != EngineState::kReady) continue;
      auto checking = client_of(engine.url)->check_health(deadline);
      co_await std::move(checking);
    }
  }

  std::string describe() const override {
    std::string text;
    for (const EngineView& engine : fleet_->engines()) text += (text.empty() ? "" : ", ") + engine.url;
    return text;
  }

 private:
  /// As try_on(). Where prompts have engines of their own, a long one is computed there first. `lease` and `request` outlive the call.
  asio::awaitable<wire::GenerateOutput> try_with_prefill(const Lease* lease, const wire::GenerateRequest* request, RequestShape shape,
                                                         net::TimePoint deadline) {
    wire::GenerateRequest own = *request;
    if (fleet_->has_prefill()) {
      own.kv_transfer_params = ask_for_prefill(fleet_->max_uncached_tokens());
      auto asking = try_on(lease->url(), lease->lost(), own, deadline);
      wire::GenerateOutput output = co_await std::move(asking);
      if (!output.needs_prefill) {
        fleet_->count(PrefillOutcome::kSkipped);
        co_return output;
      }
      auto prefilling = prefill(own, std::move(shape), deadline);
      own.kv_transfer_params = co_await std::move(prefilling);
    }
    auto trying = try_on(lease->url(), lease->lost(), std::move(own), deadline);
    co_return co_await std::move(trying);
  }

  /// What the decode engine is to be told of a prefill engine that has computed the prompt; empty if none did.
  asio::awaitable<std::string> prefill(wire::GenerateRequest request, RequestShape shape, net::TimePoint deadline) {
    request.kv_transfer_params = kPrefillOnly;
    shape.max_new_tokens = 1;
    shape.failed_on.reset();
    for (int attempt = 0; attempt < kMaxPrefills && fleet_->has_prefill(); ++attempt) {
      shape.is_replay = attempt > 0;
      std::optional<Lease> lease;
      std::exception_ptr failure;
      try {
        auto acquiring = fleet_->acquire_prefill(shape, std::min(deadline, net::Clock::now() + kPrefillPatience));
        lease.emplace(co_await std::move(acquiring));
        auto trying = try_on(lease->url(), lease->lost(), request, deadline);
        wire::GenerateOutput output = co_await std::move(trying);
        if (output.kv_transfer_params.empty()) break;
        lease->finish(1);
        fleet_->count(PrefillOutcome::kDone);
        co_return std::move(output.kv_transfer_params);
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
      const Error error = net::to_error(failure);
      if (error.code() == ErrorCode::kCancelled || net::Clock::now() >= deadline) throw error;
      if (!lease || judge(error, deadline) != Verdict::kEngineLost) break;
      lease->report_lost(error.what());
      shape.failed_on = lease->engine();
    }
    fleet_->count(PrefillOutcome::kFailed);
    co_return std::string();
  }

  /// The engine's answer; Error{kUnavailable} when the fleet says that it is lost.
  asio::awaitable<wire::GenerateOutput> try_on(std::string url, net::Signal lost, wire::GenerateRequest request, net::TimePoint deadline) {
    using namespace asio::experimental::awaitable_operators;
    const std::shared_ptr<env::GenerateClient> engine = client_of(url);
    auto captured = net::detail::capture<wire::GenerateOutput>(engine->generate(std::move(request), deadline));
    auto watching = lost.wait_until(deadline);
    auto race = std::move(captured) || std::move(watching);
    auto winner = co_await std::move(race);
    if (winner.index() == 1) {
      if (net::Clock::now() >= deadline) fail(ErrorCode::kDeadline, "waited for {} to answer a request: the deadline passed", url);
      fail(ErrorCode::kUnavailable, "{} was lost while it ran a request", url);
    }
    auto& outcome = std::get<0>(winner);
    if (outcome.exception) throw net::to_error(outcome.exception);
    co_return std::move(*outcome.value);
  }

  std::shared_ptr<env::GenerateClient> client_of(const std::string& url) {
    std::lock_guard lock(mutex_);
    auto& client = clients_[url];
    if (!client)
      client = env::make_http_generate_client(client_,
                                              {.base_url = url, .model = options_.model, .adapter = options_.adapter, .max_retries = 0});
    return client;
  }

  std::shared_ptr<Fleet> fleet_;
  std::shared_ptr<net::HttpClient> client_;
  RoutedClientOptions options_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<env::GenerateClient>> clients_;
};

}  // namespace

std::shared_ptr<env::GenerateClient> make_routed_generate_client(std::shared_ptr<Fleet> fleet, std::shared_ptr<net::HttpClient> client,
                                                                 RoutedClientOptions options) {
  return std::make_shared<RoutedGenerateClient>(std::move(fleet), std::move(client), std::move(options));
}

}  // namespace prl::router
