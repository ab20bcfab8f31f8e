#include "text/stop_tracker.hpp"

#include <algorithm>
#include <utility>

namespace prl::text {

StopTracker::StopTracker(const Tokenizer& tokenizer, Options options)
    : detokenizer_(tokenizer, options.skip_special_tokens, false),
      checker_(options.stop, options.include_stop),
      has_stop_strings_(std::any_of(options.stop.begin(), options.stop.end(), [](const std::string& s) { return !s.empty(); })),
      min_tokens_(options.min_tokens) {}

std::string StopTracker::check(std::string piece) {
  if (piece.empty() || num_tokens_ <= min_tokens_) return piece;
  const std::size_t num_free = std::min(std::exchange(num_free_bytes_, 0), piece.size());
  StopChecker::Step step = checker_.push(std::string_view(piece).substr(num_free));
  if (step.stop) stop_string_ = std::move(*step.stop);
  return piece.substr(0, num_free) + step.text;
}

std::string StopTracker::push(std::int32_t id) {
  ++num_tokens_;
  std::string text = check(detokenizer_.push(id));
  if (!has_stop_strings_ || has_stopped()) return text;
  if (num_tokens_ == min_tokens_) num_free_bytes_ = detokenizer_.num_held_bytes();
  if (num_tokens_ <= min_tokens_) return text;
  // Text that is held back may complete a stop string: the reply then ends here, and so no token comes that could change it.
  const std::string ahead = detokenizer_.tentative();
  if (ahead.size() > num_free_bytes_ && checker_.would_stop(std::string_view(ahead).substr(num_free_bytes_)))
    text += check(detokenizer_.finish());
  return text;
}

std::string StopTracker::finish() {
  std::string text = check(detokenizer_.finish());
  if (!has_stopped()) text += checker_.finish();
  return text;
}

}  // namespace prl::text
