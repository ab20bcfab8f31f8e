#include "device/cgroup_memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace prl {
namespace {

bool read_number(const std::filesystem::path& path, std::size_t& out) {
  std::ifstream file(path);
  return static_cast<bool>(file >> out);
}

/// The sum of two entries of memory.stat, which are 0 where they are missing.
std::size_t cached(const std::filesystem::path& stat, const std::string& inactive, const std::string& active) {
  std::ifstream file(stat);
  std::string key;
  std::size_t bytes = 0, sum = 0;
  while (file >> key >> bytes)
    if (key == inactive || key == active) sum += bytes;
  return sum;
}

}  // namespace

std::size_t available_in_cgroup(const std::filesystem::path& root) {
  const std::filesystem::path v1 = root / "memory";
  std::size_t limit = 0, used = 0, in_cache = 0;
  if (read_number(root / "memory.max", limit) && read_number(root / "memory.current", used))
    in_cache = cached(root / "memory.stat", "inactive_file", "active_file");
  else if (read_number(v1 / "memory.limit_in_bytes", limit) && read_number(v1 / "memory.usage_in_bytes", used))
    in_cache = cached(v1 / "memory.stat", "total_inactive_file", "total_active_file");
  else
    return std::numeric_limits<std::size_t>::max();
  used -= std::min(used, in_cache);
  return limit > used ? limit - used : 0;
}

}  // namespace prl
