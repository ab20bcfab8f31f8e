#include "rollouts/sealed.hpp"

#include <fmt/core.h>

#include "base/error.hpp"
#include "base/files.hpp"

namespace prl::rollouts {
namespace {

constexpr std::size_t kChecksumDigits = 16;

}  // namespace

std::string sealed(std::string_view mark, std::string_view bytes) {
  return fmt::format("{}{:016x}", mark, hash_bytes(bytes)).append(bytes);
}

std::string_view unsealed(std::string_view mark, std::string_view file, std::string_view what) {
  if (file.size() < mark.size() + kChecksumDigits || !file.starts_with(mark))
    fail(ErrorCode::kCorrupt, "is not {}, or is cut off: {} bytes", what, file.size());
  const std::string_view wanted = file.substr(mark.size(), kChecksumDigits), bytes = file.substr(mark.size() + kChecksumDigits);
  if (const std::string found = fmt::format("{:016x}", hash_bytes(bytes)); found != wanted)
    fail(ErrorCode::kCorrupt, "its samples have the checksum {}, it says {}: damaged after it was written", found, wanted);
  return bytes;
}

}  // namespace prl::rollouts
