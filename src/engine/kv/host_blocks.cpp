#include "engine/kv/host_blocks.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {

HostBlocks::HostBlocks(std::int64_t num_blocks, std::int64_t block_size, EvictionListener* below) : pool_(num_blocks, block_size, below) {}

void HostBlocks::save(BlockId device, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
  if (pool_.find(hash, parent, tokens)) return;  // its lease made it the most recently used
  if (!pool_.try_take(1, taken_)) return;
  pool_.publish(taken_.back(), hash, parent, tokens);
  saves_.push_back({device, std::move(taken_.back())});
  taken_.clear();
}

std::optional<BlockLease> HostBlocks::take() {
  if (!pool_.try_take(1, taken_)) return std::nullopt;
  BlockLease lease = std::move(taken_.back());
  taken_.clear();
  return lease;
}

void HostBlocks::restore(BlockLease host, BlockId device) { restores_.push_back({device, std::move(host)}); }

void HostBlocks::list(BlockCopies& copies) const {
  copies.clear();
  for (const Pending& copy : saves_) copies.saves.push_back({copy.device, copy.host.id()});
  for (const Pending& copy : restores_) copies.restores.push_back({copy.device, copy.host.id()});
}

bool HostBlocks::is_restoring(BlockId device) const noexcept {
  return std::ranges::any_of(restores_, [&](const Pending& copy) { return copy.device == device; });
}

bool HostBlocks::is_awaited(BlockId host) const noexcept {
  return std::ranges::any_of(saves_, [&](const Pending& copy) { return copy.host.id() == host; });
}

void HostBlocks::carried_out() noexcept {
  num_saved_ += std::ssize(saves_);
  num_restored_ += std::ssize(restores_);
  // A sequence's tail was evicted first and is let go first, so that it is dropped before its prefix; restores begin with the prefix.
  saves_.clear();
  while (!restores_.empty()) restores_.pop_back();
}

void HostBlocks::give_up() noexcept {
  for (const Pending& copy : saves_) pool_.unpublish(copy.host);
  saves_.clear();
  restores_.clear();
}

void HostBlocks::check_integrity() const {
  pool_.check_integrity();
  std::vector<std::int32_t> num_refs(static_cast<std::size_t>(pool_.num_blocks()), 0);
  for (const auto* copies : {&saves_, &restores_})
    for (const Pending& copy : *copies) ++num_refs[static_cast<std::size_t>(copy.host.id().value)];
  for (std::size_t i = 0; i < num_refs.size(); ++i) {
    const BlockId id{static_cast<std::int32_t>(i)};
    PRL_CHECK(num_refs[i] == pool_.ref_count(id), "host block {} has {} references, copies hold {}", i, pool_.ref_count(id), num_refs[i]);
  }
  for (std::size_t i = 0; i < saves_.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      PRL_CHECK(saves_[i].host.id() != saves_[j].host.id(), "host block {} is saved to twice", saves_[i].host.id().value);
}

}  // namespace prl::engine
