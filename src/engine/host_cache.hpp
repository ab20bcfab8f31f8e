#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/host_link.hpp"
#include "engine/disk_store.hpp"
#include "engine/kv/block_memory.hpp"
#include "engine/kv/disk_blocks.hpp"
#include "engine/kv/host_blocks.hpp"
#include "nn/decoder.hpp"

namespace prl::engine {

/// Host memory for blocks of a cache, all layers of a block side by side and the experts of its tokens behind them, and files for those
/// that it has no room for. At most two steps that carry_out() belongs to are in flight at once.
class HostCache final : public BlockFiles, public BlockMemory {
 public:
  /// Error{kOutOfMemory}.
  HostCache(std::shared_ptr<HostLink> link, const nn::KvCache& cache, std::int64_t num_layers, std::int64_t num_blocks);
  /// Enqueues the copies, which see the work enqueued before and are seen by what is enqueued next.
  void carry_out(const BlockCopies& copies);

  /// Before the calls of BlockFiles. options.block_bytes is set here. Errors of DiskStore.
  void open_files(DiskStoreOptions options);
  bool has_files() const noexcept { return disk_.has_value(); }
  bool write(const DiskCopy& copy) override;
  std::vector<DiskRead> read(std::span<const DiskCopy> copies) override;
  void forget() override { disk_->forget(); }
  DiskStats stats() const override { return disk_->stats(); }

  std::size_t block_bytes() const override { return block_bytes_; }
  void fetch(std::span<const BlockCopy> copies) override;
  void add_parts(BlockId host, std::vector<std::span<std::byte>>& parts) override;

 private:
  /// What a block has of one tensor of the cache.
  struct Piece {
    std::byte* tensor = nullptr;  ///< on the device
    std::size_t bytes = 0;        ///< of a block in it
  };
  /// Of the copies, in pieces_: one for each tensor.
  std::span<const HostCopy> pieces_of(std::span<const BlockCopy> copies, bool to_host);

  std::span<std::byte> block(BlockId host) const noexcept;
  /// Waits for the copies to and from the block that may be under way.
  void wait_for(BlockId host);

  std::shared_ptr<void> memory_;  ///< [num_blocks, block_bytes]; outlives the link, which waits for its copies
  std::shared_ptr<HostLink> link_;
  std::vector<Piece> tensors_;  ///< keys and values of each layer, and the log of experts if there is one
  std::size_t block_bytes_ = 0;
  std::vector<HostCopy> pieces_;
  struct Step {
    HostLink::Ticket saved = 0, restored = 0;
  };
  std::array<Step, 3> steps_;  ///< the last ones
  std::uint64_t num_steps_ = 0;
  std::vector<std::uint64_t> last_copied_;  ///< by block of host memory: the number of the step, 0 for none
  std::optional<DiskStore> disk_;
};

}  // namespace prl::engine
