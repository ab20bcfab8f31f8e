#pragma once

#include <boost/json/value.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/detail/metaspace.hpp"
#include "text/detail/replacer.hpp"

namespace prl::text::detail {

/// The decoder of tokenizer.json where tokens are spelt in characters: Replace, ByteFallback, Metaspace, Fuse and Strip, in a
/// Sequence or alone. Immutable.
class TokenDecoder {
 public:
  /// Error{kCorrupt, kNotImplemented} naming the key below `where`.
  TokenDecoder(const boost::json::value& config, const std::string& where);

  /// The bytes that a token stands for inside a text: one byte for "<0xE4>" where there is a ByteFallback, " the" for "▁the".
  std::string bytes_of(std::string_view token) const;

 private:
  friend class DecodeStream;
  struct ByteFallback {};
  struct Fuse {};
  struct Strip {
    std::string content;  // one character
    std::size_t num_start = 0, num_stop = 0;
  };
  using Step = std::variant<Replacer, Metaspace, ByteFallback, Fuse, Strip>;
  void add(const boost::json::value& config, const std::string& where, int depth);

  std::vector<Step> steps_;  // what stands behind Fuse is Strip, and Fuse stands at most once
};

/// Decodes one text token by token. The texts that push() and finish() append are, joined, what the steps make of the whole list.
///
/// Byte tokens in a row are held back until the row ends: as upstream, it is text only if all of it is well-formed, and else each
/// byte becomes U+FFFD. `decoder` must outlive it; a copy goes on by itself.
class DecodeStream {
 public:
  /// `begins_text` false: text was decoded before, so nothing is stripped from the beginning.
  DecodeStream(const TokenDecoder& decoder, bool begins_text);

  void push(std::string_view token, std::string& out) { feed(0, std::string(token), out); }
  void finish(std::string& out);
  /// The bytes held back because a byte token may follow.
  const std::string& held_bytes() const noexcept { return bytes_; }

 private:
  /// What a Strip behind Fuse does to the text that flows through it.
  struct Stripping {
    std::size_t num_start_left;  // how many more characters may go
    std::size_t num_held = 0;    // characters at the end that go if nothing follows
  };
  void feed(std::size_t step, std::string token, std::string& out);
  void end_bytes(std::size_t step, std::string& out);
  void strip(std::size_t step, std::string_view text, std::string& out);

  const TokenDecoder* decoder_;
  std::string bytes_;
  bool is_first_;                      // Metaspace has seen no token
  std::vector<Stripping> strippings_;  // by step
};

}  // namespace prl::text::detail
