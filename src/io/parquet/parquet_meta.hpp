#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace prl::io {

/// How values of a leaf are stored; the numbers are those of the format.
enum class ParquetType : std::uint8_t {
  kBoolean = 0,
  kInt32 = 1,
  kInt64 = 2,
  kInt96 = 3,
  kFloat = 4,
  kDouble = 5,
  kByteArray = 6,
  kFixedBytes = 7
};

/// What stored values stand for.
enum class ParquetMeaning : std::uint8_t {
  kPlain,      ///< the stored number or bytes
  kText,       ///< UTF-8; also enums and JSON text
  kUnsigned,   ///< an integer without a sign
  kDecimal,    ///< an integer over 10^scale
  kDate,       ///< days since 1970
  kTime,       ///< units since midnight
  kTimestamp,  ///< units since 1970
  kUuid,
  kFloat16,
  kList,  ///< group with one repeated child
  kMap,   ///< group with one repeated child of key and value
};

/// A column or a group of columns.
struct ParquetNode {
  enum class Repetition : std::uint8_t { kRequired, kOptional, kRepeated };
  std::string name;
  Repetition repetition = Repetition::kRequired;
  ParquetMeaning meaning = ParquetMeaning::kPlain;
  ParquetType type = ParquetType::kBoolean;  ///< of leaves
  int type_length = 0;                       ///< bytes of kFixedBytes
  int scale = 0;                             ///< of decimals
  std::int64_t units_per_second = 1;         ///< of times and timestamps
  bool is_utc = false;
  int max_def = 0, max_rep = 0;  ///< levels at which a value is there, and of its innermost repetition
  int first_leaf = 0, num_leaves = 0;
  std::vector<ParquetNode> children;  ///< empty for leaves

  bool is_leaf() const noexcept { return children.empty(); }
};

/// One column of one row group.
struct ParquetChunk {
  int codec = 0;
  std::int64_t num_values = 0;  ///< entries, nulls included
  std::uint64_t begin = 0;      ///< first page in the file
  std::uint64_t num_bytes = 0;
};

struct ParquetRowGroup {
  std::int64_t num_rows = 0;
  std::vector<ParquetChunk> chunks;  ///< by leaf
};

struct ParquetMeta {
  ParquetNode root;
  std::vector<const ParquetNode*> leaves;  ///< into root
  std::vector<std::string> leaf_names;     ///< "messages.list.element.role"
  std::vector<ParquetRowGroup> row_groups;
  std::int64_t num_rows = 0;

  ParquetMeta() = default;
  ParquetMeta(const ParquetMeta&) = delete;  ///< leaves would point into the original
  ParquetMeta& operator=(const ParquetMeta&) = delete;
};

/// Fills `meta` from a file's bytes. Every count, length and offset is checked. Error{kCorrupt} names `name` and the place;
/// Error{kNotImplemented} for encrypted files and columns in other files.
/// Source    parquet.thrift and LogicalTypes.md of github.com/apache/parquet-format.
void read_parquet_meta(std::span<const std::byte> bytes, std::string_view name, ParquetMeta& meta);

}  // namespace prl::io
