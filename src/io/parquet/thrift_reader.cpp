#include "io/parquet/thrift_reader.hpp"

#include "base/error.hpp"

namespace prl::io {
namespace {
constexpr int kMaxStructDepth = 24;
}

void ThriftReader::bad(std::string_view what) const { fail(ErrorCode::kCorrupt, "{} at byte {}: {}", subject_, position_, what); }

void ThriftReader::enter() {
  if (++depth_ > kMaxStructDepth) bad("structures nested too deeply");
}

std::uint8_t ThriftReader::byte() {
  if (position_ >= bytes_.size()) bad("it ends too early");
  return static_cast<std::uint8_t>(bytes_[position_++]);
}

std::uint64_t ThriftReader::varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const std::uint8_t b = byte();
    value |= static_cast<std::uint64_t>(b & 0x7f) << shift;
    if ((b & 0x80) == 0) return value;
  }
  bad("a number of more than 64 bits");
}

std::optional<ThriftReader::Field> ThriftReader::next_field(int& last) {
  const std::uint8_t header = byte();
  const std::uint8_t type = header & 0xf;
  if (type == 0) return std::nullopt;
  if (type > kStruct) bad(fmt::format("unknown type {}", type));
  const int delta = header >> 4;
  last = delta != 0 ? last + delta : static_cast<int>(integer(kI16));
  return Field{last, type};
}

std::int64_t ThriftReader::integer(std::uint8_t type) {
  if (type == kByte) return static_cast<std::int8_t>(byte());
  if (type != kI16 && type != kI32 && type != kI64) bad(fmt::format("type {} where an integer was wanted", type));
  const std::uint64_t zigzag = varint();
  return static_cast<std::int64_t>(zigzag >> 1) ^ -static_cast<std::int64_t>(zigzag & 1);
}

bool ThriftReader::boolean(std::uint8_t type) {
  if (type != kTrue && type != kFalse) bad(fmt::format("type {} where a boolean was wanted", type));
  return type == kTrue;
}

std::string_view ThriftReader::binary(std::uint8_t type) {
  if (type != kBinary) bad(fmt::format("type {} where a text was wanted", type));
  const std::uint64_t size = varint();
  if (size > bytes_.size() - position_) bad(fmt::format("a text of {} bytes, but {} are left", size, bytes_.size() - position_));
  const std::string_view text(reinterpret_cast<const char*>(bytes_.data() + position_), static_cast<std::size_t>(size));
  position_ += static_cast<std::size_t>(size);
  return text;
}

std::uint64_t ThriftReader::list_size(std::uint8_t element_type) {
  const std::uint8_t header = byte();
  std::uint64_t size = header >> 4;
  if (size == 15) size = varint();
  // An element takes at least a byte.
  if (size > bytes_.size() - position_) bad(fmt::format("a list of {} elements, but {} bytes are left", size, bytes_.size() - position_));
  const std::uint8_t type = header & 0xf;
  const bool are_booleans = element_type == kTrue && type == kFalse;
  if (size > 0 && type != element_type && !are_booleans) bad(fmt::format("a list of type {}, wanted {}", type, element_type));
  return size;
}

void ThriftReader::skip(std::uint8_t type) {
  switch (type) {
    case kTrue:
    case kFalse: return;
    case kByte: byte(); return;
    case kI16:
    case kI32:
    case kI64: varint(); return;
    case kDouble:
      for (int i = 0; i < 8; ++i) byte();
      return;
    case kBinary: binary(type); return;
    case kStruct: read_struct([this](Field field) { skip(field.type); }); return;
    case kList:
    case kSet: {
      enter();
      const std::uint8_t header = byte();
      std::uint64_t size = header >> 4;
      if (size == 15) size = varint();
      const std::uint8_t element = header & 0xf;
      for (std::uint64_t i = 0; i < size; ++i) element == kTrue || element == kFalse ? static_cast<void>(byte()) : skip(element);
      --depth_;
      return;
    }
    case kMap: {
      enter();
      const std::uint64_t size = varint();
      if (size > 0) {
        const std::uint8_t types = byte();
        for (std::uint64_t i = 0; i < size; ++i) {
          for (const std::uint8_t part : {static_cast<std::uint8_t>(types >> 4), static_cast<std::uint8_t>(types & 0xf)})
            part == kTrue || part == kFalse ? static_cast<void>(byte()) : skip(part);
        }
      }
      --depth_;
      return;
    }
    default: bad(fmt::format("unknown type {}", type));
  }
}

}  // namespace prl::io
