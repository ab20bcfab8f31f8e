#pragma once

#include <boost/json/value.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/detail/bpe_types.hpp"
#include "text/detail/character_alphabet.hpp"

namespace prl::text::detail {

/// The BPE model of tokenizer.json over bytes or over characters. Merges apply in rank order, leftmost first among equals.
/// Immutable but for a cache of recent words, which is guarded; const methods may run on many threads.
class Bpe {
 public:
  /// `model` is the "model" member. `is_byte_level`: tokens are spelt in the byte alphabet, for a ByteLevel step comes before.
  /// Error{kCorrupt, kNotImplemented} naming keys below `where`.
  Bpe(const boost::json::value& model, bool is_byte_level, const std::string& where);

  /// Appends the tokens of one piece. O(n log n).
  void encode(std::string_view piece, std::vector<PieceToken>& out) const;
  const StringToId& vocab() const noexcept { return vocab_; }
  std::int32_t max_id() const noexcept { return max_id_; }

 private:
  struct Merge {
    std::uint64_t pair = kNoPair;
    std::uint32_t rank = 0;
    std::int32_t id = 0;
  };
  struct Symbol {
    std::int32_t id;
    std::int32_t previous, next;  // neighbours by index; -1 at the ends
    std::uint32_t num_bytes;      // 0: merged into its left neighbour
  };
  struct CacheShard {
    std::mutex mutex;
    std::unordered_map<std::string, std::vector<PieceToken>, StringHash, std::equal_to<>> words;
  };
  static constexpr std::uint64_t kNoPair = ~std::uint64_t{0};
  static constexpr std::size_t kNumShards = 16;

  static std::uint64_t pair_key(std::int32_t left, std::int32_t right) noexcept {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
  }
  void load_vocab(const boost::json::object& model, bool is_byte_level, const std::string& where);
  void load_merges(const boost::json::object& model, const std::string& where);
  void insert_merge(const Merge& merge);
  const Merge* find_merge(std::int32_t left, std::int32_t right) const noexcept;
  void read_unk(const boost::json::object& model, const std::string& where);
  void encode_word(std::string_view word, std::vector<PieceToken>& out) const;
  void start_symbols(std::string_view piece, std::vector<Symbol>& symbols) const;
  void merge_few(std::vector<Symbol>& symbols) const;
  void merge_many(std::vector<Symbol>& symbols) const;
  void join(std::vector<Symbol>& symbols, std::int32_t left, std::int32_t id) const noexcept;

  StringToId vocab_;                             // by spelling
  StringToId whole_words_;                       // by raw bytes; filled only when merges are ignored for known words
  std::optional<CharacterAlphabet> characters_;  // none: byte level
  std::array<std::int32_t, 256> byte_ids_;       // byte level; -1: the vocabulary lacks this byte
  std::vector<Merge> merges_;                    // open addressing, power-of-two size, at most half full
  std::size_t merge_mask_ = 0;
  std::optional<std::int32_t> unk_id_;
  bool fuse_unk_ = false;
  bool ignore_merges_ = false;
  std::int32_t max_id_ = -1;
  std::unique_ptr<std::array<CacheShard, kNumShards>> cache_;
};

}  // namespace prl::text::detail
