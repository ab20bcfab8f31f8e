#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/rng.hpp"
#include "engine/engine.hpp"
#include "nn/parameters.hpp"
#include "ops/context.hpp"
#include "tools/bench.hpp"

namespace prl::tools {

/// The first options.draft_layers layers of a model, to draw drafts for it; what its other layers add is scaled in `parameters` as the
/// options say. nullptr if there are to be no such drafts.
nn::WeightsPtr make_draft_model(const BenchOptions& options, ops::OpContext& ctx, nn::Parameters& parameters);
/// An engine with room for options.num_sequences, and for their adapters. `drafts`: draws the drafts, if there are any.
std::unique_ptr<engine::Engine> make_engine(const BenchOptions& options, nn::WeightsPtr weights,
                                            std::shared_ptr<engine::StepTimes> times = {}, nn::WeightsPtr drafts = nullptr);
/// Submits random prompts, hands every event to `on_event` under one lock and waits for the last. Error{kDeadline} after 10 minutes.
void generate(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng,
              const std::function<void(const engine::StepEvent&)>& on_event);
/// Tokens per second from the moment at which all sequences have their first token, so that the prompts' pass does not count.
double time_decode(engine::Engine& engine, std::int64_t num_sequences, const BenchOptions& options, Rng& rng);

}  // namespace prl::tools
