#include "nn/stored_tensor.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "io/finite.hpp"
#include "nn/stored_layout.hpp"

namespace prl::nn {
namespace {

/// What the 4 bits of E2M1 (sign, two of exponent, one of mantissa) stand for.
constexpr std::array<float, 16> kE2M1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr int kScaleBias = 127;
/// E8M0 has no infinity, and one code that is no number.
constexpr int kNoScale = 255;

}  // namespace

StoredTensor StoredTensor::part(io::SafetensorsRef ref, std::int64_t first, std::int64_t count) {
  StoredTensor out(ref);
  out.begin_ = first;
  out.count_ = count;
  return out;
}

StoredTensor StoredTensor::reordered(io::SafetensorsRef ref, const std::vector<RowRun>& runs, std::int64_t cols) {
  StoredTensor out(ref);
  out.layout_ = Layout::kReordered;
  out.cols_ = cols;
  std::vector<Run> by_row;
  for (const RowRun& run : runs) {
    by_row.push_back({run.first, run.count, out.rows_});
    out.rows_ += run.count;
  }
  std::ranges::sort(by_row, {}, &Run::first);
  out.runs_ = std::make_shared<const std::vector<Run>>(std::move(by_row));
  return out;
}

StoredTensor StoredTensor::transposed(io::SafetensorsRef ref, std::int64_t expert, std::int64_t rows, std::int64_t cols) {
  StoredTensor out(ref);
  out.layout_ = Layout::kTransposed;
  out.expert_ = expert;
  out.rows_ = rows;
  out.cols_ = cols;
  out.count_ = rows * cols;
  return out;
}

StoredTensor StoredTensor::mxfp4(io::SafetensorsRef blocks, io::SafetensorsRef scales, std::int64_t expert, std::int64_t rows,
                                 std::int64_t cols) {
  StoredTensor out = transposed(blocks, expert, rows, cols);
  out.layout_ = Layout::kMxfp4;
  out.scales_ = scales;
  return out;
}

StoredTensor StoredTensor::scaled(const Fp8Scales& scales) const {
  StoredTensor out = *this;
  out.fp8_ = scales;
  return out;
}

void StoredTensor::read_file(std::int64_t first, std::span<float> out) const {
  if (fp8_) return read_fp8(ref_, *fp8_, first, out);
  ref_.file->read_f32(*ref_.entry, first, out);
}

void StoredTensor::read_f32(std::int64_t first, std::span<float> out) const {
  if (layout_ == Layout::kTransposed) return read_transposed(first, out);
  if (layout_ == Layout::kMxfp4) return read_mxfp4(first, out);
  if (layout_ == Layout::kReordered) return read_reordered(first, out);
  read_file(begin_ + first, out);
}

void StoredTensor::read_reordered(std::int64_t first, std::span<float> out) const {
  if (out.empty()) return;
  auto run = std::ranges::upper_bound(*runs_, first / cols_, {}, &Run::first) - 1;
  for (; !out.empty(); ++run) {
    const std::int64_t within = first - run->first * cols_;
    const auto count = std::min(out.size(), static_cast<std::size_t>(run->count * cols_ - within));
    read_file(run->in_file * cols_ + within, out.first(count));
    first += static_cast<std::int64_t>(count);
    out = out.subspan(count);
  }
}

void StoredTensor::read_transposed(std::int64_t first, std::span<float> out) const {
  if (out.empty()) return;
  const std::int64_t end = first + static_cast<std::int64_t>(out.size());
  const std::int64_t row_begin = first / cols_, row_end = (end + cols_ - 1) / cols_;
  // Along the file's rows, so that it is read in long runs.
  std::vector<float> run(static_cast<std::size_t>(row_end - row_begin));
  for (std::int64_t col = 0; col < cols_; ++col) {
    read_file((expert_ * cols_ + col) * rows_ + row_begin, run);
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
  if (is_plain()) {
    const std::int64_t at = io::find_not_finite(*ref_.file, *ref_.entry, begin_ + first, count, as);
    return at < 0 ? at : at - begin_;
  }
  std::vector<float> values(static_cast<std::size_t>(count));
  read_f32(first, values);
  const std::int64_t found = io::find_not_finite(std::as_bytes(std::span(values)).data(), io::StoredType::kF32, count, as);
  return found < 0 ? found : first + found;
}

void StoredTensor::check_whole() const {
  ref_.file->check_whole();
  if (scales_.file != nullptr) scales_.file->check_whole();
  if (fp8_) fp8_->ref.file->check_whole();
}

std::string StoredTensor::scale_note() const {
  return fp8_ ? fmt::format(", {} times a scale of '{}'", io::to_string(type()), fp8_->ref.entry->name) : std::string();
}

}  // namespace prl::nn
