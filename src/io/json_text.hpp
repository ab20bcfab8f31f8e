#pragma once

#include <string>
#include <string_view>

namespace prl::io {

/// Appends `text` as a JSON string, quotes included. Ill-formed UTF-8 becomes U+FFFD.
void append_json_text(std::string& out, std::string_view text);
/// True for well-formed UTF-8.
bool is_utf8(std::string_view text) noexcept;

}  // namespace prl::io
