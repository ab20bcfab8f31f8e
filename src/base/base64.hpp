#pragma once

#include <string>
#include <string_view>

namespace prl {

/// RFC 4648 with padding.
std::string to_base64(std::string_view bytes);
/// Error{kCorrupt} naming the first character that does not belong, or a length that is no multiple of four.
std::string from_base64(std::string_view text);

}  // namespace prl
