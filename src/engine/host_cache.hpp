#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/host_link.hpp"
#include "engine/kv/host_blocks.hpp"
#include "nn/decoder.hpp"

namespace prl::engine {

/// Host memory for blocks of a cache, all layers of a block side by side.
class HostCache {
 public:
  /// Error{kOutOfMemory}.
  HostCache(std::shared_ptr<HostLink> link, const nn::KvCache& cache, std::int64_t num_layers, std::int64_t num_blocks);
  /// Enqueues the copies, which see the work enqueued before and are seen by what is enqueued next.
  void carry_out(const BlockCopies& copies);

 private:
  /// Of the copies, in pieces_: one for each tensor.
  std::span<const HostCopy> pieces_of(std::span<const BlockCopy> copies, bool to_host);

  std::shared_ptr<void> memory_;  ///< [num_blocks, tensors, piece_bytes]; outlives the link, which waits for its copies
  std::shared_ptr<HostLink> link_;
  std::vector<std::byte*> tensors_;  ///< keys and values of each layer, on the device
  std::size_t piece_bytes_ = 0;      ///< of a block in each of them
  std::vector<HostCopy> pieces_;
};

}  // namespace prl::engine
