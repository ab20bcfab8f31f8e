#include "nn/fp8.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "base/error.hpp"

namespace prl::nn {
namespace {

constexpr float number_of(unsigned code) {
  const unsigned exponent = (code >> 3) & 15U, mantissa = code & 7U;
  float value = std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0)
    value = static_cast<float>(mantissa) * 0x1.0p-9f;
  else if (exponent != 15 || mantissa != 7)
    value = std::bit_cast<float>(((exponent + 120U) << 23) | (mantissa << 20));  // 120: the biases' difference
  return (code & 128U) != 0 ? -value : value;
}

constexpr std::array<float, 256> kE4M3 = [] {
  std::array<float, 256> numbers{};
  for (unsigned code = 0; code < 256; ++code) numbers[code] = number_of(code);
  return numbers;
}();

/// Of one block's numbers that lie together. The table stays in the first cache; for that the loop is optimized whatever the module is.
[[gnu::optimize("O3")]] void multiply(const std::byte* codes, float scale, float* out, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = kE4M3[std::to_integer<unsigned>(codes[i])] * scale;
}

float scale_at(const std::byte* scales, io::StoredType type, std::int64_t at) {
  const std::byte* const from = scales + static_cast<std::size_t>(at) * io::size_of(type);
  if (type == io::StoredType::kF32) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return type == io::StoredType::kBF16 ? to_f32(BFloat16{bits}) : io::f16_to_f32(bits);
}

std::int64_t num_blocks(std::int64_t count, std::int64_t of_block) { return (count + of_block - 1) / of_block; }

/// Files may leave out dimensions of 1 at the end: of one scale for a matrix, or for each of its rows.
bool is_shape(const std::vector<std::int64_t>& found, const std::vector<std::int64_t>& wanted) {
  return found.size() <= wanted.size() && std::equal(found.begin(), found.end(), wanted.begin()) &&
         std::all_of(wanted.begin() + static_cast<std::ptrdiff_t>(found.size()), wanted.end(), [](std::int64_t n) { return n == 1; });
}

}  // namespace

float e4m3_to_f32(std::uint8_t code) noexcept { return kE4M3[code]; }

Fp8Scales find_scales(const io::SafetensorsFolder& files, const io::SafetensorsRef& matrix, const Fp8Format& format) {
  const std::vector<std::int64_t>& shape = matrix.entry->shape;
  PRL_CHECK(shape.size() == 2 || shape.size() == 3, "scales of tensor {} with {} dimensions", matrix.entry->name, shape.size());
  const std::int64_t rows = shape[shape.size() - 2], cols = shape.back();
  const std::string name = matrix.entry->name + format.scale_suffix;
  const io::SafetensorsRef ref = files.find(name);
  if (ref.entry == nullptr)
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, but its scales, tensor '{}', are missing", matrix.file->path().string(),
         matrix.entry->name, io::to_string(matrix.entry->type), name);
  const Fp8Scales scales{.ref = ref,
                         .rows = rows,
                         .cols = cols,
                         .block_rows = format.block_rows > 0 ? format.block_rows : std::max<std::int64_t>(rows, 1),
                         .block_cols = format.block_cols > 0 ? format.block_cols : std::max<std::int64_t>(cols, 1)};
  std::vector<std::int64_t> wanted{num_blocks(rows, scales.block_rows), num_blocks(cols, scales.block_cols)};
  if (shape.size() == 3) wanted.insert(wanted.begin(), shape.front());
  if (!is_shape(ref.entry->shape, wanted))
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' has shape [{}], wanted [{}]: a scale for each {} x {} numbers of '{}' [{}]",
         ref.file->path().string(), name, fmt::join(ref.entry->shape, ", "), fmt::join(wanted, ", "), scales.block_rows, scales.block_cols,
         matrix.entry->name, fmt::join(shape, ", "));
  if (const io::StoredType type = ref.entry->type;
      type != io::StoredType::kF32 && type != io::StoredType::kBF16 && type != io::StoredType::kF16)
    fail(ErrorCode::kCorrupt, "{}: tensor '{}' is stored as {}, wanted F32, BF16 or F16", ref.file->path().string(), name,
         io::to_string(type));
  return scales;
}

void read_fp8(const io::SafetensorsRef& matrix, const Fp8Scales& scales, std::int64_t first, std::span<float> out) {
  PRL_CHECK(first >= 0 && first + static_cast<std::int64_t>(out.size()) <= matrix.entry->num_elements(), "tensor {} read past its end",
            matrix.entry->name);
  const std::byte* codes = matrix.file->bytes(*matrix.entry).data() + first;
  const std::byte* const of_blocks = scales.ref.file->bytes(*scales.ref.entry).data();
  const std::int64_t down = num_blocks(scales.rows, scales.block_rows), across = num_blocks(scales.cols, scales.block_cols);
  float* to = out.data();
  for (auto left = static_cast<std::int64_t>(out.size()); left > 0;) {
    const std::int64_t row = first / scales.cols, col = first % scales.cols, block = col / scales.block_cols;
    const std::int64_t row_of_blocks = row / scales.rows * down + row % scales.rows / scales.block_rows;
    const std::int64_t end = std::min((block + 1) * scales.block_cols, scales.cols);
    const std::int64_t count = std::min(end - col, left);
    multiply(codes, scale_at(of_blocks, scales.ref.entry->type, row_of_blocks * across + block), to, count);
    first += count;
    codes += count;
    to += count;
    left -= count;
  }
  matrix.file->check_whole();
  scales.ref.file->check_whole();
}

}  // namespace prl::nn
