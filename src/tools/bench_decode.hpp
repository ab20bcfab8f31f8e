#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/rng.hpp"
#include "engine/engine.hpp"
#include "tools/bench.hpp"

namespace prl::tools {

/// An engine with room for options.num_sequences, and for their adapters.
std::unique_ptr<engine::Engine> make_engine(const BenchOptions& options, nn::WeightsPtr weights,
                                            std::shared_ptr<engine::StepTimes> times = {});
/// Submits random prompts, hands every event to `on_event` under one lock and waits for the last. Error{kDeadline} after 10 minutes.
void generate(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng,
              const std::function<void(const engine::StepEvent&)>& on_event);
/// Tokens per second from the moment at which all sequences have their first token, so that the prompts' pass does not count.
double time_decode(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng);

}  // namespace prl::tools
