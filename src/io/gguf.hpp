#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/ggml_blocks.hpp"
#include "io/mapped_file.hpp"

namespace prl::io {

/// One tensor of a GGUF file.
struct GgufTensor {
  std::string name;
  GgmlTypeInfo type;
  std::vector<std::int64_t> shape;  ///< outermost first, as safetensors has it; the file stores it the other way round
  std::uint64_t begin = 0;          ///< from the start of the file
  std::uint64_t num_bytes = 0;

  std::int64_t num_elements() const noexcept;
};

/// A GGUF file (versions 2 and 3, little-endian), mapped. Format: magic, version, counts, metadata, tensor list, aligned data.
///
/// open() checks everything a hostile file could get wrong: counts against the bytes that are left, string and array lengths,
/// nesting, repeated keys and names, shapes that overflow, rows that are no whole number of blocks, unaligned, overlapping or
/// truncated data. Values are decoded on demand, out of the map.
/// Errors    Error{kCorrupt} names file, key or tensor and byte; Error{kNotImplemented} for other versions, byte orders and
///           tensor types; Error{kNotFound}.
/// Threads   immutable after open().
/// Source    docs/gguf.md of github.com/ggml-org/ggml.
class GgufFile {
 public:
  static GgufFile open(const std::filesystem::path& path);
  /// True if the file starts with the magic of this format; false also if it cannot be read.
  static bool is_gguf(const std::filesystem::path& path) noexcept;

  const std::filesystem::path& path() const noexcept { return file_->path(); }
  std::uint32_t version() const noexcept { return version_; }

  bool has(std::string_view key) const noexcept { return find_value(key) != nullptr; }
  /// Keys in order of their names.
  std::vector<std::string> keys() const;
  // The typed readers return nullopt (or an empty list) if the key is absent, and throw Error{kCorrupt} naming the key if its
  // type does not fit. Integers of every width read as int64.
  std::optional<std::string_view> string(std::string_view key) const;
  std::optional<std::int64_t> integer(std::string_view key) const;
  /// Integers too.
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  /// Valid while this object or a copy lives.
  std::vector<std::string_view> strings(std::string_view key) const;
  std::vector<std::int64_t> integers(std::string_view key) const;
  bool is_array(std::string_view key) const noexcept;

  /// In the order of the file.
  std::span<const GgufTensor> tensors() const noexcept { return tensors_; }
  const GgufTensor* find(std::string_view name) const noexcept;
  /// Elements [first, first + out.size()) as fp32; both are multiples of the type's block.
  void read_f32(const GgufTensor& tensor, std::int64_t first, std::span<float> out) const;

 private:
  struct Value {
    std::uint32_t type = 0;  ///< of the value, or of the elements if is_array
    bool is_array = false;
    std::uint64_t count = 1;
    std::uint64_t offset = 0;  ///< of the first element in the file
  };
  class Cursor;

  const Value* find_value(std::string_view key) const noexcept;
  std::int64_t integer_at(std::uint32_t type, std::uint64_t offset, std::string_view key) const;
  [[noreturn]] void bad_key(std::string_view key, const Value& value, std::string_view wanted) const;
  void read_metadata(Cursor& cursor, std::uint64_t count);
  void read_tensors(Cursor& cursor, std::uint64_t count);
  void check_data() const;

  std::shared_ptr<const MappedFile> file_;
  std::uint32_t version_ = 0;
  std::uint64_t data_begin_ = 0;
  std::map<std::string, Value, std::less<>> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
};

}  // namespace prl::io
