#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/parallel.hpp"

namespace prl::ops::cpu {
namespace {

/// Elements per task; its buffers stay within the second-level cache.
constexpr std::int64_t kRunElements = 1 << 14;

struct Run {
  std::size_t item;
  std::int64_t first_row, num_rows;
};

std::uint64_t hash_bytes_of_row(const char* bytes, std::int64_t size, std::uint64_t first_word) {
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t sum = 0;
  std::int64_t at = 0;
  for (; at + 8 <= size; at += 8, ++first_word) {
    std::uint64_t word;
    std::memcpy(&word, bytes + at, 8);
    sum += hash_word(word, first_word);
  }
  if (at < size) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<std::size_t>(size - at));
    sum += hash_word(word, first_word);
  }
  return sum;
}

std::uint64_t hash_run(const HashedRows& item, const Run& run, DType as) {
  const std::int64_t cols = item.num_cols, size = cols * static_cast<std::int64_t>(size_of(as)), words = (size + 7) / 8;
  std::vector<float> values(static_cast<std::size_t>(cols));
  std::vector<BFloat16> rounded(static_cast<std::size_t>(cols));
  std::uint64_t sum = 0;
  for (std::int64_t r = run.first_row; r < run.first_row + run.num_rows; ++r) {
    const char* bytes = nullptr;
    const float* wide = nullptr;
    if (item.packed != nullptr) {
      item.packed->unpack_row(item.first_row + r, values.data());
      wide = values.data();
    } else if (item.plain.dtype == as) {
      bytes = item.plain.as<char>() + (item.first_row + r) * size;
    } else {
      wide = item.plain.as<float>() + (item.first_row + r) * cols;
    }
    if (wide != nullptr && as == DType::kBF16) {
      std::transform(wide, wide + cols, rounded.begin(), to_bf16);
      bytes = reinterpret_cast<const char*>(rounded.data());
    } else if (wide != nullptr) {
      bytes = reinterpret_cast<const char*>(wide);
    }
    sum += hash_bytes_of_row(bytes, size, static_cast<std::uint64_t>((item.first_number + r) * words));
  }
  return sum;
}

}  // namespace

void hash_rows(OpContext& ctx, std::span<std::uint64_t> out, std::span<const HashedRows> items, DType as) {
  std::vector<Run> runs;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::int64_t rows_per_run = std::max<std::int64_t>(1, kRunElements / std::max<std::int64_t>(items[i].num_cols, 1));
    for (std::int64_t r = 0; r < items[i].num_rows; r += rows_per_run)
      runs.push_back({i, r, std::min(rows_per_run, items[i].num_rows - r)});
  }
  std::vector<std::uint64_t> sums(runs.size());
  parallel(ctx, static_cast<std::int64_t>(runs.size()), [&](std::int64_t n) {
    const auto i = static_cast<std::size_t>(n);
    sums[i] = hash_run(items[runs[i].item], runs[i], as);
  });
  std::fill(out.begin(), out.end(), 0);
  for (std::size_t i = 0; i < runs.size(); ++i) out[runs[i].item] += sums[i];
}

}  // namespace prl::ops::cpu
