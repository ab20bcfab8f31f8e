#include "net/percent.hpp"

#include <fmt/core.h>

#include "base/ascii.hpp"

namespace prl::net {

std::string percent_encode(std::string_view text, bool keeps_slashes) {
  std::string out;
  for (const char c : text) {
    const bool is_plain = is_ascii_alnum(c) || c == '-' || c == '_' || c == '.' || c == '~' || (keeps_slashes && c == '/');
    out += is_plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

}  // namespace prl::net
