#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "text/detokenizer.hpp"

namespace prl::text {

/// The text of one reply while its tokens come, and where a stop string ends it: one rule for the HTTP server and for engines in the
/// same process. The reply goes on the text of its prompt. `tokenizer` must outlive it.
class StopTracker {
 public:
  struct Options {
    bool skip_special_tokens = true;
    std::vector<std::string> stop = {};
    bool include_stop = false;    ///< the text keeps the stop string that ended it
    std::int64_t min_tokens = 0;  ///< text of so many first tokens neither ends the reply nor begins a stop string
  };
  StopTracker(const Tokenizer& tokenizer, Options options);

  /// Takes the next token and returns the text that is safe to show. Not once has_stopped().
  std::string push(std::int32_t id);
  /// Returns what was held back, at the end of the tokens; it may complete a stop string. Not once has_stopped().
  std::string finish();

  bool has_stop_strings() const noexcept { return has_stop_strings_; }
  bool has_stopped() const noexcept { return !stop_string_.empty(); }
  const std::string& stop_string() const noexcept { return stop_string_; }  ///< empty unless has_stopped()

 private:
  std::string check(std::string piece);

  IncrementalDetokenizer detokenizer_;
  StopChecker checker_;
  bool has_stop_strings_;
  std::int64_t min_tokens_, num_tokens_ = 0;
  std::size_t num_free_bytes_ = 0;  // text that was held back when min_tokens were reached
  std::string stop_string_;
};

}  // namespace prl::text
