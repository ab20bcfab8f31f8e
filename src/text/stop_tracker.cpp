#include "text/stop_tracker.hpp"

#include <algorithm>
#include <utility>

namespace prl::text {

StopTracker::StopTracker(const Tokenizer& tokenizer, Options options)
    : detokenizer_(tokenizer, options.skip_special_tokens),
      checker_(options.stop, options.include_stop),
      has_stop_strings_(std::any_of(options.stop.begin(), options.stop.end(), [](const std::string& s) { return !s.empty(); })),
      min_tokens_(options.min_tokens) {}

std::string StopTracker::check(std::string piece) {
  if (piece.empty() || num_tokens_ <= min_tokens_) return piece;
  StopChecker::Step step = checker_.push(piece);
  if (step.stop) stop_string_ = std::move(*step.stop);
  return std::move(step.text);
}

std::string StopTracker::push(std::int32_t id) {
  ++num_tokens_;
  return check(detokenizer_.push(id));
}

std::string StopTracker::finish() {
  std::string text = check(detokenizer_.finish());
  if (!has_stopped()) text += checker_.finish();
  return text;
}

}  // namespace prl::text
