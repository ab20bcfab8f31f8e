#include "monitor/sinks.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

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
    fd_ = ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) fail(ErrorCode::kIo, "[monitor] cannot open metrics file {} for appending: {}", path.string(), std::strerror(errno));
    struct stat info {};
    char last = '\n';
    if (::fstat(fd_, &info) == 0 && info.st_size > 0 && ::pread(fd_, &last, 1, info.st_size - 1) == 1 && last != '\n') write_line("\n");
  }
  ~JsonlSink() override { ::close(fd_); }

  void write(std::int64_t step, double unix_time, const Metrics& metrics) override {
    std::string line = fmt::format("{{\"step\": {}, \"time\": {:.6f}", step, unix_time);
    for (const auto& [name, value] : metrics) {
      if (!std::isfinite(value)) {
        log::warning("metric {} is {} in step {}: left out of {}", name, value, step, path_.string());
        continue;
      }
      line += ", ";
      append_json_string(line, name);
      line += fmt::format(": {}", value);
    }
    line += "}\n";
    write_line(line);
  }

 private:
  void write_line(std::string_view line) {
    while (!line.empty()) {
      const ssize_t n = ::write(fd_, line.data(), line.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        if (!has_warned_)
          log::warning("cannot append to metrics file {}: {}; training goes on without it", path_.string(), std::strerror(errno));
        has_warned_ = true;
        return;
      }
      line.remove_prefix(static_cast<std::size_t>(n));
    }
  }

  std::filesystem::path path_;
  int fd_ = -1;
  bool has_warned_ = false;
};

class ConsoleSink final : public Sink {
 public:
  explicit ConsoleSink(LineFormat format) : format_(std::move(format)) {}
  void write(std::int64_t step, double, const Metrics& metrics) override {
    const std::string line = format_(step, metrics);
    if (!line.empty()) log::success("{}", line);
  }

 private:
  LineFormat format_;
};

class CallbackSink final : public Sink {
 public:
  explicit CallbackSink(MetricsCallback callback) : callback_(std::move(callback)) {}
  void write(std::int64_t step, double, const Metrics& metrics) override { callback_(step, metrics); }

 private:
  MetricsCallback callback_;
};

}  // namespace

std::unique_ptr<Sink> make_jsonl_sink(const std::filesystem::path& path) { return std::make_unique<JsonlSink>(path); }
std::unique_ptr<Sink> make_console_sink(LineFormat format) { return std::make_unique<ConsoleSink>(std::move(format)); }
std::unique_ptr<Sink> make_callback_sink(MetricsCallback callback) { return std::make_unique<CallbackSink>(std::move(callback)); }

}  // namespace prl::monitor
