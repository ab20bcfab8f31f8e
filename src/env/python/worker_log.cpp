#include "env/python/worker_log.hpp"

#include <cerrno>
#include <cstring>
#include <ctime>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::env::python {

WorkerLog::WorkerLog(std::filesystem::path file) : path_(std::move(file)) {
  if (path_.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(path_.parent_path(), ignored);
  file_ = std::fopen(path_.c_str(), "ae");
  if (file_ == nullptr) fail(ErrorCode::kIo, "log file {} cannot be written: {}", path_.string(), std::strerror(errno));
}

WorkerLog::~WorkerLog() {
  if (file_ != nullptr) std::fclose(file_);
}

void WorkerLog::write(std::string_view worker, std::string_view line) {
  if (file_ == nullptr) {
    log::debug("[{}] {}", worker, line);
    return;
  }
  char time[16] = {};
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  std::strftime(time, sizeof time, "%H:%M:%S", &parts);
  std::lock_guard lock(mutex_);
  if (num_bytes_ > kMaxBytes) return;
  std::string text = fmt::format("{} [{}] {}\n", time, worker, line);
  num_bytes_ += static_cast<std::int64_t>(text.size());
  if (num_bytes_ > kMaxBytes) text += fmt::format("{} more than {} MiB: what follows is left out\n", time, kMaxBytes >> 20);
  std::fwrite(text.data(), 1, text.size(), file_);
  std::fflush(file_);
}

}  // namespace prl::env::python
