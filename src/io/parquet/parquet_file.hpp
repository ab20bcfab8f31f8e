#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.hpp"
#include "io/parquet/parquet_meta.hpp"

namespace prl::io {

/// A Parquet file as rows of JSON: lists as arrays, structs and maps of text keys as objects, dates and times as ISO 8601 text,
/// decimals as numbers; NaN and infinities become null; bytes that are no text in base64.
///
/// Reads pages of version 1 and 2, all encodings in use (PLAIN, dictionaries, RLE, DELTA_*, BYTE_STREAM_SPLIT), uncompressed,
/// Snappy, gzip and Zstandard; nested columns in the three-level and the older list forms.
/// Errors    Error{kCorrupt} or {kNotImplemented} names file, row group and column.
/// Threads   immutable after open().
class ParquetFile {
 public:
  static std::shared_ptr<const ParquetFile> open(const std::filesystem::path& path);

  std::int64_t num_rows() const noexcept { return meta_.num_rows; }
  /// Names of the top-level columns, in order.
  std::vector<std::string> columns() const;
  /// Calls `sink` with one JSON object per row, in order; only columns that `wanted` takes are read and written. One row group is in
  /// memory at a time.
  void for_each_row(const std::function<bool(std::string_view column)>& wanted,
                    const std::function<void(std::string_view json)>& sink) const;

 private:
  ParquetFile() = default;
  std::shared_ptr<const MappedFile> file_;
  ParquetMeta meta_;
};

}  // namespace prl::io
