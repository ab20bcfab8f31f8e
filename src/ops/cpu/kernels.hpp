#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tensor/dtype.hpp"

// What one instruction set offers: single-threaded loops over memory, without shapes, threads or allocation. Every function
// gives the same bits for an output element whatever the number of rows or columns of the call.

namespace prl::ops::cpu {

/// A product of packed operands, C[m, n] (+)= A[m, k] B[k, n], accumulated in fp32.
///
/// The m rows of A are cut into ceil(m / row_tile) slivers of nearly equal height (see sliver_begin); this call does
/// `num_slivers` of them from `first_sliver`. Panels of B are col_tile columns wide.
struct GemmBlock {
  const char* a = nullptr;    ///< sliver 0
  std::int64_t num_rows = 0;  ///< m of the packed A
  std::int64_t first_sliver = 0, num_slivers = 0;
  const char* b = nullptr;        ///< first panel of this call, at its first row
  std::int64_t panel_stride = 0;  ///< bytes from panel to panel
  std::int64_t num_cols = 0;
  std::int64_t depth = 0;  ///< k
  float* c = nullptr;      ///< element of the first row of first_sliver and the first column
  std::int64_t c_stride = 0;
  bool accumulate = false;
  char* scratch = nullptr;  ///< scratch_bytes
};

struct GemmKernels {
  int row_tile = 0;
  int col_tile = 0;
  int depth_multiple = 1;  ///< packed depth is padded to this with zeros
  std::size_t scratch_bytes = 0;
  DType dtype = DType::kF32;  ///< of the values: kF32 or kBF16
  /// Bytes of one sliver slot (row_tile rows) or one panel (col_tile columns) of depth k. Linear in k at multiples of depth_multiple.
  std::size_t (*sliver_bytes)(std::int64_t k) = nullptr;
  std::size_t (*panel_bytes)(std::int64_t k) = nullptr;
  /// A[i][p] = source[i * stride + p], or source[p * stride + i] if transposed; i < rows <= row_tile.
  void (*pack_sliver)(void* out, const void* source, DType source_dtype, std::int64_t stride, int rows, std::int64_t k,
                      bool transposed) = nullptr;
  /// B[p][j] = source[j * stride + p], or source[p * stride + j] if transposed; j < cols <= col_tile.
  void (*pack_panel)(void* out, const void* source, DType source_dtype, std::int64_t stride, int cols, std::int64_t k,
                     bool transposed) = nullptr;
  void (*unpack_column)(float* out, const void* panel, int j, std::int64_t k) = nullptr;
  void (*block)(const GemmBlock&) = nullptr;
};

inline std::int64_t num_slivers(std::int64_t rows, int row_tile) { return (rows + row_tile - 1) / row_tile; }
inline std::int64_t sliver_begin(std::int64_t sliver, std::int64_t rows, std::int64_t count) { return sliver * rows / count; }

/// Of the `count` keys from position `begin` on, those [first, end) that the query at `position` sees (VarlenAttention::window); none if
/// end <= first.
struct SeenKeys {
  int first, end;
};
inline SeenKeys seen_keys(std::int64_t position, std::int64_t begin, int count, std::int64_t window) {
  const std::int64_t first = window == 0 ? 0 : position - window + 1 - begin, end = position + 1 - begin;
  return {static_cast<int>(first < 0 ? 0 : first < count ? first : count), static_cast<int>(end < count ? end : count)};
}

/// Keys and values of one sequence and one kv head, dense or paged. A paged block holds k as [D][block_size], so that keys lie
/// side by side in vectors, and v as [block_size][D]. Where values are part of the keys it holds k as [block_size][D].
struct KeySource {
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_stride = 0, v_stride = 0;  ///< elements from key to key, within a block if paged; k_stride 0: k is [D][block_size]
  const std::int32_t* blocks = nullptr;     ///< nullptr: dense
  std::int64_t block_size = 0;
  std::int64_t block_stride = 0;  ///< elements from block to block
};

/// `num_tokens` consecutive queries of one sequence and the `group` heads that share a kv head, over keys of
/// [key_begin, key_end) (key_begin at a chunk's start). Row r is token r / group, head r % group.
struct AttentionTask {
  const void* q = nullptr;
  std::int64_t q_token_stride = 0, head_stride = 0;
  std::int64_t num_tokens = 0;
  int group = 1;
  int head_dim = 0, value_dim = 0;
  std::int64_t first_position = 0;
  std::int64_t position_step = 1;  ///< from token to token; 0: all see the same keys
  KeySource keys;
  std::int64_t key_begin = 0, key_end = 0;
  std::int64_t window = 0;  ///< VarlenAttention::window
  float scale = 1.0f;
  DType dtype = DType::kF32;
  // Results per row: running maximum, sum of exponentials, and unnormalised output [rows, value_dim].
  float* row_max = nullptr;
  float* row_sum = nullptr;
  float* row_out = nullptr;
  char* scratch = nullptr;  ///< attention_scratch_bytes
};

/// Normalises rows of state, of head_dim values: out = o / sum, lse = max + log(sum), after a sink, where there is one, has joined max and
/// sum. Rows as in AttentionTask.
struct AttentionFinish {
  std::int64_t num_rows = 0;
  int group = 1;
  int head_dim = 0;
  const float* row_max = nullptr;
  const float* row_sum = nullptr;
  const float* row_out = nullptr;
  void* out = nullptr;
  std::int64_t out_token_stride = 0, head_stride = 0;
  DType dtype = DType::kF32;
  float* lse = nullptr;  ///< may be null; token-major
  std::int64_t lse_token_stride = 0;
  const float* sinks = nullptr;  ///< [group], VarlenAttention::sinks_H; may be null
};

/// One sequence and one kv head of the backward pass. dq, dk, dv are overwritten.
struct AttentionBackwardTask {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *dout = nullptr, *out = nullptr;
  const float* lse = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, out_stride = 0, dout_stride = 0, dq_stride = 0, dk_stride = 0, dv_stride = 0,
               lse_stride = 0;
  std::int64_t length = 0;
  std::int64_t window = 0;
  int group = 1;
  int head_dim = 0;
  float scale = 1.0f;
  DType dtype = DType::kF32;
  char* scratch = nullptr;  ///< attention_backward_scratch_bytes(length, group, head_dim)
};

/// Maximum, sum of exp(x - max), and sum of exp(x - max) * (x - max) of one vocabulary chunk.
struct ChunkStats {
  float max = 0, sum = 0, weighted = 0;
};

/// Tokens of one sequence and a tile of columns of one value head's state.
struct DeltaTile {
  std::int64_t num_tokens = 0;
  int key_dim = 0, num_cols = 0;           ///< num_cols: at most Kernels::delta_cols
  const float *q = nullptr, *k = nullptr;  ///< [num_tokens, key_dim], scaled
  const float *decay = nullptr, *beta = nullptr;
  std::int64_t gate_stride = 0;  ///< from token to token
  const void* v = nullptr;
  void* out = nullptr;  ///< nullptr: only the state is wanted
  std::int64_t v_stride = 0, out_stride = 0;
  float* state = nullptr;  ///< [key_dim, num_cols]
  std::int64_t state_stride = 0;
  DType dtype = DType::kF32;
  bool is_state_space = false;  ///< nothing is taken from v: RuleKind::kStateSpace
  float skip = 0.0f;            ///< then: what of v comes to `out`
};
/// Its gradients. `forward.state` is the state before these tokens and stays as it is.
struct DeltaBackwardTile {
  DeltaTile forward;
  const void* dout = nullptr;
  void* dv = nullptr;
  std::int64_t dout_stride = 0, dv_stride = 0;
  float* dstate = nullptr;                        ///< [key_dim, num_cols], dense: behind these tokens, then before them
  float *dq = nullptr, *dk = nullptr;             ///< [num_tokens, key_dim], +=
  float *dbeta = nullptr, *dlog_decay = nullptr;  ///< +=
  float* dskip = nullptr;                         ///< +=; wanted of a state space
  float* states = nullptr;                        ///< scratch [num_tokens, key_dim, num_cols]
  float* deltas = nullptr;                        ///< scratch [num_tokens, 2, num_cols]
};
/// Of one token and all value heads.
struct DeltaGatesGrad {
  void *db = nullptr, *da = nullptr;
  float *drate = nullptr, *dbias = nullptr;  ///< +=
  const float *dbeta = nullptr, *dlog_decay = nullptr;
  const void *b = nullptr, *a = nullptr;
  const float *rate = nullptr, *bias = nullptr;
};
/// Limits of the steps of a state space.
struct StepLimits {
  float min = 0.0f, max = 0.0f;
};

inline constexpr int kMaxConvTaps = 8;
/// Columns that a call of Kernels::conv_backward has at most.
inline constexpr int kConvCols = 64;
/// One sequence and some columns of the gradient of the causal convolution.
struct ConvBackward {
  void* dx = nullptr;
  const void *dy = nullptr, *x = nullptr;
  std::int64_t dx_stride = 0, dy_stride = 0, x_stride = 0, weight_stride = 0;
  const float* weight = nullptr;  ///< [num_taps, weight_stride]
  float* dweight = nullptr;       ///< alike, +=
  const float* bias = nullptr;    ///< [num_cols]; nullptr: 0
  float* dbias = nullptr;         ///< +=; wanted with a bias
  std::int64_t num_tokens = 0, num_cols = 0;
  int num_taps = 0;
  DType dtype = DType::kF32;
};
/// One row.
struct GatedNormGrad {
  void *dx = nullptr, *dgate = nullptr;
  float* dw = nullptr;  ///< +=
  const void *dy = nullptr, *x = nullptr, *gate = nullptr;
  const float* w = nullptr;
  float eps = 0;
};

struct AdamWStep {
  float beta1 = 0, beta2 = 0, eps = 0, decay = 0, step_size = 0, inverse_sqrt_correction2 = 0, grad_scale = 1;
};
struct SgdStep {
  float lr = 0, momentum = 0, weight_decay = 0, grad_scale = 1;
  bool nesterov = false, first = false;
};

/// One instruction set. `n` counts elements; typed pointers are void where DType says which of kF32 and kBF16.
struct Kernels {
  std::string_view name;
  const GemmKernels* gemm_f32 = nullptr;
  const GemmKernels* gemm_bf16 = nullptr;
  /// For matrices of which one side is short (adapters): panels that waste less of it. nullptr: gemm_bf16 does them too.
  const GemmKernels* gemm_bf16_narrow = nullptr;
  /// B of 8 bits (eight_bit.hpp): their bits are those of the two above with B rounded so. Panels are not transposed.
  const GemmKernels* gemm_f32_eight = nullptr;
  const GemmKernels* gemm_bf16_eight = nullptr;

  std::size_t (*attention_scratch_bytes)(std::int64_t num_rows, int head_dim) = nullptr;
  void (*attention)(const AttentionTask&) = nullptr;
  /// Adds the state of a later chunk of keys to that of the earlier ones.
  void (*attention_merge)(float* max, float* sum, float* out, const float* next_max, const float* next_sum, const float* next_out,
                          std::int64_t rows, int head_dim) = nullptr;
  void (*attention_finish)(const AttentionFinish&) = nullptr;
  std::size_t (*attention_backward_scratch_bytes)(std::int64_t length, int group, int head_dim) = nullptr;
  void (*attention_backward)(const AttentionBackwardTask&) = nullptr;

  void (*rms_norm)(void* y, const void* x, const float* w, std::int64_t n, float eps, DType) = nullptr;
  /// dw_partial[n] += this row's share.
  void (*rms_norm_backward)(void* dx, float* dw_partial, const void* dy, const void* x, const float* w, std::int64_t n, float eps,
                            bool accumulate, DType) = nullptr;
  void (*layer_norm)(void* y, const void* x, const float* w, const float* b, std::int64_t n, float eps, DType) = nullptr;
  void (*gelu_tanh)(void* out, const void* x, std::int64_t n, DType) = nullptr;
  void (*add)(void* out, const void* a, const void* b, std::int64_t n, DType) = nullptr;
  void (*swiglu)(void* out, const void* gate, const void* up, std::int64_t n, DType) = nullptr;
  void (*swiglu_backward)(void* dgate, void* dup, const void* dout, const void* gate, const void* up, std::int64_t n, DType) = nullptr;
  void (*geglu)(void* out, const void* gate, const void* up, std::int64_t n, DType) = nullptr;
  void (*geglu_backward)(void* dgate, void* dup, const void* dout, const void* gate, const void* up, std::int64_t n, DType) = nullptr;
  void (*squared_relu)(void* out, const void* x, std::int64_t n, DType) = nullptr;
  void (*squared_relu_backward)(void* dx, const void* dout, const void* x, std::int64_t n, DType) = nullptr;
  /// Of gates and ups in fp32, as ops::ClampedGate says.
  void (*clamped_swiglu)(void* out, const float* gate, const float* up, std::int64_t n, float alpha, float limit, DType) = nullptr;
  /// In place: gate and up become their gradients.
  void (*clamped_swiglu_backward)(float* gate, float* up, const void* dout, std::int64_t n, float alpha, float limit, DType) = nullptr;
  void (*rope)(void* x, const float* cos, const float* sin, std::int64_t half, bool inverse, DType) = nullptr;
  /// Any of kF32, kBF16 to any of them.
  void (*cast)(void* out, DType out_dtype, const void* x, DType x_dtype, std::int64_t n) = nullptr;
  /// acc[n] += x[n].
  void (*accumulate)(float* acc, const void* x, std::int64_t n, DType) = nullptr;
  void (*scale_row)(void* out, const void* x, float factor, std::int64_t n, DType) = nullptr;
  float (*dot_row)(const void* a, const void* b, std::int64_t n, DType) = nullptr;
  float (*dot_weights)(const void* x, const float* w, std::int64_t n, DType) = nullptr;
  /// x[n] = factor * w[n], or += if `accumulate`.
  void (*store_scaled)(void* x, const float* w, float factor, std::int64_t n, bool accumulate, DType) = nullptr;
  /// acc[n] += factor * x[n].
  void (*accumulate_scaled)(float* acc, const void* x, float factor, std::int64_t n, DType) = nullptr;
  /// out[n] (+)= c[n] + bias[n], rounded to the dtype; bias may be null.
  void (*store_row)(void* out, const float* c, const float* bias, std::int64_t n, bool accumulate, DType) = nullptr;
  float (*sum_squares)(const float* x, std::int64_t n) = nullptr;
  void (*scale)(float* x, float factor, std::int64_t n) = nullptr;

  /// Columns of a tile of states; a tile of fewer has a multiple of 16.
  int delta_cols = 0;
  void (*delta_rule)(const DeltaTile&) = nullptr;
  void (*delta_rule_backward)(const DeltaBackwardTile&) = nullptr;
  /// decay[n] = exp(-exp(rate) * softplus(a + bias)), beta[n] = sigmoid(b).
  void (*delta_gates)(float* decay, float* beta, const void* a, const void* b, const float* rate, const float* bias, std::int64_t n,
                      DType) = nullptr;
  void (*delta_gates_backward)(const DeltaGatesGrad&, std::int64_t n, DType) = nullptr;
  /// step[n] = softplus(a + bias) within the limits, decay[n] = exp(-exp(rate) * step).
  void (*state_gates)(float* decay, float* step, const void* a, const float* rate, const float* bias, const StepLimits&, std::int64_t n,
                      DType) = nullptr;
  /// Of the steps' gradients, which are `dbeta`, without a b.
  void (*state_gates_backward)(const DeltaGatesGrad&, const StepLimits&, std::int64_t n, DType) = nullptr;
  /// out[n] = factor * x / sqrt(sum x^2 + 1e-6).
  void (*unit_row)(float* out, const void* x, float factor, std::int64_t n, DType) = nullptr;
  void (*unit_row_backward)(void* dx, const void* x, const float* dout, float factor, std::int64_t n, DType) = nullptr;
  /// y[n] = silu(bias[n] + sum over w of weight[w, n] * x[w][n]); a row that is null is 0, and so is a bias.
  void (*conv_row)(void* y, const void* const* x, const float* weight, std::int64_t weight_stride, int num_taps, const float* bias,
                   std::int64_t n, DType) = nullptr;
  void (*conv_backward)(const ConvBackward&) = nullptr;
  /// y[n] = rms_norm(x, w, eps) * silu(gate).
  void (*gated_norm)(void* y, const void* x, const void* gate, const float* w, std::int64_t n, float eps, DType) = nullptr;
  void (*gated_norm_backward)(const GatedNormGrad&, std::int64_t n, DType) = nullptr;
  /// y[n] = rms_norm(x * silu(gate), w, eps).
  void (*gated_group_norm)(void* y, const void* x, const void* gate, const float* w, std::int64_t n, float eps, DType) = nullptr;
  void (*gated_group_norm_backward)(const GatedNormGrad&, std::int64_t n, DType) = nullptr;
  /// y[n] = x * sigmoid(gate).
  void (*gate_row)(void* y, const void* x, const void* gate, std::int64_t n, DType) = nullptr;
  void (*gate_row_backward)(void* dx, void* dgate, const void* dy, const void* x, const void* gate, std::int64_t n, DType) = nullptr;

  /// x[n] divided by temperature in place (not touched when it is 1), then the statistics.
  ChunkStats (*chunk_stats)(float* x, std::int64_t n, float temperature) = nullptr;
  /// out[n] = exp(x[n] - shift), 0 where x is -inf.
  void (*exponentials)(float* out, const float* x, float shift, std::int64_t n) = nullptr;
  /// out[n] = coefficient * exp(logits / temperature - lse), rounded to the dtype.
  void (*softmax_gradient)(void* out, const float* logits, std::int64_t n, float temperature, float lse, float coefficient,
                           DType) = nullptr;

  void (*adamw)(float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep&) = nullptr;
  void (*sgd)(float* p, float* buffer, const float* g, std::int64_t n, const SgdStep&) = nullptr;
  void (*sign_sgd)(float* p, const float* g, std::int64_t n, float lr, float weight_decay) = nullptr;
  /// out = a * x + b * y.
  void (*axpby)(float* out, float a, const float* x, float b, const float* y, std::int64_t n) = nullptr;
  /// Reads n floats and returns their sum, unordered: for bandwidth measurements only.
  float (*read_sum)(const float* x, std::int64_t n) = nullptr;
};

const Kernels& kernels_portable();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const GemmKernels& gemm_bf16_avx512bf16();
const GemmKernels& gemm_bf16_narrow_avx512bf16();
const GemmKernels& gemm_bf16_amx();
const GemmKernels& gemm_bf16_eight_avx512bf16();
const GemmKernels& gemm_bf16_eight_amx();
/// Kernels::attention_backward with tile products for bf16; fp32 as AVX-512 does it.
std::size_t attention_backward_scratch_bytes_amx(std::int64_t length, int group, int head_dim);
void attention_backward_amx(const AttentionBackwardTask&);
#endif

}  // namespace prl::ops::cpu
