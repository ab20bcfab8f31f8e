#include "text/detail/added_tokens.hpp"

#include <algorithm>

#include "text/utf8.hpp"

namespace prl::text::detail {
namespace {

std::size_t previous_code_point(std::string_view text, std::size_t position) noexcept {
  do --position;
  while (position > 0 && (static_cast<unsigned char>(text[position]) & 0xC0) == 0x80);
  return position;
}

bool ends_with_word(std::string_view text) noexcept {
  if (text.empty()) return false;
  std::size_t position = previous_code_point(text, text.size());
  return is_word_character(next_code_point(text, position));
}

bool starts_with_word(std::string_view text) noexcept {
  std::size_t position = 0;
  return !text.empty() && is_word_character(next_code_point(text, position));
}

// Where the white space that ends at `end` begins, not before `floor`.
std::size_t space_begin(std::string_view text, std::size_t end, std::size_t floor) noexcept {
  while (end > floor) {
    const std::size_t begin = previous_code_point(text, end);
    std::size_t position = begin;
    if (!is_white_space(next_code_point(text, position))) break;
    end = begin;
  }
  return std::max(end, floor);
}

std::size_t space_end(std::string_view text, std::size_t begin) noexcept {
  while (begin < text.size()) {
    std::size_t position = begin;
    if (!is_white_space(next_code_point(text, position))) break;
    begin = position;
  }
  return begin;
}

}  // namespace

void AddedTokenFinder::add(const AddedToken& token, std::string_view spelling) {
  if (spelling.empty()) return;
  std::uint32_t node = 0;
  for (char c : spelling) {
    const auto byte = static_cast<unsigned char>(c);
    const auto [entry, inserted] = nodes_[node].next.try_emplace(byte, static_cast<std::uint32_t>(nodes_.size()));
    node = entry->second;
    if (inserted) nodes_.emplace_back();
  }
  nodes_[node].token = static_cast<std::int32_t>(tokens_.size());
  tokens_.push_back(token);
  can_start_[static_cast<unsigned char>(spelling.front())] = true;
}

void AddedTokenFinder::split(std::string_view text, bool allow_special, std::vector<TextSpan>& spans) const {
  std::size_t done = 0;  // text before this is in spans already
  for (std::size_t i = 0; i < text.size() && !tokens_.empty();) {
    if (!can_start_[static_cast<unsigned char>(text[i])]) {
      ++i;
      continue;
    }
    std::uint32_t node = 0;
    std::int32_t found = -1;
    std::size_t found_end = i;
    for (std::size_t j = i; j < text.size(); ++j) {
      const auto next = nodes_[node].next.find(static_cast<unsigned char>(text[j]));
      if (next == nodes_[node].next.end()) break;
      node = next->second;
      if (nodes_[node].token >= 0) {
        found = nodes_[node].token;
        found_end = j + 1;
      }
    }
    if (found < 0) {
      ++i;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<std::size_t>(found)];
    std::size_t begin = i, end = found_end;
    i = found_end;
    if (token.special && !allow_special) continue;
    if (token.single_word && (ends_with_word(text.substr(0, begin)) || starts_with_word(text.substr(end)))) continue;
    if (token.lstrip) begin = space_begin(text, begin, done);
    if (token.rstrip) end = space_end(text, end);
    begin = std::max(begin, done);
    if (begin >= end) continue;
    if (done < begin) spans.push_back({done, begin, -1});
    spans.push_back({begin, end, token.id});
    done = end;
  }
  if (done < text.size()) spans.push_back({done, text.size(), -1});
}

}  // namespace prl::text::detail
