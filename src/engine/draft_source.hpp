#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/draft_texts.hpp"

namespace prl::engine {

/// Speculative decoding: tokens that a sequence probably goes on with, so that a step can compute several of its rows.
struct DraftOptions {
  std::int64_t num_tokens = 0;  ///< most draft tokens of a sequence in a step, up to kMostTokens; 0: none are used
  std::int64_t min_ngram = 2, max_ngram = 4;
  bool from_completions = true;  ///< other completions of the same prompt are looked up too, also those that have ended
  std::int64_t max_stored_tokens = std::int64_t{1} << 20;  ///< of prompts and completions that have ended; about 100 bytes each
  bool adapts = true;                                      ///< of drafts that a model draws: as many as are worth it; else num_tokens
  bool from_head = false;  ///< the model's own head for multi-token prediction draws them (nn::Weights::mtp)
  bool uses_head() const noexcept { return from_head && num_tokens > 0; }

  static constexpr std::int64_t kMostTokens = 15;
  static constexpr std::int64_t kMostNgram = 32;
};
using DraftTokens = std::array<std::int32_t, DraftOptions::kMostTokens>;

/// Whose texts a sequence may see: those of the same prompt, adapter and salt.
struct DraftScope {
  std::span<const std::int32_t> prompt;
  std::uint64_t adapter = 0;  ///< an id that no other adapter ever has
  std::string_view cache_salt = {};
  std::uint64_t pictures = 0;  ///< which ones the prompt shows, whose tokens are all alike; 0: none
};

/// Completions of one prompt.
struct DraftGroup {
  DraftGroup(const DraftScope& scope, const DraftOptions& options);
  [[nodiscard]] bool is_of(const DraftScope& scope) const noexcept;

  DraftTexts texts;
  std::uint64_t adapter;
  std::string cache_salt;
  std::uint64_t pictures;
  bool is_stored = false;            ///< sequences to come may find it
  std::int64_t num_open = 0;         ///< of sequences that have not ended
  std::vector<std::uint32_t> ended;  ///< those of others, oldest first
};

/// What is remembered for one sequence: a place in some text where it went on as the sequence does, which is followed while it does.
struct DraftCursor {
  std::shared_ptr<DraftGroup> group;  ///< nullptr: not open
  std::uint32_t own = 0;              ///< the sequence's own text
  bool has_next = false;
  DraftTexts::Place next;   ///< what probably comes next
  std::int64_t length = 0;  ///< of the run of tokens that led there
  double hit_rate = 0;      ///< of such tokens, those that came, lately; known of all of them, whether they were drafts or not
};

/// Proposes draft tokens by lookup, without a model: what followed the last tokens of a sequence where they occurred before, in the
/// sequence itself or in another completion of the same prompt. Completions that have ended are kept up to a bound, those of the prompts
/// that were not asked for longest are forgotten first. What is proposed changes how long a step takes, and no token. One thread; no clock.
class DraftSource {
 public:
  explicit DraftSource(const DraftOptions& options);

  [[nodiscard]] bool is_on() const noexcept { return options_.num_tokens > 0; }
  /// O(prompt) for the first sequence of a prompt.
  void open(DraftCursor& cursor, const DraftScope& scope);
  /// The next token of the sequence is known. O(max_ngram), amortised.
  void append(DraftCursor& cursor, std::int32_t token);
  /// The sequence has ended. No effect if it is not open.
  void close(DraftCursor& cursor);

  /// How many drafts, at most `limit`, come true with a chance of at least `least_chance`, as the latest guesses did. `num_unknown`: so
  /// many tokens of the sequence are being drawn, whatever they are.
  [[nodiscard]] std::int64_t num_useful(const DraftCursor& cursor, std::int64_t limit, double least_chance,
                                        std::int64_t num_unknown = 0) const;
  /// Tokens that so many drafts are expected to save.
  [[nodiscard]] double expected_gain(const DraftCursor& cursor, std::int64_t num_drafts) const;
  /// The next `count` tokens, as num_useful() counted them.
  void propose(const DraftCursor& cursor, std::int64_t count, DraftTokens& out) const;

  [[nodiscard]] std::int64_t num_stored_tokens() const noexcept { return num_stored_; }

 private:
  using Groups = std::list<std::shared_ptr<DraftGroup>>;
  /// The group of the scope, moved to the front; nullptr if its place is another's, whose hash is the same.
  std::shared_ptr<DraftGroup> shared_group(const DraftScope& scope);
  /// Follows the longest match, unless the text that is followed has matched for as long.
  void look_up(DraftCursor& cursor) const;
  void drop_oldest(DraftGroup& group);
  /// Forgets what has ended, of the prompts not asked for longest first, until the bound is kept or only sequences that run are left.
  void evict();

  DraftOptions options_;
  Groups groups_;                                                ///< most recently opened first
  std::unordered_map<std::uint64_t, Groups::iterator> by_hash_;  ///< of scopes
  std::int64_t num_stored_ = 0;                                  ///< tokens of groups_
};

}  // namespace prl::engine
