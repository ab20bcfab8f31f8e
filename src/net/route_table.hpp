#pragma once

#include <string>
#include <string_view>

namespace prl::net {

/// The entry of `path` in a map by paths: its own, else that of the nearest folder above it that takes all below ("/v1/models/*" takes
/// "/v1/models/org/name", and not "/v1/models"). nullptr if there is none.
template <class Routes>
auto* find_route(Routes& routes, std::string_view path) {
  auto found = routes.find(std::string(path));
  for (std::size_t slash = path.rfind('/'); found == routes.end() && slash != std::string_view::npos;
       slash = slash == 0 ? std::string_view::npos : path.rfind('/', slash - 1))
    if (slash + 1 < path.size()) found = routes.find(std::string(path.substr(0, slash + 1)) + "*");
  return found == routes.end() ? nullptr : &found->second;
}

}  // namespace prl::net
