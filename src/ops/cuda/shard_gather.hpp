#pragma once

#include <vector_types.h>

#include <cstdint>

#include "ops/cuda/launch.hpp"

namespace prl::ops::cuda {

constexpr int kMaxShardRanks = 8;
constexpr int kMaxGatherBlocks = 96;  ///< of a kernel

using GatherVector = uint4;

/// What a rank knows of all of them, itself included.
struct GatherPeers {
  GatherVector* out[kMaxShardRanks];  ///< where the gathered rows go
  /// [rank][block]: the number of the last gather of which that part is there.
  std::uint32_t* told[kMaxShardRanks];
  /// [rank][kMaxMarkedWords]: a few values, each pair beside the number of its gather.
  uint4* marked[kMaxShardRanks];
};

/// Parts of at most so many words of 8 bytes come marked: whoever reads a word sees whether it is that of this gather, so that nothing else
/// has to be told. A word is always written and read by the same block of a kernel.
constexpr int kGatherThreads = 512;
constexpr int kMaxMarkedWords = kMaxGatherBlocks * kGatherThreads;

struct GatherPart {
  const GatherVector* data = nullptr;
  std::int64_t rows = 0, row_stride = 0, vectors = 0;  ///< a row's length and what lies between two, in vectors
};

/// In a rank's memory, all zero at first.
struct GatherState {
  std::uint32_t numbers[kMaxGatherBlocks];  ///< of the last gather, by block, so that recorded kernels count too
  std::uint32_t told[kMaxShardRanks][kMaxGatherBlocks];
  std::uint32_t has_given_up;  ///< once a rank was missing the gathers after it wait no more
};

/// Enqueues one rank's side of a gather, which ends when the parts of all `size` ranks are there, or after a deadline with a fault.
/// `may_start_early`: in recorded work beside the kernel before it, and the next one beside it; not where two ranks share a device, on
/// which the next kernel of one would then take the place of what the other waits for.
void launch_gather(const OpContext& ctx, const GatherPeers& peers, const GatherPart& part, int rank, int size, GatherState* own,
                   bool may_start_early);

}  // namespace prl::ops::cuda
