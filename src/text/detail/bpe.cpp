#include "text/detail/bpe.hpp"

#include <boost/json/serialize.hpp>

#include <algorithm>
#include <queue>
#include <utility>

#include "base/error.hpp"
#include "text/detail/byte_alphabet.hpp"
#include "text/detail/json_access.hpp"

namespace prl::text::detail {
namespace {

namespace json = boost::json;

constexpr std::int64_t kMaxId = (1 << 24) - 1;
constexpr std::size_t kMaxTokenBytes = 64 * 1024;
// Below this many symbols a plain scan for the best pair beats the heap.
constexpr std::size_t kFewSymbols = 24;
constexpr std::size_t kMaxCachedWord = 128;
constexpr std::size_t kMaxWordsPerShard = 4096;

std::uint64_t mix(std::uint64_t key) noexcept {
  key *= 0x9E3779B97F4A7C15u;
  return key ^ key >> 29;
}

}  // namespace

Bpe::Bpe(const json::value& model, bool is_byte_level, const std::string& where)
    : cache_(std::make_unique<std::array<CacheShard, kNumShards>>()) {
  const json::object& object = as_object(model, where);
  if (const json::value* type = find(object, "type"); type != nullptr && as_string(*type, where + ".type") != "BPE")
    fail(ErrorCode::kNotImplemented, "{}.type: model '{}' is not supported, only BPE is", where, as_string(*type, where + ".type"));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (const json::value* value = find(object, key); value != nullptr && !as_string(*value, where + "." + key).empty())
      fail(ErrorCode::kNotImplemented, "{}.{}: only the empty string is supported", where, key);
  if (const json::value* dropout = find(object, "dropout");
      dropout != nullptr && !(dropout->is_number() && dropout->to_number<double>() == 0))
    fail(ErrorCode::kNotImplemented, "{}.dropout: {} is not supported, only null and 0 are", where, json::serialize(*dropout));
  const bool byte_fallback = bool_or(object, "byte_fallback", false, where);
  if (byte_fallback && is_byte_level)
    fail(ErrorCode::kNotImplemented, "{}.byte_fallback: true is not supported behind a ByteLevel pre-tokenizer", where);
  fuse_unk_ = bool_or(object, "fuse_unk", false, where);
  ignore_merges_ = bool_or(object, "ignore_merges", false, where);
  load_vocab(object, is_byte_level, where);
  read_unk(object, where);
  if (!is_byte_level) {
    characters_.emplace(vocab_, CharacterAlphabet::Options{byte_fallback, fuse_unk_, unk_id_});
    if (const json::value* unk = find(object, "unk_token"); unk != nullptr && !unk_id_ && !characters_->has_all_bytes())
      fail(ErrorCode::kCorrupt, "{}.unk_token: '{}' is not in the vocabulary, and not each of the 256 bytes is", where,
           as_string(*unk, where + ".unk_token"));
  }
  load_merges(object, where);
}

void Bpe::read_unk(const json::object& model, const std::string& where) {
  const json::value* unk = find(model, "unk_token");
  if (unk == nullptr) return;
  if (const auto entry = vocab_.find(as_string(*unk, where + ".unk_token")); entry != vocab_.end()) unk_id_ = entry->second;
}

void Bpe::load_vocab(const json::object& model, bool is_byte_level, const std::string& where) {
  const json::object& vocab = as_object(require(model, "vocab", where), where + ".vocab");
  vocab_.reserve(vocab.size());
  std::vector<bool> used;
  for (const auto& member : vocab) {
    const std::string_view token(member.key().data(), member.key().size());
    const std::string key = fmt::format("{}.vocab['{}']", where, token);
    const std::int64_t id = as_int(member.value(), key);
    if (id < 0 || id > kMaxId) fail(ErrorCode::kCorrupt, "{}: id {} is outside [0, {}]", key, id, kMaxId);
    if (token.size() > kMaxTokenBytes)
      fail(ErrorCode::kCorrupt, "{}.vocab: id {} is a token of {} bytes, at most {} are accepted", where, id, token.size(), kMaxTokenBytes);
    if (static_cast<std::size_t>(id) >= used.size()) used.resize(static_cast<std::size_t>(id) + 1);
    if (used[static_cast<std::size_t>(id)]) fail(ErrorCode::kCorrupt, "{}: id {} belongs to another token too", key, id);
    used[static_cast<std::size_t>(id)] = true;
    vocab_.emplace(token, static_cast<std::int32_t>(id));
    max_id_ = std::max(max_id_, static_cast<std::int32_t>(id));
    if (ignore_merges_ && is_byte_level)
      if (auto bytes = unspell_bytes(token)) whole_words_.emplace(std::move(*bytes), static_cast<std::int32_t>(id));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char raw = static_cast<char>(static_cast<unsigned char>(byte));
    const auto entry = vocab_.find(spell_bytes({&raw, 1}));
    byte_ids_[static_cast<std::size_t>(byte)] = entry == vocab_.end() ? -1 : entry->second;
  }
}

void Bpe::load_merges(const json::object& model, const std::string& where) {
  const json::array& merges = as_array(require(model, "merges", where), where + ".merges");
  std::size_t capacity = 16;
  while (capacity < merges.size() * 2) capacity *= 2;
  merges_.resize(capacity);
  merge_mask_ = capacity - 1;
  std::string joined;
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    std::string_view left, right;
    const auto key = [&] { return fmt::format("{}.merges[{}]", where, rank); };
    if (merges[rank].is_string()) {
      const std::string_view text = as_string(merges[rank], where);
      const std::size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos)
        fail(ErrorCode::kCorrupt, "{}: expected two tokens with one space between them, found '{}'", key(), text);
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else {
      const json::array& pair = as_array(merges[rank], key());
      if (pair.size() != 2) fail(ErrorCode::kCorrupt, "{}: expected a pair, found {} members", key(), pair.size());
      left = as_string(pair[0], key());
      right = as_string(pair[1], key());
    }
    joined.assign(left).append(right);
    const auto id_of = [&](std::string_view token, std::string_view part) {
      const auto entry = vocab_.find(token);
      if (entry == vocab_.end()) fail(ErrorCode::kCorrupt, "{}: the {} token '{}' is not in the vocabulary", key(), part, token);
      return entry->second;
    };
    const std::int32_t left_id = id_of(left, "left"), right_id = id_of(right, "right");
    if (characters_) characters_->add_merge(left, left_id, right, right_id);
    insert_merge({pair_key(left_id, right_id), static_cast<std::uint32_t>(rank), id_of(joined, "merged")});
  }
}

// A pair listed twice keeps its last rank, as a Python or Rust map would.
void Bpe::insert_merge(const Merge& merge) {
  std::size_t slot = mix(merge.pair) & merge_mask_;
  while (merges_[slot].pair != kNoPair && merges_[slot].pair != merge.pair) slot = (slot + 1) & merge_mask_;
  merges_[slot] = merge;
}

const Bpe::Merge* Bpe::find_merge(std::int32_t left, std::int32_t right) const noexcept {
  const std::uint64_t key = pair_key(left, right);
  for (std::size_t slot = mix(key) & merge_mask_;; slot = (slot + 1) & merge_mask_) {
    if (merges_[slot].pair == key) return &merges_[slot];
    if (merges_[slot].pair == kNoPair) return nullptr;
  }
}

// One symbol per byte, or per character. What the vocabulary lacks becomes the unknown token, or vanishes if there is none, as upstream.
void Bpe::start_symbols(std::string_view piece, std::vector<Symbol>& symbols) const {
  symbols.clear();
  if (characters_) {
    std::vector<PieceToken> start;
    characters_->spell(piece, start);
    symbols.reserve(start.size());
    for (const PieceToken& token : start) {
      const auto index = static_cast<std::int32_t>(symbols.size());
      symbols.push_back({token.id, index - 1, index + 1, token.num_bytes});
    }
    if (!symbols.empty()) symbols.back().next = -1;
    return;
  }
  symbols.reserve(piece.size());
  bool last_was_unk = false;
  std::uint32_t num_skipped = 0;  // unencodable bytes count towards a neighbour, so that offsets stay right
  for (char c : piece) {
    std::int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    const bool is_unk = id < 0;
    if (is_unk) {
      if (!unk_id_ || (fuse_unk_ && last_was_unk)) {
        ++(symbols.empty() ? num_skipped : symbols.back().num_bytes);
        continue;
      }
      id = *unk_id_;
    }
    last_was_unk = is_unk;
    const auto index = static_cast<std::int32_t>(symbols.size());
    symbols.push_back({id, index - 1, index + 1, 1 + std::exchange(num_skipped, 0u)});
  }
  if (!symbols.empty()) symbols.back().next = -1;
}

void Bpe::join(std::vector<Symbol>& symbols, std::int32_t left, std::int32_t id) const noexcept {
  Symbol& a = symbols[static_cast<std::size_t>(left)];
  Symbol& b = symbols[static_cast<std::size_t>(a.next)];
  a.id = id;
  a.num_bytes += b.num_bytes;
  b.num_bytes = 0;
  a.next = b.next;
  if (a.next >= 0) symbols[static_cast<std::size_t>(a.next)].previous = left;
}

void Bpe::merge_few(std::vector<Symbol>& symbols) const {
  while (true) {
    const Merge* best = nullptr;
    std::int32_t best_left = -1;
    for (std::int32_t i = 0; i >= 0; i = symbols[static_cast<std::size_t>(i)].next) {
      const Symbol& left = symbols[static_cast<std::size_t>(i)];
      if (left.next < 0) break;
      const Merge* merge = find_merge(left.id, symbols[static_cast<std::size_t>(left.next)].id);
      if (merge != nullptr && (best == nullptr || merge->rank < best->rank)) {
        best = merge;
        best_left = i;
      }
    }
    if (best == nullptr) return;
    join(symbols, best_left, best->id);
  }
}

void Bpe::merge_many(std::vector<Symbol>& symbols) const {
  struct Candidate {
    std::uint32_t rank;
    std::int32_t left;
    std::int32_t id;
    bool operator<(const Candidate& other) const noexcept {  // the queue pops the largest
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  std::vector<Candidate> start;
  const auto candidate_at = [&](std::int32_t left) -> std::optional<Candidate> {
    const Symbol& a = symbols[static_cast<std::size_t>(left)];
    if (a.next < 0) return std::nullopt;
    const Merge* merge = find_merge(a.id, symbols[static_cast<std::size_t>(a.next)].id);
    if (merge == nullptr) return std::nullopt;
    return Candidate{merge->rank, left, merge->id};
  };
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i)
    if (auto candidate = candidate_at(static_cast<std::int32_t>(i))) start.push_back(*candidate);
  std::priority_queue<Candidate> queue(std::less<Candidate>{}, std::move(start));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    const Symbol& left = symbols[static_cast<std::size_t>(top.left)];
    if (left.num_bytes == 0 || left.next < 0) continue;
    // An entry is stale when one side changed since it was queued.
    const Merge* merge = find_merge(left.id, symbols[static_cast<std::size_t>(left.next)].id);
    if (merge == nullptr || merge->id != top.id) continue;
    join(symbols, top.left, top.id);
    if (left.previous >= 0)
      if (auto candidate = candidate_at(left.previous)) queue.push(*candidate);
    if (auto candidate = candidate_at(top.left)) queue.push(*candidate);
  }
}

void Bpe::encode(std::string_view piece, std::vector<PieceToken>& out) const {
  if (piece.empty()) return;
  if (ignore_merges_) {
    const StringToId& words = characters_ ? vocab_ : whole_words_;
    if (const auto word = words.find(piece); word != words.end()) {
      out.push_back({word->second, static_cast<std::uint32_t>(piece.size())});
      return;
    }
  }
  if (!characters_) return encode_word(piece, out);
  while (!piece.empty()) {
    const std::size_t size = characters_->head(piece);
    encode_word(piece.substr(0, size), out);
    piece.remove_prefix(size);
  }
}

void Bpe::encode_word(std::string_view word, std::vector<PieceToken>& out) const {
  const bool use_cache = word.size() > 1 && word.size() <= kMaxCachedWord;
  CacheShard& shard = (*cache_)[StringHash{}(word) % kNumShards];
  if (use_cache) {
    const std::unique_lock lock(shard.mutex, std::try_to_lock);
    if (lock.owns_lock()) {
      if (const auto hit = shard.words.find(word); hit != shard.words.end()) {
        out.insert(out.end(), hit->second.begin(), hit->second.end());
        return;
      }
    }
  }
  std::vector<Symbol> symbols;
  start_symbols(word, symbols);
  if (symbols.empty()) return;
  if (symbols.size() <= kFewSymbols)
    merge_few(symbols);
  else
    merge_many(symbols);
  const std::size_t first = out.size();
  for (const Symbol& symbol : symbols)
    if (symbol.num_bytes > 0) out.push_back({symbol.id, symbol.num_bytes});
  if (use_cache) {
    const std::unique_lock lock(shard.mutex, std::try_to_lock);
    if (lock.owns_lock()) {
      if (shard.words.size() >= kMaxWordsPerShard) shard.words.clear();
      shard.words.emplace(word, std::vector<PieceToken>(out.begin() + static_cast<std::ptrdiff_t>(first), out.end()));
    }
  }
}

}  // namespace prl::text::detail
