#include "engine/prefix_lookup.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "engine/image_keys.hpp"

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
    const BlockHash link = link_of_block(sequence, sequence.last_hash, sequence.num_hashed_blocks * pool_.block_size(), pool_.block_size());
    const BlockHash hash = chain_hash(link, tokens);
    if (auto lease = pool_.find(hash, link, tokens)) {
      sequence.blocks.push_back(std::move(*lease));
    } else {
      if (!find_below(index, hash, link, tokens)) break;
      found_.back().before = sequence.last_hash;
      sequence.blocks.emplace_back();
    }
    sequence.last_hash = hash;
    ++sequence.num_hashed_blocks;
  }
  read_files(sequence);
  sequence.num_tokens_computed = static_cast<std::int64_t>(sequence.blocks.size()) * pool_.block_size();
}

bool PrefixLookup::find_below(std::size_t index, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
  if (host_ == nullptr) return false;
  if (auto in_host = host_->find(hash, parent, tokens)) {
    found_.push_back({.index = index, .host = std::move(*in_host), .hash = hash, .parent = parent});
    return true;
  }
  auto slot = disk_ != nullptr ? disk_->find(hash, parent, tokens) : std::nullopt;
  if (!slot) return false;
  auto room = host_->take();
  if (!room) return false;
  slots_.push_back(std::move(*slot));
  found_.push_back({.index = index, .is_read = false, .host = std::move(*room), .hash = hash, .parent = parent});
  return true;
}

void PrefixLookup::read_files(Sequence& sequence) {
  num_from_disk_ = 0;
  if (slots_.empty()) return;
  std::vector<BlockId> wanted;
  for (const Found& found : found_)
    if (!found.is_read) wanted.push_back(found.host.id());
  const std::vector<DiskRead> outcomes = disk_->read(wanted, slots_);
  while (!slots_.empty()) slots_.pop_back();  // the tail first
  std::size_t num_kept = found_.size();       // before the first that is missing
  std::size_t next = 0;
  for (std::size_t i = 0; i < found_.size(); ++i) {
    Found& found = found_[i];
    if (found.is_read) continue;
    found.is_read = outcomes[next++] == DiskRead::kRead;
    if (!found.is_read)
      num_kept = std::min(num_kept, i);
    else
      host_->publish(found.host, found.hash, found.parent, tokens_of(sequence, found.index));
    if (found.is_read && num_kept == found_.size()) ++num_from_disk_;
  }
  if (num_kept == found_.size()) return;
  const Found& missing = found_[num_kept];
  sequence.last_hash = missing.before;
  sequence.num_hashed_blocks = static_cast<std::int64_t>(missing.index);
  while (sequence.blocks.size() > missing.index) sequence.blocks.pop_back();
  while (found_.size() > num_kept) found_.pop_back();
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
