#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <vector>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/gemm.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/row_access.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

std::int64_t bytes_of(DType t) { return static_cast<std::int64_t>(size_of(t)); }
void check_id(const char* op, std::int64_t t, std::int32_t id, std::int64_t limit) {
  if (id < 0 || id >= limit) fail(ErrorCode::kInvalidArgument, "[{}] entry {} is {}, wanted 0 to {}", op, t, id, limit - 1);
}
void check_ids(const char* op, const ConstTensorView& ids, std::int64_t limit) {
  for (std::int64_t t = 0; t < ids.shape.num_elements(); ++t) check_id(op, t, ids.as<std::int32_t>()[t], limit);
}

float half_to_float(std::uint16_t h) {
  const float magnitude = std::bit_cast<float>(static_cast<std::uint32_t>(h & 0x7fffu) << 13) * 0x1.0p112f;
  const bool special = (h & 0x7c00u) == 0x7c00u;
  const std::uint32_t bits =
      special ? 0x7f800000u | (static_cast<std::uint32_t>(h & 0x3ffu) << 13) : std::bit_cast<std::uint32_t>(magnitude);
  return std::bit_cast<float>(bits | (static_cast<std::uint32_t>(h & 0x8000u) << 16));
}
/// Nearest, ties to even.
std::uint16_t float_to_half(float f) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below the smallest normal half: let the fp32 adder round at the right bit
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float load_any(const char* p, DType t) {
  if (t == DType::kF32) return *reinterpret_cast<const float*>(p);
  if (t == DType::kBF16) return to_f32(*reinterpret_cast<const BFloat16*>(p));
  return half_to_float(*reinterpret_cast<const std::uint16_t*>(p));
}
void store_any(char* p, DType t, float v) {
  if (t == DType::kF32)
    *reinterpret_cast<float*>(p) = v;
  else if (t == DType::kBF16)
    *reinterpret_cast<BFloat16*>(p) = to_bf16(v);
  else
    *reinterpret_cast<std::uint16_t*>(p) = float_to_half(v);
}

}  // namespace

void embedding(OpContext& ctx, TensorView out_TH, ConstTensorView table_VH, const TokenIds& ids) {
  const std::int64_t T = out_TH.shape.num_rows(), V = table_VH.shape.num_rows(), H = table_VH.shape.num_cols();
  const std::int32_t* drawn = ids.drawn_B.as<std::int32_t>();
  const std::int64_t num_drawn = drawn == nullptr ? 0 : ids.drawn_B.shape.num_elements();
  const auto id_of = [&](std::int64_t t) {
    const std::int32_t id = ids.ids_T.as<std::int32_t>()[t];
    return id < 0 && -1 - id < num_drawn ? drawn[-1 - id] : id;
  };
  for (std::int64_t t = 0; t < T; ++t) check_id("embedding", t, id_of(t), V);
  parallel_rows(ctx, T, H, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      __builtin_memcpy(row_bytes(out_TH, t), row_bytes(table_VH, id_of(t)), static_cast<std::size_t>(H * bytes_of(out_TH.dtype)));
  });
}

void store_rows(OpContext& ctx, TensorView to_SC, ConstTensorView rows_TC, ConstTensorView slot_T) {
  const std::int64_t S = to_SC.shape.num_rows(), C = to_SC.shape.num_cols();
  const auto* const slots = slot_T.as<std::int32_t>();
  for (std::int64_t t = 0; t < rows_TC.shape.num_rows(); ++t)
    if (slots[t] < -1 || slots[t] >= S)
      fail(ErrorCode::kInvalidArgument, "[store_rows] slot {} of row {}, wanted -1 to {}", slots[t], t, S - 1);
  parallel_rows(ctx, rows_TC.shape.num_rows(), C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      if (slots[t] >= 0)
        __builtin_memcpy(row_bytes(to_SC, slots[t]), row_bytes(rows_TC, t), static_cast<std::size_t>(C * bytes_of(to_SC.dtype)));
  });
}

void embedding_backward(OpContext& ctx, TensorView dtable_VH, ConstTensorView dout_TH, ConstTensorView ids_T) {
  check_ids("embedding_backward", ids_T, dtable_VH.shape.num_rows());
  constexpr std::int64_t kCols = 64;
  const std::int64_t T = dout_TH.shape.num_rows(), H = dtable_VH.shape.num_cols();
  const std::int32_t* ids = ids_T.as<std::int32_t>();
  const Kernels& k = kernels(ctx);
  // A task owns columns, so a token that appears twice is added in token order by one thread.
  parallel(ctx, (H + kCols - 1) / kCols, [&](std::int64_t i) {
    const std::int64_t col = i * kCols, cols = std::min(kCols, H - col);
    for (std::int64_t t = 0; t < T; ++t)
      k.accumulate(reinterpret_cast<float*>(row_bytes(dtable_VH, ids[t], col)), row_bytes(dout_TH, t, col), cols, dout_TH.dtype);
  });
}

void rms_norm(OpContext& ctx, TensorView y_RC, ConstTensorView x_RC, ConstTensorView w_C, float eps) {
  const std::int64_t C = x_RC.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_RC.shape.num_rows(), C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) k.rms_norm(row_bytes(y_RC, r), row_bytes(x_RC, r), w_C.as<float>(), C, eps, x_RC.dtype);
  });
}

void add_rms_norm(OpContext& ctx, TensorView y_RC, TensorView sum_RC, ConstTensorView x_RC, ConstTensorView residual_RC,
                  ConstTensorView w_C, float eps) {
  const std::int64_t C = x_RC.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_RC.shape.num_rows(), C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      k.add(row_bytes(sum_RC, r), row_bytes(x_RC, r), row_bytes(residual_RC, r), C, x_RC.dtype);
      k.rms_norm(row_bytes(y_RC, r), row_bytes(sum_RC, r), w_C.as<float>(), C, eps, x_RC.dtype);
    }
  });
}

void rms_norm_backward(OpContext& ctx, TensorView dx_RC, TensorView dw_C, ConstTensorView dy_RC, ConstTensorView x_RC, ConstTensorView w_C,
                       float eps, bool accumulate) {
  constexpr std::int64_t kRows = 128;  // per partial sum of dw; part of the order of summation
  const std::int64_t R = x_RC.shape.num_rows(), C = x_RC.shape.num_cols(), blocks = (R + kRows - 1) / kRows;
  const std::int64_t stride = (C + 15) / 16 * 16;
  float* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(blocks * stride) * sizeof(float)));
  const Kernels& k = kernels(ctx);
  parallel(ctx, blocks, [&](std::int64_t b) {
    float* dw = partial + b * stride;
    std::fill(dw, dw + C, 0.0f);
    for (std::int64_t r = b * kRows; r < std::min(R, (b + 1) * kRows); ++r)
      k.rms_norm_backward(row_bytes(dx_RC, r), dw, row_bytes(dy_RC, r), row_bytes(x_RC, r), w_C.as<float>(), C, eps, accumulate,
                          x_RC.dtype);
  });
  for (std::int64_t b = 0; b < blocks; ++b) k.accumulate(dw_C.as<float>(), partial + b * stride, C, DType::kF32);
}

namespace {

/// Heads as plain strided rows: one part per head over all tokens, or one per token where those are fewer.
struct HeadParts {
  std::int64_t tokens, heads, head_dim;
  explicit HeadParts(const ConstTensorView& x) : tokens(x.shape[0]), heads(x.shape[1]), head_dim(x.shape[2]) {}
  bool by_token() const { return tokens < heads; }
  std::int64_t count() const { return by_token() ? tokens : heads; }
  template <typename View>
  View part(View v, std::int64_t token_stride, std::int64_t i) const {
    using Byte = std::conditional_t<std::is_same_v<View, TensorView>, char, const char>;
    v.data = static_cast<Byte*>(v.data) + i * (by_token() ? token_stride : head_dim) * bytes_of(v.dtype);
    v.shape = Shape{by_token() ? heads : tokens, head_dim};
    v.row_stride = by_token() ? head_dim : token_stride;
    return v;
  }
};

}  // namespace

void head_norm(OpContext& ctx, TensorView y_THD, std::int64_t y_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride,
               ConstTensorView w_D, float eps) {
  const HeadParts parts(x_THD);
  for (std::int64_t i = 0; i < parts.count(); ++i)
    cpu::rms_norm(ctx, parts.part(y_THD, y_token_stride, i), parts.part(x_THD, x_token_stride, i), w_D, eps);
}

void head_norm_backward(OpContext& ctx, TensorView dx_THD, std::int64_t dx_token_stride, TensorView dw_D, ConstTensorView dy_THD,
                        std::int64_t dy_token_stride, ConstTensorView x_THD, std::int64_t x_token_stride, ConstTensorView w_D, float eps) {
  const HeadParts parts(x_THD);
  for (std::int64_t i = 0; i < parts.count(); ++i)
    cpu::rms_norm_backward(ctx, parts.part(dx_THD, dx_token_stride, i), dw_D, parts.part(dy_THD, dy_token_stride, i),
                           parts.part(x_THD, x_token_stride, i), w_D, eps, false);
}

void add(OpContext& ctx, TensorView out, ConstTensorView a, ConstTensorView b) {
  const std::int64_t C = out.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, out.shape.num_rows(), C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) k.add(row_bytes(out, r), row_bytes(a, r), row_bytes(b, r), C, out.dtype);
  });
}

namespace {

/// Each row through a kernel of gates.
void gate_rows(OpContext& ctx, decltype(Kernels::swiglu) kernel, TensorView out_TF, ConstTensorView gate_up_T2F) {
  const std::int64_t F = out_TF.shape.num_cols();
  parallel_rows(ctx, out_TF.shape.num_rows(), 8 * F, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      kernel(row_bytes(out_TF, t), row_bytes(gate_up_T2F, t), row_bytes(gate_up_T2F, t, F), F, out_TF.dtype);
  });
}

void gate_rows_backward(OpContext& ctx, decltype(Kernels::swiglu_backward) kernel, TensorView dgate_up_T2F, ConstTensorView dout_TF,
                        ConstTensorView gate_up_T2F) {
  const std::int64_t F = dout_TF.shape.num_cols();
  parallel_rows(ctx, dout_TF.shape.num_rows(), 8 * F, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      kernel(row_bytes(dgate_up_T2F, t), row_bytes(dgate_up_T2F, t, F), row_bytes(dout_TF, t), row_bytes(gate_up_T2F, t),
             row_bytes(gate_up_T2F, t, F), F, dout_TF.dtype);
  });
}

}  // namespace

void swiglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) { gate_rows(ctx, kernels(ctx).swiglu, out_TF, gate_up_T2F); }
void swiglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  gate_rows_backward(ctx, kernels(ctx).swiglu_backward, dgate_up_T2F, dout_TF, gate_up_T2F);
}
void geglu(OpContext& ctx, TensorView out_TF, ConstTensorView gate_up_T2F) { gate_rows(ctx, kernels(ctx).geglu, out_TF, gate_up_T2F); }
void geglu_backward(OpContext& ctx, TensorView dgate_up_T2F, ConstTensorView dout_TF, ConstTensorView gate_up_T2F) {
  gate_rows_backward(ctx, kernels(ctx).geglu_backward, dgate_up_T2F, dout_TF, gate_up_T2F);
}

void squared_relu(OpContext& ctx, TensorView out_TF, ConstTensorView x_TF, ConstTensorView factors_T) {
  const std::int64_t F = out_TF.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, out_TF.shape.num_rows(), 4 * F, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      k.squared_relu(row_bytes(out_TF, t), row_bytes(x_TF, t), F, out_TF.dtype);
      if (factors_T.data != nullptr) k.scale_row(row_bytes(out_TF, t), row_bytes(out_TF, t), factors_T.as<float>()[t], F, out_TF.dtype);
    }
  });
}

void squared_relu_backward(OpContext& ctx, TensorView dx_TF, TensorView dfactors_T, ConstTensorView dout_TF, ConstTensorView x_TF,
                           ConstTensorView factors_T) {
  const std::int64_t F = dout_TF.shape.num_cols();
  const DType dtype = dout_TF.dtype;
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, dout_TF.shape.num_rows(), 8 * F, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(F));  // a row of dtype, which has no more bytes
    for (std::int64_t t = begin; t < end; ++t) {
      const void* dout = row_bytes(dout_TF, t);
      if (factors_T.data != nullptr) {
        k.squared_relu(scratch.data(), row_bytes(x_TF, t), F, dtype);
        dfactors_T.as<float>()[t] = k.dot_row(dout, scratch.data(), F, dtype);
        k.scale_row(scratch.data(), dout, factors_T.as<float>()[t], F, dtype);
        dout = scratch.data();
      }
      k.squared_relu_backward(row_bytes(dx_TF, t), dout, row_bytes(x_TF, t), F, dtype);
    }
  });
}

void rope(OpContext& ctx, TensorView x_THD, std::int64_t token_stride, ConstTensorView positions_T, const RopeTable& table, bool inverse) {
  check_ids("rope", positions_T, table.cos_PR2.shape()[0]);
  const std::int64_t heads = x_THD.shape[1], D = x_THD.shape[2], half = table.num_pairs();
  const std::int32_t* positions = positions_T.as<std::int32_t>();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_THD.shape[0], heads * D, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t h = 0; h < heads; ++h)
        k.rope(static_cast<char*>(x_THD.data) + (t * token_stride + h * D) * bytes_of(x_THD.dtype),
               table.cos_PR2.as<float>() + positions[t] * half, table.sin_PR2.as<float>() + positions[t] * half, half, inverse,
               x_THD.dtype);
  });
}

void cast(OpContext& ctx, TensorView out, ConstTensorView x) {
  const Kernels& k = kernels(ctx);
  const bool dense = out.is_contiguous() && x.is_contiguous();
  // One long row is cut like many short ones.
  const std::int64_t C = dense ? 4096 : out.shape.num_cols(), total = out.shape.num_elements();
  const std::int64_t rows = dense ? (total + C - 1) / C : out.shape.num_rows();
  parallel_rows(ctx, rows, C, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      char* to = static_cast<char*>(out.data) + r * (dense ? C : out.row_stride) * bytes_of(out.dtype);
      const char* from = static_cast<const char*>(x.data) + r * (dense ? C : x.row_stride) * bytes_of(x.dtype);
      const std::int64_t n = dense ? std::min(C, total - r * C) : C;
      if (out.dtype != DType::kF16 && x.dtype != DType::kF16) {
        k.cast(to, out.dtype, from, x.dtype, n);
      } else {
        for (std::int64_t i = 0; i < n; ++i)
          store_any(to + i * bytes_of(out.dtype), out.dtype, load_any(from + i * bytes_of(x.dtype), x.dtype));
      }
    }
  });
}

namespace {

double sum_squares_of(OpContext& ctx, const ConstTensorView& x) {
  const std::int64_t chunks = (x.shape.num_elements() + kSquaresChunk - 1) / kSquaresChunk;
  float* partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(chunks) * sizeof(float)));
  cpu::chunk_squares(ctx, {partial, static_cast<std::size_t>(chunks)}, std::span(&x, 1));
  double total = 0;
  for (std::int64_t c = 0; c < chunks; ++c) total += static_cast<double>(partial[c]);
  return total;
}

}  // namespace

void chunk_squares(OpContext& ctx, std::span<float> out_C, std::span<const ConstTensorView> xs) {
  const Kernels& k = kernels(ctx);
  for (const ConstTensorView& x : xs) {
    const std::int64_t n = x.shape.num_elements(), chunks = (n + kSquaresChunk - 1) / kSquaresChunk;
    parallel_rows(ctx, chunks, kSquaresChunk, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t c = begin; c < end; ++c)
        out_C[static_cast<std::size_t>(c)] =
            k.sum_squares(x.as<float>() + c * kSquaresChunk, std::min(kSquaresChunk, n - c * kSquaresChunk));
    });
    out_C = out_C.subspan(static_cast<std::size_t>(chunks));
  }
}

double sum_squares(OpContext& ctx, std::span<const ConstTensorView> xs) {
  double total = 0;
  for (const ConstTensorView& x : xs) total += sum_squares_of(ctx, x);
  return total;
}

std::int64_t find_not_finite(OpContext& ctx, ConstTensorView x) {
  const std::int64_t n = x.shape.num_elements();
  std::atomic<std::int64_t> first{n};
  const auto note = [&first](std::int64_t index) {
    std::int64_t known = first.load(std::memory_order_relaxed);
    while (index < known && !first.compare_exchange_weak(known, index, std::memory_order_relaxed)) {
    }
  };
  parallel_rows(ctx, n, 1, [&](std::int64_t begin, std::int64_t end) {
    // An exponent of all ones; the loop over whole pieces has no branch.
    const auto scan = [&](const auto* bits, auto mask) {
      constexpr std::int64_t kPiece = 4096;
      for (std::int64_t at = begin; at < end; at += kPiece) {
        const std::int64_t stop = std::min(end, at + kPiece);
        unsigned any = 0;
        for (std::int64_t i = at; i < stop; ++i) any |= static_cast<unsigned>((bits[i] & mask) == mask);
        if (any == 0) continue;
        for (std::int64_t i = at; i < stop; ++i)
          if ((bits[i] & mask) == mask) return note(i);
      }
    };
    if (x.dtype == DType::kF32)
      scan(x.as<std::uint32_t>(), std::uint32_t{0x7f800000});
    else
      scan(x.as<std::uint16_t>(), std::uint16_t{0x7f80});
  });
  return first < n ? first.load() : -1;
}

void scale(OpContext& ctx, TensorView x, float factor) {
  const std::int64_t n = x.shape.num_elements();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, n, 1, [&](std::int64_t begin, std::int64_t end) { k.scale(x.as<float>() + begin, factor, end - begin); });
}

}  // namespace prl::ops::cpu
