#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace prl::text::detail {

/// A compiled pattern of a tokenizer file, written for Oniguruma and matched by PCRE2 with its just-in-time compiler.
/// Immutable; matching needs a Scan, which belongs to one thread.
class Regex {
 public:
  /// Error{kCorrupt} with the reason and the position; `where` names file and key.
  Regex(std::string_view pattern, std::string_view where);
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  /// Walks over the matches of one text from left to right.
  class Scan {
   public:
    Scan(const Regex& regex, std::string_view text);
    ~Scan();
    Scan(const Scan&) = delete;
    Scan& operator=(const Scan&) = delete;
    /// False at the end. Error{kInvalidArgument} if the match needs more steps than the limit.
    bool next(std::size_t& begin, std::size_t& end);

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Code;
  std::unique_ptr<Code> code_;
};

/// The pattern with Oniguruma's meaning of \s, \w and \h spelt out for PCRE2.
std::string translate_oniguruma(std::string_view pattern);

}  // namespace prl::text::detail
