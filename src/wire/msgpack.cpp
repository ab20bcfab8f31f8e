#include "wire/msgpack.hpp"

#include <bit>
#include <limits>

#include "base/error.hpp"

namespace prl::wire {

void MsgpackWriter::big_endian(std::uint64_t value, int num_bytes) {
  for (int i = num_bytes - 1; i >= 0; --i) bytes_ += static_cast<char>((value >> (8 * i)) & 0xff);
}

void MsgpackWriter::array(std::size_t count) {
  PRL_CHECK(count <= std::numeric_limits<std::uint32_t>::max(), "array of {} items", count);
  if (count < 16) {
    bytes_ += static_cast<char>(0x90 | count);
  } else if (count < 65536) {
    bytes_ += '\xdc';
    big_endian(count, 2);
  } else {
    bytes_ += '\xdd';
    big_endian(count, 4);
  }
}

void MsgpackWriter::integer(std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  if (value >= -32 && value < 128) {
    bytes_ += static_cast<char>(value);
  } else if (value >= 0) {
    const int size = value < 256 ? 1 : value < 65536 ? 2 : value < (std::int64_t{1} << 32) ? 4 : 8;
    bytes_ += size == 1 ? '\xcc' : size == 2 ? '\xcd' : size == 4 ? '\xce' : '\xcf';
    big_endian(bits, size);
  } else {
    const int size = value >= -128 ? 1 : value >= -32768 ? 2 : value >= std::numeric_limits<std::int32_t>::min() ? 4 : 8;
    bytes_ += size == 1 ? '\xd0' : size == 2 ? '\xd1' : size == 4 ? '\xd2' : '\xd3';
    big_endian(bits, size);
  }
}

void MsgpackWriter::real(float value) {
  bytes_ += '\xca';
  big_endian(std::bit_cast<std::uint32_t>(value), 4);
}

void MsgpackWriter::string(std::string_view text) {
  PRL_CHECK(text.size() <= std::numeric_limits<std::uint32_t>::max(), "text of {} bytes", text.size());
  if (text.size() < 32) {
    bytes_ += static_cast<char>(0xa0 | text.size());
  } else if (text.size() < 256) {
    bytes_ += '\xd9';
    big_endian(text.size(), 1);
  } else if (text.size() < 65536) {
    bytes_ += '\xda';
    big_endian(text.size(), 2);
  } else {
    bytes_ += '\xdb';
    big_endian(text.size(), 4);
  }
  bytes_ += text;
}

void MsgpackWriter::binary(std::string_view bytes) {
  PRL_CHECK(bytes.size() <= std::numeric_limits<std::uint32_t>::max(), "binary of {} bytes", bytes.size());
  const int size = bytes.size() < 256 ? 1 : bytes.size() < 65536 ? 2 : 4;
  bytes_ += size == 1 ? '\xc4' : size == 2 ? '\xc5' : '\xc6';
  big_endian(bytes.size(), size);
  bytes_ += bytes;
}

void MsgpackWriter::integers(std::span<const std::int32_t> values) {
  array(values.size());
  for (const std::int32_t v : values) integer(v);
}

void MsgpackWriter::reals(std::span<const float> values) {
  array(values.size());
  for (const float v : values) real(v);
}

void MsgpackWriter::booleans(std::span<const std::uint8_t> values) {
  array(values.size());
  for (const std::uint8_t v : values) boolean(v != 0);
}

void MsgpackReader::wrong(std::string_view field, std::string_view wanted) const {
  if (offset_ >= bytes_.size())
    fail(ErrorCode::kCorrupt, "[msgpack] field {}: wanted {}, but the message ends at byte {}", field, wanted, bytes_.size());
  fail(ErrorCode::kCorrupt, "[msgpack] field {}: wanted {}, found byte 0x{:02x} at offset {} of {}", field, wanted,
       static_cast<unsigned>(static_cast<unsigned char>(bytes_[offset_])), offset_, bytes_.size());
}

std::uint8_t MsgpackReader::peek(std::string_view field) const {
  if (offset_ >= bytes_.size()) wrong(field, "a value");
  return static_cast<std::uint8_t>(bytes_[offset_]);
}

std::uint64_t MsgpackReader::big_endian(std::string_view field, int num_bytes) {
  // The type byte is at offset_; its payload follows.
  if (bytes_.size() - offset_ < static_cast<std::size_t>(num_bytes) + 1)
    fail(ErrorCode::kCorrupt, "[msgpack] field {}: value at offset {} needs {} bytes, but the message ends at byte {}", field, offset_,
         num_bytes + 1, bytes_.size());
  std::uint64_t value = 0;
  for (int i = 0; i < num_bytes; ++i) value = (value << 8) | static_cast<std::uint8_t>(bytes_[offset_ + 1 + static_cast<std::size_t>(i)]);
  offset_ += static_cast<std::size_t>(num_bytes) + 1;
  return value;
}

std::size_t MsgpackReader::array(std::string_view field) {
  const std::uint8_t head = peek(field);
  const std::size_t start = offset_;
  std::uint64_t count = 0;
  if ((head & 0xf0) == 0x90)
    ++offset_, count = head & 0x0f;
  else if (head == 0xdc)
    count = big_endian(field, 2);
  else if (head == 0xdd)
    count = big_endian(field, 4);
  else
    wrong(field, "an array");
  // Each item takes at least one byte.
  if (count > bytes_.size() - offset_)
    fail(ErrorCode::kCorrupt, "[msgpack] field {}: array at offset {} claims {} items, but only {} bytes follow", field, start, count,
         bytes_.size() - offset_);
  return static_cast<std::size_t>(count);
}

std::int64_t MsgpackReader::integer(std::string_view field) {
  const std::uint8_t head = peek(field);
  if (head < 0x80 || head >= 0xe0) {
    ++offset_;
    return static_cast<std::int8_t>(head);
  }
  switch (head) {
    case 0xcc: return static_cast<std::int64_t>(big_endian(field, 1));
    case 0xcd: return static_cast<std::int64_t>(big_endian(field, 2));
    case 0xce: return static_cast<std::int64_t>(big_endian(field, 4));
    case 0xcf: {
      const std::uint64_t value = big_endian(field, 8);
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        fail(ErrorCode::kCorrupt, "[msgpack] field {}: integer {} at offset {} does not fit 64 signed bits", field, value, offset_ - 9);
      return static_cast<std::int64_t>(value);
    }
    case 0xd0: return static_cast<std::int8_t>(big_endian(field, 1));
    case 0xd1: return static_cast<std::int16_t>(big_endian(field, 2));
    case 0xd2: return static_cast<std::int32_t>(big_endian(field, 4));
    case 0xd3: return static_cast<std::int64_t>(big_endian(field, 8));
    default: wrong(field, "an integer");
  }
}

float MsgpackReader::real(std::string_view field) {
  switch (peek(field)) {
    case 0xca: return std::bit_cast<float>(static_cast<std::uint32_t>(big_endian(field, 4)));
    case 0xcb: return static_cast<float>(std::bit_cast<double>(big_endian(field, 8)));
    default: return static_cast<float>(integer(field));
  }
}

bool MsgpackReader::boolean(std::string_view field) {
  const std::uint8_t head = peek(field);
  if (head != 0xc2 && head != 0xc3) wrong(field, "a boolean");
  ++offset_;
  return head == 0xc3;
}

std::string MsgpackReader::string(std::string_view field) {
  const std::uint8_t head = peek(field);
  std::uint64_t size = 0;
  if ((head & 0xe0) == 0xa0)
    ++offset_, size = head & 0x1f;
  else if (head == 0xd9)
    size = big_endian(field, 1);
  else if (head == 0xda)
    size = big_endian(field, 2);
  else if (head == 0xdb)
    size = big_endian(field, 4);
  else
    wrong(field, "a string");
  if (size > bytes_.size() - offset_)
    fail(ErrorCode::kCorrupt, "[msgpack] field {}: text of {} bytes at offset {}, but only {} bytes follow", field, size, offset_,
         bytes_.size() - offset_);
  std::string text(bytes_.substr(offset_, size));
  offset_ += size;
  return text;
}

std::string_view MsgpackReader::binary(std::string_view field) {
  const std::uint8_t head = peek(field);
  if (head < 0xc4 || head > 0xc6) wrong(field, "binary");
  const std::size_t start = offset_;
  const std::uint64_t size = big_endian(field, head == 0xc4 ? 1 : head == 0xc5 ? 2 : 4);
  if (size > bytes_.size() - offset_)
    fail(ErrorCode::kCorrupt, "[msgpack] field {}: binary at offset {} claims {} bytes, but only {} follow", field, start, size,
         bytes_.size() - offset_);
  const std::string_view out = bytes_.substr(offset_, static_cast<std::size_t>(size));
  offset_ += static_cast<std::size_t>(size);
  return out;
}

bool MsgpackReader::take_nil() {
  if (offset_ >= bytes_.size() || static_cast<std::uint8_t>(bytes_[offset_]) != 0xc0) return false;
  ++offset_;
  return true;
}

std::vector<std::int32_t> MsgpackReader::integers(std::string_view field) {
  std::vector<std::int32_t> values(array(field));
  for (std::int32_t& v : values) {
    const std::int64_t wide = integer(field);
    if (wide < std::numeric_limits<std::int32_t>::min() || wide > std::numeric_limits<std::int32_t>::max())
      fail(ErrorCode::kCorrupt, "[msgpack] field {}: {} does not fit 32 bits", field, wide);
    v = static_cast<std::int32_t>(wide);
  }
  return values;
}

std::vector<float> MsgpackReader::reals(std::string_view field) {
  std::vector<float> values(array(field));
  for (float& v : values) v = real(field);
  return values;
}

std::vector<std::uint8_t> MsgpackReader::booleans(std::string_view field) {
  std::vector<std::uint8_t> values(array(field));
  for (std::uint8_t& v : values) v = boolean(field) ? 1 : 0;
  return values;
}

}  // namespace prl::wire
