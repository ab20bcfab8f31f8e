#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/mapped_file.hpp"

namespace prl::io {

/// True for files that RowTable reads, by their name: .jsonl .ndjson .json .csv .tsv .parquet, each of the text ones also with .gz or
/// .zst behind.
bool is_data_file(std::string_view name) noexcept;
/// "json", "csv" or "parquet"; empty for other files.
std::string_view data_format(std::string_view name) noexcept;

/// Rows of data files as the texts of JSON objects, at random access.
///
///   .jsonl .ndjson   one object per line
///   .json            the same, a list of objects, or one object whose members are columns of equal length
///   .csv .tsv        a header line, then cells as texts; empty cells become null
///   .parquet         see ParquetFile
///
/// Rows of JSON files stay in a memory map of the file. Other rows are written once, as JSON, to a temporary file that has no name
/// and ends with the object, so memory does not grow with the data. A row of a JSON file is not parsed here.
/// Errors    Error{kNotFound}; Error{kCorrupt} naming file and line, element or row; {kNotImplemented}; {kIo}.
/// Threads   immutable once the files are added.
class RowTable {
 public:
  /// Columns worth keeping of formats that have columns; empty keeps all, as does a file that has none of them.
  explicit RowTable(std::vector<std::string> columns = {}) : columns_(std::move(columns)) {}

  void add_file(const std::filesystem::path& path);
  std::size_t size() const noexcept { return rows_.size(); }
  /// A copy, so that a file that is cut short while the table lives is an Error{kCorrupt} here and not half a row.
  std::string row(std::size_t index) const;
  /// "data/train.jsonl:17", "data/train.parquet, row 17".
  std::string where(std::size_t index) const;
  /// The file that a row is of.
  const std::filesystem::path& file(std::size_t index) const { return files_[rows_[index].file].path; }

 private:
  struct Row {
    std::string_view text;
    std::uint32_t file = 0;
    std::uint32_t map = 0;
    std::int64_t number = 0;  ///< line, element or row, from 1
  };
  struct File {
    std::filesystem::path path;
    std::string_view unit;  ///< of Row::number; empty for lines
  };

  /// Of the newest file, in the newest map.
  void add_row(std::string_view text, std::int64_t number);
  void add_lines(std::string_view text);
  void add_json(std::string_view text);
  void add_csv(std::string_view text, char separator);
  void add_parquet();
  std::function<bool(std::string_view)> wanted_of(const std::vector<std::string>& present) const;
  std::string path_text() const { return files_.back().path.string(); }

  std::vector<std::string> columns_;
  std::vector<std::shared_ptr<const MappedFile>> maps_;
  std::vector<File> files_;
  std::vector<Row> rows_;
};

}  // namespace prl::io
