#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.hpp"
#include "text/utf8.hpp"

namespace prl::text {

/// Turns ids into text one by one. The pieces joined equal Tokenizer::decode of all ids (without space clean-up), and no
/// piece ever ends inside a UTF-8 character. One object per output sequence; `tokenizer` must outlive it.
class IncrementalDetokenizer {
 public:
  explicit IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special = true)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  /// The text that became final with this token; often empty inside a multi-token character.
  std::string push(std::int32_t id);
  /// What is left at the end: U+FFFD for a character that never completed, else nothing.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  Utf8Decoder decoder_;
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
  /// The text still held back, at the end of a sequence that did not stop by string.
  std::string finish();

 private:
  struct Pattern {
    std::string text;
    std::vector<std::uint32_t> failure;  // KMP failure function
    std::uint32_t matched = 0;           // length of the longest prefix of `text` that ends the stream so far
  };
  std::vector<Pattern> patterns_;
  std::string held_;
  bool include_stop_;
};

}  // namespace prl::text
