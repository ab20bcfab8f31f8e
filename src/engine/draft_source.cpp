#include "engine/draft_source.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"

namespace prl::engine {
namespace {

/// Weight of the latest guess in the mean of all.
constexpr double kNewest = 0.125;
/// Of a sequence whose guesses are not known yet: one draft is tried.
constexpr double kFirstRate = 0.5;
/// Completions of one prompt that have ended: those of a few epochs.
constexpr std::size_t kMostEnded = 64;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6);
  hash *= 0xff51afd7ed558ccdULL;
  return hash ^ (hash >> 32);
}

std::uint64_t hash_of(const DraftScope& scope) noexcept {
  std::uint64_t hash = mix(mix(scope.adapter, scope.pictures), scope.prompt.size());
  for (const char c : scope.cache_salt) hash = mix(hash, static_cast<unsigned char>(c));
  hash = mix(hash, scope.cache_salt.size());
  for (const std::int32_t token : scope.prompt) hash = mix(hash, static_cast<std::uint32_t>(token));
  return hash;
}

}  // namespace

DraftGroup::DraftGroup(const DraftScope& scope, const DraftOptions& options)
    : texts(scope.prompt, options.min_ngram, options.max_ngram),
      adapter(scope.adapter),
      cache_salt(scope.cache_salt),
      pictures(scope.pictures) {}

bool DraftGroup::is_of(const DraftScope& scope) const noexcept {
  return adapter == scope.adapter && cache_salt == scope.cache_salt && pictures == scope.pictures &&
         std::ranges::equal(texts.prompt(), scope.prompt);
}

DraftSource::DraftSource(const DraftOptions& options) : options_(options) {
  PRL_CHECK(options.num_tokens >= 0 && options.num_tokens <= DraftOptions::kMostTokens, "{} draft tokens", options.num_tokens);
}

void DraftSource::open(DraftCursor& cursor, const DraftScope& scope) {
  close(cursor);
  if (!is_on()) return;
  if (options_.from_completions) cursor.group = shared_group(scope);
  if (cursor.group == nullptr) cursor.group = std::make_shared<DraftGroup>(scope, options_);
  DraftGroup& group = *cursor.group;
  ++group.num_open;
  const std::int64_t before = group.texts.num_tokens();
  cursor.own = group.texts.add_text();
  if (group.is_stored) num_stored_ += group.texts.num_tokens() - before;
  cursor.hit_rate = kFirstRate;
  cursor.length = 0;
  cursor.has_next = false;
  look_up(cursor);
}

std::shared_ptr<DraftGroup> DraftSource::shared_group(const DraftScope& scope) {
  const std::uint64_t hash = hash_of(scope);
  if (const auto found = by_hash_.find(hash); found != by_hash_.end()) {
    if (!(*found->second)->is_of(scope)) return nullptr;
    groups_.splice(groups_.begin(), groups_, found->second);
    return groups_.front();
  }
  groups_.push_front(std::make_shared<DraftGroup>(scope, options_));
  groups_.front()->is_stored = true;
  by_hash_.emplace(hash, groups_.begin());
  num_stored_ += groups_.front()->texts.num_tokens();
  return groups_.front();
}

void DraftSource::look_up(DraftCursor& cursor) const {
  const DraftTexts& texts = cursor.group->texts;
  const bool is_followed = cursor.has_next && cursor.next.position < texts.text(cursor.next.text).size();
  // A text that has matched for long is followed on.
  if (is_followed && cursor.length >= options_.max_ngram) return;
  const auto match = texts.find(cursor.own);
  if (!match || (is_followed && match->length < cursor.length)) return;
  cursor.next = match->next;
  cursor.length = match->length;
  cursor.has_next = true;
}

void DraftSource::append(DraftCursor& cursor, std::int32_t token) {
  if (cursor.group == nullptr) return;
  DraftTexts& texts = cursor.group->texts;
  if (cursor.has_next) {
    const std::span<const std::int32_t> followed = texts.text(cursor.next.text);
    const bool is_known = cursor.next.position < followed.size();  // else it ends there, or was dropped
    const bool is_hit = is_known && followed[cursor.next.position] == token;
    if (is_known) cursor.hit_rate += kNewest * ((is_hit ? 1.0 : 0.0) - cursor.hit_rate);
    cursor.has_next = is_hit;
    cursor.length = is_hit ? cursor.length + 1 : 0;
    ++cursor.next.position;
  }
  texts.append(cursor.own, token);
  if (cursor.group->is_stored) ++num_stored_;
  look_up(cursor);
}

void DraftSource::close(DraftCursor& cursor) {
  const std::shared_ptr<DraftGroup> group = std::exchange(cursor.group, nullptr);
  if (group == nullptr) return;
  --group->num_open;
  cursor.has_next = false;
  if (!group->is_stored) return;
  group->ended.push_back(cursor.own);
  if (group->ended.size() > kMostEnded) drop_oldest(*group);
  evict();
}

void DraftSource::drop_oldest(DraftGroup& group) {
  const std::int64_t before = group.texts.num_tokens();
  group.texts.drop(group.ended.front());
  group.ended.erase(group.ended.begin());
  num_stored_ -= before - group.texts.num_tokens();
}

void DraftSource::evict() {
  for (auto at = groups_.end(); num_stored_ > options_.max_stored_tokens && at != groups_.begin();) {
    --at;
    DraftGroup& group = **at;
    if (group.num_open > 0) {
      while (num_stored_ > options_.max_stored_tokens && !group.ended.empty()) drop_oldest(group);
      continue;
    }
    num_stored_ -= group.texts.num_tokens();
    by_hash_.erase(hash_of({group.texts.prompt(), group.adapter, group.cache_salt, group.pictures}));
    at = groups_.erase(at);
  }
}

std::int64_t DraftSource::num_useful(const DraftCursor& cursor, std::int64_t limit, double least_chance, std::int64_t num_unknown) const {
  limit = std::min(limit, options_.num_tokens);
  if (!cursor.has_next || limit <= 0) return 0;
  if (cursor.next.text != cursor.own) {
    const auto num_there = static_cast<std::int64_t>(cursor.group->texts.text(cursor.next.text).size());
    limit = std::min(limit, num_there - static_cast<std::int64_t>(cursor.next.position) - num_unknown);
  }
  std::int64_t num = 0;
  for (double chance = cursor.hit_rate; num < limit && chance >= least_chance; chance *= cursor.hit_rate) ++num;
  return num;
}

double DraftSource::expected_gain(const DraftCursor& cursor, std::int64_t num_drafts) const {
  double gain = 0, chance = 1;
  for (std::int64_t i = 0; i < num_drafts; ++i) gain += chance *= cursor.hit_rate;
  return gain;
}

void DraftSource::propose(const DraftCursor& cursor, std::int64_t count, DraftTokens& out) const {
  const std::span<const std::int32_t> followed = cursor.group->texts.text(cursor.next.text);
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    const std::size_t position = cursor.next.position + i;
    // A text that repeats itself goes on with what it has just been given.
    out[i] = position < followed.size() ? followed[position] : out[position - followed.size()];
  }
}

}  // namespace prl::engine
