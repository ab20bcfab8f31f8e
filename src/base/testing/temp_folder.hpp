#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace prl::testing {

/// A new empty folder, removed with what lies in it when the object goes.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "prl-test-XXXXXX").string();
    const char* made = ::mkdtemp(pattern.data());
    path_ =
        made != nullptr ? made : throw std::filesystem::filesystem_error("no temporary folder", std::make_error_code(std::errc::io_error));
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace prl::testing
