#include "engine/kv/block_pool.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/rng.hpp"

namespace prl::engine {

BlockHash root_hash(const PrefixKey& key) noexcept {
  const std::uint64_t adapter = mix_seed(key.adapter.id, static_cast<std::uint64_t>(key.adapter.version.value));
  return {mix_seed(mix_seed(key.epoch, static_cast<std::uint64_t>(key.version.value), hash_bytes(key.cache_salt)), adapter)};
}

BlockHash chain_hash(BlockHash parent, std::span<const std::int32_t> tokens) noexcept {
  return {hash_bytes(std::as_bytes(tokens), parent.value)};
}

BlockLease::BlockLease(BlockLease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, BlockId{-1})) {}

BlockLease& BlockLease::operator=(BlockLease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    id_ = std::exchange(other.id_, BlockId{-1});
  }
  return *this;
}

BlockLease::~BlockLease() { release(); }

BlockLease BlockLease::share() const {
  PRL_CHECK(pool_ != nullptr, "share() of an empty lease");
  pool_->add_ref(id_);
  return {pool_, id_};
}

void BlockLease::release() noexcept {
  if (pool_ == nullptr) return;
  pool_->drop_ref(id_);
  pool_ = nullptr;
  id_ = BlockId{-1};
}

void release_tail_first(std::vector<BlockLease>& leases) noexcept {
  while (!leases.empty()) leases.pop_back();
}

BlockPool::BlockPool(std::int64_t num_blocks, std::int64_t block_size, EvictionListener* below) : block_size_(block_size), below_(below) {
  PRL_CHECK(num_blocks > 0 && num_blocks < (std::int64_t{1} << 30) && block_size > 0, "{} blocks of {} tokens", num_blocks, block_size);
  const auto count = static_cast<std::size_t>(num_blocks);
  blocks_.resize(count);
  tokens_.resize(count * static_cast<std::size_t>(block_size));
  table_.assign(std::bit_ceil(2 * count), -1);
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(num_blocks); ++i) push_free(i, false);
}

bool BlockPool::try_take(std::int64_t n, std::vector<BlockLease>& leases) {
  if (n > num_free_) return false;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t block = first_free_;
    if (const Block& b = blocks_[static_cast<std::size_t>(block)]; b.has_hash) {
      if (below_ != nullptr) below_->save(BlockId{block}, b.hash, b.parent, tokens_of(block));
      forget(block);
    }
    remove_free(block);
    blocks_[static_cast<std::size_t>(block)].ref_count = 1;
    leases.push_back(BlockLease(this, BlockId{block}));
  }
  return true;
}

void BlockPool::publish(const BlockLease& lease, BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
  PRL_CHECK(lease.pool_ == this && static_cast<std::int64_t>(tokens.size()) == block_size_, "published block holds {} tokens, wanted {}",
            tokens.size(), block_size_);
  const auto index = static_cast<std::size_t>(lease.id_.value);
  Block& block = blocks_[index];
  PRL_CHECK(!block.has_hash, "block {} published twice", lease.id_.value);
  const std::size_t slot = probe(hash);
  if (table_[slot] >= 0) return;
  table_[slot] = lease.id_.value;
  block.has_hash = true;
  block.hash = hash;
  block.parent = parent;
  std::copy(tokens.begin(), tokens.end(), tokens_.begin() + static_cast<std::ptrdiff_t>(index) * block_size_);
  ++num_cached_;
}

void BlockPool::unpublish(const BlockLease& lease) noexcept {
  if (blocks_[static_cast<std::size_t>(lease.id_.value)].has_hash) forget(lease.id_.value);
}

std::optional<BlockLease> BlockPool::find(BlockHash hash, BlockHash parent, std::span<const std::int32_t> tokens) {
  const std::int32_t block = table_[probe(hash)];
  if (block < 0 || blocks_[static_cast<std::size_t>(block)].parent != parent) return std::nullopt;
  const auto held = tokens_of(block);
  if (!std::equal(held.begin(), held.end(), tokens.begin(), tokens.end())) return std::nullopt;
  add_ref(BlockId{block});
  return BlockLease(this, BlockId{block});
}

void BlockPool::reset_cache() noexcept {
  std::fill(table_.begin(), table_.end(), -1);
  for (Block& block : blocks_) block.has_hash = false;
  num_cached_ = 0;
}

void BlockPool::add_ref(BlockId id) noexcept {
  Block& block = blocks_[static_cast<std::size_t>(id.value)];
  if (block.ref_count++ == 0) remove_free(id.value);
}

void BlockPool::drop_ref(BlockId id) noexcept {
  Block& block = blocks_[static_cast<std::size_t>(id.value)];
  PRL_CHECK(block.ref_count > 0, "block {} released more often than taken", id.value);
  // Blocks without a hash, which no prefix can match, are reused first.
  if (--block.ref_count == 0) push_free(id.value, !block.has_hash);
}

void BlockPool::push_free(std::int32_t block, bool at_front) noexcept {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  b.previous_free = at_front ? -1 : last_free_;
  b.next_free = at_front ? first_free_ : -1;
  if (b.previous_free >= 0) blocks_[static_cast<std::size_t>(b.previous_free)].next_free = block;
  if (b.next_free >= 0) blocks_[static_cast<std::size_t>(b.next_free)].previous_free = block;
  if (b.previous_free < 0) first_free_ = block;
  if (b.next_free < 0) last_free_ = block;
  ++num_free_;
}

void BlockPool::remove_free(std::int32_t block) noexcept {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  if (b.previous_free >= 0) blocks_[static_cast<std::size_t>(b.previous_free)].next_free = b.next_free;
  if (b.next_free >= 0) blocks_[static_cast<std::size_t>(b.next_free)].previous_free = b.previous_free;
  if (first_free_ == block) first_free_ = b.next_free;
  if (last_free_ == block) last_free_ = b.previous_free;
  b.previous_free = b.next_free = -1;
  --num_free_;
}

std::size_t BlockPool::probe(BlockHash hash) const noexcept {
  std::size_t slot = home(hash);
  while (table_[slot] >= 0 && blocks_[static_cast<std::size_t>(table_[slot])].hash != hash) slot = (slot + 1) & (table_.size() - 1);
  return slot;
}

void BlockPool::forget(std::int32_t block) noexcept {
  Block& b = blocks_[static_cast<std::size_t>(block)];
  const std::size_t mask = table_.size() - 1;
  std::size_t hole = probe(b.hash);
  // Entries after the hole move back over it unless that would put them before their home slot.
  for (std::size_t next = (hole + 1) & mask; table_[next] >= 0; next = (next + 1) & mask) {
    const std::size_t wanted = home(blocks_[static_cast<std::size_t>(table_[next])].hash);
    if (((next - wanted) & mask) >= ((next - hole) & mask)) {
      table_[hole] = table_[next];
      hole = next;
    }
  }
  table_[hole] = -1;
  b.has_hash = false;
  --num_cached_;
}

std::span<const std::int32_t> BlockPool::tokens_of(std::int32_t block) const noexcept {
  return std::span(tokens_).subspan(static_cast<std::size_t>(block) * static_cast<std::size_t>(block_size_),
                                    static_cast<std::size_t>(block_size_));
}

void BlockPool::check_integrity() const {
  std::vector<bool> is_free(blocks_.size(), false);
  std::int64_t num_listed = 0;
  std::int32_t previous = -1;
  for (std::int32_t block = first_free_; block >= 0; block = blocks_[static_cast<std::size_t>(block)].next_free) {
    const Block& b = blocks_[static_cast<std::size_t>(block)];
    PRL_CHECK(!is_free[static_cast<std::size_t>(block)], "block {} is twice in the free list", block);
    PRL_CHECK(b.previous_free == previous, "free list is broken at block {}", block);
    is_free[static_cast<std::size_t>(block)] = true;
    previous = block;
    ++num_listed;
  }
  PRL_CHECK(previous == last_free_ && num_listed == num_free_, "free list holds {} blocks, counted {}", num_listed, num_free_);
  std::int64_t num_hashed = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    const Block& b = blocks_[i];
    PRL_CHECK(b.ref_count >= 0 && is_free[i] == (b.ref_count == 0), "block {} has {} references and is {}free", i, b.ref_count,
              is_free[i] ? "" : "not ");
    if (!b.has_hash) continue;
    ++num_hashed;
    PRL_CHECK(table_[probe(b.hash)] == static_cast<std::int32_t>(i), "block {} cannot be found by its hash", i);
    PRL_CHECK(chain_hash(b.parent, tokens_of(static_cast<std::int32_t>(i))) == b.hash, "block {} does not hold the tokens of its hash", i);
  }
  const auto num_entries =
      static_cast<std::int64_t>(std::count_if(table_.begin(), table_.end(), [](std::int32_t block) { return block >= 0; }));
  PRL_CHECK(num_hashed == num_cached_ && num_entries == num_cached_, "{} hashed blocks, {} table entries, counted {}", num_hashed,
            num_entries, num_cached_);
}

}  // namespace prl::engine
