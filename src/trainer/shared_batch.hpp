#pragma once

#include <cstdint>
#include <optional>

#include "comm/communicator.hpp"
#include "rollouts/sample_queue.hpp"

namespace prl::trainer {

/// What waiting for the samples of a step has come to.
enum class Supply : std::uint8_t { kWaiting, kBatch, kEnd };

/// Rank 0 alone takes samples from the queue: its `supply`, and its `batch` with kBatch, become everyone's. The others' own are ignored.
/// Every rank of `group` calls it; one rank returns at once. PeerLost.
Supply share_batch(comm::Communicator& group, Supply supply, std::optional<rollouts::RankBatch>& batch);

}  // namespace prl::trainer
