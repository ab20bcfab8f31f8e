#include "io/finite.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/error.hpp"

namespace prl::io {
namespace {

/// Index of the first of `count` elements whose bits, masked, are at least `limit`; -1 if there is none. Signed, because the mask takes the
/// sign away and every x86-64 compares signed numbers in vectors; for that the loop is optimized whatever the module is.
template <typename Bits>
[[gnu::optimize("O3")]] std::int64_t find_large(const std::byte* source, std::int64_t count, Bits mask, Bits limit) {
  constexpr std::int64_t kBlock = 4096 / sizeof(Bits);  // looked at without a branch each
  const Bits below = static_cast<Bits>(limit - 1);
  for (std::int64_t first = 0; first < count; first += kBlock) {
    const std::int64_t size = std::min(kBlock, count - first);
    Bits bits[kBlock];
    std::memcpy(bits, source + static_cast<std::size_t>(first) * sizeof(Bits), static_cast<std::size_t>(size) * sizeof(Bits));
    Bits found = 0;
    for (std::int64_t i = 0; i < size; ++i) found |= static_cast<Bits>(static_cast<Bits>(bits[i] & mask) > below);
    if (found == 0) continue;
    for (std::int64_t i = 0; i < size; ++i)
      if ((bits[i] & mask) >= limit) return first + i;
  }
  return -1;
}

}  // namespace

std::int64_t find_not_finite(const std::byte* values, StoredType type, std::int64_t count, DType as) {
  // The bits of a number without its sign grow with it; infinity is above all numbers, and every NaN above infinity. The largest fp32
  // numbers become infinite when they are rounded to bfloat16.
  const std::int32_t limit = as == DType::kBF16 ? 0x7f7f8000 : 0x7f800000;
  switch (type) {
    case StoredType::kF32: return find_large<std::int32_t>(values, count, 0x7fffffff, limit);
    case StoredType::kBF16: return find_large<std::int16_t>(values, count, 0x7fff, 0x7f80);
    case StoredType::kF16: return find_large<std::int16_t>(values, count, 0x7fff, 0x7c00);
    default: return -1;
  }
}

std::int64_t find_not_finite(const SafetensorsFile& file, const SafetensorsEntry& entry, std::int64_t first, std::int64_t count, DType as) {
  PRL_CHECK(first >= 0 && first + count <= entry.num_elements(), "tensor {} looked at past its end", entry.name);
  const std::byte* source = file.bytes(entry).data() + static_cast<std::size_t>(first) * size_of(entry.type);
  const std::int64_t at = find_not_finite(source, entry.type, count, as);
  return at < 0 ? -1 : first + at;
}

}  // namespace prl::io
