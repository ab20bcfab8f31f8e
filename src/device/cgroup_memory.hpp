#pragma once

#include <cstddef>
#include <filesystem>

namespace prl {

/// Bytes of memory that the cgroup mounted at `root` (v2, else v1's memory controller below it) still allows; the largest number where
/// there is no limit. Pages of files count as free: the kernel gives them up when memory is asked for, and reading a model fills many.
std::size_t available_in_cgroup(const std::filesystem::path& root);

}  // namespace prl
