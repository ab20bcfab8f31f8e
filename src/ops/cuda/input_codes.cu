#include <algorithm>

#include "base/error.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/input_codes.cuh"
#include "ops/cuda/launch.hpp"

namespace prl::ops::cuda {
namespace {

/// Threads of the block that has a row, at most.
constexpr int kRowThreads = 256;
/// Vectors of kVec that a thread keeps of its row; it reads others twice.
constexpr int kKeptVectors = 8;

template <typename T>
struct InputArgs {
  const T* x;
  T* values;  ///< or null
  InputCodes to;
  std::int64_t x_stride, values_stride;
  int cols;
  const std::int32_t* rows = nullptr;  ///< of x, which become the first, second, ... row; or null: all of them
};

/// A block for each row. kKept: vectors of a thread, or 0 for any number of them, read twice.
template <typename T, bool kWide, int kKept>
__global__ void __launch_bounds__(kRowThreads) input_codes_kernel(const InputArgs<T> a) {
  if (a.rows == nullptr) let_next_begin();
  wait_for_previous();
  if (a.rows != nullptr) let_next_begin();
  const std::int64_t row = blockIdx.x;
  const T* const x = a.x + (a.rows != nullptr ? a.rows[row] : row) * a.x_stride;
  const int num_vectors = (a.cols + kVec - 1) / kVec;
  float kept[kKept > 0 ? kKept : 1][kVec];
  std::uint32_t greatest = 0;
  const auto read = [&](float(&v)[kVec], int vector) { load<kWide>(v, x + vector * kVec, min(kVec, a.cols - vector * kVec)); };
  const auto for_each = [&](auto&& use) {
    if constexpr (kKept > 0) {
#pragma unroll
      for (int j = 0; j < kKept; ++j)
        if (const int vector = static_cast<int>(threadIdx.x + j * blockDim.x); vector < num_vectors) use(kept[j], vector);
    } else {
      for (int vector = static_cast<int>(threadIdx.x); vector < num_vectors; vector += static_cast<int>(blockDim.x)) use(kept[0], vector);
    }
  };
  for_each([&](float(&v)[kVec], int vector) {
    read(v, vector);
    greatest = greatest_of(v, greatest);
  });
  const CodeScale scale = code_scale(greatest_of_block<kRowThreads>(greatest));
  if (a.values == nullptr && threadIdx.x == 0) a.to.factors[row] = scale.factor;
  for_each([&](float(&v)[kVec], int vector) {
    if constexpr (kKept == 0) read(v, vector);
    if (a.values != nullptr) {
#pragma unroll
      for (float& value : v) value = nearest_eight_bit(value * scale.inverse) * scale.factor;
      store<kWide>(a.values + row * a.values_stride + vector * kVec, v, min(kVec, a.cols - vector * kVec));
      return;
    }
    store_codes(a.to, row, vector * kVec, v, scale.inverse);
  });
}

template <typename T>
void launch(const OpContext& ctx, InputArgs<T> a, std::int64_t rows, bool is_wide) {
  const std::int64_t vectors = ceil_div(a.cols, kVec);
  const auto threads = static_cast<int>(std::min<std::int64_t>(kRowThreads, round_up(vectors, kWarp)));
  const std::int64_t kept = ceil_div(vectors, threads);
  const auto run = [&]<bool kWide, int kKept>() {
    launch_chained(stream_of(ctx), input_codes_kernel<T, kWide, kKept>, dim3(static_cast<unsigned>(rows)),
                   dim3(static_cast<unsigned>(threads)), 0, a);
  };
  if (!is_wide) return run.template operator()<false, 0>();
  if (kept <= 1) return run.template operator()<true, 1>();
  if (kept <= 2) return run.template operator()<true, 2>();
  kept <= kKeptVectors ? run.template operator()<true, kKeptVectors>() : run.template operator()<true, 0>();
}

/// Which rows of x, and how many.
struct RowsToRound {
  const std::int32_t* index = nullptr;  ///< or null: all of them
  std::int64_t count;
};

template <typename T>
void run_rows(const OpContext& ctx, ConstTensorView x, TensorView values, const InputCodes& to, const RowsToRound& rows) {
  InputArgs<T> a{x.as<T>(), values.as<T>(), to, x.row_stride, values.row_stride, static_cast<int>(x.shape.num_cols()), rows.index};
  const auto is_vector = [&](const void* data, std::int64_t stride) { return is_aligned(data, 16) && stride % kVec == 0; };
  const bool is_wide = a.cols % kVec == 0 && is_vector(a.x, a.x_stride) && (a.values == nullptr || is_vector(a.values, a.values_stride));
  launch(ctx, a, rows.count, is_wide);
}

}  // namespace

void inputs_to_codes(const OpContext& ctx, const InputCodes& to, ConstTensorView x_MK) {
  rows_to_codes(ctx, to, x_MK, nullptr, x_MK.shape.num_rows());
}

void rows_to_codes(const OpContext& ctx, const InputCodes& to, ConstTensorView x_MK, const std::int32_t* rows_R, std::int64_t num_rows) {
  PRL_CHECK(x_MK.shape.num_cols() % 16 == 0 && to.stride % 16 == 0, "codes of rows of {}", x_MK.shape.num_cols());
  with_type(x_MK.dtype, [&](auto t) { run_rows<decltype(t)>(ctx, x_MK, {}, to, {rows_R, num_rows}); });
}

void round_inputs(const OpContext& ctx, TensorView out_MK, ConstTensorView x_MK) {
  with_type(x_MK.dtype, [&](auto t) { run_rows<decltype(t)>(ctx, x_MK, out_MK, {}, {nullptr, x_MK.shape.num_rows()}); });
}

}  // namespace prl::ops::cuda
