#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "text/detail/regex.hpp"

namespace prl::text::detail {

/// A stretch of text that BPE sees alone. `origin` is the position of text[0] in the normalized segment; it is -1 when a
/// prefix space was put in front of the segment.
struct Piece {
  std::string_view text;
  std::int64_t origin = 0;
};

/// The pre_tokenizer of tokenizer.json: an ordered list of splits. Byte-level spelling itself is left to the model, but steps behind
/// the ByteLevel one see text so spelled, and may cut characters apart.
class PreTokenizer {
 public:
  /// Error{kCorrupt, kNotImplemented} naming the key below `where`.
  PreTokenizer(const boost::json::value& config, const std::string& where);

  /// Splits well-formed UTF-8 into `pieces`; texts that had to be built live in `storage`.
  void split(std::string_view text, std::vector<Piece>& pieces, std::deque<std::string>& storage) const;
  /// True if a ByteLevel step is among them: what makes any byte encodable.
  bool is_byte_level() const noexcept { return is_byte_level_; }

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Step {
    Regex regex;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    bool add_prefix_space = false;
    bool split = true;
    bool is_spelled = false;  ///< it comes after ByteLevel
  };
  void add(const boost::json::value& config, const std::string& where, int depth);
  void apply(const Step& step, const Piece& piece, std::vector<Piece>& out) const;
  void apply_to_spelling(const Step& step, const Piece& piece, std::vector<Piece>& out) const;

  std::vector<Step> steps_;
  bool is_byte_level_ = false;
};

}  // namespace prl::text::detail
