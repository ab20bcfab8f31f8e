#include "launch/visible_gpus.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string_view>
#include <system_error>

#include "base/error.hpp"
#include "device/cuda_build.hpp"

namespace prl::launch {

std::optional<std::vector<std::string>> listed_gpus() {
  const char* set = std::getenv("CUDA_VISIBLE_DEVICES");
  if (set == nullptr) return std::nullopt;
  std::vector<std::string> gpus;
  std::string_view left = set;
  while (!left.empty()) {
    const std::size_t comma = std::min(left.find(','), left.size());
    const std::string_view name = left.substr(0, comma);
    // As the driver reads it: the list ends at the first entry that is none.
    if (name.empty() || name.front() == '-') break;
    gpus.emplace_back(name);
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  return gpus;
}

int num_visible_gpus() {
  if (!has_cuda_build()) return 0;
  int num_present = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename().string();
    constexpr std::string_view kPrefix = "nvidia";
    if (name.size() > kPrefix.size() && name.starts_with(kPrefix) &&
        std::all_of(name.begin() + kPrefix.size(), name.end(), [](unsigned char c) { return std::isdigit(c) != 0; }))
      ++num_present;
  }
  const auto listed = listed_gpus();
  return num_present > 0 && listed ? static_cast<int>(listed->size()) : num_present;
}

std::string visible_devices_of(std::span<const int> ids) {
  const auto listed = listed_gpus();
  if (!listed) return fmt::format("{}", fmt::join(ids, ","));
  if (listed->empty()) return "";
  std::string names;
  for (const int id : ids) {
    if (id < 0 || static_cast<std::size_t>(id) >= listed->size())
      fail(ErrorCode::kInvalidArgument,
           "GPU {} is asked for, but CUDA_VISIBLE_DEVICES = {} lists {}: the keys *_gpu_ids count in that list, from 0", id,
           fmt::join(*listed, ","), listed->size());
    names += (names.empty() ? "" : ",") + (*listed)[static_cast<std::size_t>(id)];
  }
  return names;
}

std::vector<int> gpus_of_engine(const config::InferenceConfig& config, int number) {
  std::vector<int> ids(static_cast<std::size_t>(config.parallel.tp));
  std::iota(ids.begin(), ids.end(), number * config.parallel.tp);
  return ids;
}

}  // namespace prl::launch
