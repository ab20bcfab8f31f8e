#include <type_traits>

#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/head.cuh"
#include "ops/cuda/mma.cuh"
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
  int heads, kv_heads, rows_per_token, dim, rotated;
  float inverse_dim;
  ::prl::cuda::FaultWord* fault;
};

/// kLanes threads, of 8 elements each, share a head: a power of two, as in norm.cu. They take kHeads neighbouring heads of one token,
/// whose position and angles they read once. kEven: all of a group are of q, or all of k.
template <typename T, int kLanes, bool kNorm, bool kCache, int kHeads, bool kEven = false>
struct NormRope {
  const NormRopeArgs<T>& a;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, c = lane * kVec, half = a.rotated / 2, partner = partner_of<kLanes>(a.rotated);
  const bool is_first = c < half, turns = c < a.rotated;

  struct Group {
    std::uint32_t token;
    int first_head, num_heads;
  };
  __device__ __forceinline__ Group group_at(std::uint32_t index) const {
    const auto groups_per_token = static_cast<std::uint32_t>((a.rows_per_token + kHeads - 1) / kHeads);
    const std::uint32_t token = index / groups_per_token;
    const int first_head = static_cast<int>(index - token * groups_per_token) * kHeads;
    return {token, first_head, token < a.num_tokens && c < a.dim ? min(kHeads, a.rows_per_token - first_head) : 0};
  }
  __device__ __forceinline__ bool has(const Group& g, int h) const { return kEven ? g.num_heads > 0 : h < g.num_heads; }
  __device__ __forceinline__ const T* head_at(const Group& g, int h) const {
    return a.qkv + g.token * a.qkv_stride + (g.first_head + h) * a.dim + c;
  }
  __device__ __forceinline__ const float* norm_of(int head) const { return (head < a.heads ? a.q_norm : a.k_norm) + c; }
  __device__ __forceinline__ bool is_value(int head) const { return kCache && head >= a.heads + a.kv_heads; }

  /// By all threads of a warp.
  __device__ __forceinline__ void run(const Group& g, const Raw<T> (&raw)[kHeads]) const {
    float cosine[kVec] = {}, sine[kVec] = {};
    bool has_place = true;
    if (g.num_heads > 0 && !is_value(g.first_head)) {
      const std::int32_t position = a.positions[g.token];
      has_place = position >= 0 && position < a.num_positions;
      if (has_place && turns) {
        const std::int64_t at = static_cast<std::int64_t>(position) * half + (is_first ? c : c - half);
        load<true>(cosine, a.cosines + at, kVec);
        load<true>(sine, a.sines + at, kVec);
        sign_sines(sine, is_first);
      } else if (!has_place) {
        ::prl::cuda::report(a.fault, ::prl::cuda::Fault::kRopePosition, g.token);
      }
    }

    float w[kVec] = {}, squares[kHeads] = {};
    if constexpr (kNorm) {  // the heads' sums side by side: each step of one waits for the step before
      if (kEven && g.num_heads > 0) load<true>(w, norm_of(g.first_head), kVec);
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
      const int head = g.first_head + h;
      const bool is_live = has(g, h), rotates = is_live && !is_value(head);
      Raw<T> own = raw[h];
      float v[kVec], other[kVec];
      if constexpr (kNorm) {
        // The weights are those of the head before, but for the first of q and of k.
        if (!kEven && rotates && (h == 0 || head == a.heads)) load<true>(w, norm_of(head), kVec);
        if (kEven || rotates) {
          own.unpack(v);
          norm_by(v, w, norm_scale(squares[h], a.inverse_dim, a.eps));
          own.pack(v);
        }
      }
      own.unpack(v);
      own.template of_lane<kLanes>(partner).unpack(other);
      if ((kEven || rotates) && turns) rotate_head(v, other, cosine, sine);
      if (!is_live || !has_place) continue;
      if (!kCache || head < a.heads) {
        store<true>(a.qk + g.token * a.qk_stride + head * a.dim + c, v, kVec);
        continue;
      }
      const std::int32_t slot = a.slots[g.token];
      if (slot < 0) continue;
      const int kv_head = is_value(head) ? head - a.heads - a.kv_heads : head - a.heads;
      const std::int64_t at =
          ((static_cast<std::int64_t>(slot / a.block_size) * a.kv_heads + kv_head) * a.block_size + slot % a.block_size) * a.dim;
      store<true>((is_value(head) ? a.v_cache : a.k_cache) + at + c, v, kVec);
    }
  }
};

template <typename T, int kLanes, bool kNorm, bool kCache, int kHeads>
__global__ void __launch_bounds__(kBlock) norm_rope_kernel(const __grid_constant__ NormRopeArgs<T> a) {
  const NormRope<T, kLanes, kNorm, kCache, kHeads> n{a};
  const auto g = n.group_at(blockIdx.x * (kBlock / kLanes) + threadIdx.x / kLanes);
  let_next_begin();
  if (kNorm && kHeads == 1 && g.num_heads > 0 && !n.is_value(g.first_head)) prefetch_weight(n.norm_of(g.first_head));
  wait_for_previous();
  Raw<T> raw[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h)
    if (h < g.num_heads) raw[h].read(n.head_at(g, h));
  n.run(g, raw);
}

/// Many tokens and norms, with heads of q and of k in whole groups: persistent blocks that prefetch heads into shared memory, where each
/// thread has a slot of its own, so that they take no registers and need no synchronisation.
constexpr int kManyHeads = 4, kManyStages = 3, kManyBlocks = 3;
template <int kLanes>
__global__ void __launch_bounds__(kBlock, kManyBlocks) norm_rope_many_kernel(const __grid_constant__ NormRopeArgs<__nv_bfloat16> a) {
  __shared__ uint4 ahead[kManyStages][kManyHeads][kBlock];
  const NormRope<__nv_bfloat16, kLanes, true, false, kManyHeads, true> n{a};
  constexpr std::uint32_t kGroups = kBlock / kLanes;
  const std::uint32_t step = gridDim.x * kGroups;
  std::uint32_t at = blockIdx.x * kGroups + threadIdx.x / kLanes;
  const auto ask = [&](std::uint32_t index, int stage) {
    const auto g = n.group_at(index);
    if (g.num_heads > 0)
#pragma unroll
      for (int h = 0; h < kManyHeads; ++h) copy_16(&ahead[stage][h][threadIdx.x], n.head_at(g, h), true);
    copies_commit();
  };
  let_next_begin();
  wait_for_previous();
  for (int s = 0; s + 1 < kManyStages; ++s) ask(at + static_cast<std::uint32_t>(s) * step, s);
  int stage = 0;
  for (std::uint32_t first = blockIdx.x * kGroups; n.group_at(first).token < a.num_tokens; first += step, at += step) {
    ask(at + (kManyStages - 1) * step, stage == 0 ? kManyStages - 1 : stage - 1);
    copies_wait<kManyStages - 1>();
    const auto g = n.group_at(at);
    Raw<__nv_bfloat16> raw[kManyHeads] = {};
    if (g.num_heads > 0)
#pragma unroll
      for (int h = 0; h < kManyHeads; ++h) *reinterpret_cast<uint4*>(raw[h].words) = ahead[stage][h][threadIdx.x];
    n.run(g, raw);
    stage = stage + 1 == kManyStages ? 0 : stage + 1;
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
  int q_groups, heads, kv_heads, dim, rotated;
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
  const int c = lane * kVec, half = a.rotated / 2, partner = partner_of<kLanes>(a.rotated);
  const bool has_columns = c < a.dim, is_first = c < half, turns = c < a.rotated;
  float w[kVec] = {}, dw[kVec] = {};
  if (has_columns) load<true>(w, (is_q ? a.q_norm : a.k_norm) + c, kVec);
  // The position of a row is asked for while the one before it is summed: without it no angle can be.
  const std::uint32_t token_step = kRows / heads, head_step = kRows % heads;
  std::uint32_t row = begin + static_cast<std::uint32_t>(slot), token = row / heads, head_of_kind = row % heads;
  const auto position_of = [&](std::uint32_t row, std::uint32_t token) { return row < end && has_columns ? a.positions[token] : 0; };
  std::int32_t position = position_of(row, token);
  const std::uint32_t turn = is_first ? 0 : sizeof(T) == 2 ? 0x80008000u : 0x80000000u;  // back: the second half's partners are negative
  for (std::uint32_t base = begin; base < end; base += kRows) {
    const int head = first_head + static_cast<int>(head_of_kind);
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
      if (turns) {
        load<true>(cosine, a.cosines + at, kVec);
        load<true>(sine, a.sines + at, kVec);
      }
    }
    T* const d_row = a.dqkv + token * a.dqkv_stride + head * a.dim + c;
    row += kRows;
    token += token_step;
    head_of_kind += head_step;
    if (head_of_kind >= heads) {
      head_of_kind -= heads;
      ++token;
    }
    position = position_of(row, token);
    float dy[kVec], x[kVec], other[kVec];
    raw_dy.unpack(dy);
    raw_x.unpack(x);
    Raw<T> raw_other = raw_dy.template of_lane<kLanes>(partner);
#pragma unroll
    for (std::uint32_t& w : raw_other.words) w ^= turn;
    raw_other.unpack(other);
    if (turns) rotate_head(dy, other, cosine, sine);
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
  return in.head_dim % kVec == 0 && in.rope->num_pairs() % kVec == 0 && in.head_dim <= kWarp * kVec && fits(in.qkv_TE) &&
         is_aligned(in.q_norm_D.data, 16) && is_aligned(in.k_norm_D.data, 16) && is_aligned(in.rope->cos_PR2.data(), 16) &&
         is_aligned(in.rope->sin_PR2.data(), 16);
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
  a.cosines = in.rope->cos_PR2.as<float>();
  a.sines = in.rope->sin_PR2.as<float>();
  a.num_positions = in.rope->cos_PR2.shape()[0];
  a.heads = static_cast<int>(in.num_heads);
  a.kv_heads = static_cast<int>(in.num_kv_heads);
  a.dim = static_cast<int>(in.head_dim);
  a.rotated = static_cast<int>(2 * in.rope->num_pairs());
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
        if (tokens >= kManyTokens) {
          if constexpr (decltype(has_norm)::value && !kCache) {
            if (a.heads % kManyHeads == 0 && a.kv_heads % kManyHeads == 0) {
              const std::int64_t groups = tokens * (a.rows_per_token / kManyHeads);
              PRL_CHECK(groups < std::int64_t{1} << 31, "{} tokens in one launch", tokens);
              const std::int64_t blocks = std::min<std::int64_t>(ceil_div(groups, kBlock / kLanes), kManyBlocks * num_multiprocessors(ctx));
              return launch_chained(stream_of(ctx), norm_rope_many_kernel<kLanes>, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), 0, a);
            }
          }
          return launch(std::integral_constant<int, 4>{});
        }
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
    a.cosines = in.rope->cos_PR2.as<float>();
    a.sines = in.rope->sin_PR2.as<float>();
    a.num_positions = in.rope->cos_PR2.shape()[0];
    a.q_rows = static_cast<std::uint32_t>(q_rows);
    a.k_rows = static_cast<std::uint32_t>(k_rows);
    a.group_rows = static_cast<std::uint32_t>(group_rows);
    a.q_groups = static_cast<int>(q_groups);
    a.heads = static_cast<int>(in.num_heads);
    a.kv_heads = static_cast<int>(in.num_kv_heads);
    a.dim = static_cast<int>(in.head_dim);
    a.rotated = static_cast<int>(2 * in.rope->num_pairs());
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
