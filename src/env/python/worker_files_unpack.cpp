#include <unistd.h>

#include <cstdlib>
#include <mutex>

#include "base/error.hpp"
#include "base/files.hpp"
#include "env/python/worker_files.hpp"

namespace prl::env::python {

namespace fs = std::filesystem;

fs::path cache_folder() {
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg != '\0') return fs::path(xdg) / "prl";
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') return fs::path(home) / ".cache" / "prl";
  return fs::temp_directory_path() / fmt::format("prl-{}", ::getuid());
}

fs::path unpack_worker(const fs::path& cache) {
  static std::mutex one_at_a_time;  // pools and trackers of one process start at the same moment
  const std::lock_guard lock(one_at_a_time);
  const std::vector<WorkerFile> files = worker_files();
  std::uint64_t hash = 0;
  for (const WorkerFile& file : files) hash = hash_bytes(file.content, hash_bytes(file.path, hash));
  const fs::path folder = cache / fmt::format("worker-{:016x}", hash);
  if (fs::is_directory(folder)) {
    // Whoever tidies a cache by age removes single files.
    for (const WorkerFile& file : files)
      if (std::error_code ignored; !fs::exists(folder / file.path, ignored)) write_file_atomic(folder / file.path, file.content);
    return folder;
  }
  const fs::path temporary = cache / fmt::format("worker-{:016x}.tmp-{}", hash, ::getpid());
  try {
    for (const WorkerFile& file : files) {
      fs::create_directories((temporary / file.path).parent_path());
      write_file_atomic(temporary / file.path, file.content);
    }
    publish_directory(temporary, folder);
  } catch (const std::exception& error) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    // Another process was faster.
    if (!fs::is_directory(folder)) fail(ErrorCode::kIo, "the Python worker cannot be unpacked into {}: {}", cache.string(), error.what());
  }
  return folder;
}

}  // namespace prl::env::python
