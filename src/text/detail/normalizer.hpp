#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/detail/replacer.hpp"

namespace prl::text::detail {

/// Normalized text. `places`, where it was asked for, has the byte of the given text that each byte came from, never descending,
/// and behind them the size of the given text.
struct NormalText {
  std::string text;
  std::vector<std::uint32_t> places;
};

/// The normalizer of tokenizer.json: NFC, Prepend and Replace, in Sequences or alone.
class Normalizer {
 public:
  Normalizer() = default;  ///< changes nothing
  /// Error{kCorrupt, kNotImplemented} naming the key below `where`.
  Normalizer(const boost::json::value& config, const std::string& where) { add(config, where, 0); }

  bool is_identity() const noexcept { return steps_.empty(); }
  NormalText apply(std::string_view text, bool want_places) const;

 private:
  struct Nfc {};
  struct Prepend {
    std::string text;
  };
  using Step = std::variant<Nfc, Prepend, Replacer>;
  void add(const boost::json::value& config, const std::string& where, int depth);

  std::vector<Step> steps_;
};

}  // namespace prl::text::detail
