#include "engine/prefix_lookup.hpp"

#include <utility>

#include "base/error.hpp"

namespace prl::engine {

std::span<const std::int32_t> PrefixLookup::tokens_of(const Sequence& sequence, std::size_t index) const noexcept {
  const auto block_size = static_cast<std::size_t>(pool_.block_size());
  return std::span<const std::int32_t>(sequence.tokens).subspan(index * block_size, block_size);
}

void PrefixLookup::take(Sequence& sequence) {
  const std::int64_t max_blocks = (sequence.num_tokens() - 1) / pool_.block_size();
  while (sequence.num_hashed_blocks < max_blocks) {
    const auto index = static_cast<std::size_t>(sequence.num_hashed_blocks);
    const auto tokens = tokens_of(sequence, index);
    const BlockHash hash = chain_hash(sequence.last_hash, tokens);
    if (auto lease = pool_.find(hash, sequence.last_hash, tokens)) {
      sequence.blocks.push_back(std::move(*lease));
    } else {
      auto in_host = host_ != nullptr ? host_->find(hash, sequence.last_hash, tokens) : std::nullopt;
      if (!in_host) break;
      found_.push_back({index, std::move(*in_host), hash, sequence.last_hash});
      sequence.blocks.emplace_back();
    }
    sequence.last_hash = hash;
    ++sequence.num_hashed_blocks;
  }
  sequence.num_tokens_computed = static_cast<std::int64_t>(sequence.blocks.size()) * pool_.block_size();
}

void PrefixLookup::restore(Sequence& sequence) {
  for (Found& found : found_) {
    PRL_CHECK(pool_.try_take(1, taken_), "no room for a block in host memory");
    BlockLease& lease = sequence.blocks[found.index];
    lease = std::move(taken_.back());
    taken_.clear();
    host_->restore(std::move(found.host), lease.id());
    pool_.publish(lease, found.hash, found.parent, tokens_of(sequence, found.index));
  }
  found_.clear();
}

void PrefixLookup::drop(Sequence& sequence) noexcept {
  while (!found_.empty()) found_.pop_back();  // the tail first, see release_tail_first()
  drop_blocks(sequence);
}

void drop_blocks(Sequence& sequence) noexcept {
  release_tail_first(sequence.blocks);
  sequence.num_tokens_computed = 0;
  sequence.num_hashed_blocks = 0;
}

}  // namespace prl::engine
