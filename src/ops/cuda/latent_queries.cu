#include "base/error.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/mma.cuh"

// Attention to latents, around attention itself: queries times the matrix that would form keys, and results times the one that would form
// values. Each head has rows of its own in that matrix, so these are as many small products side by side.

namespace prl::ops::cuda {
namespace {

/// What is rotated: elements of all queries, and of the key, which its latent follows.
template <typename T>
struct RotaryArgs {
  const T *q, *latent, *rotary;
  T *out, *key;               ///< contiguous
  const std::int32_t* slots;  ///< of each token's key in `key`, -1: nowhere; nullptr: keys lie in the order of tokens
  std::int64_t q_stride, latent_stride, rotary_stride;
  const std::int32_t* positions;
  const float *cosines, *sines;
  std::int64_t num_positions;
  int H, N, R, L;
  bool neighbours;
  ::prl::cuda::FaultWord* fault;
};

/// Of one token and head, head H being the key, by `num_threads` threads of which this is number `thread`.
template <typename T>
__device__ __forceinline__ void rotate_latent_head(const RotaryArgs<T>& a, std::int64_t t, int head, int thread, int num_threads) {
  const int half = a.R / 2, E = a.R + a.L;
  const std::int32_t position = a.positions[t];
  if (position < 0 || position >= a.num_positions) {
    if (thread == 0) ::prl::cuda::report(a.fault, ::prl::cuda::Fault::kRopePosition, static_cast<std::uint32_t>(t));
    return;
  }
  const bool is_key = head == a.H;
  const std::int64_t place = a.slots != nullptr && is_key ? a.slots[t] : t;
  if (place < 0) return;
  T* const to = is_key ? a.key + place * E : a.out + (t * a.H + head) * E;
  const T* const from = is_key ? a.rotary + t * a.rotary_stride : a.q + t * a.q_stride + head * (a.N + a.R) + a.N;
  for (int pair = thread; pair < half; pair += num_threads) {
    const float x = to_float(from[a.neighbours ? 2 * pair : pair]), y = to_float(from[a.neighbours ? 2 * pair + 1 : half + pair]);
    const std::int64_t at = position * static_cast<std::int64_t>(half) + pair;
    const float cosine = a.cosines[at], sine = a.sines[at];
    to[pair] = from_float<T>(fmaf(y, -sine, x * cosine));
    to[half + pair] = from_float<T>(fmaf(x, sine, y * cosine));
  }
  if (!is_key) return;
  const T* const latent = a.latent + t * a.latent_stride;
  for (int i = thread; i < a.L; i += num_threads) to[a.R + i] = latent[i];
}

/// y[t, h] = x[t, h] B of each head h, B [K, N] of its own.
template <typename T>
struct HeadProductArgs {
  const T *x, *w;
  T* y;
  std::int64_t x_stride, y_stride;  ///< from token to token
  int x_step, y_step;               ///< from head to head
  std::int64_t w_step;              ///< from a head's rows of w, of w_stride elements, to the next one's
  int w_stride;
  int num_tokens, K, N;
  RotaryArgs<T> rotary;  ///< without positions: nothing is rotated; else there is a block of heads more, of the key
};

constexpr int kHeadTile = 64, kHeadThreads = 128, kHeadStages = 4;

/// A block: 64 tokens, kN outputs, a head. `kRows`: B's columns are rows of w, else its rows are. An output's sum runs over K in steps of
/// 16, whatever shares its tile.
template <bool kRows, int kN>
__global__ void __launch_bounds__(kHeadThreads) head_product_kernel(const __grid_constant__ HeadProductArgs<__nv_bfloat16> a) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Matrix = PaddedMatrix<kHeadTile>;
  const auto matrix = [&](int i) { return Matrix{reinterpret_cast<__nv_bfloat16*>(shared + i * kHeadTile * Matrix::kRowBytes)}; };
  const int n0 = static_cast<int>(blockIdx.x) * kN, t0 = static_cast<int>(blockIdx.y) * kHeadTile, h = static_cast<int>(blockIdx.z);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const __nv_bfloat16* const w = a.w + h * a.w_step;
  const int steps = (a.K + kHeadTile - 1) / kHeadTile;
  constexpr int kPieces = kHeadTile / 8, kWeightPieces = kRows ? kPieces : kN / 8, kWeightRows = kRows ? kN : kHeadTile;
  const auto copy_weight = [&](int step) {
    const Matrix b = matrix(kHeadStages + step % kHeadStages);
    for (int i = static_cast<int>(threadIdx.x); i < kWeightRows * kWeightPieces; i += kHeadThreads) {
      const int row = i / kWeightPieces, column = i % kWeightPieces * 8;
      const int n = kRows ? n0 + row : n0 + column, k = step * kHeadTile + (kRows ? column : row);
      const bool exists = n < a.N && k < a.K;
      copy_16(b.at(row, column), exists ? w + static_cast<std::int64_t>(kRows ? n : k) * a.w_stride + (kRows ? k : n) : w, exists);
    }
  };
  const auto copy_inputs = [&](int step) {
    const Matrix m = matrix(step % kHeadStages);
    for (int i = static_cast<int>(threadIdx.x); i < kHeadTile * kPieces; i += kHeadThreads) {
      const int row = i / kPieces, k = step * kHeadTile + i % kPieces * 8;
      const bool exists = t0 + row < a.num_tokens && k < a.K;
      copy_16(m.at(row, i % kPieces * 8), exists ? a.x + (t0 + row) * a.x_stride + h * a.x_step + k : a.x, exists);
    }
  };
  const bool is_key = a.rotary.positions != nullptr && h == a.rotary.H;
  let_next_begin();
  // Weights are not what kernels before this one write.
  for (int s = 0; s < kHeadStages - 1 && s < steps && !is_key; ++s) copy_weight(s);
  wait_for_previous();
  for (int s = 0; s < kHeadStages - 1; ++s) {
    if (s < steps && !is_key) copy_inputs(s);
    copies_commit();
  }
  if (a.rotary.positions != nullptr) {  // blocks of a head share its tokens: one after another they take longer than the product
    constexpr int kWarps = kHeadThreads / 32;
    for (int t = t0 + static_cast<int>(blockIdx.x) * kWarps + warp; t < min(a.num_tokens, t0 + kHeadTile);
         t += static_cast<int>(gridDim.x) * kWarps)
      rotate_latent_head(a.rotary, t, h, lane, 32);
  }
  if (is_key) return;
  float out[kN / 2] = {};
  for (int s = 0; s < steps; ++s) {
    copies_wait<kHeadStages - 2>();
    __syncthreads();
    if (s + kHeadStages - 1 < steps) {
      copy_weight(s + kHeadStages - 1);
      copy_inputs(s + kHeadStages - 1);
    }
    copies_commit();
    const Matrix m = matrix(s % kHeadStages), b = matrix(kHeadStages + s % kHeadStages);
#pragma unroll
    for (int k = 0; k < kHeadTile; k += 16) {
      std::uint32_t left[4];
      m.left(left, 16 * warp, k);
#pragma unroll
      for (int n = 0; n < kN; n += 16) {
        std::uint32_t right[4];
        if constexpr (kRows)
          b.right_rows(right, n, k);
        else
          b.right_columns(right, k, n);
        multiply_add(out + n / 2, left, right[0], right[1]);
        multiply_add(out + n / 2 + 4, left, right[2], right[3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kN / 2; i += 2) {
    const int t = t0 + 16 * warp + lane / 4 + 8 * (i / 2 % 2), n = n0 + i / 4 * 8 + 2 * (lane % 4);
    if (t >= a.num_tokens || n >= a.N) continue;
    *reinterpret_cast<std::uint32_t*>(a.y + t * a.y_stride + h * a.y_step + n) = pack_bf16(out[i], out[i + 1]);
  }
}

/// The same in fp32, for proofs and small models: a thread per output.
template <bool kRows>
__global__ void __launch_bounds__(kHeadThreads) head_product_f32_kernel(const __grid_constant__ HeadProductArgs<float> a) {
  let_next_begin();
  wait_for_previous();
  const int n = static_cast<int>(blockIdx.x * kHeadThreads + threadIdx.x), h = static_cast<int>(blockIdx.z);
  if (a.rotary.positions != nullptr && blockIdx.x == 0)
    for (int t = static_cast<int>(blockIdx.y); t < a.num_tokens; t += static_cast<int>(gridDim.y))
      rotate_latent_head(a.rotary, t, h, static_cast<int>(threadIdx.x), kHeadThreads);
  if (n >= a.N || (a.rotary.positions != nullptr && h == a.rotary.H)) return;
  const float* const w = a.w + h * a.w_step;
  for (int t = static_cast<int>(blockIdx.y); t < a.num_tokens; t += static_cast<int>(gridDim.y)) {
    const float* const x = a.x + t * a.x_stride + h * a.x_step;
    float sum = 0.0f;
    for (int k = 0; k < a.K; ++k) sum = fmaf(x[k], w[static_cast<std::int64_t>(kRows ? n : k) * a.w_stride + (kRows ? k : n)], sum);
    a.y[t * a.y_stride + h * a.y_step + n] = sum;
  }
}

template <typename T>
dim3 head_grid(const HeadProductArgs<T>& a, int num_heads, int outputs_of_block, std::int64_t blocks_of_tokens) {
  return {static_cast<unsigned>(ceil_div(a.N, outputs_of_block)), static_cast<unsigned>(blocks_of_tokens),
          static_cast<unsigned>(num_heads + (a.rotary.positions != nullptr ? 1 : 0))};
}
template <bool kRows>
void launch_head_products(OpContext& ctx, const HeadProductArgs<float>& a, int num_heads) {
  launch_chained(stream_of(ctx), head_product_f32_kernel<kRows>, head_grid(a, num_heads, kHeadThreads, std::min(a.num_tokens, 32768)),
                 dim3(kHeadThreads), 0, a);
}
template <bool kRows, int kN>
void launch_head_tiles(OpContext& ctx, const HeadProductArgs<__nv_bfloat16>& a, int num_heads) {
  constexpr int kShared = 2 * kHeadStages * kHeadTile * PaddedMatrix<kHeadTile>::kRowBytes;
  PRL_CUDA_CHECK(cudaFuncSetAttribute(head_product_kernel<kRows, kN>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_chained(stream_of(ctx), head_product_kernel<kRows, kN>, head_grid(a, num_heads, kN, ceil_div(a.num_tokens, kHeadTile)),
                 dim3(kHeadThreads), kShared, a);
}
template <bool kRows>
void launch_head_products(OpContext& ctx, const HeadProductArgs<__nv_bfloat16>& a, int num_heads) {
  // Of few tokens the weights are what is waited for: more blocks read them side by side.
  if (a.num_tokens <= 16)
    launch_head_tiles<kRows, kHeadTile / 2>(ctx, a, num_heads);
  else
    launch_head_tiles<kRows, kHeadTile>(ctx, a, num_heads);
}

void check_rows_of_16(const char* what, const ConstTensorView& v) {
  if (!is_aligned(v.data, 16) || v.row_stride * static_cast<std::int64_t>(size_of(v.dtype)) % 16 != 0)
    fail(ErrorCode::kShape, "[ops] latent attention on CUDA: rows of {} must start at multiples of 16 bytes", what);
}

void form_queries(OpContext& ctx, TensorView out_TE, void* key, const std::int32_t* slots, ConstTensorView q_TQ, ConstTensorView latent_TL,
                  ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& h, const RopeTable& rope,
                  ConstTensorView positions_T) {
  check_rows_of_16("q", q_TQ);
  const auto L = static_cast<int>(up.num_inputs()), R = static_cast<int>(h.rotary_dim), N = static_cast<int>(h.plain_dim);
  const DenseWeight& w = dense(ctx, up);
  PRL_CHECK(w.has_values(), "a matrix of latent attention without values");
  with_type(out_TE.dtype, [&](auto type) {
    using T = decltype(type);
    const HeadProductArgs<T> product{.x = q_TQ.as<T>(),
                                     .w = w.w_NK.template as<T>(),
                                     .y = out_TE.as<T>() + R,
                                     .x_stride = q_TQ.row_stride,
                                     .y_stride = out_TE.row_stride,
                                     .x_step = N + R,
                                     .y_step = R + L,
                                     .w_step = static_cast<std::int64_t>(N + h.value_dim) * L,
                                     .w_stride = L,
                                     .num_tokens = static_cast<int>(out_TE.shape.num_rows()),
                                     .K = N,
                                     .N = L,
                                     .rotary = {.q = q_TQ.as<T>(),
                                                .latent = latent_TL.as<T>(),
                                                .rotary = rotary_TR.as<T>(),
                                                .out = out_TE.as<T>(),
                                                .key = static_cast<T*>(key),
                                                .slots = slots,
                                                .q_stride = q_TQ.row_stride,
                                                .latent_stride = latent_TL.row_stride,
                                                .rotary_stride = rotary_TR.row_stride,
                                                .positions = positions_T.as<std::int32_t>(),
                                                .cosines = rope.cos_PR2.as<float>(),
                                                .sines = rope.sin_PR2.as<float>(),
                                                .num_positions = rope.cos_PR2.shape()[0],
                                                .H = static_cast<int>(h.num_heads),
                                                .N = N,
                                                .R = R,
                                                .L = L,
                                                .neighbours = h.are_pairs_neighbours,
                                                .fault = fault_word_of(ctx)}};
    launch_head_products<false>(ctx, product, static_cast<int>(h.num_heads));
  });
}

}  // namespace

void latent_queries(OpContext& ctx, TensorView out_TE, TensorView key_TK, ConstTensorView q_TQ, ConstTensorView latent_TL,
                    ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& h, const RopeTable& rope,
                    ConstTensorView positions_T) {
  form_queries(ctx, out_TE, key_TK.data, nullptr, q_TQ, latent_TL, rotary_TR, up, h, rope, positions_T);
}

void latent_queries_to_cache(OpContext& ctx, TensorView out_TE, const KvLayer& layer, ConstTensorView slot_T, ConstTensorView q_TQ,
                             ConstTensorView latent_TL, ConstTensorView rotary_TR, const LinearWeight& up, const LatentHeads& h,
                             const RopeTable& rope, ConstTensorView positions_T) {
  // There is one key head, so that slots are rows of the cache.
  form_queries(ctx, out_TE, layer.k.data, slot_T.as<std::int32_t>(), q_TQ, latent_TL, rotary_TR, up, h, rope, positions_T);
}

void latent_values(OpContext& ctx, TensorView y_TV, ConstTensorView x_TL, const LinearWeight& up, const LatentHeads& h) {
  check_rows_of_16("x", x_TL);
  const auto L = static_cast<int>(up.num_inputs()), N = static_cast<int>(h.plain_dim), V = static_cast<int>(h.value_dim);
  const DenseWeight& w = dense(ctx, up);
  PRL_CHECK(w.has_values(), "a matrix of latent attention without values");
  with_type(y_TV.dtype, [&](auto type) {
    using T = decltype(type);
    const HeadProductArgs<T> product{.x = x_TL.as<T>(),
                                     .w = w.w_NK.template as<T>() + static_cast<std::int64_t>(N) * L,
                                     .y = y_TV.as<T>(),
                                     .x_stride = x_TL.row_stride,
                                     .y_stride = y_TV.row_stride,
                                     .x_step = L,
                                     .y_step = V,
                                     .w_step = static_cast<std::int64_t>(N + V) * L,
                                     .w_stride = L,
                                     .num_tokens = static_cast<int>(y_TV.shape.num_rows()),
                                     .K = L,
                                     .N = V,
                                     .rotary = {}};
    launch_head_products<true>(ctx, product, static_cast<int>(h.num_heads));
  });
}

}  // namespace prl::ops::cuda
