#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace prl::engine {

/// Texts that begin with one prompt, and where in them each run of min_ngram to max_ngram tokens occurred last. Pure bookkeeping, one
/// thread.
///
/// Text 0 is the prompt. Every other one begins with the prompt's last tokens, as many as a run has at most, so that what came first behind
/// the prompt is found by the prompt's end. A run counts as soon as the token behind it is there.
class DraftTexts {
 public:
  /// A token of a text.
  struct Place {
    std::uint32_t text = 0;
    std::uint32_t position = 0;
  };
  struct Match {
    Place next;               ///< behind the occurrence that was found
    std::int64_t length = 0;  ///< of the run
  };

  /// 1 <= min_ngram <= max_ngram <= 32.
  DraftTexts(std::span<const std::int32_t> prompt, std::int64_t min_ngram, std::int64_t max_ngram);

  std::uint32_t add_text();
  /// O(max_ngram), amortised.
  void append(std::uint32_t text, std::int32_t token);
  /// Forgets a text, whose number may be that of a later one.
  void drop(std::uint32_t text);
  /// Of the longest run at the end of the text that occurred before: the latest occurrence. O(max_ngram).
  [[nodiscard]] std::optional<Match> find(std::uint32_t text) const;

  [[nodiscard]] std::span<const std::int32_t> text(std::uint32_t index) const noexcept { return texts_[index]; }
  [[nodiscard]] std::span<const std::int32_t> prompt() const noexcept { return texts_[0]; }
  /// Of all texts.
  [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }

 private:
  /// Open addressing; key 0 is free.
  struct Slot {
    std::uint64_t key = 0;
    Place next;
  };
  /// Enters the runs that end before `position`.
  void enter(std::uint32_t text, std::size_t position);
  Slot& slot_of(std::uint64_t key) noexcept;
  void grow();
  void rebuild();

  std::int64_t min_ngram_, max_ngram_;
  std::vector<std::vector<std::int32_t>> texts_;
  std::vector<std::uint32_t> free_texts_;
  std::vector<Slot> slots_;  ///< a power of two
  std::size_t num_keys_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t num_dropped_ = 0;  ///< tokens that slots_ may still name
};

}  // namespace prl::engine
