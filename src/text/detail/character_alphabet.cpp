#include "text/detail/character_alphabet.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "text/utf8.hpp"

namespace prl::text::detail {
namespace {

std::uint64_t pair_of(char32_t left, char32_t right) noexcept { return std::uint64_t{left} << 32 | right; }

char32_t last_code_point(std::string_view text) noexcept {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return next_code_point(text, begin);
}

}  // namespace

CharacterAlphabet::CharacterAlphabet(const StringToId& vocab, Options options) : options_(options) {
  ascii_ids_.fill(-1);
  for (const auto& [token, id] : vocab) {
    if (token.empty()) continue;
    std::size_t position = 0;
    const char32_t character = next_code_point(token, position);
    if (position != token.size()) continue;
    if (character < ascii_ids_.size())
      ascii_ids_[character] = id;
    else
      ids_.emplace(character, id);
  }
  for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    const auto entry = options_.byte_fallback ? vocab.find(fmt::format("<0x{:02X}>", byte)) : vocab.end();
    byte_ids_[byte] = entry == vocab.end() ? -1 : entry->second;
    has_all_bytes_ &= entry != vocab.end();
  }
}

void CharacterAlphabet::add_merge(std::string_view left, std::int32_t left_id, std::string_view right, std::int32_t right_id) {
  for (const std::int32_t id : {left_id, right_id})
    joins_bytes_ |= id == options_.unk_id || std::find(byte_ids_.begin(), byte_ids_.end(), id) != byte_ids_.end();
  if (left.empty() || right.empty()) return;  // no text ever gives an empty token
  std::size_t position = 0;
  joins_.insert(pair_of(last_code_point(left), next_code_point(right, position)));
}

std::int32_t CharacterAlphabet::id_of(char32_t character) const noexcept {
  if (character < ascii_ids_.size()) return ascii_ids_[character];
  const auto entry = ids_.find(character);
  return entry == ids_.end() ? -1 : entry->second;
}

bool CharacterAlphabet::has_bytes(std::string_view character) const noexcept {
  return std::all_of(character.begin(), character.end(), [&](char c) { return byte_ids_[static_cast<unsigned char>(c)] >= 0; });
}

// A cut lies behind a character of the vocabulary: then no unknown token is waiting to be fused or put down.
std::size_t CharacterAlphabet::head(std::string_view text) const {
  std::size_t position = 0;
  char32_t previous = next_code_point(text, position);
  bool is_known = id_of(previous) >= 0;
  while (position < text.size()) {
    const std::size_t cut = position;
    const char32_t character = next_code_point(text, position);
    const bool was_known = std::exchange(is_known, id_of(character) >= 0);
    if (was_known && !(is_known ? joins_.contains(pair_of(previous, character)) : joins_bytes_)) return cut;
    previous = character;
  }
  return text.size();
}

// As upstream, an unknown token waits until a character of the vocabulary comes, also where bytes come between.
void CharacterAlphabet::spell(std::string_view text, std::vector<PieceToken>& out) const {
  out.clear();
  std::uint32_t num_unknown = 0;  // bytes of the unknown token that waits
  std::uint32_t num_skipped = 0;
  const auto put = [&](std::int32_t id, std::uint32_t num_bytes) { out.push_back({id, num_bytes + std::exchange(num_skipped, 0u)}); };
  const auto put_unknown = [&] {
    if (num_unknown > 0) put(*options_.unk_id, std::exchange(num_unknown, 0u));
  };
  for (std::size_t position = 0; position < text.size();) {
    const std::size_t begin = position;
    const std::int32_t id = id_of(next_code_point(text, position));
    const std::string_view character = text.substr(begin, position - begin);
    const auto num_bytes = static_cast<std::uint32_t>(character.size());
    if (id >= 0) {
      put_unknown();
      put(id, num_bytes);
    } else if (has_bytes(character)) {
      for (char c : character) put(byte_ids_[static_cast<unsigned char>(c)], 1);
    } else if (options_.unk_id) {
      if (!options_.fuse_unk) put_unknown();
      num_unknown += num_bytes;
    } else {
      (out.empty() ? num_skipped : out.back().num_bytes) += num_bytes;
    }
  }
  put_unknown();
}

}  // namespace prl::text::detail
