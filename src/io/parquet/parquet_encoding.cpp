#include "io/parquet/parquet_encoding.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace prl::io {
namespace {

constexpr std::size_t kMaxStorage = std::size_t{1} << 30;  // of strings put together from prefixes

std::string_view as_text(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// Little-endian groups of 8 values of `bit_width` bits.
class BitUnpacker {
 public:
  BitUnpacker(std::span<const std::byte> bytes, int bit_width) : bytes_(bytes), bit_width_(bit_width) {}
  std::uint64_t next() {
    std::uint64_t value = 0;
    for (int got = 0; got < bit_width_;) {
      const std::size_t at = bit_ / 8;
      const int shift = static_cast<int>(bit_ % 8), take = std::min(8 - shift, bit_width_ - got);
      const auto byte = static_cast<std::uint64_t>(bytes_[at]);
      value |= ((byte >> shift) & ((std::uint64_t{1} << take) - 1)) << got;
      got += take;
      bit_ += static_cast<std::size_t>(take);
    }
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
  int bit_width_;
  std::size_t bit_ = 0;
};

std::size_t width_of(const ParquetNode& leaf) {
  switch (leaf.type) {
    case ParquetType::kInt32:
    case ParquetType::kFloat: return 4;
    case ParquetType::kInt64:
    case ParquetType::kDouble: return 8;
    case ParquetType::kInt96: return 12;
    case ParquetType::kFixedBytes: return static_cast<std::size_t>(leaf.type_length);
    default: return 0;
  }
}

/// INT96: nanoseconds of the day and the Julian day, to microseconds since 1970.
std::int64_t from_int96(const std::byte* p) {
  std::int64_t nanoseconds;
  std::int32_t day;
  std::memcpy(&nanoseconds, p, 8);
  std::memcpy(&day, p + 8, 4);
  return (std::int64_t{day} - 2'440'588) * 86'400'000'000 + nanoseconds / 1000;
}

ParquetValue from_fixed(const ParquetNode& leaf, const std::byte* p) {
  ParquetValue value;
  switch (leaf.type) {
    case ParquetType::kInt32: {
      std::int32_t v;
      std::memcpy(&v, p, 4);
      value.integer = leaf.meaning == ParquetMeaning::kUnsigned ? std::int64_t{static_cast<std::uint32_t>(v)} : v;
      return value;
    }
    case ParquetType::kInt64: std::memcpy(&value.integer, p, 8); return value;
    case ParquetType::kInt96: value.integer = from_int96(p); return value;
    case ParquetType::kFloat: {
      float v;
      std::memcpy(&v, p, 4);
      value.number = v;
      return value;
    }
    case ParquetType::kDouble: std::memcpy(&value.number, p, 8); return value;
    default: value.bytes = {reinterpret_cast<const char*>(p), static_cast<std::size_t>(leaf.type_length)}; return value;
  }
}

void decode_plain(ParquetBytes& in, const ParquetNode& leaf, std::size_t count, std::vector<ParquetValue>& out) {
  if (leaf.type == ParquetType::kByteArray) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto size = in.take_number<std::uint32_t>();
      ParquetValue value;
      value.bytes = as_text(in.take(size));
      out.push_back(value);
    }
    return;
  }
  if (leaf.type == ParquetType::kBoolean) {
    BitUnpacker bits(in.take((count + 7) / 8), 1);
    for (std::size_t i = 0; i < count; ++i) {
      ParquetValue value;
      value.integer = static_cast<std::int64_t>(bits.next());
      out.push_back(value);
    }
    return;
  }
  const std::size_t width = width_of(leaf);
  if (width != 0 && count > in.left() / width) in.bad(fmt::format("{} values of {} bytes do not fit in {}", count, width, in.left()));
  const std::span<const std::byte> bytes = in.take(count * width);
  for (std::size_t i = 0; i < count; ++i) out.push_back(from_fixed(leaf, bytes.data() + i * width));
}

void decode_byte_stream_split(ParquetBytes& in, const ParquetNode& leaf, std::size_t count, std::vector<ParquetValue>& out,
                              std::string& storage) {
  const std::size_t width = width_of(leaf);
  if (width == 0 || leaf.type == ParquetType::kInt96) in.bad("BYTE_STREAM_SPLIT of a type that has none");
  if (count > in.left() / width) in.bad(fmt::format("{} values of {} bytes do not fit in {}", count, width, in.left()));
  const std::span<const std::byte> bytes = in.take(count * width);
  storage.resize(count * width);
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t b = 0; b < width; ++b) storage[i * width + b] = static_cast<char>(bytes[b * count + i]);
  for (std::size_t i = 0; i < count; ++i) out.push_back(from_fixed(leaf, reinterpret_cast<const std::byte*>(storage.data()) + i * width));
}

std::vector<std::int64_t> lengths_of(ParquetBytes& in, std::size_t count) {
  std::vector<std::int64_t> lengths = decode_delta_integers(in, count);
  if (lengths.size() != count) in.bad(fmt::format("{} lengths for {} values", lengths.size(), count));
  if (std::any_of(lengths.begin(), lengths.end(), [](std::int64_t n) { return n < 0 || n > (std::int64_t{1} << 31); }))
    in.bad("a length out of range");
  return lengths;
}

void decode_delta_length(ParquetBytes& in, std::size_t count, std::vector<ParquetValue>& out) {
  for (const std::int64_t length : lengths_of(in, count)) {
    ParquetValue value;
    value.bytes = as_text(in.take(static_cast<std::size_t>(length)));
    out.push_back(value);
  }
}

void decode_delta_bytes(ParquetBytes& in, std::size_t count, std::vector<ParquetValue>& out, std::string& storage) {
  const std::vector<std::int64_t> prefixes = lengths_of(in, count);
  std::vector<ParquetValue> suffixes;
  decode_delta_length(in, count, suffixes);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    total += static_cast<std::size_t>(prefixes[i]) + suffixes[i].bytes.size();
    if (total > kMaxStorage) in.bad(fmt::format("texts of more than {} bytes in one page", kMaxStorage));
  }
  storage.reserve(total);  // so that views into it stay valid
  std::string_view last;
  for (std::size_t i = 0; i < count; ++i) {
    const auto prefix = static_cast<std::size_t>(prefixes[i]);
    if (prefix > last.size()) in.bad(fmt::format("a prefix of {} bytes, the value before has {}", prefix, last.size()));
    const std::size_t begin = storage.size();
    storage.append(last.substr(0, prefix));
    storage.append(suffixes[i].bytes);
    last = std::string_view(storage).substr(begin);
    ParquetValue value;
    value.bytes = last;
    out.push_back(value);
  }
}

}  // namespace

void ParquetBytes::bad(std::string_view what) const { fail(ErrorCode::kCorrupt, "{} at byte {}: {}", subject_, position_, what); }

std::span<const std::byte> ParquetBytes::take(std::size_t count) {
  if (count > left()) bad(fmt::format("{} bytes wanted, {} are left", count, left()));
  const auto part = bytes_.subspan(position_, count);
  position_ += count;
  return part;
}

template <typename T>
T ParquetBytes::take_number() {
  T value;
  std::memcpy(&value, take(sizeof value).data(), sizeof value);
  return value;
}
template std::uint32_t ParquetBytes::take_number<std::uint32_t>();
template std::uint8_t ParquetBytes::take_number<std::uint8_t>();

std::uint64_t ParquetBytes::take_varint() {
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto b = static_cast<std::uint8_t>(take(1)[0]);
    value |= static_cast<std::uint64_t>(b & 0x7f) << shift;
    if ((b & 0x80) == 0) return value;
  }
  bad("a number of more than 64 bits");
}

void decode_rle(ParquetBytes& in, int bit_width, std::size_t count, std::vector<std::uint32_t>& out) {
  if (bit_width < 0 || bit_width > 32) in.bad(fmt::format("a width of {} bits", bit_width));
  const auto width = static_cast<std::size_t>(bit_width);
  while (count > 0) {
    const std::uint64_t header = in.take_varint();
    if (header & 1) {
      const std::uint64_t groups = header >> 1;
      // The last group may hold more values than are wanted; a file may also end before its padding.
      const std::uint64_t wanted_groups = std::min<std::uint64_t>(groups, (count + 7) / 8);
      if (groups == 0) in.bad("an empty run");
      const std::uint64_t num_bytes = width == 0 ? 0 : std::min<std::uint64_t>(groups > in.left() ? in.left() : groups * width, in.left());
      if (wanted_groups * width > num_bytes && (count * width + 7) / 8 > num_bytes) in.bad("a run that ends too early");
      BitUnpacker bits(in.take(static_cast<std::size_t>(num_bytes)), bit_width);
      const std::size_t run = static_cast<std::size_t>(std::min<std::uint64_t>(count, wanted_groups * 8));
      for (std::size_t i = 0; i < run; ++i) out.push_back(static_cast<std::uint32_t>(bits.next()));
      count -= run;
    } else {
      const std::uint64_t run = header >> 1;
      if (run == 0) in.bad("an empty run");
      std::uint32_t value = 0;
      const auto bytes = in.take((width + 7) / 8);
      std::memcpy(&value, bytes.data(), bytes.size());
      const std::size_t taken = static_cast<std::size_t>(std::min<std::uint64_t>(run, count));
      out.insert(out.end(), taken, value);
      count -= taken;
    }
  }
}

std::vector<std::int64_t> decode_delta_integers(ParquetBytes& in, std::size_t max_count) {
  const std::uint64_t block = in.take_varint(), minis = in.take_varint(), total = in.take_varint();
  std::uint64_t value = static_cast<std::uint64_t>(in.take_zigzag());  // sums wrap around, as the format says
  if (block == 0 || block % 128 != 0 || block > (1 << 20) || minis == 0 || block % minis != 0 || block / minis % 32 != 0)
    in.bad(fmt::format("blocks of {} values in {} parts", block, minis));
  if (total > max_count) in.bad(fmt::format("{} values, {} were announced", total, max_count));
  std::vector<std::int64_t> out;
  if (total == 0) return out;
  out.reserve(static_cast<std::size_t>(total));
  out.push_back(static_cast<std::int64_t>(value));
  const std::size_t per_mini = static_cast<std::size_t>(block / minis);
  while (out.size() < total) {
    const auto least = static_cast<std::uint64_t>(in.take_zigzag());
    const std::span<const std::byte> widths = in.take(static_cast<std::size_t>(minis));
    for (std::size_t m = 0; m < minis && out.size() < total; ++m) {
      const int width = static_cast<int>(widths[m]);
      if (width > 64) in.bad(fmt::format("differences of {} bits", width));
      BitUnpacker bits(in.take(per_mini * static_cast<std::size_t>(width) / 8), width);
      for (std::size_t i = 0; i < per_mini && out.size() < total; ++i) {
        value += least + bits.next();
        out.push_back(static_cast<std::int64_t>(value));
      }
    }
  }
  return out;
}

void decode_values(ParquetBytes& in, int encoding, const ParquetNode& leaf, std::size_t count, std::vector<ParquetValue>& out,
                   std::string& storage) {
  const auto wants = [&](bool is_right) {
    if (!is_right) in.bad(fmt::format("encoding {} does not fit the column's type", encoding));
  };
  switch (encoding) {
    case 0: return decode_plain(in, leaf, count, out);
    case 3: {  // RLE of booleans, after its length
      wants(leaf.type == ParquetType::kBoolean);
      ParquetBytes runs(in.take(in.take_number<std::uint32_t>()), in.subject());
      std::vector<std::uint32_t> bits;
      decode_rle(runs, 1, count, bits);
      for (const std::uint32_t bit : bits) {
        ParquetValue value;
        value.integer = bit;
        out.push_back(value);
      }
      return;
    }
    case 5: {
      wants(leaf.type == ParquetType::kInt32 || leaf.type == ParquetType::kInt64);
      const std::vector<std::int64_t> integers = decode_delta_integers(in, count);
      if (integers.size() != count) in.bad(fmt::format("{} values, wanted {}", integers.size(), count));
      for (const std::int64_t integer : integers) {
        ParquetValue value;
        value.integer = leaf.type == ParquetType::kInt64            ? integer
                        : leaf.meaning == ParquetMeaning::kUnsigned ? std::int64_t{static_cast<std::uint32_t>(integer)}
                                                                    : std::int64_t{static_cast<std::int32_t>(integer)};
        out.push_back(value);
      }
      return;
    }
    case 6: wants(leaf.type == ParquetType::kByteArray); return decode_delta_length(in, count, out);
    case 7:
      wants(leaf.type == ParquetType::kByteArray || leaf.type == ParquetType::kFixedBytes);
      return decode_delta_bytes(in, count, out, storage);
    case 9: return decode_byte_stream_split(in, leaf, count, out, storage);
    default:
      fail(ErrorCode::kNotImplemented,
           "{}: its values are stored with encoding {}; this build reads PLAIN, dictionaries, RLE, DELTA_* and "
           "BYTE_STREAM_SPLIT",
           in.subject(), encoding);
  }
}

}  // namespace prl::io
