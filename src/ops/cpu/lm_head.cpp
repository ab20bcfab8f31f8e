#include <algorithm>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/detail/log_softmax.hpp"
#include "ops/cpu/gemm.hpp"
#include "ops/cpu/linear_weight.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

/// Tokens per pass over the vocabulary in the backward pass: the weight gradient is read and written once per pass.
constexpr std::int64_t kBackwardTokens = 1024;

/// Carves typed pieces out of the workspace, 64-byte steps. With no memory it only counts.
class Carver {
 public:
  explicit Carver(char* memory) : memory_(memory) {}
  template <typename T>
  T* take(std::int64_t count) {
    char* p = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += aligned_bytes(static_cast<std::size_t>(count) * sizeof(T));
    return reinterpret_cast<T*>(p);
  }
  std::size_t used() const { return used_; }

 private:
  char* memory_;
  std::size_t used_ = 0;
};

/// The tokens that count, gathered so that no product is spent on the others; a row's result does not depend on its place.
struct LiveRows {
  std::int32_t* index;  ///< position in the caller's rows
  char* h;              ///< [count, H]
  std::int64_t count = 0;
};

void gather(OpContext& ctx, LiveRows& live, const ConstTensorView& h) {
  const auto size = static_cast<std::int64_t>(size_of(h.dtype));
  const std::int64_t bytes = h.shape.num_cols() * size;
  parallel_rows(ctx, live.count, h.shape.num_cols(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      __builtin_memcpy(live.h + i * bytes, static_cast<const char*>(h.data) + live.index[i] * h.row_stride * size,
                       static_cast<std::size_t>(bytes));
  });
}

/// Takes statistics of each row of a finished chunk of logits, and the target's scaled logit where it falls into the chunk.
struct ChunkSink {
  const Kernels* kernels;
  const LiveRows* live;
  const std::int32_t* targets;
  const float* temperatures;
  ChunkStats* stats;     ///< [chunks][rows]
  float* target_logits;  ///< [rows]

  static void run(const void* self, const GemmTileResult& t) {
    const auto& s = *static_cast<const ChunkSink*>(self);
    const std::int64_t chunk = t.col / kVocabChunk;
    for (std::int64_t i = 0; i < t.rows; ++i) {
      const std::int64_t row = t.row + i;
      const std::int32_t token = s.live->index[row];
      float* x = t.c + i * t.c_stride;
      s.stats[chunk * s.live->count + row] = s.kernels->chunk_stats(x, t.cols, s.temperatures[token]);
      const std::int64_t target = s.targets[token] - t.col;
      if (target >= 0 && target < t.cols) s.target_logits[row] = x[target];
    }
  }
};

}  // namespace

void lm_head_logprob(OpContext& ctx, TensorView logp_T, TensorView entropy_T, TensorView lse_T, ConstTensorView h_TH,
                     const LinearWeight& weight, std::span<const std::int32_t> targets_T, std::span<const float> temperatures_T,
                     TensorView) {
  const PackedWeight& w = packed(ctx, weight);
  const GemmKernels& k = *w.gemm;
  const auto T = static_cast<std::int64_t>(targets_T.size());
  const std::int64_t H = w.num_inputs(), V = w.num_outputs(), chunks = (V + kVocabChunk - 1) / kVocabChunk;
  LiveRows live{};
  live.count = std::count_if(targets_T.begin(), targets_T.end(), [](std::int32_t t) { return t >= 0; });
  float *logp = logp_T.as<float>(), *entropy = entropy_T.as<float>(), *lse = lse_T.as<float>();
  std::fill(logp, logp + T, 0.0f);
  std::fill(entropy, entropy + T, 0.0f);
  std::fill(lse, lse + T, 0.0f);
  if (live.count == 0) return;

  const GemmPlan plan = plan_gemm(ctx, k, live.count, H, V, true, kVocabChunk);
  ChunkStats* stats = nullptr;
  float* target_logits = nullptr;
  char* gemm_memory = nullptr;
  const auto carve = [&](char* memory) {
    Carver c(memory);
    live.index = c.take<std::int32_t>(live.count);
    live.h = c.take<char>(live.count * H * static_cast<std::int64_t>(size_of(w.dtype())));
    stats = c.take<ChunkStats>(chunks * live.count);
    target_logits = c.take<float>(live.count);
    gemm_memory = c.take<char>(static_cast<std::int64_t>(plan.total_bytes));
    return c.used();
  };
  carve(static_cast<char*>(ctx.workspace->require(carve(nullptr))));

  std::int64_t n = 0;
  for (std::int64_t t = 0; t < T; ++t)
    if (targets_T[static_cast<std::size_t>(t)] >= 0) live.index[n++] = static_cast<std::int32_t>(t);
  gather(ctx, live, h_TH);
  const ChunkSink sink{&kernels(ctx), &live, targets_T.data(), temperatures_T.data(), stats, target_logits};
  gemm(ctx, k, plan, {.data = live.h, .dtype = w.dtype(), .stride = H, .rows = live.count, .depth = H}, forward_operand(w, 0, V),
       {.sink = ChunkSink::run, .self = &sink, .sink_cols = kVocabChunk}, gemm_memory);
  for (std::int64_t i = 0; i < live.count; ++i) {
    LogSumExp total;
    for (std::int64_t c = 0; c < chunks; ++c) total.merge(stats[c * live.count + i]);
    const std::int32_t t = live.index[i];
    lse[t] = total.value();
    logp[t] = target_logits[i] - lse[t];
    entropy[t] = total.entropy();
  }
}

namespace {

/// One pass of the backward over up to kBackwardTokens gathered tokens.
struct BackwardPass {
  OpContext& ctx;
  const PackedWeight& w;
  const LiveRows& live;
  const float* dlogp;
  const float* lse;
  const std::int32_t* targets;
  const float* temperatures;
  float* logits;  ///< [tokens, chunk]
  char* dlogits;  ///< [tokens, chunk], compute dtype
  float* dh;      ///< [tokens, H]
  char* h_panels;
  char* gemm_memory;

  /// d logits = dlogp / temperature * (one_hot - softmax), in the compute dtype.
  void gradient_of_logits(std::int64_t first, std::int64_t tokens, std::int64_t col, std::int64_t cols) const {
    const Kernels& kn = kernels(ctx);
    const auto size = static_cast<std::int64_t>(size_of(w.dtype()));
    parallel_rows(ctx, tokens, cols, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int32_t t = live.index[first + i];
        const float coefficient = dlogp[t] / temperatures[t];
        const float* x = logits + i * cols;
        kn.softmax_gradient(dlogits + i * cols * size, x, cols, temperatures[t], lse[t], -coefficient, w.dtype());
        const std::int64_t target = targets[t] - col;
        if (target < 0 || target >= cols) continue;
        float value = 0.0f;
        kn.softmax_gradient(&value, x + target, 1, temperatures[t], lse[t], -coefficient, DType::kF32);
        value += coefficient;
        kn.cast(dlogits + (i * cols + target) * size, w.dtype(), &value, DType::kF32, 1);
      }
    });
  }

  void run(std::int64_t first, std::int64_t tokens, float* dw) const {
    const GemmKernels& k = *w.gemm;
    const std::int64_t H = w.num_inputs(), V = w.num_outputs();
    const DType dtype = w.dtype();
    const char* h = live.h + first * H * static_cast<std::int64_t>(size_of(dtype));
    if (dw != nullptr) pack_panels(ctx, k, h_panels, h, dtype, H, H, tokens, true);
    for (std::int64_t col = 0; col < V; col += kVocabChunk) {
      const std::int64_t cols = std::min<std::int64_t>(kVocabChunk, V - col);
      gemm(ctx, k, plan_gemm(ctx, k, tokens, H, cols, false), {.data = h, .dtype = dtype, .stride = H, .rows = tokens, .depth = H},
           forward_operand(w, col, cols), {.c = logits, .c_stride = cols}, gemm_memory);
      gradient_of_logits(first, tokens, col, cols);
      gemm(ctx, k, plan_gemm(ctx, k, tokens, cols, H, false),
           {.data = dlogits, .dtype = dtype, .stride = cols, .rows = tokens, .depth = cols}, backward_operand(w, col),
           {.c = dh, .c_stride = H, .accumulate = col > 0}, gemm_memory);
      if (dw == nullptr) continue;
      gemm(ctx, k, plan_gemm(ctx, k, cols, tokens, H, false),
           {.data = dlogits, .dtype = dtype, .stride = cols, .transposed = true, .rows = cols, .depth = tokens},
           {h_panels, static_cast<std::int64_t>(k.panel_bytes(tokens)), H}, {.c = dw + col * H, .c_stride = H, .accumulate = true},
           gemm_memory);
    }
  }
};

}  // namespace

void lm_head_logprob_backward(OpContext& ctx, TensorView dh_TH, TensorView dw_VH, ConstTensorView dlogp_T, ConstTensorView lse_T,
                              ConstTensorView h_TH, const LinearWeight& weight, std::span<const std::int32_t> targets_T,
                              std::span<const float> temperatures_T, bool accumulate, ConstTensorView) {
  const PackedWeight& w = packed(ctx, weight);
  const GemmKernels& k = *w.gemm;
  if (!accumulate && dw_VH.data != nullptr)
    ctx.runtime->zero(dw_VH.data, static_cast<std::size_t>(dw_VH.shape.num_elements()) * sizeof(float));
  const auto T = static_cast<std::int64_t>(targets_T.size());
  const std::int64_t H = w.num_inputs(), chunk = std::min<std::int64_t>(kVocabChunk, w.num_outputs());
  const float* dlogp = dlogp_T.as<float>();
  const auto size = static_cast<std::int64_t>(size_of(w.dtype()));
  for (std::int64_t t = 0; t < T; ++t)
    __builtin_memset(static_cast<char*>(dh_TH.data) + t * dh_TH.row_stride * size, 0, static_cast<std::size_t>(H * size));
  const auto is_live = [&](std::int64_t t) { return targets_T[static_cast<std::size_t>(t)] >= 0 && dlogp[t] != 0.0f; };
  LiveRows live{};
  for (std::int64_t t = 0; t < T; ++t) live.count += is_live(t);
  if (live.count == 0) return;

  const std::int64_t block = std::min(live.count, kBackwardTokens);
  std::size_t gemm_bytes = plan_gemm(ctx, k, block, H, chunk, false).total_bytes;
  gemm_bytes = std::max(gemm_bytes, plan_gemm(ctx, k, block, chunk, H, false).total_bytes);
  gemm_bytes = std::max(gemm_bytes, plan_gemm(ctx, k, chunk, block, H, false).total_bytes);
  BackwardPass pass{ctx,     w,       live,    dlogp,  lse_T.as<float>(), targets_T.data(), temperatures_T.data(), nullptr,
                    nullptr, nullptr, nullptr, nullptr};
  const auto carve = [&](char* memory) {
    Carver c(memory);
    live.index = c.take<std::int32_t>(live.count);
    live.h = c.take<char>(live.count * H * size);
    pass.logits = c.take<float>(block * chunk);
    pass.dlogits = c.take<char>(block * chunk * size);
    pass.dh = c.take<float>(block * H);
    pass.h_panels = c.take<char>(static_cast<std::int64_t>(panels_bytes(k, H, block)));
    pass.gemm_memory = c.take<char>(static_cast<std::int64_t>(gemm_bytes));
    return c.used();
  };
  carve(static_cast<char*>(ctx.workspace->require(carve(nullptr))));
  std::int64_t n = 0;
  for (std::int64_t t = 0; t < T; ++t)
    if (is_live(t)) live.index[n++] = static_cast<std::int32_t>(t);
  gather(ctx, live, h_TH);

  for (std::int64_t first = 0; first < live.count; first += block) {
    const std::int64_t tokens = std::min(block, live.count - first);
    pass.run(first, tokens, dw_VH.as<float>());
    for (std::int64_t i = 0; i < tokens; ++i)
      kernels(ctx).cast(static_cast<char*>(dh_TH.data) + live.index[first + i] * dh_TH.row_stride * size, w.dtype(), pass.dh + i * H,
                        DType::kF32, H);
  }
}

}  // namespace prl::ops::cpu
