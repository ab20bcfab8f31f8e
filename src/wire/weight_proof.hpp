#pragma once

#include <cstdint>
#include <vector>

#include "base/ids.hpp"

namespace prl::wire {

/// What an engine says about the weights that it now uses, so that whoever sent them can compare (weights::verify_proof).
struct WeightProof {
  PolicyVersion version;
  std::uint64_t checksum = 0;         ///< over all tensors in compute dtype; independent of packing and transport
  std::vector<float> probe_logprobs;  ///< of the probe prompt's tokens
};

}  // namespace prl::wire
