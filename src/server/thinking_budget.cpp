#include "server/thinking_budget.hpp"

#include <algorithm>
#include <utility>

namespace prl::server {
namespace {

/// A block that does not begin within so many tokens is no think block: white space may stand before it.
constexpr std::size_t kMaxTokensBefore = 4;

}  // namespace

ThinkingBudget::ThinkingBudget(const text::Tokenizer& tokenizer, const ThinkingMarks& marks, std::size_t budget, bool starts_open,
                               std::shared_ptr<const wire::TokenRule> form)
    : open_(tokenizer.encode(marks.open, {.begins_text = false})),
      close_(tokenizer.encode(marks.close, {.begins_text = false})),
      budget_(budget),
      starts_open_(starts_open),
      form_(std::move(form)) {}

bool ThinkingBudget::allow(std::span<const std::int32_t> output, wire::TokenRuleCursor& cursor,
                           std::span<std::uint64_t> allowed_words) const {
  std::span<const std::int32_t> thought = output;
  bool is_open = starts_open_;
  if (!starts_open_) {
    const auto head = output.first(std::min(output.size(), kMaxTokensBefore + open_.size()));
    const auto begin = std::search(head.begin(), head.end(), open_.begin(), open_.end());
    is_open = begin != head.end();
    if (is_open) thought = output.subspan(static_cast<std::size_t>(begin - head.begin()) + open_.size());
  }
  is_open = is_open && std::search(thought.begin(), thought.end(), close_.begin(), close_.end()) == thought.end();
  if (is_open && thought.size() >= budget_) {
    // How much of the closing tag stands at the end already.
    std::size_t matched = std::min(thought.size(), close_.size() - 1);
    while (!std::equal(close_.begin(), close_.begin() + static_cast<std::ptrdiff_t>(matched),
                       thought.end() - static_cast<std::ptrdiff_t>(matched)))
      --matched;
    std::fill(allowed_words.begin(), allowed_words.end(), 0);
    const std::int32_t next = close_[matched];
    allowed_words[static_cast<std::size_t>(next) / 64] |= std::uint64_t{1} << (next % 64);
    return false;
  }
  if (form_) return form_->allow(output, cursor, allowed_words);
  std::fill(allowed_words.begin(), allowed_words.end(), ~std::uint64_t{0});
  return true;
}

}  // namespace prl::server
