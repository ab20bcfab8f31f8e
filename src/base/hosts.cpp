#include "base/hosts.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>

namespace prl {

bool is_loopback(std::string_view host) noexcept {
  if (host.starts_with("127.")) return std::ranges::all_of(host, [](char c) { return c == '.' || ('0' <= c && c <= '9'); });
  return host == "localhost" || host == "::1" || host == "[::1]";
}

bool is_connected_to_itself(int socket) noexcept {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  return ::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 && own_size == peer_size &&
         std::memcmp(&own, &peer, own_size) == 0;
}

}  // namespace prl
