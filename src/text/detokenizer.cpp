#include "text/detokenizer.hpp"

#include <algorithm>
#include <utility>

#include "text/detail/token_decoder.hpp"

namespace prl::text {

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer, bool skip_special, bool begins_text)
    : tokenizer_(&tokenizer), skip_special_(skip_special) {
  if (const detail::TokenDecoder* decoder = tokenizer.token_decoder())
    stream_ = std::make_unique<detail::DecodeStream>(*decoder, begins_text);
}
IncrementalDetokenizer::IncrementalDetokenizer(IncrementalDetokenizer&&) noexcept = default;
IncrementalDetokenizer& IncrementalDetokenizer::operator=(IncrementalDetokenizer&&) noexcept = default;
IncrementalDetokenizer::~IncrementalDetokenizer() = default;

void IncrementalDetokenizer::push(std::int32_t id, std::string& out) {
  if (skip_special_ && tokenizer_->is_special(id)) return;
  if (stream_ == nullptr)
    decoder_.push(tokenizer_->bytes_of(id), out);
  else if (const std::string_view token = tokenizer_->token_of(id); !token.empty())
    stream_->push(token, out);
}

void IncrementalDetokenizer::finish(std::string& out) {
  if (stream_ == nullptr)
    decoder_.finish(out);
  else
    stream_->finish(out);
}

std::string IncrementalDetokenizer::push(std::int32_t id) {
  std::string out;
  push(id, out);
  return out;
}

std::string IncrementalDetokenizer::finish() {
  std::string out;
  finish(out);
  return out;
}

std::string IncrementalDetokenizer::tentative() const {
  std::string out;
  if (stream_ == nullptr || stream_->held_bytes().empty() || !is_valid_utf8(stream_->held_bytes())) return out;
  detail::DecodeStream copy = *stream_;
  copy.finish(out);
  return out;
}

std::size_t IncrementalDetokenizer::num_held_bytes() const {
  if (stream_ == nullptr) return 0;
  std::string_view bytes = stream_->held_bytes();
  while (!is_valid_utf8(bytes)) bytes.remove_suffix(1);
  return bytes.size();
}

StopChecker::StopChecker(std::vector<std::string> stops, bool include_stop) : include_stop_(include_stop) {
  for (std::string& stop : stops) {
    if (stop.empty()) continue;
    Pattern pattern;
    pattern.text = std::move(stop);
    pattern.failure.assign(pattern.text.size(), 0);
    for (std::uint32_t i = 1, k = 0; i < pattern.text.size(); ++i) {
      while (k > 0 && pattern.text[i] != pattern.text[k]) k = pattern.failure[k - 1];
      if (pattern.text[i] == pattern.text[k]) ++k;
      pattern.failure[i] = k;
    }
    patterns_.push_back(std::move(pattern));
  }
}

std::uint32_t StopChecker::Pattern::after(std::uint32_t before, char c) const noexcept {
  while (before > 0 && text[before] != c) before = failure[before - 1];
  return text[before] == c ? before + 1 : before;
}

bool StopChecker::would_stop(std::string_view text) const {
  return std::any_of(patterns_.begin(), patterns_.end(), [&](const Pattern& pattern) {
    std::uint32_t matched = pattern.matched;
    return std::any_of(text.begin(), text.end(), [&](char c) {
      matched = pattern.after(matched, c);
      return matched == pattern.text.size();
    });
  });
}

StopChecker::Step StopChecker::push(std::string_view text) {
  if (patterns_.empty()) return {std::string(text), std::nullopt};
  for (char c : text) {
    held_.push_back(c);
    const Pattern* found = nullptr;
    for (Pattern& pattern : patterns_) {
      pattern.matched = pattern.after(pattern.matched, c);
      if (pattern.matched == pattern.text.size() && (found == nullptr || pattern.text.size() > found->text.size())) found = &pattern;
    }
    if (found != nullptr) {
      if (!include_stop_) held_.resize(held_.size() - found->text.size());
      return {std::exchange(held_, {}), found->text};
    }
  }
  std::size_t keep = 0;
  for (const Pattern& pattern : patterns_) keep = std::max<std::size_t>(keep, pattern.matched);
  std::string ready = held_.substr(0, held_.size() - keep);
  held_.erase(0, ready.size());
  return {std::move(ready), std::nullopt};
}

std::string StopChecker::finish() { return std::exchange(held_, {}); }

}  // namespace prl::text
