#include "engine/sequence_states.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "engine/image_keys.hpp"

namespace prl::engine {

SequenceStates::SequenceStates(std::int64_t num_slots, std::int64_t num_snapshots, std::int64_t block_size)
    : block_size_(block_size), num_slots_(num_slots), snapshots_(num_slots, num_snapshots) {
  for (std::int64_t slot = num_slots; slot-- > 0;) free_slots_.push_back(static_cast<std::int32_t>(slot));
}

void SequenceStates::take_slot(Sequence& sequence) {
  PRL_CHECK(!free_slots_.empty() && sequence.state_slot < 0, "no slot for the state of sequence {}", sequence.request_id.value);
  sequence.state_slot = free_slots_.back();
  free_slots_.pop_back();
}

void SequenceStates::return_slot(Sequence& sequence) {
  free_slots_.push_back(std::exchange(sequence.state_slot, -1));
  if (sequence.former_slot >= 0) free_slots_.push_back(std::exchange(sequence.former_slot, -1));
  sequence.last_kept = std::nullopt;
}

std::int64_t SequenceStates::room_for_drafts(const Sequence& sequence, std::int64_t first, std::int64_t count) const noexcept {
  if (first < sequence.num_prompt_tokens || count > kMostAgain || (free_slots_.empty() && sequence.former_slot < 0)) return 0;
  // The next place to keep the state is not passed over.
  for (std::int64_t end = first + count; end < first + count + kStep; ++end)
    if (is_kept_at(sequence, end)) return end - first - count;
  return kStep;
}

void SequenceStates::guard(Sequence& sequence) {
  if (sequence.former_slot < 0) {
    PRL_CHECK(!free_slots_.empty(), "no second slot for the state of sequence {}", sequence.request_id.value);
    sequence.former_slot = free_slots_.back();
    free_slots_.pop_back();
  }
  copies_.push_back({sequence.state_slot, sequence.former_slot});
}

void SequenceStates::go_back(Sequence& sequence) noexcept { std::swap(sequence.state_slot, sequence.former_slot); }

std::int64_t SequenceStates::prompt_end(const Sequence& sequence) const noexcept {
  return (sequence.num_prompt_tokens - 1) / block_size_ * block_size_;
}

bool SequenceStates::is_kept_at(const Sequence& sequence, std::int64_t position) const noexcept {
  if (!keeps_prefixes() || position == 0 || position % block_size_ != 0) return false;
  return position == prompt_end(sequence) || position % kStep == 0;
}

std::int64_t SequenceStates::cut(const Sequence& sequence, std::int64_t first, std::int64_t count) const noexcept {
  const std::int64_t end = prompt_end(sequence);
  return keeps_prefixes() && first < end && end < first + count ? end - first : count;
}

std::optional<BlockHash> SequenceStates::hash_at(const Sequence& sequence, std::int64_t position) const {
  const std::int64_t hashed = sequence.num_hashed_blocks * block_size_;
  if (hashed == position) return sequence.last_hash;
  // The last block was filled by a step in flight, after which it will be published.
  if (hashed + block_size_ != position || sequence.num_tokens() < position) return std::nullopt;
  return chain_hash(link_of_block(sequence, sequence.last_hash, hashed, block_size_),
                    std::span(sequence.tokens).subspan(static_cast<std::size_t>(hashed), static_cast<std::size_t>(block_size_)));
}

void SequenceStates::keep(Sequence& sequence, std::int64_t first) {
  if (!is_kept_at(sequence, first)) return;
  const std::optional<BlockHash> hash = hash_at(sequence, first);
  if (!hash || snapshots_.has(*hash)) return;
  const bool is_of_prompt = first == prompt_end(sequence);
  if (!is_of_prompt && sequence.last_kept) snapshots_.forget(*std::exchange(sequence.last_kept, std::nullopt));
  const std::optional<std::int32_t> slot = snapshots_.add(*hash);
  copies_.push_back({sequence.state_slot, *slot});
  if (!is_of_prompt) sequence.last_kept = hash;
}

void SequenceStates::expect(const Sequence& sequence, std::int64_t end) {
  if (is_kept_at(sequence, end) && sequence.num_hashed_blocks * block_size_ == end) expected_.insert(sequence.last_hash.value);
}

bool SequenceStates::trim(Sequence& sequence, BlockHash root) {
  std::vector<BlockHash> hashes{root};  // before the first block, behind it, ...
  for (std::size_t i = 0; i < sequence.blocks.size(); ++i)
    hashes.push_back(
        chain_hash(link_of_block(sequence, hashes.back(), static_cast<std::int64_t>(i) * block_size_, block_size_),
                   std::span(sequence.tokens).subspan(i * static_cast<std::size_t>(block_size_), static_cast<std::size_t>(block_size_))));
  std::size_t kept = sequence.blocks.size();
  for (; kept > 0 && !snapshots_.has(hashes[kept]); --kept)
    if (expected_.contains(hashes[kept].value)) return false;
  while (sequence.blocks.size() > kept) sequence.blocks.pop_back();
  sequence.num_hashed_blocks = static_cast<std::int64_t>(kept);
  sequence.last_hash = hashes[kept];
  sequence.num_tokens_computed = static_cast<std::int64_t>(kept) * block_size_;
  return true;
}

void SequenceStates::restore(const Sequence& sequence) {
  if (sequence.num_tokens_computed == 0) return;
  const std::optional<std::int32_t> slot = snapshots_.find(sequence.last_hash);
  PRL_CHECK(slot, "sequence {} begins at token {}, of which no state is kept", sequence.request_id.value, sequence.num_tokens_computed);
  copies_.push_back({*slot, sequence.state_slot});
}

void SequenceStates::list(std::vector<StateCopy>& copies) {
  copies.insert(copies.end(), copies_.begin(), copies_.end());
  copies_.clear();
}

void SequenceStates::clear() {
  snapshots_.clear();
  expected_.clear();
}

void SequenceStates::give_up() {
  clear();
  copies_.clear();
}

void SequenceStates::check_integrity(std::span<Sequence* const> running) const {
  snapshots_.check_integrity();
  std::vector<std::int32_t> slots = free_slots_;
  for (const Sequence* sequence : running) {
    slots.push_back(sequence->state_slot);
    if (sequence->former_slot >= 0) slots.push_back(sequence->former_slot);
  }
  std::ranges::sort(slots);
  PRL_CHECK(static_cast<std::int64_t>(slots.size()) == num_slots_, "{} slots for states, of {}", slots.size(), num_slots_);
  for (std::size_t i = 0; i < slots.size(); ++i)
    PRL_CHECK(slots[i] == static_cast<std::int32_t>(i), "slot {} for a state is missing or taken twice", i);
}

}  // namespace prl::engine
