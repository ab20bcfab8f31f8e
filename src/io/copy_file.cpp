#include "io/copy_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

[[noreturn]] void fail_write(const fs::path& to, int reason) {
  fail(ErrorCode::kIo, "cannot write {}: {}", to.string(), std::strerror(reason));
}

void write_all(int fd, const char* bytes, std::size_t size, const fs::path& to) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t put = ::write(fd, bytes + done, size - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_write(to, errno);
    done += static_cast<std::size_t>(put);
  }
}

}  // namespace

void copy_file(const fs::path& from, const fs::path& to) {
  const Fd in(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  if (in.get() < 0)
    fail(errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo, "cannot read {}: {}", from.string(), std::strerror(errno));
  Fd out(::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (out.get() < 0) fail_write(to, errno);
  try {
    std::vector<char> piece(kPieceBytes);
    for (;;) {
      const ssize_t got = ::read(in.get(), piece.data(), piece.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(ErrorCode::kIo, "cannot read {}: {}", from.string(), std::strerror(errno));
      if (got == 0) break;
      write_all(out.get(), piece.data(), static_cast<std::size_t>(got), to);
    }
    if (::fsync(out.get()) != 0) fail_write(to, errno);
    if (const int reason = out.close(); reason != 0) fail_write(to, reason);
  } catch (const Error&) {
    ::unlink(to.c_str());
    throw;
  }
}

}  // namespace prl::io
