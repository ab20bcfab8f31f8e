#pragma once

#include <cstdint>
#include <memory>

#include "base/ids.hpp"
#include "orchestrator/policy_source.hpp"
#include "rollouts/sample_queue.hpp"

namespace prl::launch {

// What the orchestrator's benchmark has in place of a trainer, which measures itself on random data meanwhile: it publishes no weights and
// takes no batch.

/// The weights that the engines have are `version`, and no newer ones come.
std::shared_ptr<orchestrator::PolicySource> make_standing_policy(PolicyVersion version);
/// Takes every step and drops it.
std::unique_ptr<rollouts::SampleSender> make_dropping_sender(std::int64_t num_ranks);

}  // namespace prl::launch
