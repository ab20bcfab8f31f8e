#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define PRL_HOST_DEVICE __host__ __device__
#else
#define PRL_HOST_DEVICE
#endif

namespace prl::cuda {

/// Bad input that only a kernel could see. The kernel leaves a word in host memory, and the next call of the runtime that waits
/// for the device throws Error{kInvalidArgument} with it.
enum class Fault : std::uint32_t { kNone, kEmbeddingId, kEmbeddingBackwardId, kRopePosition, kMissingPeer };

/// Kind in the upper half, entry in the lower: written whole, so two faults at a time leave one of them.
using FaultWord = volatile std::uint64_t;

PRL_HOST_DEVICE inline void report(FaultWord* word, Fault fault, std::uint32_t entry) {
  *word = (static_cast<std::uint64_t>(fault) << 32) | entry;
}

}  // namespace prl::cuda
