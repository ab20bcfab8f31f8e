#include "base/output_file.hpp"

#include "base/error.hpp"

namespace prl {
namespace fs = std::filesystem;

void refuse_overwrite(const fs::path& path, bool overwrite, std::string_view option) {
  std::error_code ignored;
  const bool is_folder = fs::is_directory(path, ignored);
  const bool is_there = is_folder ? !fs::is_empty(path, ignored) : fs::is_regular_file(path, ignored);
  if (is_there && !overwrite)
    fail(ErrorCode::kAlreadyExists, "{} exists already{}; choose another name or add {}", path.string(),
         is_folder ? " and is not empty" : "", option);
}

}  // namespace prl
