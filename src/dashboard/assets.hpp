#pragma once

#include <span>
#include <string_view>

namespace prl::dashboard {

/// A file of the page, part of the program (assets.cmake makes the table from page/).
struct Asset {
  std::string_view path;  ///< "/main.js"; "/" is the page itself
  std::string_view content_type;
  std::string_view bytes;
};
std::span<const Asset> assets() noexcept;

}  // namespace prl::dashboard
