#include "io/parquet/parquet_codec.hpp"

#include <snappy-c.h>
#include <zlib.h>
#include <zstd.h>

#include "base/error.hpp"

namespace prl::io {
namespace {

constexpr const char* kNames[] = {"none", "Snappy", "gzip", "LZO", "Brotli", "LZ4", "Zstandard", "LZ4_RAW"};

bool gunzip(std::span<const std::byte> data, char* out, std::size_t size) {
  z_stream stream{};
  if (inflateInit2(&stream, 15 + 32) != Z_OK) return false;  // 32: gzip or zlib by its header
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(data.data()));
  stream.avail_in = static_cast<uInt>(data.size());
  stream.next_out = reinterpret_cast<Bytef*>(out);
  stream.avail_out = static_cast<uInt>(size);
  const int status = inflate(&stream, Z_FINISH);
  const bool is_whole = status == Z_STREAM_END && stream.avail_out == 0;
  inflateEnd(&stream);
  return is_whole;
}

}  // namespace

void decompress_page(int codec, std::span<const std::byte> data, std::size_t size, std::string& out, std::string_view subject) {
  const std::size_t begin = out.size();
  const auto* in = reinterpret_cast<const char*>(data.data());
  const auto bad = [&](std::string_view what) {
    fail(ErrorCode::kCorrupt, "{}: {} bytes of {} {}", subject, data.size(), codec >= 0 && codec < 8 ? kNames[codec] : "?", what);
  };
  switch (codec) {
    case 0:
      if (data.size() != size) bad(fmt::format("stored, {} promised", size));
      out.append(in, size);
      return;
    case 1: {
      std::size_t found = 0;
      if (snappy_uncompressed_length(in, data.size(), &found) != SNAPPY_OK || found != size)
        bad(fmt::format("hold {} bytes, {} promised", found, size));
      out.resize(begin + size);
      if (snappy_uncompress(in, data.size(), out.data() + begin, &found) != SNAPPY_OK || found != size) bad("are damaged");
      return;
    }
    case 2:
      out.resize(begin + size);
      if (!gunzip(data, out.data() + begin, size)) bad(fmt::format("are damaged or do not hold the {} bytes promised", size));
      return;
    case 6: {
      out.resize(begin + size);
      const std::size_t found = ZSTD_decompress(out.data() + begin, size, in, data.size());
      if (ZSTD_isError(found) != 0) bad(fmt::format("are damaged: {}", ZSTD_getErrorName(found)));
      if (found != size) bad(fmt::format("hold {} bytes, {} promised", found, size));
      return;
    }
    default:
      fail(ErrorCode::kNotImplemented, "{}: its pages are compressed with {}; this build reads none, Snappy, gzip and Zstandard", subject,
           codec >= 0 && codec < 8 ? kNames[codec] : fmt::format("codec {}", codec));
  }
}

}  // namespace prl::io
