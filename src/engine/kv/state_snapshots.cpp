#include "engine/kv/state_snapshots.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace prl::engine {

StateSnapshots::StateSnapshots(std::int64_t first_slot, std::int64_t num_slots)
    : first_slot_(first_slot), entries_(static_cast<std::size_t>(num_slots)) {
  index_.reserve(entries_.size());
}

std::optional<std::int32_t> StateSnapshots::find(BlockHash block) {
  const auto found = index_.find(block.value);
  if (found == index_.end()) return std::nullopt;
  entries_[found->second].last_use = ++num_uses_;
  return static_cast<std::int32_t>(first_slot_ + static_cast<std::int64_t>(found->second));
}

std::optional<std::int32_t> StateSnapshots::add(BlockHash block) {
  if (entries_.empty() || has(block)) return std::nullopt;
  const auto oldest = std::ranges::min_element(entries_, {}, &Entry::last_use);
  if (oldest->block) index_.erase(oldest->block->value);
  *oldest = {block, ++num_uses_};
  const std::size_t at = static_cast<std::size_t>(oldest - entries_.begin());
  index_.emplace(block.value, at);
  return static_cast<std::int32_t>(first_slot_ + static_cast<std::int64_t>(at));
}

void StateSnapshots::forget(BlockHash block) {
  const auto found = index_.find(block.value);
  if (found == index_.end()) return;
  entries_[found->second] = {};
  index_.erase(found);
}

void StateSnapshots::clear() {
  std::ranges::fill(entries_, Entry{});
  index_.clear();
}

void StateSnapshots::check_integrity() const {
  std::size_t num_held = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].block) continue;
    ++num_held;
    const auto found = index_.find(entries_[i].block->value);
    PRL_CHECK(found != index_.end() && found->second == i, "the state in entry {} cannot be found", i);
  }
  PRL_CHECK(num_held == index_.size(), "{} states are held, {} are indexed", num_held, index_.size());
}

}  // namespace prl::engine
