#include "launch/fleet_pressure.hpp"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "router/engine_metrics.hpp"

namespace prl::launch {
namespace {

namespace asio = orchestrator::asio;

class FleetPressure final : public orchestrator::PressureSource {
 public:
  FleetPressure(std::shared_ptr<router::Fleet> fleet, std::shared_ptr<net::HttpClient> client)
      : fleet_(std::move(fleet)), client_(std::move(client)) {}

  asio::awaitable<std::optional<orchestrator::EnginePressure>> read(net::TimePoint deadline) override {
    orchestrator::EnginePressure sum;
    bool has_any = false;
    for (const router::EngineView& engine : fleet_->engines()) {
      if (engine.state != router::EngineState::kReady) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - net::Clock::now());
      if (left.count() <= 0) break;
      auto reading = router::read_gauges(client_, engine.url, left);
      const std::optional<router::EngineGauges> gauges = co_await std::move(reading);
      if (!gauges) continue;
      has_any = true;
      sum.num_cache_tokens += gauges->num_cache_tokens;
      sum.max_model_len = std::max(sum.max_model_len, gauges->max_model_len);
      sum.kv_usage = std::max(sum.kv_usage, gauges->kv_usage);
      sum.num_running += gauges->num_running;
      sum.num_waiting += gauges->num_waiting;
      sum.num_preemptions += gauges->num_preemptions;
      sum.num_prefix_queries += gauges->num_prefix_queries;
      sum.num_prefix_hits += gauges->num_prefix_hits;
      sum.num_generation_tokens += gauges->num_generation_tokens;
      sum.num_draft_tokens += gauges->num_draft_tokens;
      sum.num_accepted_tokens += gauges->num_accepted_tokens;
    }
    sum.num_waiting += static_cast<double>(fleet_->counts().num_waiting);
    if (!has_any) co_return std::nullopt;
    co_return sum;
  }

 private:
  std::shared_ptr<router::Fleet> fleet_;
  std::shared_ptr<net::HttpClient> client_;
};

}  // namespace

std::shared_ptr<orchestrator::PressureSource> make_fleet_pressure(std::shared_ptr<router::Fleet> fleet,
                                                                  std::shared_ptr<net::HttpClient> client) {
  return std::make_shared<FleetPressure>(std::move(fleet), std::move(client));
}

}  // namespace prl::launch
