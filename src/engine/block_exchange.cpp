#include "engine/block_exchange.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {

std::int64_t BlockExchange::num_useful(const PromptKey& prompt) const noexcept {
  return std::max<std::int64_t>(0, (static_cast<std::int64_t>(prompt.tokens.size()) - 1) / block_size());
}

void BlockExchange::walk(BlockHash root, const PromptKey& prompt, std::int64_t num_blocks,
                         const std::function<bool(std::int64_t, const Link&, std::span<const std::int32_t>)>& visit) const {
  const auto size = static_cast<std::size_t>(block_size());
  BlockHash last = root;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const auto tokens = std::span<const std::int32_t>(prompt.tokens).subspan(static_cast<std::size_t>(i) * size, size);
    const BlockHash parent = link_of_block(prompt.images, last, i * block_size(), block_size());
    last = chain_hash(parent, tokens);
    if (!visit(i, {.hash = last, .parent = parent}, tokens)) return;
  }
}

std::int64_t BlockExchange::num_cached(BlockHash root, const PromptKey& prompt) {
  std::int64_t num = 0;
  walk(root, prompt, num_useful(prompt), [&](std::int64_t, const Link& link, std::span<const std::int32_t> tokens) {
    const bool is_here = device_.find(link.hash, link.parent, tokens) || host_.find(link.hash, link.parent, tokens) ||
                         (disk_ != nullptr && disk_->find(link.hash, link.parent, tokens));
    if (is_here) ++num;
    return is_here;
  });
  return num;
}

std::vector<BlockParts> BlockExchange::parts_of(std::span<const BlockLease> leases) {
  std::vector<BlockParts> parts;
  for (const BlockLease& lease : leases) memory_.add_parts(lease.id(), parts.emplace_back());
  return parts;
}

std::vector<BlockParts> BlockExchange::give(Key key, BlockHash root, const PromptKey& prompt, std::int64_t first, std::int64_t max_blocks) {
  PRL_CHECK(!held_.contains(key), "blocks are given twice under one key");
  const std::int64_t num_full = static_cast<std::int64_t>(prompt.tokens.size()) / block_size();
  const std::int64_t end = std::min(num_full, first + max_blocks);
  std::vector<BlockLease> given, on_device;
  std::vector<BlockCopy> copies;
  std::vector<std::pair<Link, std::size_t>> fetched;  // with its place in `given`
  walk(root, prompt, end, [&](std::int64_t i, const Link& link, std::span<const std::int32_t> tokens) {
    if (i < first) return true;
    if (auto lease = host_.find(link.hash, link.parent, tokens); lease && !host_.is_awaited(lease->id())) {
      given.push_back(std::move(*lease));
      return true;
    }
    auto lease = device_.find(link.hash, link.parent, tokens);
    auto room = lease ? host_.take() : std::nullopt;
    if (!room) return false;
    copies.push_back({.device = lease->id(), .host = room->id()});
    fetched.push_back({link, given.size()});
    on_device.push_back(std::move(*lease));
    given.push_back(std::move(*room));
    return true;
  });
  memory_.fetch(copies);
  // Found here by the next who asks, and not saved again when it leaves the device.
  const auto size = static_cast<std::size_t>(block_size());
  for (const auto& [link, at] : fetched) {
    const auto tokens = std::span<const std::int32_t>(prompt.tokens).subspan((static_cast<std::size_t>(first) + at) * size, size);
    host_.publish(given[at], link.hash, link.parent, tokens);
  }
  release_tail_first(on_device);
  std::vector<BlockParts> parts = parts_of(given);
  held_[key].leases = std::move(given);
  return parts;
}

std::vector<BlockParts> BlockExchange::reserve(Key key, BlockHash root, const PromptKey& prompt, std::int64_t first,
                                               std::int64_t max_blocks) {
  Held& held = held_[key];
  held.root = root;
  held.first = first;
  held.num_kept = held.leases.size();
  const std::int64_t num_wanted = std::min(max_blocks, num_useful(prompt) - first);
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    auto room = host_.take();
    if (!room) break;
    held.leases.push_back(std::move(*room));
  }
  return parts_of(std::span(held.leases).subspan(held.num_kept));
}

std::int64_t BlockExchange::publish(Key key, BlockHash root, const PromptKey& prompt, std::int64_t num_good) {
  const auto it = held_.find(key);
  if (it == held_.end()) return 0;
  Held& held = it->second;
  if (root != held.root) num_good = 0;
  while (held.leases.size() > held.num_kept + static_cast<std::size_t>(num_good)) held.leases.pop_back();
  walk(root, prompt, held.first + num_good, [&](std::int64_t i, const Link& link, std::span<const std::int32_t> tokens) {
    if (i >= held.first)
      host_.publish(held.leases[held.num_kept + static_cast<std::size_t>(i - held.first)], link.hash, link.parent, tokens);
    return true;
  });
  held.num_kept = held.leases.size();
  held.first += num_good;
  return num_good;
}

void BlockExchange::end(Key key) noexcept {
  const auto it = held_.find(key);
  if (it == held_.end()) return;
  release_tail_first(it->second.leases);
  held_.erase(it);
}

std::vector<BlockLease> BlockExchange::adopt(Key key) {
  const auto it = held_.find(key);
  if (it == held_.end()) return {};
  std::vector<BlockLease> leases = std::move(it->second.leases);
  held_.erase(it);
  return leases;
}

}  // namespace prl::engine
