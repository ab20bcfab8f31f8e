#include "ops/vision.hpp"

#include <cmath>
#include <numbers>

#include "base/error.hpp"
#include "ops/cpu/bodies.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/row_access.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

template <typename T>
void gelu_erf_row(T* out, const T* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    float v = 0;
    if constexpr (std::is_same_v<T, BFloat16>)
      v = to_f32(x[i]);
    else
      v = x[i];
    const float y = 0.5f * v * (1.0f + std::erf(v * static_cast<float>(1.0 / std::numbers::sqrt2)));
    if constexpr (std::is_same_v<T, BFloat16>)
      out[i] = to_bf16(y);
    else
      out[i] = y;
  }
}

}  // namespace

void layer_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, ConstTensorView b_C, float eps) {
  const std::int64_t C = x_RC.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_RC.shape.num_rows(), C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      k.layer_norm(row_bytes(y_RC, r), row_bytes(x_RC, r), w_C.as<float>(), b_C.as<float>(), C, eps, x_RC.dtype);
  });
}

void gelu(OpContext& ctx, TensorView out_RC, ConstTensorView x_RC, GeluForm form) {
  const std::int64_t C = x_RC.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_RC.shape.num_rows(), 8 * C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      if (form == GeluForm::kTanh)
        k.gelu_tanh(row_bytes(out_RC, r), row_bytes(x_RC, r), C, x_RC.dtype);
      else if (x_RC.dtype == DType::kBF16)
        gelu_erf_row(row_of<BFloat16>(out_RC, r), row_of<BFloat16>(x_RC, r), C);
      else
        gelu_erf_row(row_of<float>(out_RC, r), row_of<float>(x_RC, r), C);
    }
  });
}

void gather_rope_rows(OpContext&, TensorView cos_TR2, TensorView sin_TR2, const RopeTable& table, ConstTensorView positions_3T,
                      RopeSections sections) {
  const std::int64_t T = cos_TR2.shape[0], pairs = cos_TR2.shape[1], num_positions = table.cos_PR2.shape()[0];
  const std::int32_t* positions = positions_3T.as<std::int32_t>();
  for (std::int64_t i = 0; i < 3 * T; ++i)
    if (positions[i] < 0 || positions[i] >= num_positions)
      fail(ErrorCode::kInvalidArgument, "[gather_rope_rows] token {} is at position {}, the table has {}", i % T, positions[i],
           num_positions);
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < pairs; ++i) {
      const std::int64_t axis = i % 3 == 1 && i < 3 * sections.height ? 1 : i % 3 == 2 && i < 3 * sections.width ? 2 : 0;
      const std::int64_t from = positions[axis * T + t] * pairs + i;
      cos_TR2.as<float>()[t * pairs + i] = table.cos_PR2.as<float>()[from];
      sin_TR2.as<float>()[t * pairs + i] = table.sin_PR2.as<float>()[from];
    }
}

}  // namespace prl::ops::cpu
