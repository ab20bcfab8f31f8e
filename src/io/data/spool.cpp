#include "io/data/spool.hpp"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "base/error.hpp"

namespace prl::io {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kBufferBytes = 1 << 20;
/// Data sets are large, but a few bytes that unpack to more than this are no data set.
constexpr std::uint64_t kMaxUnpackedBytes = std::uint64_t{1} << 42;

void gunzip(const fs::path& path, std::span<const std::byte> bytes, Spool& out) {
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 16) != Z_OK) fail(ErrorCode::kInternal, "zlib cannot be initialised");
  std::string piece(kBufferBytes, '\0');
  int status = Z_OK;
  std::size_t position = 0;
  while (position < bytes.size() || stream.avail_in > 0) {
    if (stream.avail_in == 0) {
      const std::size_t part = std::min<std::size_t>(bytes.size() - position, 1 << 30);
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(bytes.data() + position));
      stream.avail_in = static_cast<uInt>(part);
      position += part;
    }
    if (status == Z_STREAM_END) inflateReset(&stream);  // several members in one file
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = static_cast<uInt>(piece.size());
    status = inflate(&stream, Z_NO_FLUSH);
    out.append(std::string_view(piece).substr(0, piece.size() - stream.avail_out));
    if (status != Z_OK && status != Z_STREAM_END) break;
  }
  while (status == Z_OK) {  // what is left inside
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = static_cast<uInt>(piece.size());
    status = inflate(&stream, Z_NO_FLUSH);
    out.append(std::string_view(piece).substr(0, piece.size() - stream.avail_out));
  }
  inflateEnd(&stream);
  if (status != Z_STREAM_END)
    fail(ErrorCode::kCorrupt, "{}: damaged or truncated gzip data after {} unpacked bytes", path.string(), out.size());
}

void unzstd(const fs::path& path, std::span<const std::byte> bytes, Spool& out) {
  const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context(ZSTD_createDCtx(), &ZSTD_freeDCtx);
  std::string piece(kBufferBytes, '\0');
  ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
  std::size_t status = 1;
  while (in.pos < in.size || status > 0) {
    ZSTD_outBuffer room{piece.data(), piece.size(), 0};
    const std::size_t before = in.pos;
    status = ZSTD_decompressStream(context.get(), &room, &in);
    if (ZSTD_isError(status) != 0)
      fail(ErrorCode::kCorrupt, "{}: damaged Zstandard data after {} unpacked bytes: {}", path.string(), out.size(),
           ZSTD_getErrorName(status));
    out.append(std::string_view(piece).substr(0, room.pos));
    if (room.pos == 0 && in.pos == before && in.pos == in.size && status > 0)
      fail(ErrorCode::kCorrupt, "{}: truncated Zstandard data after {} unpacked bytes", path.string(), out.size());
  }
}

}  // namespace

Spool::Spool() {
  const char* folder = std::getenv("TMPDIR");
  folder_ = folder != nullptr && *folder != '\0' ? fs::path(folder) : fs::temp_directory_path();
  fd_ = ::open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd_ < 0) {  // file systems without nameless files
    std::string name = (folder_ / "prl-spool-XXXXXX").string();
    fd_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd_ >= 0) ::unlink(name.c_str());
  }
  if (fd_ < 0)
    fail(ErrorCode::kIo, "cannot make a temporary file in {}: {}; set TMPDIR to a folder with room", folder_.string(),
         std::strerror(errno));
  buffer_.reserve(kBufferBytes);
}

Spool::~Spool() {
  if (fd_ >= 0) ::close(fd_);
}

void Spool::append(std::string_view bytes) {
  size_ += bytes.size();
  if (size_ > kMaxUnpackedBytes) fail(ErrorCode::kInvalidArgument, "data that unpack to more than {} bytes", kMaxUnpackedBytes);
  if (buffer_.size() + bytes.size() > kBufferBytes) flush();
  buffer_.append(bytes);
  if (buffer_.size() >= kBufferBytes) flush();
}

void Spool::flush() {
  std::string_view rest = buffer_;
  while (!rest.empty()) {
    const ssize_t put = ::write(fd_, rest.data(), rest.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0)
      fail(ErrorCode::kIo, "cannot write a temporary file in {} after {} bytes: {}; set TMPDIR to a folder with room", folder_.string(),
           size_, std::strerror(errno));
    rest.remove_prefix(static_cast<std::size_t>(put));
  }
  buffer_.clear();
}

std::shared_ptr<const MappedFile> Spool::map() {
  flush();
  // The kernel's name of an open file, since it has none of its own.
  return MappedFile::open(fmt::format("/proc/self/fd/{}", fd_));
}

std::shared_ptr<const MappedFile> decompress_file(const fs::path& path) {
  const auto file = MappedFile::open(path);
  Spool out;
  if (path.extension() == ".gz") {
    gunzip(path, file->bytes(), out);
  } else {
    unzstd(path, file->bytes(), out);
  }
  file->check_whole();
  return out.map();
}

}  // namespace prl::io
