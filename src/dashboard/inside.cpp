#include "dashboard/inside.hpp"

#include <algorithm>
#include <system_error>

namespace prl::dashboard {
namespace fs = std::filesystem;

bool is_inside(const fs::path& folder, const fs::path& path) noexcept try {
  const fs::path whole = fs::canonical(folder), found = fs::canonical(path);
  return std::mismatch(whole.begin(), whole.end(), found.begin(), found.end()).first == whole.end();
} catch (const fs::filesystem_error&) {
  return false;
}

}  // namespace prl::dashboard
