#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/parquet/parquet_meta.hpp"

namespace prl::io {

/// One value of a leaf, by its physical type.
union ParquetValue {
  ParquetValue() : integer(0) {}
  std::int64_t integer;    ///< booleans and integers; INT96 as microseconds since 1970
  double number;           ///< FLOAT, DOUBLE
  std::string_view bytes;  ///< into a page, a dictionary or a buffer that the column keeps
};

/// Bytes that are read front to back. Error{kCorrupt} naming the subject when they end.
class ParquetBytes {
 public:
  ParquetBytes(std::span<const std::byte> bytes, std::string_view subject) : bytes_(bytes), subject_(subject) {}
  std::size_t left() const noexcept { return bytes_.size() - position_; }
  std::span<const std::byte> take(std::size_t count);
  template <typename T>
  T take_number();
  std::uint64_t take_varint();
  std::int64_t take_zigzag() {
    const std::uint64_t v = take_varint();
    return static_cast<std::int64_t>(v >> 1) ^ -static_cast<std::int64_t>(v & 1);
  }
  [[noreturn]] void bad(std::string_view what) const;
  std::string_view subject() const noexcept { return subject_; }

 private:
  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
  std::string_view subject_;
};

/// `count` integers of `bit_width` bits in the hybrid of runs and bit-packed groups.
void decode_rle(ParquetBytes& in, int bit_width, std::size_t count, std::vector<std::uint32_t>& out);
/// The integers of one DELTA_BINARY_PACKED sequence; at most `max_count` of them.
std::vector<std::int64_t> decode_delta_integers(ParquetBytes& in, std::size_t max_count);

/// Appends `count` values of a leaf stored with `encoding` (PLAIN, RLE, DELTA_*, BYTE_STREAM_SPLIT). Bytes of DELTA_BYTE_ARRAY are
/// put together in `storage`, a string per page that must not move afterwards. Error{kNotImplemented} for other encodings.
void decode_values(ParquetBytes& in, int encoding, const ParquetNode& leaf, std::size_t count, std::vector<ParquetValue>& out,
                   std::string& storage);

}  // namespace prl::io
