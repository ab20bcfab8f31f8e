#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/image_keys.hpp"
#include "engine/kv/block_memory.hpp"
#include "engine/kv/block_pool.hpp"
#include "engine/kv/disk_blocks.hpp"
#include "engine/kv/host_blocks.hpp"

namespace prl::engine {

/// What the keys and values of a prompt depend on beside weights and adapter.
struct PromptKey {
  std::vector<std::int32_t> tokens;
  std::vector<ImageMark> images;  ///< ascending
  std::string cache_salt;
};

/// Which weights computed a block, in words that mean the same to every engine. Engines give each other blocks only if all of it agrees.
struct KvIdentity {
  PolicyVersion version;
  std::uint64_t checksum = 0;      ///< of these weights (WeightProof)
  std::string adapter;             ///< name; empty: none
  PolicyVersion adapter_version;   ///< of that name
  std::uint64_t adapter_hash = 0;  ///< of its weights
  bool operator==(const KvIdentity&) const = default;
};

/// The bytes of a block, part by part.
using BlockParts = std::vector<std::span<std::byte>>;

/// Blocks of prompts that go to another engine or come from one. They lie in host memory on both sides: given ones are copied there from
/// the device, taken ones are found there by the scheduler like those that left the device. Engine thread only, between two steps;
/// the parts it hands out may be read or written by another thread until end() or publish().
class BlockExchange {
 public:
  /// Identifies what is under way; the caller's choice, never used twice.
  using Key = std::uint64_t;
  /// `disk` may be null.
  BlockExchange(BlockPool& device, HostBlocks& host, DiskBlocks* disk, BlockMemory& memory)
      : device_(device), host_(host), disk_(disk), memory_(memory) {}

  std::int64_t block_size() const noexcept { return device_.block_size(); }
  std::size_t block_bytes() const { return memory_.block_bytes(); }
  /// Blocks of the prompt that a sequence may begin with: at least one token is left to compute.
  std::int64_t num_useful(const PromptKey& prompt) const noexcept;
  /// How many of them are here, from the first on.
  std::int64_t num_cached(BlockHash root, const PromptKey& prompt);

  /// Up to `max_blocks` blocks of the prompt from the `first` one on, as far as they are here and host memory has room.
  std::vector<BlockParts> give(Key key, BlockHash root, const PromptKey& prompt, std::int64_t first, std::int64_t max_blocks);
  /// Room for up to `max_blocks` blocks of the prompt from the `first` one on, to be filled; fewer if host memory has no more.
  std::vector<BlockParts> reserve(Key key, BlockHash root, const PromptKey& prompt, std::int64_t first, std::int64_t max_blocks);
  /// The first `num_good` blocks of the last reserve() were filled: they can be found, if `root` is what it was then; the others are
  /// dropped. How many can be found. They stay at least until end() or adopt().
  std::int64_t publish(Key key, BlockHash root, const PromptKey& prompt, std::int64_t num_good);
  /// Lets go of all that the key holds. No effect without any.
  void end(Key key) noexcept;
  /// Gives what the key holds to the caller, who releases it when its request has begun.
  std::vector<BlockLease> adopt(Key key);

 private:
  struct Held {
    std::vector<BlockLease> leases;  ///< in the order of the prompt
    // Of the last reserve(), which are the last ones of `leases`.
    BlockHash root;
    std::int64_t first = 0;
    std::size_t num_kept = 0;  ///< leases before them
  };
  struct Link {
    BlockHash hash, parent;
  };
  /// Calls `visit(index, link, tokens)` for blocks from 0 on until it says false.
  void walk(BlockHash root, const PromptKey& prompt, std::int64_t num_blocks,
            const std::function<bool(std::int64_t, const Link&, std::span<const std::int32_t>)>& visit) const;
  std::vector<BlockParts> parts_of(std::span<const BlockLease> leases);

  BlockPool& device_;
  HostBlocks& host_;
  DiskBlocks* disk_;
  BlockMemory& memory_;
  std::unordered_map<Key, Held> held_;
};

}  // namespace prl::engine
