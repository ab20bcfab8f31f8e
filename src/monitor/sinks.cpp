#include "monitor/sinks.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"

namespace prl::monitor {

namespace {

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  out += '"';
}

class JsonlSink final : public Sink {
 public:
  explicit JsonlSink(const std::filesystem::path& path) : path_(path) {
    std::error_code ignored;
    if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), ignored);
    if (!open()) fail(ErrorCode::kIo, "[monitor] cannot open metrics file {} for appending: {}", path.string(), std::strerror(errno));
  }
  ~JsonlSink() override {
    if (fd_ >= 0) ::close(fd_);
  }

  void write(const Row& row) override {
    std::string line = fmt::format("{{\"step\": {}", row.step);
    if (!row.role.empty()) {
      line += ", \"role\": ";
      append_json_string(line, row.role);
    }
    line += fmt::format(", \"time\": {:.6f}", row.unix_time);
    for (const auto& [name, value] : row.metrics) {
      if (!std::isfinite(value)) {
        log::warning("metric {} is {} in step {}: left out of {}", name, value, row.step, path_.string());
        continue;
      }
      line += ", ";
      append_json_string(line, name);
      line += fmt::format(": {}", value);
    }
    line += "}\n";
    write_line(std::move(line));
  }

  void sync() override {
    if (fd_ >= 0 && ::fsync(fd_) != 0) warn("sync");
  }

 private:
  bool open() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = ::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    return fd_ >= 0;
  }

  /// Locks the file of this name, opening it anew if another role has replaced or removed the one that is open (trim_rows).
  bool lock_current() {
    constexpr int kMaxReplacements = 100;
    for (int i = 0; i < kMaxReplacements; ++i) {
      if (fd_ < 0 && !open()) return false;
      while (::flock(fd_, LOCK_EX) != 0)
        if (errno != EINTR) return false;
      struct stat named {
      }, opened{};
      if (::stat(path_.c_str(), &named) == 0 && ::fstat(fd_, &opened) == 0 && named.st_ino == opened.st_ino &&
          named.st_dev == opened.st_dev)
        return true;
      ::close(std::exchange(fd_, -1));  // and unlocks
    }
    return false;
  }

  void write_line(std::string line) {
    if (!lock_current()) return warn("append to");
    struct stat info {};
    char last = '\n';
    // A process that was killed or a disk that was full left a line unfinished: it must not run into this one.
    if (::fstat(fd_, &info) == 0 && info.st_size > 0 && ::pread(fd_, &last, 1, info.st_size - 1) == 1 && last != '\n')
      line.insert(0, 1, '\n');
    std::string_view left = line;
    while (!left.empty()) {
      const ssize_t n = ::write(fd_, left.data(), left.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        warn("append to");
        break;
      }
      left.remove_prefix(static_cast<std::size_t>(n));
    }
    ::flock(fd_, LOCK_UN);
  }

  void warn(const char* what) {
    if (!std::exchange(has_warned_, true))
      log::warning("cannot {} metrics file {}: {}; training continues without it", what, path_.string(), std::strerror(errno));
  }

  std::filesystem::path path_;
  int fd_ = -1;
  bool has_warned_ = false;
};

class ConsoleSink final : public Sink {
 public:
  explicit ConsoleSink(LineFormat format) : format_(std::move(format)) {}
  void write(const Row& row) override {
    const std::string line = format_(row.step, row.metrics);
    if (!line.empty()) log::success("{}", line);
  }

 private:
  LineFormat format_;
};

class CallbackSink final : public Sink {
 public:
  explicit CallbackSink(MetricsCallback callback) : callback_(std::move(callback)) {}
  void write(const Row& row) override { callback_(row.step, row.metrics); }

 private:
  MetricsCallback callback_;
};

}  // namespace

std::unique_ptr<Sink> make_jsonl_sink(const std::filesystem::path& path) { return std::make_unique<JsonlSink>(path); }
std::unique_ptr<Sink> make_console_sink(LineFormat format) { return std::make_unique<ConsoleSink>(std::move(format)); }
std::unique_ptr<Sink> make_callback_sink(MetricsCallback callback) { return std::make_unique<CallbackSink>(std::move(callback)); }

}  // namespace prl::monitor
