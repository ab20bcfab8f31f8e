#pragma once

#include <string>
#include <string_view>

namespace prl::net {

/// For paths and queries: all but letters, digits, '-', '_', '.', '~', and '/' if it is kept, as %XX.
std::string percent_encode(std::string_view text, bool keeps_slashes = false);

}  // namespace prl::net
