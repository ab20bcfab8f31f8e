#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace prl {

/// Owns a file descriptor; -1 stands for none.
class Fd {
 public:
  explicit Fd(int fd = -1) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this == &other) return *this;
    close();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~Fd() { close(); }
  int get() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }
  /// The error number; 0 if it was closed well. Some file systems say only now that the disk is full.
  int close() noexcept { return fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0 ? errno : 0; }

 private:
  int fd_;
};

}  // namespace prl
