#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.hpp"
#include "text/utf8.hpp"

namespace prl::text {
namespace detail {
class DecodeStream;
}

/// Turns ids into text one by one. The pieces joined equal Tokenizer::decode of all ids (without space clean-up), and no
/// piece ever ends inside a UTF-8 character. One object per output sequence; `tokenizer` must outlive it.
///
/// Tokens that stand for one byte each ("<0xE4>") are held back until another token comes: what a row of them means depends on
/// all of it.
class IncrementalDetokenizer {
 public:
  /// `begins_text` false: the ids go on a text, so that the space in front of their first word stays.
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special = true, bool begins_text = true);
  IncrementalDetokenizer(IncrementalDetokenizer&&) noexcept;
  IncrementalDetokenizer& operator=(IncrementalDetokenizer&&) noexcept;
  ~IncrementalDetokenizer();

  /// The text that became final with this token; often empty inside a multi-token character.
  std::string push(std::int32_t id);
  void push(std::int32_t id, std::string& out);  ///< the same, appended
  /// What is left at the end: U+FFFD for a character that never completed, else what was held back.
  std::string finish();
  void finish(std::string& out);

  /// What finish() would give, where that is whole characters which only a byte token to come can spoil; else empty.
  std::string tentative() const;
  /// How many of the bytes held back make whole characters.
  std::size_t num_held_bytes() const;

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Decoder decoder_;                           // byte level
  std::unique_ptr<detail::DecodeStream> stream_;  // otherwise
};

/// Finds stop strings in streamed text and holds back what may become one.
///
/// The match that ends first wins (of those the longest), so the result does not depend on how the text was chunked.
class StopChecker {
 public:
  /// Empty strings in `stops` are ignored. `include_stop`: the emitted text keeps the matched stop string.
  explicit StopChecker(std::vector<std::string> stops, bool include_stop = false);

  struct Step {
    std::string text;                 ///< safe to send now
    std::optional<std::string> stop;  ///< the stop string that matched; text after it is dropped
  };
  /// Must not be called again after a match.
  Step push(std::string_view text);
  /// True if push(text) would find a match. Changes nothing.
  bool would_stop(std::string_view text) const;
  /// The text still held back, at the end of a sequence that did not stop by string.
  std::string finish();

 private:
  struct Pattern {
    std::string text;
    std::vector<std::uint32_t> failure;  // KMP failure function
    std::uint32_t matched = 0;           // length of the longest prefix of `text` that ends the stream so far

    std::uint32_t after(std::uint32_t before, char c) const noexcept;  // `matched` once `c` has come
  };
  std::vector<Pattern> patterns_;
  std::string held_;
  bool include_stop_;
};

}  // namespace prl::text
