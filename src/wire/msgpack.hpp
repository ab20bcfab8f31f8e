#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace prl::wire {

/// Appends MessagePack values (github.com/msgpack/msgpack/blob/master/spec.md) to a string, smallest form of each.
class MsgpackWriter {
 public:
  void array(std::size_t count);
  void nil() { bytes_ += '\xc0'; }
  void boolean(bool value) { bytes_ += value ? '\xc3' : '\xc2'; }
  void integer(std::int64_t value);
  void real(float value);
  void string(std::string_view text);
  void binary(std::string_view bytes);
  void integers(std::span<const std::int32_t> values);
  void reals(std::span<const float> values);
  void booleans(std::span<const std::uint8_t> values);
  const std::string& bytes() const noexcept { return bytes_; }
  std::string take() { return std::move(bytes_); }

 private:
  void big_endian(std::uint64_t value, int num_bytes);
  std::string bytes_;
};

/// Reads typed MessagePack values front to back from untrusted bytes.
///
/// Nothing is reserved before the bytes that fill it are known to exist, and nothing recurses, so a hostile message costs no
/// more than its own size. Errors    Error{kCorrupt} naming `field`, what was wanted, what was found and the offset.
class MsgpackReader {
 public:
  explicit MsgpackReader(std::string_view bytes) : bytes_(bytes) {}
  std::size_t array(std::string_view field);
  std::int64_t integer(std::string_view field);
  float real(std::string_view field);  ///< float32, float64 or an integer
  bool boolean(std::string_view field);
  std::string string(std::string_view field);
  std::string_view binary(std::string_view field);  ///< of the message
  /// Consumes a nil if it is next.
  bool take_nil();
  std::vector<std::int32_t> integers(std::string_view field);
  std::vector<float> reals(std::string_view field);
  std::vector<std::uint8_t> booleans(std::string_view field);
  bool at_end() const noexcept { return offset_ == bytes_.size(); }
  std::size_t offset() const noexcept { return offset_; }

 private:
  [[noreturn]] void wrong(std::string_view field, std::string_view wanted) const;
  std::uint8_t peek(std::string_view field) const;
  std::uint64_t big_endian(std::string_view field, int num_bytes);
  std::string_view bytes_;
  std::size_t offset_ = 0;
};

}  // namespace prl::wire
