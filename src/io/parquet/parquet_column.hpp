#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/parquet/parquet_encoding.hpp"
#include "io/parquet/parquet_meta.hpp"

namespace prl::io {

/// All entries of one column of one row group. An entry has a repetition and a definition level; those whose definition level is
/// the leaf's max_def have a value, in order.
struct ParquetColumn {
  std::vector<std::uint8_t> rep, def;  ///< empty if the leaf has no such levels
  std::vector<ParquetValue> values;
  std::size_t num_entries = 0;
  std::vector<std::unique_ptr<std::string>> storage;  ///< what values point into besides the file
};

/// Reads all pages of a chunk. Error{kCorrupt} or {kNotImplemented} names `subject`.
ParquetColumn read_parquet_column(std::span<const std::byte> file, const ParquetChunk& chunk, const ParquetNode& leaf,
                                  std::string_view subject);

}  // namespace prl::io
