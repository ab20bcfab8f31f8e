// For tests alone: temporary files of one test program stay apart from those of any other.
#pragma once

#include <stdlib.h>  // setenv is POSIX: <cstdlib> need not declare it

#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

namespace prl {

/// Makes a new folder the place of temporary files for this process and the children that it starts (`TMPDIR` and GoogleTest's
/// `TEST_TMPDIR`), so that two runs of a test program, of one checkout or of two, share no file whatever names the tests choose.
/// The folder is removed with all that lies in it, unless `keep` was called.
/// Threads: made in main before any other thread.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "prl-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) return;  // tests then use the shared folder and say themselves what they cannot write
    folder_ = pattern;
    ::setenv("TMPDIR", folder_.c_str(), 1);
    ::setenv("TEST_TMPDIR", folder_.c_str(), 1);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  /// Leaves the folder for inspection and prints where it is.
  void keep() {
    if (!folder_.empty()) std::printf("kept for inspection: %s\n", folder_.c_str());
    folder_.clear();
  }

 private:
  std::filesystem::path folder_;
};

}  // namespace prl
