#include "nn/stored_tensor.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "io/finite.hpp"

namespace prl::nn {
namespace {

/// What the 4 bits of E2M1 (sign, two of exponent, one of mantissa) stand for.
constexpr std::array<float, 16> kE2M1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr int kScaleBias = 127;
/// E8M0 has no infinity, and one code that is no number.
constexpr int kNoScale = 255;

}  // namespace

StoredTensor StoredTensor::transposed(io::SafetensorsRef ref, std::int64_t expert, std::int64_t rows, std::int64_t cols) {
  StoredTensor out(ref);
  out.layout_ = Layout::kTransposed;
  out.expert_ = expert;
  out.rows_ = rows;
  out.cols_ = cols;
  return out;
}

StoredTensor StoredTensor::mxfp4(io::SafetensorsRef blocks, io::SafetensorsRef scales, std::int64_t expert, std::int64_t rows,
                                 std::int64_t cols) {
  StoredTensor out = transposed(blocks, expert, rows, cols);
  out.layout_ = Layout::kMxfp4;
  out.scales_ = scales;
  return out;
}

void StoredTensor::read_f32(std::int64_t first, std::span<float> out) const {
  if (layout_ == Layout::kTransposed) return read_transposed(first, out);
  if (layout_ == Layout::kMxfp4) return read_mxfp4(first, out);
  ref_.file->read_f32(*ref_.entry, first, out);
}

void StoredTensor::read_transposed(std::int64_t first, std::span<float> out) const {
  if (out.empty()) return;
  const std::int64_t end = first + static_cast<std::int64_t>(out.size());
  const std::int64_t row_begin = first / cols_, row_end = (end + cols_ - 1) / cols_;
  // Along the file's rows, so that it is read in long runs.
  std::vector<float> run(static_cast<std::size_t>(row_end - row_begin));
  for (std::int64_t col = 0; col < cols_; ++col) {
    ref_.file->read_f32(*ref_.entry, (expert_ * cols_ + col) * rows_ + row_begin, run);
    for (std::int64_t row = row_begin; row < row_end; ++row)
      if (const std::int64_t at = row * cols_ + col; at >= first && at < end)
        out[static_cast<std::size_t>(at - first)] = run[static_cast<std::size_t>(row - row_begin)];
  }
}

void StoredTensor::read_mxfp4(std::int64_t first, std::span<float> out) const {
  const std::byte* const blocks = ref_.file->bytes(*ref_.entry).data();
  const std::byte* const scales = scales_.file->bytes(*scales_.entry).data();
  const std::int64_t begin = expert_ * rows_ * cols_ + first;
  float factor = 0.0f;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::int64_t at = begin + static_cast<std::int64_t>(i);
    if (i == 0 || at % kMxfp4Block == 0) {
      const auto scale = std::to_integer<int>(scales[at / kMxfp4Block]);
      factor = scale == kNoScale ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, scale - kScaleBias);
    }
    const auto both = std::to_integer<unsigned>(blocks[at / 2]);
    out[i] = kE2M1[at % 2 == 0 ? both & 15U : both >> 4U] * factor;
  }
}

std::int64_t StoredTensor::find_not_finite(std::int64_t first, std::int64_t count, DType as) const {
  if (is_plain()) return io::find_not_finite(*ref_.file, *ref_.entry, first, count, as);
  std::vector<float> values(static_cast<std::size_t>(count));
  read_f32(first, values);
  const std::int64_t found = io::find_not_finite(std::as_bytes(std::span(values)).data(), io::StoredType::kF32, count, as);
  return found < 0 ? found : first + found;
}

void StoredTensor::check_whole() const {
  ref_.file->check_whole();
  if (scales_.file != nullptr) scales_.file->check_whole();
}

}  // namespace prl::nn
