#include "launch/local_pressure.hpp"

namespace prl::launch {
namespace {

class LocalPressure final : public orchestrator::PressureSource {
 public:
  explicit LocalPressure(engine::Engine& engine) : engine_(engine) {}
  orchestrator::asio::awaitable<std::optional<orchestrator::EnginePressure>> read(net::TimePoint) override {
    const engine::EngineStats stats = engine_.stats();
    orchestrator::EnginePressure pressure;
    pressure.num_cache_tokens = static_cast<double>(stats.num_blocks_total * stats.block_size);
    pressure.max_model_len = static_cast<double>(stats.max_model_len);
    if (stats.num_blocks_total > 0)
      pressure.kv_usage = static_cast<double>(stats.num_blocks_used) / static_cast<double>(stats.num_blocks_total);
    pressure.num_running = static_cast<double>(stats.num_running);
    pressure.num_waiting = static_cast<double>(stats.num_waiting);
    pressure.num_preemptions = static_cast<double>(stats.num_preemptions);
    pressure.num_prefix_queries = static_cast<double>(stats.num_prefix_queries_tokens);
    pressure.num_prefix_hits = static_cast<double>(stats.num_prefix_hit_tokens);
    pressure.num_generation_tokens = static_cast<double>(stats.num_generation_tokens);
    pressure.num_draft_tokens = static_cast<double>(stats.num_draft_tokens);
    pressure.num_accepted_tokens = static_cast<double>(stats.num_accepted_tokens);
    co_return pressure;
  }

 private:
  engine::Engine& engine_;
};

}  // namespace

std::shared_ptr<orchestrator::PressureSource> make_local_pressure(engine::Engine& engine) {
  return std::make_shared<LocalPressure>(engine);
}

}  // namespace prl::launch
