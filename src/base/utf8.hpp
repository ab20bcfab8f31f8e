#pragma once

#include <string>
#include <string_view>

namespace prl {

/// Turns a stream of bytes into valid UTF-8, replacing each maximal ill-formed piece by U+FFFD as Python's
/// decode(errors="replace") and the Unicode standard (section 3.9) do. The result does not depend on how bytes are chunked.
class Utf8Decoder {
 public:
  /// Appends to `out` the characters that became final; at most 3 bytes stay back.
  void push(std::string_view bytes, std::string& out);
  /// Ends the stream: a character cut short becomes U+FFFD. The decoder is then empty again.
  void finish(std::string& out);
  bool has_pending() const noexcept { return num_pending_ > 0; }

 private:
  char pending_[4] = {};
  int num_pending_ = 0;
};

/// True if `bytes` is well-formed UTF-8 (no surrogates, no overlong forms).
bool is_valid_utf8(std::string_view bytes) noexcept;
/// `bytes` if well-formed, else with U+FFFD for each maximal ill-formed piece.
std::string replace_invalid_utf8(std::string_view bytes);

}  // namespace prl
