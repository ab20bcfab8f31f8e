#pragma once

#include <algorithm>

#include "base/log.hpp"
#include "engine/engine.hpp"
#include "engine/sequence.hpp"

namespace prl::engine {

/// A request of EngineCore. The event is reused from step to step, so that steady decoding allocates nothing.
struct CoreRequest {
  RequestId id;
  ResolvedRequest resolved;
  EventSink sink;
  StepEvent event;
  Sequence sequence;
  wire::RoutedExperts routes;       ///< taken when it ends, while its blocks are there
  std::vector<BlockLease> brought;  ///< blocks of its prompt that came from another engine, until it has begun
  bool is_sink_broken = false;

  /// Clears the event and fills in what every event says. `version`: the weights in use.
  void begin_event(PolicyVersion version) {
    wire::GenerateOutput& delta = event.delta;
    delta.token_ids.clear();
    delta.logprobs.clear();
    delta.top_logprobs.clear();
    delta.versions.clear();
    delta.finish_reason = wire::FinishReason::kNone;
    delta.stop_token_id.reset();
    delta.stop_string.clear();
    delta.error.clear();
    delta.prompt_logprobs.clear();
    delta.prompt_top_logprobs.clear();
    delta.prompt_ranks.clear();
    delta.routed_experts = {};
    delta.num_prompt_tokens = sequence.num_prompt_tokens;
    delta.num_cached_tokens = std::max<std::int64_t>(0, sequence.num_cached_tokens);
    delta.version_start = sequence.num_output_tokens() > 0 ? sequence.version_first : version;
    delta.version_end = sequence.num_output_tokens() > 0 ? sequence.version_last : version;
  }
  /// Makes the event the final one.
  void end_event(wire::FinishReason reason) {
    wire::GenerateOutput& delta = event.delta;
    delta.finish_reason = reason;
    delta.first_step = sequence.first_step;
    delta.prompt_logprobs = std::move(sequence.prompt_logprobs);
    delta.prompt_top_logprobs = std::move(sequence.prompt_top_logprobs);
    delta.prompt_ranks = std::move(sequence.prompt_ranks);
    delta.routed_experts = std::move(routes);
  }
  /// False if the receiver failed, now or before: no more events are sent.
  bool send_event() {
    if (is_sink_broken) return false;
    try {
      sink(event);
    } catch (const std::exception& error) {
      log::error("the receiver of request {} failed and the request is dropped: {}", id.value, error.what());
      is_sink_broken = true;
    }
    return !is_sink_broken;
  }
};

}  // namespace prl::engine
