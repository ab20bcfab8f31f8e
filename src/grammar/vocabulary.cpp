#include "grammar/vocabulary.hpp"

#include <algorithm>
#include <numeric>

namespace prl::grammar {
namespace {

/// Longer ones are left out: they would make the trie deep, and the text can be spelt without them.
constexpr std::size_t kMaxSpellingBytes = 1024;

/// 0xFF and the id in base 7 with digits from 0xF8: no UTF-8 text has such bytes.
constexpr std::uint8_t kMarkerByte = 0xFF, kFirstDigit = 0xF8;
std::string marker_spelling(std::int32_t id) {
  std::string out(1, static_cast<char>(kMarkerByte));
  for (int digit = 0; digit < 12; ++digit, id /= 7) out.push_back(static_cast<char>(kFirstDigit + id % 7));
  return out;
}

}  // namespace

Vocabulary::Vocabulary(const text::Tokenizer& tokenizer) {
  spellings_.resize(static_cast<std::size_t>(tokenizer.vocab_size()));
  for (std::int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const bool is_marker = tokenizer.is_added(id) || tokenizer.is_special(id);
    std::string& spelling = spellings_[static_cast<std::size_t>(id)];
    spelling = is_marker ? marker_spelling(id) : std::string(tokenizer.bytes_of(id));
    if (is_marker) markers_.emplace(tokenizer.token_of(id), spelling);
    // Vocabularies have tokens of all single bytes. Those of markers' bytes could spell a marker that is no token of the model's.
    const auto is_of_marker = [](char c) { return static_cast<std::uint8_t>(c) >= kFirstDigit; };
    if (!is_marker && std::any_of(spelling.begin(), spelling.end(), is_of_marker)) spelling.clear();
  }
  for (const std::int32_t id : tokenizer.stop_ids())
    if (id >= 0 && id < tokenizer.vocab_size()) spellings_[static_cast<std::size_t>(id)].clear();
  build();
}

Vocabulary::Vocabulary(std::vector<std::string> spellings) : spellings_(std::move(spellings)) { build(); }

std::string Vocabulary::marker(std::string_view text) const {
  const auto found = markers_.find(text);
  return found != markers_.end() ? found->second : std::string(text);
}

void Vocabulary::build() {
  for (int byte = kFirstDigit; byte <= kMarkerByte; ++byte) usable_bytes_.set(static_cast<std::size_t>(byte));
  for (std::string& spelling : spellings_)
    if (spelling.size() > kMaxSpellingBytes) spelling.clear();
  std::vector<std::int32_t> order(spellings_.size());
  std::iota(order.begin(), order.end(), 0);
  std::erase_if(order, [&](std::int32_t id) { return spelling(id).empty(); });
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return spelling(a) < spelling(b); });

  std::vector<std::uint32_t> open;  // entries above the place where the next one goes
  const auto close_to = [&](std::size_t depth) {
    for (; open.size() > depth; open.pop_back()) entries_[open.back()].subtree_end = static_cast<std::uint32_t>(entries_.size());
  };
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::string& text = spelling(order[i]);
    max_spelling_bytes_ = std::max(max_spelling_bytes_, text.size());
    if (text.size() == 1) usable_bytes_.set(static_cast<std::uint8_t>(text[0]));
    if (i > 0 && text == spelling(order[i - 1])) {
      twins_.emplace_back(entries_[open.back()].token, order[i]);
      continue;
    }
    std::size_t shared = 0;
    while (shared < open.size() && shared < text.size() && entries_[open[shared]].byte == static_cast<std::uint8_t>(text[shared])) ++shared;
    close_to(shared);
    for (std::size_t k = shared; k < text.size(); ++k) {
      open.push_back(static_cast<std::uint32_t>(entries_.size()));
      entries_.push_back({0, -1, static_cast<std::uint16_t>(k + 1), static_cast<std::uint8_t>(text[k])});
    }
    entries_[open.back()].token = order[i];
  }
  close_to(0);
}

}  // namespace prl::grammar
