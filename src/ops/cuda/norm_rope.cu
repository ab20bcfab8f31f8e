#include <type_traits>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/head.cuh"
#include "ops/cuda/sums.hpp"

// Norm and rotation of heads in one pass, and on the way into the cache: head.cuh has the arithmetic.

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 256;
constexpr std::int64_t kManyTokens = 1024;

template <typename T>
struct NormRopeArgs {
  const T* qkv;
  T* qk;  ///< q, and k behind it unless the cache takes k
  std::int64_t qkv_stride, qk_stride;
  T* k_cache;  ///< [num_blocks, kv_heads, block_size, D]
  T* v_cache;
  const std::int32_t* slots;
  int block_size;
  const float* q_norm;  ///< null: no norms
  const float* k_norm;
  float eps;
  const std::int32_t* positions;
  const float* cosines;
  const float* sines;
  std::int64_t num_positions;
  std::uint32_t num_tokens;
  int heads, kv_heads, rows_per_token, dim;
  float inverse_dim;
  ::prl::cuda::FaultWord* fault;
};

/// kLanes threads, of 8 elements each, share a head: a power of two, as in norm.cu. They take kHeads neighbouring heads of one token,
/// whose position and angles they read once.
template <typename T, int kLanes, bool kNorm, bool kCache, int kHeads>
__global__ void __launch_bounds__(kBlock) norm_rope_kernel(const __grid_constant__ NormRopeArgs<T> a) {
  const std::uint32_t group = blockIdx.x * (kBlock / kLanes) + threadIdx.x / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, c = lane * kVec, half = a.dim / 2;
  const auto groups_per_token = static_cast<std::uint32_t>((a.rows_per_token + kHeads - 1) / kHeads);
  const std::uint32_t token = group / groups_per_token;
  const int first_head = static_cast<int>(group - token * groups_per_token) * kHeads;
  const int num_heads = token < a.num_tokens && c < a.dim ? min(kHeads, a.rows_per_token - first_head) : 0;
  const bool is_first = c < half;
  const auto norm_of = [&](int head) { return (head < a.heads ? a.q_norm : a.k_norm) + c; };
  const auto is_value = [&](int head) { return kCache && head >= a.heads + a.kv_heads; };
  let_next_begin();
  if (kNorm && kHeads == 1 && num_heads > 0 && !is_value(first_head)) prefetch_weight(norm_of(first_head));
  wait_for_previous();

  Raw<T> raw[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (h < num_heads) raw[h].read(a.qkv + token * a.qkv_stride + (first_head + h) * a.dim + c);
  float cosine[kVec] = {}, sine[kVec] = {};
  bool has_place = true;
  if (num_heads > 0 && !is_value(first_head)) {
    const std::int32_t position = a.positions[token];
    has_place = position >= 0 && position < a.num_positions;
    if (has_place) {
      const std::int64_t at = static_cast<std::int64_t>(position) * half + (is_first ? c : c - half);
      load<true>(cosine, a.cosines + at, kVec);
      load<true>(sine, a.sines + at, kVec);
      sign_sines(sine, is_first);
    } else {
      ::prl::cuda::report(a.fault, ::prl::cuda::Fault::kRopePosition, token);
    }
  }

  float w[kVec] = {}, squares[kHeads] = {};
  if constexpr (kNorm) {  // the heads' sums side by side: each step of one waits for the step before
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float v[kVec];
      raw[h].unpack(v);
      squares[h] = squares_of(v);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2)
#pragma unroll
      for (int h = 0; h < kHeads; ++h) squares[h] += __shfl_xor_sync(kFullWarp, squares[h], step, kLanes);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = first_head + h;
    const bool is_live = h < num_heads, rotates = is_live && !is_value(head);
    float v[kVec], other[kVec];
    raw[h].unpack(v);
    if constexpr (kNorm) {
      // The weights are those of the head before, but for the first of q and of k.
      if (rotates && (h == 0 || head == a.heads)) load<true>(w, norm_of(head), kVec);
      if (rotates) norm_by<T>(v, w, norm_scale(squares[h], a.inverse_dim, a.eps));
    }
    partners_of<T, kLanes>(other, v, a.dim);
    if (rotates) rotate_head(v, other, cosine, sine);
    if (!is_live || !has_place) continue;
    if (!kCache || head < a.heads) {
      store<true>(a.qk + token * a.qk_stride + head * a.dim + c, v, kVec);
      continue;
    }
    const std::int32_t slot = a.slots[token];
    if (slot < 0) continue;
    const int kv_head = is_value(head) ? head - a.heads - a.kv_heads : head - a.heads;
    const std::int64_t at =
        ((static_cast<std::int64_t>(slot / a.block_size) * a.kv_heads + kv_head) * a.block_size + slot % a.block_size) * a.dim;
    store<true>((is_value(head) ? a.v_cache : a.k_cache) + at + c, v, kVec);
  }
}

/// Blocks of the backward pass: each takes neighbouring heads of q or of k, sums its share of dw in order, and the shares are
/// added in order.
constexpr std::int64_t kMaxGroups = 528;
constexpr std::int64_t kMinGroupRows = 64;

template <typename T>
struct NormRopeBackwardArgs {
  T* dqkv;
  const T* dqk;
  const T* qkv;
  std::int64_t dqkv_stride, dqk_stride, qkv_stride;
  const float* q_norm;
  const float* k_norm;
  float eps;
  const std::int32_t* positions;
  const float* cosines;
  const float* sines;
  std::int64_t num_positions;
  std::uint32_t q_rows, k_rows, group_rows;
  int q_groups, heads, kv_heads, dim;
  float inverse_dim;
  float* partial_dw;  ///< [groups of q, then of k, dim]
  ::prl::cuda::FaultWord* fault;
};

template <typename T, int kLanes>
__global__ void __launch_bounds__(kBlock, 4) norm_rope_backward_kernel(const __grid_constant__ NormRopeBackwardArgs<T> a) {
  constexpr int kRows = kBlock / kLanes;
  __shared__ float dw_rows[kRows][kLanes * kVec];
  const bool is_q = static_cast<int>(blockIdx.x) < a.q_groups;
  const std::uint32_t group = is_q ? blockIdx.x : blockIdx.x - static_cast<std::uint32_t>(a.q_groups);
  const std::uint32_t begin = group * a.group_rows, end = min(is_q ? a.q_rows : a.k_rows, begin + a.group_rows);
  const auto heads = static_cast<std::uint32_t>(is_q ? a.heads : a.kv_heads);
  const int first_head = is_q ? 0 : a.heads;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, slot = static_cast<int>(threadIdx.x) / kLanes;
  const int c = lane * kVec, half = a.dim / 2, partner = partner_of<kLanes>(a.dim);
  const bool has_columns = c < a.dim, is_first = c < half;
  float w[kVec] = {}, dw[kVec] = {};
  if (has_columns) load<true>(w, (is_q ? a.q_norm : a.k_norm) + c, kVec);
  // The position of a row is asked for while the one before it is summed: without it no angle can be.
  const auto token_of = [&](std::uint32_t row) { return row / heads; };
  const auto position_of = [&](std::uint32_t row, std::uint32_t token) { return row < end && has_columns ? a.positions[token] : 0; };
  std::uint32_t row = begin + static_cast<std::uint32_t>(slot), token = token_of(row);
  std::int32_t position = position_of(row, token);
  for (std::uint32_t base = begin; base < end; base += kRows) {
    const int head = first_head + static_cast<int>(row - token * heads);
    const bool is_live = row < end && has_columns;
    Raw<T> raw_dy = {}, raw_x = {};
    float cosine[kVec] = {}, sine[kVec] = {};
    if (is_live) {
      raw_dy.read(a.dqk + token * a.dqk_stride + head * a.dim + c);
      raw_x.read(a.qkv + token * a.qkv_stride + head * a.dim + c);
      if (position < 0 || position >= a.num_positions) {
        ::prl::cuda::report(a.fault, ::prl::cuda::Fault::kRopePosition, token);
        position = 0;
      }
      const std::int64_t at = static_cast<std::int64_t>(position) * half + (is_first ? c : c - half);
      load<true>(cosine, a.cosines + at, kVec);
      load<true>(sine, a.sines + at, kVec);
    }
    T* const d_row = a.dqkv + token * a.dqkv_stride + head * a.dim + c;
    row += kRows;
    token = token_of(row);
    position = position_of(row, token);
    float dy[kVec], x[kVec], other[kVec];
    raw_dy.unpack(dy);
    raw_x.unpack(x);
    raw_dy.template of_lane<kLanes>(partner).unpack(other);
    sign_sines(sine, !is_first);  // back
    rotate_head(dy, other, cosine, sine);
    round_all<T>(dy);
    float squares = 0.0f, dots = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      squares = fmaf(x[i], x[i], squares);
      dots = fmaf(dy[i] * w[i], x[i], dots);
    }
    squares = warp_sum<kLanes>(squares);
    dots = warp_sum<kLanes>(dots);
    if (!is_live) continue;
    const float scale = norm_scale(squares, a.inverse_dim, a.eps);
    const float k = dots * scale * scale * scale * a.inverse_dim;
    float d[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      dw[i] = fmaf(dy[i], x[i] * scale, dw[i]);
      d[i] = fmaf(-k, x[i], dy[i] * w[i] * scale);
    }
    store<true>(d_row, d, kVec);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) dw_rows[slot][c + i] = dw[i];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < a.dim; i += kBlock) {
    float total = 0.0f;
    for (int r = 0; r < kRows; ++r) total += dw_rows[r][i];
    a.partial_dw[static_cast<std::int64_t>(blockIdx.x) * a.dim + i] = total;
  }
}

bool fits(const ConstTensorView& v) {
  return is_aligned(v.data, 16) && (v.shape.num_rows() <= 1 || v.row_stride * static_cast<std::int64_t>(size_of(v.dtype)) % 16 == 0);
}
bool fits(const HeadInputs& in) {
  return in.head_dim % (2 * kVec) == 0 && in.head_dim <= kWarp * kVec && fits(in.qkv_TE) && is_aligned(in.q_norm_D.data, 16) &&
         is_aligned(in.k_norm_D.data, 16) && is_aligned(in.rope->cos_PD2.data(), 16) && is_aligned(in.rope->sin_PD2.data(), 16);
}

template <typename T>
NormRopeArgs<T> args_of(OpContext& ctx, const TensorView& qk, const HeadInputs& in) {
  NormRopeArgs<T> a{};
  a.qkv = in.qkv_TE.as<T>();
  a.qkv_stride = in.qkv_TE.row_stride;
  a.qk = qk.as<T>();
  a.qk_stride = qk.row_stride;
  a.q_norm = in.q_norm_D.as<float>();
  a.k_norm = in.k_norm_D.as<float>();
  a.eps = in.eps;
  a.positions = in.positions_T.as<std::int32_t>();
  a.cosines = in.rope->cos_PD2.as<float>();
  a.sines = in.rope->sin_PD2.as<float>();
  a.num_positions = in.rope->cos_PD2.shape()[0];
  a.heads = static_cast<int>(in.num_heads);
  a.kv_heads = static_cast<int>(in.num_kv_heads);
  a.dim = static_cast<int>(in.head_dim);
  a.inverse_dim = 1.0f / static_cast<float>(a.dim);
  a.fault = fault_word_of(ctx);
  return a;
}

/// Calls body with the number of threads that share a head.
template <typename Body>
void with_lanes(std::int64_t dim, Body&& body) {
  if (dim <= 64)
    body(std::integral_constant<int, 8>{});
  else if (dim <= 128)
    body(std::integral_constant<int, 16>{});
  else
    body(std::integral_constant<int, 32>{});
}

template <bool kCache, typename T>
void launch(OpContext& ctx, NormRopeArgs<T>& a, std::int64_t tokens) {
  a.rows_per_token = a.heads + (kCache ? 2 : 1) * a.kv_heads;
  a.num_tokens = static_cast<std::uint32_t>(tokens);
  with_lanes(a.dim, [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    with_bool(a.q_norm != nullptr, [&](auto has_norm) {
      const auto launch = [&](auto heads) {
        constexpr int kHeads = decltype(heads)::value;
        const std::int64_t groups = tokens * ceil_div(a.rows_per_token, kHeads);
        PRL_CHECK(groups < std::int64_t{1} << 31, "{} tokens in one launch", tokens);
        launch_chained(stream_of(ctx), norm_rope_kernel<T, kLanes, decltype(has_norm)::value, kCache, kHeads>,
                       dim3(static_cast<unsigned>(ceil_div(groups, kBlock / kLanes))), dim3(kBlock), 0, a);
      };
      // Few tokens are spread as widely as they can be. fp32 is not worth kernels of its own.
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if (tokens >= kManyTokens) return launch(std::integral_constant<int, 4>{});
      }
      launch(std::integral_constant<int, 1>{});
    });
  });
}

}  // namespace

bool norm_rope(OpContext& ctx, TensorView qk_TE, const HeadInputs& in) {
  if (!fits(in) || !fits(qk_TE)) return false;
  with_type(qk_TE.dtype, [&](auto t) {
    auto a = args_of<decltype(t)>(ctx, qk_TE, in);
    launch<false>(ctx, a, qk_TE.shape.num_rows());
  });
  return true;
}

bool norm_rope_backward(OpContext& ctx, TensorView dqkv_TE, TensorView dq_norm_D, TensorView dk_norm_D, TensorView dqk_TE,
                        const HeadInputs& in) {
  if (!fits(in) || !fits(dqkv_TE) || !fits(dqk_TE)) return false;
  const std::int64_t tokens = dqk_TE.shape.num_rows(), q_rows = tokens * in.num_heads, k_rows = tokens * in.num_kv_heads;
  const std::int64_t group_rows = std::max(kMinGroupRows, ceil_div(q_rows + k_rows, kMaxGroups));
  const std::int64_t q_groups = ceil_div(q_rows, group_rows), k_groups = ceil_div(k_rows, group_rows);
  PRL_CHECK(q_rows + group_rows < std::int64_t{1} << 32, "{} tokens in one launch", tokens);
  auto* partial =
      static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>((q_groups + k_groups) * in.head_dim) * sizeof(float)));
  with_type(dqk_TE.dtype, [&](auto t) {
    using T = decltype(t);
    NormRopeBackwardArgs<T> a{};
    a.dqkv = dqkv_TE.as<T>();
    a.dqkv_stride = dqkv_TE.row_stride;
    a.dqk = dqk_TE.as<T>();
    a.dqk_stride = dqk_TE.row_stride;
    a.qkv = in.qkv_TE.as<T>();
    a.qkv_stride = in.qkv_TE.row_stride;
    a.q_norm = in.q_norm_D.as<float>();
    a.k_norm = in.k_norm_D.as<float>();
    a.eps = in.eps;
    a.positions = in.positions_T.as<std::int32_t>();
    a.cosines = in.rope->cos_PD2.as<float>();
    a.sines = in.rope->sin_PD2.as<float>();
    a.num_positions = in.rope->cos_PD2.shape()[0];
    a.q_rows = static_cast<std::uint32_t>(q_rows);
    a.k_rows = static_cast<std::uint32_t>(k_rows);
    a.group_rows = static_cast<std::uint32_t>(group_rows);
    a.q_groups = static_cast<int>(q_groups);
    a.heads = static_cast<int>(in.num_heads);
    a.kv_heads = static_cast<int>(in.num_kv_heads);
    a.dim = static_cast<int>(in.head_dim);
    a.inverse_dim = 1.0f / static_cast<float>(a.dim);
    a.partial_dw = partial;
    a.fault = fault_word_of(ctx);
    with_lanes(in.head_dim, [&](auto lanes) {
      norm_rope_backward_kernel<T, decltype(lanes)::value><<<static_cast<unsigned>(q_groups + k_groups), kBlock, 0, stream_of(ctx)>>>(a);
    });
    PRL_CUDA_CHECK(cudaGetLastError());
  });
  add_rows(ctx, dq_norm_D.as<float>(), partial, q_groups, in.head_dim);
  add_rows(ctx, dk_norm_D.as<float>(), partial + q_groups * in.head_dim, k_groups, in.head_dim);
  return true;
}

void norm_rope_to_cache(OpContext& ctx, TensorView q_TE, const KvLayer& layer, ConstTensorView slot_T, const HeadInputs& in) {
  if (!fits(in) || !fits(q_TE))
    fail(ErrorCode::kNotImplemented, "[norm_rope_to_cache] heads of {} elements, or rows that are not 16-byte aligned", in.head_dim);
  with_type(q_TE.dtype, [&](auto t) {
    using T = decltype(t);
    auto a = args_of<T>(ctx, q_TE, in);
    a.k_cache = layer.k.as<T>();
    a.v_cache = layer.v.as<T>();
    a.block_size = static_cast<int>(layer.k.shape[2]);
    a.slots = slot_T.as<std::int32_t>();
    launch<true>(ctx, a, q_TE.shape.num_rows());
  });
}

}  // namespace prl::ops::cuda
