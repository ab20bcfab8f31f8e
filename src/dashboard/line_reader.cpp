#include "dashboard/line_reader.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"

namespace prl::dashboard {
namespace {

constexpr std::size_t kReadBytes = std::size_t{256} << 10;
constexpr std::size_t kTailBytes = 64;

/// A descriptor of a regular file, or -1; opening a pipe does not wait.
class OpenFile {
 public:
  explicit OpenFile(const std::filesystem::path& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (fd_ >= 0 && (::fstat(fd_, &status_) != 0 || !S_ISREG(status_.st_mode))) {
      ::close(fd_);
      fd_ = -1;
      errno = EINVAL;
    }
  }
  ~OpenFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int fd() const noexcept { return fd_; }
  const struct stat& status() const noexcept { return status_; }

 private:
  struct stat status_ {};
  int fd_;
};

/// Up to `size` bytes at `offset`, fewer at the end of the file or where it cannot be read.
std::size_t read_at(int fd, char* to, std::size_t size, std::uint64_t offset) {
  std::size_t got = 0;
  while (got < size) {
    const ssize_t n = ::pread(fd, to + got, size - got, static_cast<off_t>(offset + got));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    got += static_cast<std::size_t>(n);
  }
  return got;
}

}  // namespace

bool LineReader::is_same_file(int fd, std::uint64_t device, std::uint64_t inode, std::uint64_t size) const {
  if (device != device_ || inode != inode_ || size < offset_) return false;
  std::string found(tail_.size(), '\0');
  return read_at(fd, found.data(), found.size(), offset_ - tail_.size()) == found.size() && found == tail_;
}

void LineReader::feed(std::string_view bytes, const Sink& sink) {
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    const std::string_view piece = bytes.substr(0, end);
    if (!piece.empty()) sink.piece(piece);
    offset_ += piece.size();
    if (end == std::string_view::npos) return;
    sink.end_line(line_begin_, offset_ - line_begin_);
    line_begin_ = ++offset_;
    bytes.remove_prefix(end + 1);
  }
}

bool LineReader::read(const Sink& sink, std::uint64_t max_bytes) {
  const OpenFile file(path_);
  if (file.fd() < 0) {
    // Whatever replaces it is another file.
    if (was_read_) sink.restart();
    was_read_ = false;
    return false;
  }
  const struct stat& status = file.status();
  const auto device = static_cast<std::uint64_t>(status.st_dev), inode = static_cast<std::uint64_t>(status.st_ino);
  if (!was_read_ || !is_same_file(file.fd(), device, inode, static_cast<std::uint64_t>(status.st_size))) {
    if (was_read_) sink.restart();
    device_ = device;
    inode_ = inode;
    offset_ = line_begin_ = torn_end_ = 0;
    tail_.clear();
    was_read_ = true;
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (torn_end_ != 0 && size == torn_end_) return false;
  torn_end_ = 0;
  std::string buffer(static_cast<std::size_t>(std::min<std::uint64_t>(kReadBytes, size - offset_)), '\0');
  while (offset_ < size && max_bytes > 0 && !buffer.empty()) {
    const std::size_t got =
        read_at(file.fd(), buffer.data(), static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), max_bytes)), offset_);
    if (got == 0) return false;
    max_bytes -= got;
    const std::string_view bytes(buffer.data(), got);
    feed(bytes, sink);
    tail_ += bytes.substr(got - std::min(got, kTailBytes));
    if (tail_.size() > kTailBytes) tail_.erase(0, tail_.size() - kTailBytes);
  }
  return offset_ < size;
}

void LineReader::rewind_line() {
  if (offset_ == line_begin_) return;
  torn_end_ = offset_;
  const auto cut = static_cast<std::size_t>(std::min<std::uint64_t>(tail_.size(), offset_ - line_begin_));
  tail_.resize(tail_.size() - cut);
  offset_ = line_begin_;
}

std::string read_range(const std::filesystem::path& path, std::uint64_t offset, std::uint64_t num_bytes) {
  const OpenFile file(path);
  if (file.fd() < 0) fail(errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo, "{}: {}", path.string(), std::strerror(errno));
  const auto size = static_cast<std::uint64_t>(file.status().st_size);
  std::string bytes(static_cast<std::size_t>(offset >= size ? 0 : std::min(num_bytes, size - offset)), '\0');
  bytes.resize(read_at(file.fd(), bytes.data(), bytes.size(), offset));
  return bytes;
}

}  // namespace prl::dashboard
