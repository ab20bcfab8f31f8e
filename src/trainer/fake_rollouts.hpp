#pragma once

#include <cstdint>
#include <memory>

#include "rollouts/sample_queue.hpp"

namespace prl::trainer {

struct FakeRolloutsOptions {
  std::int64_t num_micro_batches = 2;  ///< per step
  std::int64_t seq_len = 2048;
  std::int64_t vocab_size = 0;
  bool generate_samples = false;  ///< several documents of random length per row instead of one of seq_len
  std::int64_t first_step = 1;    ///< resume + 1
  std::uint64_t rank = 0;
};

/// Endless random steps, so that a trainer runs without an orchestrator. Row i of step s is a pure function of (rank, s, i), so a
/// resumed run sees the same data. Advantages and sampler log-probabilities are standard normal, every token but the first of a
/// document trains, the environment is "fake" (spec 2.14).
std::unique_ptr<rollouts::SampleReceiver> make_fake_rollouts(const FakeRolloutsOptions& options);

}  // namespace prl::trainer
