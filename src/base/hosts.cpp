#include "base/hosts.hpp"

#include <algorithm>

namespace prl {

bool is_loopback(std::string_view host) noexcept {
  if (host.starts_with("127.")) return std::ranges::all_of(host, [](char c) { return c == '.' || ('0' <= c && c <= '9'); });
  return host == "localhost" || host == "::1" || host == "[::1]";
}

}  // namespace prl
