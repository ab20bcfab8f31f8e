#pragma once

#include <string_view>

namespace prl {

/// Whether a host, as an address or a name says it, is this machine whoever asks: "localhost", "127.0.0.1" and its like, "::1". Looks up
/// nothing.
bool is_loopback(std::string_view host) noexcept;

}  // namespace prl
