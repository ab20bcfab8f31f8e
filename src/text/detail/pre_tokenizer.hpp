#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/detail/metaspace.hpp"
#include "text/detail/regex.hpp"

namespace prl::text::detail {

/// A stretch of text that BPE sees alone. `origin` is the position of text[0] in the normalized segment; it is -1 when a
/// prefix space was put in front of the segment.
struct Piece {
  std::string_view text;
  std::int64_t origin = 0;
  const std::uint32_t* places = nullptr;  ///< where set: the position of each byte of `text`, and of its end

  std::int64_t place(std::size_t byte) const { return places != nullptr ? places[byte] : origin + static_cast<std::int64_t>(byte); }
  Piece part(std::size_t begin, std::size_t end) const {
    return {text.substr(begin, end - begin), place(begin), places != nullptr ? places + begin : nullptr};
  }
};

/// Owns what pieces refer to where a step had to build a text.
struct PieceStorage {
  std::deque<std::string> texts;
  std::deque<std::vector<std::uint32_t>> places;
  void clear() {
    texts.clear();
    places.clear();
  }
};

/// Where the segment that is split stands in the whole text.
struct SegmentPlace {
  bool begins_text = true;                     ///< byte 0 of the segment as it was given is byte 0 of the text
  std::span<const std::uint32_t> places = {};  ///< NormalText::places of the segment from its first byte on; empty: not changed
  bool is_at_start(std::int64_t position) const {
    if (!begins_text || places.empty()) return begins_text && position <= 0;
    return places[static_cast<std::size_t>(position < 0 ? 0 : position)] == 0;
  }
};

/// The pre_tokenizer of tokenizer.json: an ordered list of splits. Byte-level spelling itself is left to the model, but steps behind
/// the ByteLevel one see text so spelled, and may cut characters apart.
class PreTokenizer {
 public:
  /// Error{kCorrupt, kNotImplemented} naming the key below `where`.
  PreTokenizer(const boost::json::value& config, const std::string& where);

  PreTokenizer() = default;  ///< the whole text is one piece

  /// Splits well-formed UTF-8 into `pieces`, which refer to `text` and `storage`. `want_places`: Piece::place is asked for.
  void split(std::string_view text, const SegmentPlace& segment, bool want_places, std::vector<Piece>& pieces, PieceStorage& storage) const;
  /// True if a ByteLevel step is among them: what makes any byte encodable.
  bool is_byte_level() const noexcept { return is_byte_level_; }
  /// True if split() looks at SegmentPlace.
  bool knows_start() const noexcept { return knows_start_; }

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Step {
    Regex regex;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    bool add_prefix_space = false;
    bool split = true;
    bool is_spelled = false;                  ///< it comes after ByteLevel
    std::optional<Metaspace> metaspace = {};  ///< puts its replacement in before it splits
  };
  void add(const boost::json::value& config, const std::string& where, int depth);
  void apply(const Step& step, const Piece& piece, std::vector<Piece>& out) const;
  Piece with_metaspace(const Metaspace& metaspace, const Piece& piece, const SegmentPlace& segment, bool want_places,
                       PieceStorage& storage) const;
  void apply_to_spelling(const Step& step, const Piece& piece, std::vector<Piece>& out) const;

  std::vector<Step> steps_;
  bool is_byte_level_ = false;
  bool knows_start_ = false;
  int num_metaspace_ = 0;
};

}  // namespace prl::text::detail
