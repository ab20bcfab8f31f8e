#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>

namespace prl::env::python {

/// The output and the log records of an environment's workers, in one file of the run's logs. Any thread.
class WorkerLog {
 public:
  /// `file` is appended to, its folder made; empty: lines go to the log of this process at debug level.
  explicit WorkerLog(std::filesystem::path file);
  ~WorkerLog();
  WorkerLog(const WorkerLog&) = delete;
  WorkerLog& operator=(const WorkerLog&) = delete;

  /// One line, "HH:MM:SS [worker 0] text". After kMaxBytes a last line says that the rest is left out.
  void write(std::string_view worker, std::string_view line);
  const std::filesystem::path& file() const noexcept { return path_; }
  static constexpr std::int64_t kMaxBytes = std::int64_t{256} << 20;

 private:
  std::filesystem::path path_;
  std::mutex mutex_;
  std::FILE* file_ = nullptr;
  std::int64_t num_bytes_ = 0;
};

}  // namespace prl::env::python
