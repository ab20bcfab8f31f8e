#pragma once

#include <string_view>

namespace prl {

/// Whether a host, as an address or a name says it, is this machine whoever asks: "localhost", "127.0.0.1" and its like, "::1". Looks up
/// nothing.
bool is_loopback(std::string_view host) noexcept;
/// Whether a TCP socket is its own peer. Linux connects a socket to itself where nobody listens at a port of this machine and the socket
/// happened to get that very port as its own: whoever looks for a server that has gone meets this once in some thousand attempts.
bool is_connected_to_itself(int socket) noexcept;

}  // namespace prl
