#include "text/detokenizer.hpp"

#include <algorithm>
#include <utility>

namespace prl::text {

std::string IncrementalDetokenizer::push(std::int32_t id) {
  std::string out;
  if (!(skip_special_ && tokenizer_->is_special(id))) decoder_.push(tokenizer_->bytes_of(id), out);
  return out;
}

std::string IncrementalDetokenizer::finish() {
  std::string out;
  decoder_.finish(out);
  return out;
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

StopChecker::Step StopChecker::push(std::string_view text) {
  if (patterns_.empty()) return {std::string(text), std::nullopt};
  for (char c : text) {
    held_.push_back(c);
    const Pattern* found = nullptr;
    for (Pattern& pattern : patterns_) {
      while (pattern.matched > 0 && pattern.text[pattern.matched] != c) pattern.matched = pattern.failure[pattern.matched - 1];
      if (pattern.text[pattern.matched] == c) ++pattern.matched;
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
