#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/block_exchange.hpp"
#include "engine/engine.hpp"

namespace prl::engine {

using PromptPtr = std::shared_ptr<const PromptKey>;

/// Where other threads ask an engine for blocks of prompts, and bring it some. Any thread; calls with a `timeout` wait for the
/// step in progress, so long at most, and throw Error{kDeadline} then. `adapter`: name of the one that the prompt is computed with; empty:
/// none.
class KvDesk {
 public:
  using Key = BlockExchange::Key;
  /// What is known of a prompt before anything is brought.
  struct Standing {
    KvIdentity identity;
    std::int64_t num_cached = 0;  ///< blocks that are here, from the first on
    std::int64_t num_useful = 0;  ///< that a request of the prompt may begin with
  };
  /// Error{kNotImplemented} naming why if the engine exchanges no blocks: a model with linear attention, no host memory for blocks.
  explicit KvDesk(Engine& engine);

  /// What must be equal for a block of one engine to be one of another: kind of device, arithmetic, model's shape, types, block size.
  const std::string& layout() const noexcept { return layout_; }
  std::int64_t block_size() const noexcept { return block_size_; }
  std::size_t block_bytes() const noexcept { return block_bytes_; }
  /// Never used before.
  Key make_key() noexcept { return ++num_keys_; }

  Standing standing(PromptPtr prompt, const std::string& adapter, std::chrono::milliseconds timeout);
  /// Tells `done` Standing::num_cached on the engine's thread, -1 if it cannot say. Does not wait.
  void count_cached(PromptPtr prompt, const std::string& adapter, std::function<void(std::int64_t)> done);
  /// BlockExchange::give; nothing if `identity` is not what the engine computes with now.
  std::vector<BlockParts> give(Key key, PromptPtr prompt, const KvIdentity& identity, std::int64_t first, std::int64_t max_blocks,
                               std::chrono::milliseconds timeout);
  /// BlockExchange::reserve; likewise.
  std::vector<BlockParts> reserve(Key key, PromptPtr prompt, const KvIdentity& identity, std::int64_t first, std::int64_t max_blocks,
                                  std::chrono::milliseconds timeout);
  std::int64_t publish(Key key, PromptPtr prompt, const std::string& adapter, std::int64_t num_good, std::chrono::milliseconds timeout);
  /// Does not wait.
  void end(Key key) noexcept;

 private:
  Engine& engine_;
  std::string layout_;
  std::int64_t block_size_ = 0;
  std::size_t block_bytes_ = 0;
  std::atomic<Key> num_keys_{0};
};

}  // namespace prl::engine
