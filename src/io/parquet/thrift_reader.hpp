#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace prl::io {

/// Reads Thrift's compact protocol, as Parquet's footer and page headers use it. Every step checks what is left; nesting is
/// limited. Error{kCorrupt} names the subject and the byte.
/// Source    doc/specs/thrift-compact-protocol.md of github.com/apache/thrift.
class ThriftReader {
 public:
  /// Types on the wire. Values of struct fields carry booleans in the type itself.
  enum Type : std::uint8_t {
    kTrue = 1,
    kFalse = 2,
    kByte = 3,
    kI16 = 4,
    kI32 = 5,
    kI64 = 6,
    kDouble = 7,
    kBinary = 8,
    kList = 9,
    kSet = 10,
    kMap = 11,
    kStruct = 12
  };
  struct Field {
    int id = 0;
    std::uint8_t type = 0;
  };

  /// `subject` is named in errors; `bytes` must outlive the reader and what it returns.
  ThriftReader(std::span<const std::byte> bytes, std::string_view subject) : bytes_(bytes), subject_(subject) {}

  std::size_t position() const noexcept { return position_; }

  /// Calls `each(field)` for every field of a struct; what `each` does not read it must skip(field.type).
  template <typename Each>
  void read_struct(Each each) {
    enter();
    int last = 0;
    while (const std::optional<Field> field = next_field(last)) each(*field);
    --depth_;
  }
  /// Calls `each()` for every element of a list of `element_type` (booleans: kTrue).
  template <typename Each>
  void read_list(std::uint8_t element_type, Each each) {
    const std::uint64_t size = list_size(element_type);
    for (std::uint64_t i = 0; i < size; ++i) each();
  }
  std::int64_t integer(std::uint8_t type);
  /// Of a field; lists of booleans are not read here.
  bool boolean(std::uint8_t type);
  std::string_view binary(std::uint8_t type);
  void skip(std::uint8_t type);
  [[noreturn]] void bad(std::string_view what) const;

 private:
  void enter();
  std::optional<Field> next_field(int& last);
  std::uint64_t list_size(std::uint8_t element_type);
  std::uint8_t byte();
  std::uint64_t varint();

  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
  int depth_ = 0;
  std::string_view subject_;
};

}  // namespace prl::io
