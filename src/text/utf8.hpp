#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.hpp"

namespace prl::text {

using prl::is_valid_utf8;
using prl::replace_invalid_utf8;
using prl::Utf8Decoder;

/// The code point that starts at `position` of well-formed `text`, advancing `position` past it.
char32_t next_code_point(std::string_view text, std::size_t& position) noexcept;
void append_code_point(std::string& out, char32_t code_point);
std::vector<char32_t> to_code_points(std::string_view text);
std::size_t count_code_points(std::string_view text) noexcept;
/// Byte position of code point `index`, or text.size() when there are fewer.
std::size_t byte_of_code_point(std::string_view text, std::size_t index) noexcept;

/// str.isspace of Python for one character.
bool is_python_space(char32_t code_point) noexcept;
/// The White_Space property, which is what \s means to the tokenizers library.
bool is_white_space(char32_t code_point) noexcept;
/// \w of the tokenizers library: letters, marks, decimal numbers, connector punctuation.
bool is_word_character(char32_t code_point) noexcept;
/// Python's str.isalpha, isprintable and the three kinds of numbers it tells apart, of one character.
bool is_alpha(char32_t code_point) noexcept;
bool is_printable(char32_t code_point) noexcept;
/// 0 to 9 for a decimal digit of any script, -1 for another character.
int decimal_value(char32_t code_point) noexcept;
bool is_digit(char32_t code_point) noexcept;    ///< also superscripts and digits in circles
bool is_numeric(char32_t code_point) noexcept;  ///< also fractions, Roman and Chinese numerals

/// str.upper and friends with full (one to many) case mapping.
std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string to_title(std::string_view text);
std::string capitalize(std::string_view text);

/// Text in normalization form C. `origin`, when given, receives for each byte of the result the byte offset in `text` it came
/// from (a composed character: from its starter), never descending.
std::string to_nfc(std::string_view text, std::vector<std::uint32_t>* origin = nullptr);

}  // namespace prl::text
