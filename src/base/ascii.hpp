#pragma once

namespace prl {

// Classes of ASCII characters, whatever the locale is.
constexpr bool is_ascii_digit(char c) noexcept { return c >= '0' && c <= '9'; }
constexpr char ascii_lower(char c) noexcept { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }
constexpr bool is_ascii_alnum(char c) noexcept { return (ascii_lower(c) >= 'a' && ascii_lower(c) <= 'z') || is_ascii_digit(c); }
/// The value of a hexadecimal digit; -1 of anything else.
constexpr int hex_value(char c) noexcept {
  if (is_ascii_digit(c)) return c - '0';
  return ascii_lower(c) >= 'a' && ascii_lower(c) <= 'f' ? ascii_lower(c) - 'a' + 10 : -1;
}

}  // namespace prl
