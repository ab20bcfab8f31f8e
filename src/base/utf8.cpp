#include "base/utf8.hpp"

#include <algorithm>

namespace prl {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Classifies the bytes at `p`: a complete character (length > 0, valid), an ill-formed piece (valid false), or a prefix that
// may still become a character (complete false). Ranges of the second byte are table 3-7 of the Unicode standard.
struct Utf8Piece {
  int length = 0;
  bool valid = false;
  bool complete = true;
};

Utf8Piece classify(const unsigned char* p, std::size_t available) noexcept {
  const unsigned char lead = p[0];
  if (lead < 0x80) return {1, true, true};
  int length = 0;
  unsigned char low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {1, false, true};
  }
  for (int i = 1; i < length; ++i) {
    if (static_cast<std::size_t>(i) >= available) return {i, false, false};
    if (p[i] < low || p[i] > high) return {i, false, true};
    low = 0x80;
    high = 0xBF;
  }
  return {length, true, true};
}

const unsigned char* utf8_bytes(std::string_view text, std::size_t position) noexcept {
  return reinterpret_cast<const unsigned char*>(text.data()) + position;
}

}  // namespace

void Utf8Decoder::push(std::string_view bytes, std::string& out) {
  std::string joined;
  if (num_pending_ > 0) {
    joined.assign(pending_, static_cast<std::size_t>(num_pending_)).append(bytes);
    bytes = joined;
    num_pending_ = 0;
  }
  std::size_t i = 0;
  while (i < bytes.size()) {
    const Utf8Piece piece = classify(utf8_bytes(bytes, i), bytes.size() - i);
    if (!piece.complete) {
      num_pending_ = piece.length;
      std::copy_n(bytes.data() + i, piece.length, pending_);
      return;
    }
    if (piece.valid)
      out.append(bytes.substr(i, static_cast<std::size_t>(piece.length)));
    else
      out.append(kReplacement);
    i += static_cast<std::size_t>(piece.length);
  }
}

void Utf8Decoder::finish(std::string& out) {
  if (num_pending_ > 0) out.append(kReplacement);
  num_pending_ = 0;
}

bool is_valid_utf8(std::string_view bytes) noexcept {
  for (std::size_t i = 0; i < bytes.size();) {
    const Utf8Piece piece = classify(utf8_bytes(bytes, i), bytes.size() - i);
    if (!piece.valid) return false;
    i += static_cast<std::size_t>(piece.length);
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view bytes) {
  if (is_valid_utf8(bytes)) return std::string(bytes);
  std::string out;
  out.reserve(bytes.size() + 16);
  Utf8Decoder decoder;
  decoder.push(bytes, out);
  decoder.finish(out);
  return out;
}

}  // namespace prl
