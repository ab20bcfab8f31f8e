#include "text/detail/byte_alphabet.hpp"

#include "text/utf8.hpp"

namespace prl::text::detail {
namespace {

constexpr bool is_printable(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

struct Alphabet {
  char32_t of_byte[256] = {};
  int of_char[256 + 68] = {};  // 68 bytes are not printable
  constexpr Alphabet() {
    for (int& byte : of_char) byte = -1;
    char32_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) {
      of_byte[byte] = is_printable(byte) ? byte : next++;
      of_char[of_byte[byte]] = static_cast<int>(byte);
    }
  }
};
constexpr Alphabet kAlphabet;

}  // namespace

char32_t byte_to_char(unsigned char byte) noexcept { return kAlphabet.of_byte[byte]; }

int char_to_byte(char32_t character) noexcept { return character < std::size(kAlphabet.of_char) ? kAlphabet.of_char[character] : -1; }

std::string spell_bytes(std::string_view bytes) {
  std::string out;
  for (char byte : bytes) append_code_point(out, byte_to_char(static_cast<unsigned char>(byte)));
  return out;
}

std::optional<std::string> unspell_bytes(std::string_view spelling) {
  std::string out;
  for (std::size_t i = 0; i < spelling.size();) {
    const int byte = char_to_byte(next_code_point(spelling, i));
    if (byte < 0) return std::nullopt;
    out.push_back(static_cast<char>(static_cast<unsigned char>(byte)));
  }
  return out;
}

}  // namespace prl::text::detail
