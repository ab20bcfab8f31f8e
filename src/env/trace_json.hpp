#pragma once

#include <boost/json/object.hpp>

#include <cstdint>
#include <string>

#include "env/episode.hpp"

namespace prl::env {

/// What a trace tells besides the episode itself.
struct TraceContext {
  std::string run_id;
  std::string model;
  std::int64_t rollout_idx = 0;
};

/// The episode as verifiers' v1 API records it: one Episode with one Trace, whose nodes are the messages in a line and whose
/// calls are the model's turns. Without token ids, as its evaluation client leaves them; nulls are left out. The trace's one
/// reward is the episode's; scores of reward functions are metrics.
boost::json::object to_trace_json(const Episode& episode, const TraceContext& context);

/// SHA-256, hexadecimal, of the JSON of a task's data as Python's json.dumps(sort_keys=True) writes it, nulls of the top level
/// left out: the hash by which verifiers tells tasks apart.
std::string task_hash(const boost::json::object& data);

}  // namespace prl::env
