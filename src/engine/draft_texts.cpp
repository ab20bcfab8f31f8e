#include "engine/draft_texts.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {
namespace {

constexpr std::size_t kFirstSlots = 64;

/// Of a run of tokens, from its last to its first.
std::uint64_t extend(std::uint64_t hash, std::int32_t token) noexcept {
  hash ^= static_cast<std::uint64_t>(static_cast<std::uint32_t>(token)) + 0x9e3779b97f4a7c15ULL;
  hash *= 0xff51afd7ed558ccdULL;
  return hash ^ (hash >> 32);
}

/// Runs of different lengths have different keys; 0 is none.
std::uint64_t key_of(std::uint64_t hash, std::int64_t length) noexcept {
  return std::max<std::uint64_t>(1, extend(hash, static_cast<std::int32_t>(-length)));
}

}  // namespace

DraftTexts::DraftTexts(std::span<const std::int32_t> prompt, std::int64_t min_ngram, std::int64_t max_ngram)
    : min_ngram_(min_ngram), max_ngram_(max_ngram), slots_(kFirstSlots) {
  PRL_CHECK(1 <= min_ngram && min_ngram <= max_ngram && max_ngram <= 32, "runs of {} to {} tokens", min_ngram, max_ngram);
  texts_.emplace_back(prompt.begin(), prompt.end());
  num_tokens_ = static_cast<std::int64_t>(prompt.size());
  for (std::size_t position = 1; position < prompt.size(); ++position) enter(0, position);
}

std::uint32_t DraftTexts::add_text() {
  if (free_texts_.empty()) {
    free_texts_.push_back(static_cast<std::uint32_t>(texts_.size()));
    texts_.emplace_back();
  }
  const std::uint32_t index = free_texts_.back();
  free_texts_.pop_back();
  const auto tail = prompt().last(std::min(static_cast<std::size_t>(max_ngram_), prompt().size()));
  texts_[index].assign(tail.begin(), tail.end());
  num_tokens_ += static_cast<std::int64_t>(tail.size());
  return index;
}

void DraftTexts::append(std::uint32_t text, std::int32_t token) {
  texts_[text].push_back(token);
  ++num_tokens_;
  enter(text, texts_[text].size() - 1);
}

void DraftTexts::drop(std::uint32_t text) {
  const auto count = static_cast<std::int64_t>(texts_[text].size());
  std::vector<std::int32_t>().swap(texts_[text]);
  free_texts_.push_back(text);
  num_tokens_ -= count;
  num_dropped_ += count;
  if (num_dropped_ > num_tokens_) rebuild();
}

std::optional<DraftTexts::Match> DraftTexts::find(std::uint32_t text) const {
  const std::span<const std::int32_t> tokens = texts_[text];
  const std::int64_t longest = std::min(max_ngram_, static_cast<std::int64_t>(tokens.size()));
  std::optional<Match> found;
  std::uint64_t hash = 0;
  for (std::int64_t length = 1; length <= longest; ++length) {
    hash = extend(hash, tokens[tokens.size() - static_cast<std::size_t>(length)]);
    if (length < min_ngram_) continue;
    const Slot& slot = const_cast<DraftTexts&>(*this).slot_of(key_of(hash, length));
    if (slot.key == 0) break;  // what a run ends with has occurred wherever the run has, unless that text was dropped
    // Keys may collide, and texts have been dropped.
    const std::span<const std::int32_t> other = texts_[slot.next.text];
    const auto end = static_cast<std::size_t>(slot.next.position), count = static_cast<std::size_t>(length);
    if (end < other.size() && std::ranges::equal(other.subspan(end - count, count), tokens.last(count))) found = {slot.next, length};
  }
  return found;
}

void DraftTexts::enter(std::uint32_t text, std::size_t position) {
  if (2 * (num_keys_ + static_cast<std::size_t>(max_ngram_)) > slots_.size()) grow();
  const std::vector<std::int32_t>& tokens = texts_[text];
  const std::int64_t longest = std::min(max_ngram_, static_cast<std::int64_t>(position));
  std::uint64_t hash = 0;
  for (std::int64_t length = 1; length <= longest; ++length) {
    hash = extend(hash, tokens[position - static_cast<std::size_t>(length)]);
    if (length < min_ngram_) continue;
    Slot& slot = slot_of(key_of(hash, length));
    if (slot.key == 0) {
      slot.key = key_of(hash, length);
      ++num_keys_;
    }
    slot.next = {text, static_cast<std::uint32_t>(position)};
  }
}

DraftTexts::Slot& DraftTexts::slot_of(std::uint64_t key) noexcept {
  const std::size_t mask = slots_.size() - 1;
  std::size_t at = static_cast<std::size_t>(key) & mask;
  while (slots_[at].key != 0 && slots_[at].key != key) at = (at + 1) & mask;
  return slots_[at];
}

void DraftTexts::grow() {
  std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(4 * slots_.size()));
  for (const Slot& slot : before)
    if (slot.key != 0) slot_of(slot.key) = slot;
}

void DraftTexts::rebuild() {
  slots_.assign(kFirstSlots, {});
  num_keys_ = 0;
  num_dropped_ = 0;
  // Which of several texts had a run last is not known any more: the later number wins.
  for (std::size_t text = 0; text < texts_.size(); ++text) {
    const std::size_t begin = text == 0 ? 1 : std::min(static_cast<std::size_t>(max_ngram_), texts_[0].size());
    for (std::size_t position = begin; position < texts_[text].size(); ++position) enter(static_cast<std::uint32_t>(text), position);
  }
}

}  // namespace prl::engine
