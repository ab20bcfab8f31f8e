#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "text/detail/bpe_types.hpp"

namespace prl::text::detail {

/// Where BPE over characters begins, as vocabularies made from SentencePiece have it: each character is a token; one that the
/// vocabulary lacks becomes its UTF-8 bytes, spelt "<0xE4>", or else the unknown token. Immutable once all merges are added.
class CharacterAlphabet {
 public:
  struct Options {
    bool byte_fallback = false;
    bool fuse_unk = false;  ///< unknown characters next to each other are one token
    std::optional<std::int32_t> unk_id = {};
  };
  CharacterAlphabet(const StringToId& vocab, Options options);

  /// Tells of a merge: which characters can meet inside a token.
  void add_merge(std::string_view left, std::int32_t left_id, std::string_view right, std::int32_t right_id);
  /// True if every text can be spelt without the unknown token.
  bool has_all_bytes() const noexcept { return has_all_bytes_; }

  /// Length of a head of `text` (not empty) that no merge can join with what follows, so that both can be encoded alone. O(length).
  std::size_t head(std::string_view text) const;
  /// The tokens that `text` begins from, before any merge. Bytes that no token stands for count towards a neighbour.
  void spell(std::string_view text, std::vector<PieceToken>& out) const;

 private:
  std::int32_t id_of(char32_t character) const noexcept;
  bool has_bytes(std::string_view character) const noexcept;

  Options options_;
  std::array<std::int32_t, 128> ascii_ids_;         // -1: not in the vocabulary
  std::unordered_map<char32_t, std::int32_t> ids_;  // of the other characters
  std::array<std::int32_t, 256> byte_ids_;          // -1: not in the vocabulary, or there is no fallback
  bool has_all_bytes_ = true;
  std::unordered_set<std::uint64_t> joins_;  // the last character of the left and the first of the right token of some merge
  bool joins_bytes_ = false;                 // some merge has a byte or the unknown token for a part
};

}  // namespace prl::text::detail
