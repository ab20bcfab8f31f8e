#pragma once

#include <filesystem>

namespace prl::dashboard {

/// True if `path` is there and, links followed, lies within `folder`. A run folder that came from somebody else may hold links: what they
/// lead to is nothing of the run, and whoever reaches the page would read it.
bool is_inside(const std::filesystem::path& folder, const std::filesystem::path& path) noexcept;

}  // namespace prl::dashboard
