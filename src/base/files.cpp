#include "base/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/regular_file.hpp"

namespace prl {
namespace fs = std::filesystem;
namespace {

void sync_path(const fs::path& path, int flags) {
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC));
  if (fd.get() < 0 || ::fsync(fd.get()) != 0) fail(ErrorCode::kIo, "cannot sync {}: {}", path.string(), std::strerror(errno));
}

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

}  // namespace

namespace {

std::string read_opened(const fs::path& path, std::uint64_t max_bytes, bool is_regular_only) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | (is_regular_only ? O_NONBLOCK : 0)));
  if (fd.get() < 0) {
    const bool leads_nowhere = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENAMETOOLONG;
    fail(leads_nowhere ? ErrorCode::kNotFound : ErrorCode::kIo, "cannot read {}: {}", path.string(), std::strerror(errno));
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) fail(ErrorCode::kIo, "cannot stat {}: {}", path.string(), std::strerror(errno));
  if (S_ISDIR(info.st_mode)) fail(ErrorCode::kInvalidArgument, "{} is a folder, wanted a file", path.string());
  if (is_regular_only && !S_ISREG(info.st_mode))
    fail(ErrorCode::kInvalidArgument, "{} is a pipe, a device or a socket, wanted a regular file", path.string());
  if (static_cast<std::uint64_t>(info.st_size) > max_bytes)
    fail(ErrorCode::kInvalidArgument, "{} has {} bytes, the limit here is {}", path.string(), info.st_size, max_bytes);
  std::string bytes;
  bytes.reserve(static_cast<std::size_t>(info.st_size));
  char buffer[1 << 16];
  for (;;) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(ErrorCode::kIo, "cannot read {}: {}", path.string(), std::strerror(errno));
    if (got == 0) return bytes;
    if (bytes.size() + static_cast<std::size_t>(got) > max_bytes)
      fail(ErrorCode::kInvalidArgument, "{} grew past the limit of {} bytes", path.string(), max_bytes);
    bytes.append(buffer, static_cast<std::size_t>(got));
  }
}

}  // namespace

std::string read_file(const fs::path& path, std::uint64_t max_bytes) { return read_opened(path, max_bytes, false); }
std::string read_regular_file(const fs::path& path, std::uint64_t max_bytes) { return read_opened(path, max_bytes, true); }

void write_file_atomic(const fs::path& path, std::string_view bytes) {
  std::error_code ignored;
  fs::create_directories(folder_of(path), ignored);
  const fs::path temporary = path.string() + ".tmp-" + std::to_string(::getpid());
  try {
    Fd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (fd.get() < 0) fail(ErrorCode::kIo, "cannot write {}: {}", temporary.string(), std::strerror(errno));
    for (std::size_t done = 0; done < bytes.size();) {
      const ssize_t put = ::write(fd.get(), bytes.data() + done, bytes.size() - done);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail(ErrorCode::kIo, "cannot write {}: {}", temporary.string(), std::strerror(errno));
      done += static_cast<std::size_t>(put);
    }
    if (::fsync(fd.get()) != 0) fail(ErrorCode::kIo, "cannot sync {}: {}", temporary.string(), std::strerror(errno));
    if (::rename(temporary.c_str(), path.c_str()) != 0)
      fail(ErrorCode::kIo, "cannot rename {} to {}: {}", temporary.string(), path.string(), std::strerror(errno));
    sync_path(folder_of(path), O_RDONLY | O_DIRECTORY);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

void publish_directory(const fs::path& temporary, const fs::path& final_path) {
  for (const auto& entry : fs::recursive_directory_iterator(temporary))
    sync_path(entry.path(), entry.is_directory() ? O_RDONLY | O_DIRECTORY : O_RDONLY);
  sync_path(temporary, O_RDONLY | O_DIRECTORY);
  std::error_code error;
  fs::rename(temporary, final_path, error);
  if (error) fail(ErrorCode::kIo, "cannot rename {} to {}: {}", temporary.string(), final_path.string(), error.message());
  sync_path(folder_of(final_path), O_RDONLY | O_DIRECTORY);
}

std::int64_t parse_step_dir(std::string_view name) noexcept {
  constexpr std::string_view kPrefix = "step_";
  if (!name.starts_with(kPrefix)) return -1;
  name.remove_prefix(kPrefix.size());
  std::int64_t step = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  return error == std::errc{} && end == name.data() + name.size() ? step : -1;
}

std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}
std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

}  // namespace prl
