#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace prl::text::detail {

/// GPT-2's printable stand-in for a byte: itself for printable Latin-1, else U+0100 and up in byte order.
char32_t byte_to_char(unsigned char byte) noexcept;
/// The inverse; -1 for characters outside the alphabet.
int char_to_byte(char32_t character) noexcept;
/// Spelling in tokenizer.json of raw bytes.
std::string spell_bytes(std::string_view bytes);
/// Bytes of a spelling; nullopt if a character is outside the alphabet.
std::optional<std::string> unspell_bytes(std::string_view spelling);

}  // namespace prl::text::detail
