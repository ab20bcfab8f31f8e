#include "ops/lora.hpp"

#include <algorithm>
#include <cstring>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/gemm.hpp"
#include "ops/cpu/linear_weight.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

/// Groups of fewer rows are shared out among threads whole, larger ones are cut up: a decoding step has many groups of a row or two.
constexpr std::int64_t kGroupOfOneThread = 64;

/// Scales finished tiles, column by column as the parts ask, and rounds them into rows of `out`.
struct StoreScaled {
  const Kernels* kernels;
  TensorView out;
  const std::int32_t* rows;         ///< of the out; nullptr: row i is row i
  std::span<const LoraPart> parts;  ///< scales by rank; empty: `scale` for all columns
  float scale;
  bool accumulate;

  static void run(const void* self, const GemmTileResult& t) {
    const auto& s = *static_cast<const StoreScaled*>(self);
    const auto size = static_cast<std::int64_t>(size_of(s.out.dtype));
    for (std::int64_t i = 0; i < t.rows; ++i) {
      float* values = t.c + i * t.c_stride;
      if (s.parts.empty()) {
        s.kernels->scale(values, s.scale, t.cols);
      } else {
        for (const LoraPart& part : s.parts) {
          const std::int64_t begin = std::max(part.first_rank, t.col), end = std::min(part.first_rank + part.rank, t.col + t.cols);
          if (begin < end) s.kernels->scale(values + (begin - t.col), part.scale, end - begin);
        }
      }
      const std::int64_t row = s.rows != nullptr ? s.rows[t.row + i] : t.row + i;
      char* to = static_cast<char*>(s.out.data) + (row * s.out.row_stride + t.col) * size;
      s.kernels->store_row(to, values, nullptr, t.cols, s.accumulate, s.out.dtype);
    }
  }
};

GemmLeft left_of(const ConstTensorView& x) {
  return {.data = x.data, .dtype = x.dtype, .stride = x.row_stride, .rows = x.shape.num_rows(), .depth = x.shape.num_cols()};
}

void product(OpContext& ctx, const GemmKernels& k, const GemmLeft& a, const GemmRight& b, const StoreScaled& store, char* memory) {
  const GemmPlan plan = plan_gemm(ctx, k, a.rows, a.depth, b.cols, true);
  gemm(ctx, k, plan, a, b, {.sink = StoreScaled::run, .self = &store}, memory);
}

std::size_t product_bytes(const OpContext& ctx, const GemmKernels& k, std::int64_t rows, std::int64_t depth, std::int64_t cols) {
  return plan_gemm(ctx, k, rows, depth, cols, true).total_bytes;
}

TensorView dense_rows(char* data, std::int64_t rows, std::int64_t cols, DType dtype) { return {data, Shape{rows, cols}, dtype, {}, cols}; }

/// The work on one group, and the memory it takes.
class GroupWork {
 public:
  /// Without threads, a group of rows that are one sliver does without all that cuts products up: a decoding step has many such groups.
  GroupWork(const OpContext& ctx, const LoraRows& group, const ConstTensorView& x)
      : group_(group),
        a_(packed(ctx, *group.weight->a)),
        num_rows_(group.count(x.shape.num_rows())),
        is_one_sliver_(ctx.pool == nullptr && num_rows_ <= a_.gemm->row_tile) {
    const LoraWeight& w = *group.weight;
    const std::int64_t K = w.a->num_inputs(), R = w.num_ranks();
    x_bytes_ = group.lie_together() ? 0 : aligned_bytes(static_cast<std::size_t>(num_rows_ * K) * size_of(x.dtype));
    h_bytes_ = aligned_bytes(static_cast<std::size_t>(num_rows_ * R) * size_of(w.dtype()));
    if (is_one_sliver_) {
      sliver_bytes_ = aligned_bytes(a_.gemm->sliver_bytes(std::max(K, R)));
      values_bytes_ = aligned_bytes(static_cast<std::size_t>(num_rows_ * std::max(R, kSliverCols)) * sizeof(float));
      product_bytes_ = sliver_bytes_ + values_bytes_ + a_.gemm->scratch_bytes;
      return;
    }
    product_bytes_ = product_bytes(ctx, *a_.gemm, num_rows_, K, R);
    for (const LoraPart& part : w.parts)
      product_bytes_ = std::max(product_bytes_, product_bytes(ctx, *a_.gemm, num_rows_, part.rank, part.num_outputs));
  }
  std::size_t num_bytes() const { return x_bytes_ + h_bytes_ + aligned_bytes(product_bytes_); }

  void run(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, char* memory) const {
    const LoraWeight& w = *group_.weight;
    const TensorView h = dense_rows(memory + x_bytes_, num_rows_, w.num_ranks(), w.dtype());
    char* scratch = memory + x_bytes_ + h_bytes_;
    if (is_one_sliver_) return run_sliver(ctx, y_TN, rows_of(x_TK, memory), h, scratch);
    product(ctx, *a_.gemm, left_of(rows_of(x_TK, memory)), forward_operand(a_, 0, w.num_ranks()),
            {&kernels(ctx), h, nullptr, {}, 1.0f, false}, scratch);
    for (const LoraPart& part : w.parts) {
      const StoreScaled store{&kernels(ctx), y_TN.columns(part.first_output, part.num_outputs), group_.rows.data(), {}, part.scale, true};
      product(ctx, *a_.gemm, left_of(h.columns(part.first_rank, part.rank)), forward_operand(packed(ctx, *part.b), 0, part.num_outputs),
              store, scratch);
    }
  }

 private:
  /// Columns of B (A x) at a time; a multiple of every width of panels.
  static constexpr std::int64_t kSliverCols = 256;

  void run_sliver(const OpContext& ctx, TensorView y_TN, ConstTensorView x, TensorView h, char* memory) const {
    const Kernels& k = kernels(ctx);
    const LoraWeight& w = *group_.weight;
    float* values = reinterpret_cast<float*>(memory + sliver_bytes_);
    GemmBlock block{.a = memory, .num_rows = num_rows_, .num_slivers = 1, .c = values, .scratch = memory + sliver_bytes_ + values_bytes_};
    const auto pack = [&](const ConstTensorView& from) {
      block.depth = from.shape.num_cols();
      a_.gemm->pack_sliver(memory, from.data, from.dtype, from.row_stride, static_cast<int>(num_rows_), block.depth, false);
    };
    const auto multiply = [&](const GemmRight& right, std::int64_t first) {
      block.b = right.panels + first / a_.gemm->col_tile * right.panel_stride;
      block.panel_stride = right.panel_stride;
      block.num_cols = block.c_stride = right.cols - first;
      a_.gemm->block(block);
    };
    pack(x);
    multiply(forward_operand(a_, 0, w.num_ranks()), 0);
    k.store_row(h.data, values, nullptr, num_rows_ * w.num_ranks(), false, h.dtype);
    const auto size = static_cast<std::int64_t>(size_of(y_TN.dtype));
    for (const LoraPart& part : w.parts) {
      pack(h.columns(part.first_rank, part.rank));
      for (std::int64_t first = 0; first < part.num_outputs; first += kSliverCols) {
        const std::int64_t cols = std::min(kSliverCols, part.num_outputs - first);
        multiply(forward_operand(packed(ctx, *part.b), 0, first + cols), first);
        k.scale(values, part.scale, num_rows_ * cols);
        for (std::int64_t i = 0; i < num_rows_; ++i) {
          const std::int64_t row = group_.rows.data() != nullptr ? group_.rows[static_cast<std::size_t>(i)] : i;
          char* y = static_cast<char*>(y_TN.data) + (row * y_TN.row_stride + part.first_output + first) * size;
          k.store_row(y, values + i * cols, nullptr, cols, true, y_TN.dtype);
        }
      }
    }
  }

  ConstTensorView rows_of(const ConstTensorView& x, char* memory) const {
    if (x_bytes_ == 0) return x.rows(group_.first(), num_rows_);
    const std::size_t row_bytes = static_cast<std::size_t>(x.shape.num_cols()) * size_of(x.dtype);
    for (std::size_t i = 0; i < group_.rows.size(); ++i)
      std::memcpy(memory + i * row_bytes,
                  static_cast<const char*>(x.data) + static_cast<std::size_t>(group_.rows[i] * x.row_stride) * size_of(x.dtype), row_bytes);
    return dense_rows(memory, num_rows_, x.shape.num_cols(), x.dtype);
  }

  const LoraRows& group_;
  const PackedWeight& a_;
  std::int64_t num_rows_;
  bool is_one_sliver_;
  std::size_t x_bytes_ = 0, h_bytes_ = 0, sliver_bytes_ = 0, values_bytes_ = 0, product_bytes_ = 0;
};

}  // namespace

void add_lora(OpContext& ctx, TensorView y_TN, ConstTensorView x_TK, std::span<const LoraRows> groups) {
  OpContext alone = ctx;
  alone.pool = nullptr;
  const std::int64_t T = x_TK.shape.num_rows();
  const auto is_small = [&](const LoraRows& group) { return groups.size() > 1 && group.count(T) < kGroupOfOneThread; };
  std::size_t slot_bytes = 0, num_bytes = 0;
  for (const LoraRows& group : groups) {
    if (group.count(T) == 0) continue;
    if (is_small(group))
      slot_bytes = std::max(slot_bytes, GroupWork(alone, group, x_TK).num_bytes());
    else
      num_bytes = std::max(num_bytes, GroupWork(ctx, group, x_TK).num_bytes());
  }
  char* memory = static_cast<char*>(ctx.workspace->require(std::max(num_bytes, slot_bytes * static_cast<std::size_t>(num_threads(ctx)))));
  for (const LoraRows& group : groups)
    if (group.count(T) > 0 && !is_small(group)) GroupWork(ctx, group, x_TK).run(ctx, y_TN, x_TK, memory);
  if (slot_bytes == 0) return;
  parallel_slots(ctx, static_cast<std::int64_t>(groups.size()), [&](std::int64_t i, std::int64_t slot) {
    const LoraRows& group = groups[static_cast<std::size_t>(i)];
    if (group.count(T) == 0 || !is_small(group)) return;
    OpContext own = alone;
    GroupWork(own, group, x_TK).run(own, y_TN, x_TK, memory + static_cast<std::size_t>(slot) * slot_bytes);
  });
}

void lora_backward(OpContext& ctx, TensorView dx_TK, TensorView da_RK, std::span<const TensorView> db, ConstTensorView dy_TN,
                   ConstTensorView x_TK, const LoraWeight& w, bool accumulate_dx, bool accumulate) {
  const PackedWeight& a = packed(ctx, *w.a);
  const GemmKernels& k = *a.gemm;
  const GemmKernels& wide = gemm_for(ctx, w.dtype());
  const std::int64_t T = x_TK.shape.num_rows(), K = x_TK.shape.num_cols(), R = w.num_ranks();
  const std::size_t h_bytes = aligned_bytes(static_cast<std::size_t>(T * R) * size_of(w.dtype()));
  std::size_t scratch_bytes =
      std::max({product_bytes(ctx, k, T, K, R), product_bytes(ctx, k, T, R, K), weight_gradient_bytes(ctx, wide, T, R, K, accumulate)});
  for (const LoraPart& part : w.parts)
    scratch_bytes = std::max({scratch_bytes, product_bytes(ctx, k, T, part.num_outputs, part.rank),
                              weight_gradient_bytes(ctx, wide, T, part.num_outputs, part.rank, accumulate)});
  char* memory = static_cast<char*>(ctx.workspace->require(2 * h_bytes + scratch_bytes));
  const TensorView h = dense_rows(memory, T, R, w.dtype()), dh = dense_rows(memory + h_bytes, T, R, w.dtype());
  char* scratch = memory + 2 * h_bytes;

  product(ctx, k, left_of(x_TK), forward_operand(a, 0, R), {&kernels(ctx), h, nullptr, w.parts, 1.0f, false}, scratch);
  for (std::size_t i = 0; i < w.parts.size(); ++i) {
    const LoraPart& part = w.parts[i];
    const ConstTensorView dy = dy_TN.columns(part.first_output, part.num_outputs);
    weight_gradient(ctx, wide, db[i], dy, h.columns(part.first_rank, part.rank), accumulate, scratch);
    product(ctx, k, left_of(dy), backward_operand(packed(ctx, *part.b), 0),
            {&kernels(ctx), dh.columns(part.first_rank, part.rank), nullptr, {}, part.scale, false}, scratch);
  }
  weight_gradient(ctx, wide, da_RK, dh, x_TK, accumulate, scratch);
  if (dx_TK.data != nullptr)
    product(ctx, k, left_of(dh), backward_operand(a, 0), {&kernels(ctx), dx_TK, nullptr, {}, 1.0f, accumulate_dx}, scratch);
}

void dropout(OpContext& ctx, TensorView y_TK, ConstTensorView x_TK, const DropoutMask& mask, bool accumulate) {
  const std::int64_t K = x_TK.shape.num_cols();
  const std::uint64_t threshold = dropout_threshold(mask.probability);
  const float kept = 1.0f / (1.0f - mask.probability);
  const auto run = [&]<typename T>(T*, const auto& read, const auto& write) {
    parallel_rows(ctx, x_TK.shape.num_rows(), K, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const T* x = x_TK.as<T>() + t * x_TK.row_stride;
        T* y = y_TK.as<T>() + t * y_TK.row_stride;
        for (std::int64_t i = 0; i < K; ++i) {
          const bool drop = is_dropped(mask.seed, static_cast<std::uint64_t>((mask.first_row + t) * K + i), threshold);
          const float value = drop ? 0.0f : read(x[i]) * kept;
          y[i] = write(accumulate ? read(y[i]) + value : value);
        }
      }
    });
  };
  if (x_TK.dtype == DType::kF32)
    run(
        static_cast<float*>(nullptr), [](float v) { return v; }, [](float v) { return v; });
  else
    run(
        static_cast<BFloat16*>(nullptr), [](BFloat16 v) { return to_f32(v); }, [](float v) { return to_bf16(v); });
}

}  // namespace prl::ops::cpu
