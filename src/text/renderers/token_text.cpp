#include "text/renderers/token_text.hpp"

#include <algorithm>

#include "text/utf8.hpp"

namespace prl::text::renderers {

TokenText::TokenText(const Tokenizer& tokenizer, std::span<const std::int32_t> ids) : tokenizer_(tokenizer), ids_(ids) {
  begins_.reserve(ids.size());
  for (std::int32_t id : ids) {
    begins_.push_back(bytes_.size());
    bytes_ += tokenizer.bytes_of(id);
  }
}

std::string TokenText::text(std::size_t begin, std::size_t end) const {
  end = std::min(end, bytes_.size());
  return begin >= end ? std::string() : replace_invalid_utf8(std::string_view(bytes_).substr(begin, end - begin));
}

std::size_t TokenText::find(std::string_view marker, std::size_t from) const { return find(marker, from, kNowhere); }

std::size_t TokenText::find(std::string_view marker, std::size_t from, std::size_t end) const {
  const auto id = tokenizer_.id_of(marker);
  if (!id) {
    const std::size_t at = bytes_.find(marker, from);
    return at < end ? at : kNowhere;
  }
  const auto first = static_cast<std::size_t>(std::lower_bound(begins_.begin(), begins_.end(), from) - begins_.begin());
  for (std::size_t i = first; i < ids_.size() && begins_[i] < end; ++i)
    if (ids_[i] == *id) return begins_[i];
  return kNowhere;
}

}  // namespace prl::text::renderers
