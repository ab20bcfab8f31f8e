#include "engine/kv/disk_blocks.hpp"

#include "base/error.hpp"

namespace prl::engine {

void DiskBlocks::save(BlockId host, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
  if (pool_.find(hash, parent, tokens)) return;  // its lease made it the most recently used
  if (!pool_.try_take(1, taken_)) return;
  if (files_.write({host, taken_.back().id()})) pool_.publish(taken_.back(), hash, parent, tokens);
  taken_.clear();
}

std::vector<DiskRead> DiskBlocks::read(std::span<const BlockId> host, std::span<const BlockLease> slots) {
  PRL_CHECK(host.size() == slots.size(), "{} blocks for {} slots", host.size(), slots.size());
  copies_.clear();
  for (std::size_t i = 0; i < slots.size(); ++i) copies_.push_back({host[i], slots[i].id()});
  std::vector<DiskRead> outcomes = files_.read(copies_);
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (outcomes[i] == DiskRead::kGone) pool_.unpublish(slots[i]);
  return outcomes;
}

void DiskBlocks::reset_cache() {
  pool_.reset_cache();
  files_.forget();
}

}  // namespace prl::engine
