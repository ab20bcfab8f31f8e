#include <climits>

#include "base/error.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/few_rows.hpp"
#include "ops/cuda/gated.cuh"
#include "ops/cuda/greatest.cuh"
#include "ops/cuda/linear_weight.hpp"
#include "ops/experts.hpp"

namespace prl::ops::cuda {
namespace {

constexpr int kRouteWarps = 4;
constexpr int kRowBlock = 128;
/// Of sum_rows: asked for before any is added.
constexpr int kRowsAtOnce = 8;
/// From so many on a block for each fills the device.
constexpr std::int64_t kManyTokens = 512;

struct RouteArgs {
  std::int32_t* ids;
  float* weights;
  float* mass;
  const float* logits;
  std::int64_t ids_stride, weights_stride, logits_stride;
  int num_tokens, num_experts, num_active;
  bool renormalize;
  const std::int32_t* given;  ///< nullptr: none
  std::int64_t given_stride;
};

/// One warp per token; lane k keeps the k-th expert, and every lane the logits of kEach experts.
template <int kEach>
__global__ void __launch_bounds__(kRouteWarps* kWarp) route_kernel(const RouteArgs a) {
  const int t = static_cast<int>(blockIdx.x) * kRouteWarps + static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  wait_for_previous();
  let_next_begin();
  if (t >= a.num_tokens) return;
  const float* logits = a.logits + t * a.logits_stride;
  float v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) v[i] = i * kWarp + lane < a.num_experts ? logits[i * kWarp + lane] : 0.0f;
  Candidate last, mine{0.0f, 0};
  float most = 0.0f;
  const int given = given_expert(a.given, t * a.given_stride, lane, a.num_active, a.num_experts);
  if (given >= 0) {
    mine = {logits[given], given};
    most = mine.value;
    if (!a.renormalize) {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (i * kWarp + lane < a.num_experts) most = fmaxf(most, v[i]);
    }
    most = warp_max(most);
  } else {
    for (int k = 0; k < a.num_active; ++k) {
      Candidate best{-INFINITY, INT_MAX};
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (const Candidate c{v[i], i * kWarp + lane}; c.index < a.num_experts && is_behind(c, last)) take_greater(best, c);
      last = greatest_of_warp(best);
      if (k == 0) most = last.value;
      if (lane == k) mine = last;
    }
  }
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (i * kWarp + lane < a.num_experts) all += __expf(v[i] - most);
  all = warp_sum(all);
  const float weight = __expf(mine.value - most);
  float of_chosen = 0.0f;
  for (int k = 0; k < a.num_active; ++k) of_chosen += __shfl_sync(kFullWarp, weight, k);
  if (lane == 0) a.mass[t] = of_chosen / all;
  if (lane < a.num_active) {
    a.ids[t * a.ids_stride + lane] = mine.index;
    a.weights[t * a.weights_stride + lane] = weight / (a.renormalize ? of_chosen : all);
  }
}

__global__ void __launch_bounds__(kRowBlock) log_route_kernel(std::uint16_t* log, std::int64_t width, const std::int32_t* ids,
                                                              std::int64_t ids_stride, const std::int32_t* slots, int num, int num_active) {
  const int i = static_cast<int>(blockIdx.x) * kRowBlock + static_cast<int>(threadIdx.x);
  if (i >= num) return;
  const int t = i / num_active, k = i % num_active;
  if (const int slot = slots[t]; slot >= 0) log[slot * width + k] = static_cast<std::uint16_t>(ids[t * ids_stride + k]);
}

/// One warp per token: first what all experts get, then the active ones.
template <typename T>
__global__ void __launch_bounds__(kRouteWarps* kWarp)
    route_backward_kernel(T* dlogits, const float* dweights, std::int64_t dlogits_stride, std::int64_t dweights_stride, const RouteArgs a) {
  const int t = static_cast<int>(blockIdx.x) * kRouteWarps + static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  if (t >= a.num_tokens) return;
  const float* logits = a.logits + t * a.logits_stride;
  const bool is_mine = lane < a.num_active;
  const int index = is_mine ? a.ids[t * a.ids_stride + lane] : 0;
  const float w = is_mine ? a.weights[t * a.weights_stride + lane] : 0.0f, dw = is_mine ? dweights[t * dweights_stride + lane] : 0.0f;
  float mean = 0.0f;
  for (int k = 0; k < a.num_active; ++k) mean += __shfl_sync(kFullWarp, w * dw, k);
  float all = 1.0f;
  float most = -INFINITY;
  if (!a.renormalize) {
    for (int e = lane; e < a.num_experts; e += kWarp) most = fmaxf(most, logits[e]);
    most = warp_max(most);
    all = 0.0f;
    for (int e = lane; e < a.num_experts; e += kWarp) all += __expf(logits[e] - most);
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) all += __shfl_xor_sync(kFullWarp, all, step);
  }
  T* out = dlogits + t * dlogits_stride;
  for (int e = lane; e < a.num_experts; e += kWarp) out[e] = from_float<T>(a.renormalize ? 0.0f : -mean * (__expf(logits[e] - most) / all));
  __syncwarp();
  if (is_mine) out[index] = from_float<T>(w * (dw - mean));
}

/// use(first column, count): a block has a row, a thread kVec columns at a time.
template <typename Use>
__device__ __forceinline__ void for_each_vector(std::int64_t cols, Use&& use) {
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kVec; c < cols; c += kRowBlock * kVec)
    use(c, static_cast<int>(min(static_cast<std::int64_t>(kVec), cols - c)));
}

template <typename T, bool kWide>
__global__ void __launch_bounds__(kRowBlock) swiglu_rows_kernel(T* out, const T* gate_up, const float* factors, std::int64_t out_stride,
                                                                std::int64_t gate_up_stride, std::int64_t cols) {
  const std::int64_t r = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  const float factor = factors[r];
  const T* const gates = gate_up + r * gate_up_stride;
  for_each_vector(cols, [&](std::int64_t c, int count) {
    float g[kVec], u[kVec];
    load<kWide>(g, gates + c, count);
    load<kWide>(u, gates + cols + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) g[i] = gated(g[i], u[i]);
    round_all<T>(g);
#pragma unroll
    for (float& v : g) v *= factor;
    store<kWide>(out + r * out_stride + c, g, count);
  });
}

template <typename T>
struct SwigluRowsBackwardArgs {
  T* dgate_up;
  float* dfactors;
  const T *dout, *gate_up;
  const float* factors;
  std::int64_t dgate_up_stride, dout_stride, gate_up_stride, cols;
};
template <typename T, bool kWide>
__global__ void __launch_bounds__(kRowBlock) swiglu_rows_backward_kernel(const SwigluRowsBackwardArgs<T> a) {
  __shared__ float scratch[kRowBlock / kWarp];
  const std::int64_t r = blockIdx.x;
  const float factor = a.factors[r];
  const T *const gates = a.gate_up + r * a.gate_up_stride, *const douts = a.dout + r * a.dout_stride;
  T* const to = a.dgate_up + r * a.dgate_up_stride;
  float sum = 0.0f;
  for_each_vector(a.cols, [&](std::int64_t c, int count) {
    float g[kVec], u[kVec], d[kVec], hidden[kVec];
    load<kWide>(g, gates + c, count);
    load<kWide>(u, gates + a.cols + c, count);
    load<kWide>(d, douts + c, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) hidden[i] = gated(g[i], u[i]);
    round_all<T>(hidden);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum = fmaf(d[i], hidden[i], sum);
      d[i] *= factor;
    }
    round_all<T>(d);
#pragma unroll
    for (int i = 0; i < kVec; ++i) gated_backward(d[i], g[i], u[i]);
    store<kWide>(to + c, g, count);
    store<kWide>(to + a.cols + c, u, count);
  });
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) a.dfactors[r] = sum;
}

template <typename T>
struct SumRowsArgs {
  T* out;
  const T* x;
  const std::int32_t* rows;
  std::int64_t out_stride, x_stride, rows_stride, cols;
  int num_rows;
  bool accumulate;
};

/// One column a thread: for few tokens, which have the device to themselves.
template <typename T>
__global__ void __launch_bounds__(kRowBlock) sum_rows_kernel(const SumRowsArgs<T> a) {
  const std::int64_t t = blockIdx.x, c = static_cast<std::int64_t>(blockIdx.y) * kRowBlock + threadIdx.x;
  wait_for_previous();
  let_next_begin();
  if (c >= a.cols) return;
  float sum = 0.0f;
  for (int first = 0; first < a.num_rows; first += kRowsAtOnce) {
    std::int64_t row[kRowsAtOnce];
    T v[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) row[i] = a.rows[t * a.rows_stride + min(first + i, a.num_rows - 1)];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) v[i] = a.x[row[i] * a.x_stride + c];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i)
      if (first + i < a.num_rows) sum += to_float(v[i]);
  }
  T* const to = a.out + t * a.out_stride + c;
  *to = from_float<T>(a.accumulate ? to_float(*to) + sum : sum);
}
/// A row a block, in whole vectors: for many tokens. The sums are the same.
template <typename T>
__global__ void __launch_bounds__(kRowBlock) sum_wide_rows_kernel(const SumRowsArgs<T> a) {
  const std::int64_t t = blockIdx.x;
  wait_for_previous();
  let_next_begin();
  for_each_vector(a.cols, [&](std::int64_t c, int) {
    float sum[kVec] = {};
    for (int first = 0; first < a.num_rows; first += kRowsAtOnce / 2) {
      Raw<T> v[kRowsAtOnce / 2];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce / 2; ++i)
        v[i].read(a.x + a.rows[t * a.rows_stride + min(first + i, a.num_rows - 1)] * a.x_stride + c);
#pragma unroll
      for (int i = 0; i < kRowsAtOnce / 2; ++i) {
        if (first + i >= a.num_rows) continue;
#pragma unroll
        for (int e = 0; e < kVec; ++e) sum[e] += v[i][e];
      }
    }
    T* const to = a.out + t * a.out_stride + c;
    if (a.accumulate) {
      float old[kVec];
      load<true>(old, to, kVec);
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] = old[e] + sum[e];
    }
    store<true>(to, sum, kVec);
  });
}

/// Mean rows of an expert from which products are grouped in place of tiles of few rows: three quarters of a grouped product's tile. Where
/// exactly the one becomes faster was not measured; at 256 the grouped ones are.
constexpr std::int64_t kManyRowsOfExpert = 96;

struct PlaceArgs {
  std::int32_t* begin;  ///< [E + 1], or null
  std::int32_t* token;
  float* weight;
  std::int32_t* slot;
  RowTile* tiles;  ///< [num_tiles], or null
  const std::int32_t* ids;
  const float* weights;
  int num_rows, num_active, num_experts, num_tiles, rows_of_tile;
};
constexpr int kMostPlaceWarps = 32;

/// Exclusive sum of `value` over the block's warps, and its total. Free for another use after the next barrier.
__device__ __forceinline__ int2 sum_before(int value, int* scratch) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, num_warps = static_cast<int>(blockDim.x) / kWarp;
  __syncthreads();
  if (threadIdx.x % kWarp == 0) scratch[warp] = value;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < num_warps; ++w) {
    if (w < warp) before += scratch[w];
    all += scratch[w];
  }
  return {before, all};
}

/// The tiles of this block's expert, which begin behind those of the experts before it; the last expert's block empties those behind all.
__device__ __forceinline__ void write_tiles(const PlaceArgs& a, int begin, int count, int* scratch, int* of_expert) {
  const int expert = static_cast<int>(blockIdx.x), t = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  for (int e = t; e < a.num_experts; e += step) of_expert[e] = 0;
  __syncthreads();
  for (int i = t; i < a.num_rows; i += step) atomicAdd(of_expert + a.ids[i], 1);
  __syncthreads();
  int tiles = 0;
  for (int e = t; e < expert; e += step) tiles += (of_expert[e] + a.rows_of_tile - 1) / a.rows_of_tile;
  const int first = block_sum(tiles, scratch), mine = (count + a.rows_of_tile - 1) / a.rows_of_tile;
  for (int i = t; i < mine; i += step)
    a.tiles[first + i] = {expert, begin + i * a.rows_of_tile, min(a.rows_of_tile, count - i * a.rows_of_tile), 0};
  if (expert == a.num_experts - 1)
    for (int i = first + mine + t; i < a.num_tiles; i += step) a.tiles[i] = {};
}

/// One block per expert: each looks at all rows, so that no block waits for another. A warp has a part of them, in order.
__global__ void __launch_bounds__(kMostPlaceWarps* kWarp) place_rows_kernel(const PlaceArgs a) {
  __shared__ int scratch[kMostPlaceWarps];
  __shared__ int of_expert[kMaxExperts];
  const int expert = static_cast<int>(blockIdx.x), num_warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int part = (a.num_rows + num_warps * kWarp - 1) / (num_warps * kWarp) * kWarp;
  const int first = warp * part, end = min(a.num_rows, first + part);
  wait_for_previous();
  let_next_begin();
  int mine = 0, lower = 0;
  for (int base = first; base < end; base += kWarp) {
    const int id = base + lane < end ? a.ids[base + lane] : INT_MAX;
    mine += __popc(__ballot_sync(kFullWarp, id == expert));
    lower += __popc(__ballot_sync(kFullWarp, id < expert));
  }
  const int begin = sum_before(lower, scratch).y;
  const int2 before = sum_before(mine, scratch);
  int row = begin + before.x;
  for (int base = first; base < end; base += kWarp) {
    const int i = base + lane;
    const bool is_mine = i < end && a.ids[i] == expert;
    const unsigned hits = __ballot_sync(kFullWarp, is_mine);
    if (is_mine) {
      const int r = row + __popc(hits & ((1u << lane) - 1u));
      a.token[r] = i / a.num_active;
      a.weight[r] = a.weights[i];
      a.slot[i] = r;
    }
    row += __popc(hits);
  }
  if (a.begin != nullptr && threadIdx.x == 0) {
    a.begin[expert] = begin;
    if (expert == a.num_experts - 1) a.begin[a.num_experts] = a.num_rows;
  }
  if (a.tiles != nullptr) write_tiles(a, begin, before.y, scratch, of_expert);
}

/// out[r] = x[rows[r]], 16 bytes a thread.
__global__ void __launch_bounds__(kRowBlock)
    gather_rows_kernel(uint4* out, const uint4* x, const std::int32_t* rows, std::int64_t x_pieces, int pieces) {
  wait_for_previous();
  let_next_begin();
  const std::int64_t r = blockIdx.x, from = rows[r];
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kRowBlock) out[r * pieces + i] = x[from * x_pieces + i];
}

void place(OpContext& ctx, const PlaceArgs& a) {
  const unsigned warps = a.num_rows > 4096 ? kMostPlaceWarps : 8;
  launch_chained(stream_of(ctx), place_rows_kernel, dim3(static_cast<unsigned>(a.num_experts)), dim3(warps * kWarp), 0, a);
}

/// out[r] = x[rows[r]], bf16.
void gather_rows(const OpContext& ctx, std::uint16_t* out, const ConstTensorView& x, const std::int32_t* rows, std::int64_t num_rows) {
  launch_chained(stream_of(ctx), gather_rows_kernel, dim3(static_cast<unsigned>(num_rows)), dim3(kRowBlock), 0,
                 reinterpret_cast<uint4*>(out), reinterpret_cast<const uint4*>(x.as<char>()), rows, x.row_stride / kVec,
                 static_cast<int>(x.shape.num_cols() / kVec));
}

/// What mix_experts() runs, without the places of its rows.
struct Mixture {
  Product gate_up, down;
  RowsOfExperts rows_of_gate_up, rows_of_down;
  FewRowsTile tile_of_gate_up, tile_of_down;
};

/// A product of experts' rows, without what it reads and writes of those, and the rows of b from one expert's matrix to the next.
struct ExpertProduct {
  Product product;
  std::int64_t rows_apart = 0;
};
std::optional<ExpertProduct> expert_product(const OpContext& ctx, std::span<const LinearWeight* const> weights, std::int64_t R) {
  const std::int64_t N = weights[0]->num_outputs(), K = weights[0]->num_inputs();
  if (weights[0]->rounds_inputs()) {
    const std::optional<ProductCodes> codes = stacked_codes(ctx, weights);
    if (!codes) return std::nullopt;
    Product p = forward_product(dense(ctx, *weights[0]), nullptr, K, R, 0, N);
    p.in_dtype = DType::kU8;
    p.out_dtype = DType::kBF16;
    p.b = codes->codes;
    p.b_factors = codes->factors;
    return ExpertProduct{p, N};
  }
  const std::optional<Stacked> all = stacked(ctx, weights);
  if (!all || all->first->dtype() != DType::kBF16) return std::nullopt;
  Product p = forward_product(*all->first, nullptr, K, R, 0, N);
  p.out_dtype = DType::kBF16;
  return ExpertProduct{p, all->rows_apart};
}

std::optional<Mixture> mixture(const OpContext& ctx, std::int64_t num_tokens, std::int64_t num_active, const ExpertMatrices& experts) {
  const auto E = static_cast<std::int64_t>(experts.down.size());
  const std::int64_t R = num_tokens * num_active;
  // Twice the mean, so that most experts have one tile: one of 16 rows costs little more than one of 8, a second reads the weights again.
  int rows = 8;
  while (rows < 128 && rows * E < 2 * R) rows *= 2;
  Mixture m;
  const auto product = [&](Product& p, RowsOfExperts& of, FewRowsTile& tile, std::span<const LinearWeight* const> weights, bool swiglu) {
    const std::optional<ExpertProduct> of_all = expert_product(ctx, weights, R);
    if (!of_all) return false;
    p = of_all->product;
    p.out_stride = p.N / (swiglu ? 2 : 1);
    // Each expert that has rows has one tile that may not be full.
    of = {.tiles = nullptr, .num_tiles = std::min(R, std::min(R, E) + R / rows), .num_experts = E, .rows_apart = of_all->rows_apart};
    if (!has_librarys_bits(ctx, p) || of.num_tiles > 65535) return false;
    const std::optional<FewRowsTile> found = expert_rows_tile(p, properties_of(ctx), of, rows, swiglu);
    if (found) tile = *found;
    return found.has_value();
  };
  if (!product(m.gate_up, m.rows_of_gate_up, m.tile_of_gate_up, experts.gate_up, true) ||
      !product(m.down, m.rows_of_down, m.tile_of_down, experts.down, false))
    return std::nullopt;
  return m;
}

RouteArgs args_of(const ConstTensorView& logits_TE, const ConstTensorView& ids_TK, const ConstTensorView& weights_TK, bool renormalize) {
  return {.ids = const_cast<std::int32_t*>(ids_TK.as<std::int32_t>()),
          .weights = const_cast<float*>(weights_TK.as<float>()),
          .mass = nullptr,
          .logits = logits_TE.as<float>(),
          .ids_stride = ids_TK.row_stride,
          .weights_stride = weights_TK.row_stride,
          .logits_stride = logits_TE.row_stride,
          .num_tokens = static_cast<int>(logits_TE.shape.num_rows()),
          .num_experts = static_cast<int>(logits_TE.shape.num_cols()),
          .num_active = static_cast<int>(ids_TK.shape.num_cols()),
          .renormalize = renormalize,
          .given = nullptr,
          .given_stride = 0};
}

unsigned route_blocks(const RouteArgs& a) { return static_cast<unsigned>((a.num_tokens + kRouteWarps - 1) / kRouteWarps); }

}  // namespace

void route(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE, bool renormalize,
           ConstTensorView given_TK) {
  RouteArgs a = args_of(logits_TE, ids_TK, weights_TK, renormalize);
  a.mass = mass_T.as<float>();
  a.given = given_TK.as<std::int32_t>();
  a.given_stride = given_TK.row_stride;
  const auto run = [&](auto kernel) { launch_chained(stream_of(ctx), kernel, dim3(route_blocks(a)), dim3(kRouteWarps * kWarp), 0, a); };
  static_assert(kMaxExperts <= 32 * kWarp);
  if (a.num_experts <= 4 * kWarp) return run(route_kernel<4>);
  a.num_experts <= 8 * kWarp ? run(route_kernel<8>) : run(route_kernel<32>);
}

void log_route(OpContext& ctx, TensorView log_SB, ConstTensorView ids_TK, ConstTensorView slot_T, std::int64_t first_entry) {
  const auto num = static_cast<int>(ids_TK.shape.num_elements()), num_active = static_cast<int>(ids_TK.shape.num_cols());
  log_route_kernel<<<(num + kRowBlock - 1) / kRowBlock, kRowBlock, 0, stream_of(ctx)>>>(
      static_cast<std::uint16_t*>(log_SB.data) + first_entry, log_SB.shape.num_cols() / 2, ids_TK.as<std::int32_t>(), ids_TK.row_stride,
      slot_T.as<std::int32_t>(), num, num_active);
}

void route_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE, ConstTensorView ids_TK,
                    ConstTensorView weights_TK, bool renormalize) {
  const RouteArgs a = args_of(logits_TE, ids_TK, weights_TK, renormalize);
  with_type(dlogits_TE.dtype, [&](auto t) {
    using T = decltype(t);
    route_backward_kernel<T><<<route_blocks(a), kRouteWarps * kWarp, 0, stream_of(ctx)>>>(dlogits_TE.as<T>(), dweights_TK.as<float>(),
                                                                                          dlogits_TE.row_stride, dweights_TK.row_stride, a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void place_rows(OpContext& ctx, TensorView begin_P, TensorView token_R, TensorView weight_R, TensorView slot_TK, ConstTensorView ids_TK,
                ConstTensorView weights_TK) {
  place(ctx, {.begin = begin_P.as<std::int32_t>(),
              .token = token_R.as<std::int32_t>(),
              .weight = weight_R.as<float>(),
              .slot = slot_TK.as<std::int32_t>(),
              .tiles = nullptr,
              .ids = ids_TK.as<std::int32_t>(),
              .weights = weights_TK.as<float>(),
              .num_rows = static_cast<int>(ids_TK.shape.num_elements()),
              .num_active = static_cast<int>(ids_TK.shape.num_cols()),
              .num_experts = static_cast<int>(begin_P.shape.num_elements()) - 1,
              .num_tiles = 0,
              .rows_of_tile = 1});
}

void swiglu_rows(OpContext& ctx, TensorView out_RF, ConstTensorView gate_up_R2F, ConstTensorView factors_R) {
  const dim3 grid(static_cast<unsigned>(out_RF.shape.num_rows()));
  with_type(out_RF.dtype, [&](auto t) {
    using T = decltype(t);
    with_bool(is_wide(out_RF) && is_wide(gate_up_R2F), [&](auto wide) {
      launch_chained(stream_of(ctx), swiglu_rows_kernel<T, wide.value>, grid, dim3(kRowBlock), 0, out_RF.as<T>(), gate_up_R2F.as<T>(),
                     factors_R.as<float>(), out_RF.row_stride, gate_up_R2F.row_stride, out_RF.shape.num_cols());
    });
  });
}

void swiglu_rows_backward(OpContext& ctx, TensorView dgate_up_R2F, TensorView dfactors_R, ConstTensorView dout_RF,
                          ConstTensorView gate_up_R2F, ConstTensorView factors_R) {
  with_type(dout_RF.dtype, [&](auto t) {
    using T = decltype(t);
    with_bool(is_wide(dgate_up_R2F) && is_wide(dout_RF) && is_wide(gate_up_R2F), [&](auto wide) {
      swiglu_rows_backward_kernel<T, wide.value>
          <<<static_cast<unsigned>(dout_RF.shape.num_rows()), kRowBlock, 0, stream_of(ctx)>>>({.dgate_up = dgate_up_R2F.as<T>(),
                                                                                               .dfactors = dfactors_R.as<float>(),
                                                                                               .dout = dout_RF.as<T>(),
                                                                                               .gate_up = gate_up_R2F.as<T>(),
                                                                                               .factors = factors_R.as<float>(),
                                                                                               .dgate_up_stride = dgate_up_R2F.row_stride,
                                                                                               .dout_stride = dout_RF.row_stride,
                                                                                               .gate_up_stride = gate_up_R2F.row_stride,
                                                                                               .cols = dout_RF.shape.num_cols()});
    });
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

void sum_rows(OpContext& ctx, TensorView out_TC, ConstTensorView x_RC, ConstTensorView rows_TK, bool accumulate) {
  const std::int64_t cols = out_TC.shape.num_cols(), tokens = out_TC.shape.num_rows();
  const bool is_vectored = tokens >= kManyTokens && is_wide(out_TC) && is_wide(x_RC);
  const dim3 grid(static_cast<unsigned>(tokens), is_vectored ? 1 : static_cast<unsigned>(ceil_div(cols, kRowBlock)));
  with_type(out_TC.dtype, [&](auto t) {
    using T = decltype(t);
    const SumRowsArgs<T> a{.out = out_TC.as<T>(),
                           .x = x_RC.as<T>(),
                           .rows = rows_TK.as<std::int32_t>(),
                           .out_stride = out_TC.row_stride,
                           .x_stride = x_RC.row_stride,
                           .rows_stride = rows_TK.row_stride,
                           .cols = cols,
                           .num_rows = static_cast<int>(rows_TK.shape.num_cols()),
                           .accumulate = accumulate};
    const auto run = [&](auto kernel) { launch_chained(stream_of(ctx), kernel, grid, dim3(kRowBlock), 0, a); };
    is_vectored ? run(sum_wide_rows_kernel<T>) : run(sum_rows_kernel<T>);
  });
}

bool can_mix_experts(OpContext& ctx, std::int64_t num_tokens, std::int64_t num_active, const ExpertMatrices& experts) {
  const bool is_always_grouped = experts.biased != nullptr || experts.is_squared;
  if (!is_always_grouped && mixture(ctx, num_tokens, num_active, experts)) return true;
  return (is_always_grouped || experts.gate_up[0]->rounds_inputs()) && can_group(ctx, experts.gate_up, num_tokens * num_active) &&
         can_group(ctx, experts.down, num_tokens * num_active);
}

/// For many rows of each expert, and for experts with biases or without gates: by grouped products, which hold gate and up in memory.
bool mix_many_rows(OpContext& ctx, TensorView out_TH, ConstTensorView x_TH, ConstTensorView ids_TK, ConstTensorView weights_TK,
                   const ExpertMatrices& experts, const SharedLayers& shared) {
  const std::int64_t T = ids_TK.shape.num_rows(), K = ids_TK.shape.num_cols(), R = T * K, H = x_TH.shape.num_cols();
  const auto E = static_cast<std::int64_t>(experts.down.size());
  // Of this rank, if others have other outputs of the matrices.
  const std::int64_t G = experts.gate_up[0]->num_outputs(), F = experts.is_squared ? G : G / 2, own_H = experts.down[0]->num_outputs();
  const std::int64_t first_cols = std::max(H, F), second_cols = std::max(G, own_H);
  std::int32_t *begin = nullptr, *token = nullptr, *slot = nullptr;
  float* weight = nullptr;
  std::uint16_t *first_memory = nullptr, *second_memory = nullptr;
  const bool rounds_inputs = experts.gate_up[0]->rounds_inputs();
  InputCodes codes;  // of rows, and then of what goes into `down`
  const std::int64_t down_inputs = experts.down[0]->num_inputs();
  const auto carve = [&](void* memory) {
    Carver c(memory);
    begin = c.take<std::int32_t>(E + 1);
    token = c.take<std::int32_t>(R);
    slot = c.take<std::int32_t>(R);
    weight = c.take<float>(R);
    first_memory = c.take<std::uint16_t>(R * first_cols);
    second_memory = c.take<std::uint16_t>(R * second_cols);
    if (rounds_inputs) codes = take_codes(c, R, std::max(H, down_inputs));
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  const Device device = ctx.runtime->device();
  const auto view = [&](void* data, std::int64_t rows, std::int64_t cols, DType dtype) {
    return TensorView{data, {rows, cols}, dtype, device, cols};
  };
  const TensorView begin_P{begin, Shape{E + 1}, DType::kI32, device, E + 1}, token_R{token, Shape{R}, DType::kI32, device, R};
  const TensorView weight_R{weight, Shape{R}, DType::kF32, device, R}, slot_TK = view(slot, T, K, DType::kI32);
  const TensorView rows_RH = view(first_memory, R, H, DType::kBF16), gate_up_R2F = view(second_memory, R, G, DType::kBF16);
  const TensorView hidden_RF = view(first_memory, R, F, DType::kBF16), down_RH = view(second_memory, R, own_H, DType::kBF16);
  cuda::place_rows(ctx, begin_P, token_R, weight_R, slot_TK, ids_TK, weights_TK);
  if (rounds_inputs) {
    codes.stride = H;
    rows_to_codes(ctx, codes, x_TH, token, R);
    if (!grouped_codes(ctx, gate_up_R2F, codes, experts.gate_up, begin_P)) return false;
  } else {
    gather_rows(ctx, first_memory, x_TH, token, R);
    if (!cuda::grouped_linear(ctx, gate_up_R2F, rows_RH, experts.gate_up, begin_P)) return false;
  }
  if (const BiasedExperts* biased = experts.biased; biased != nullptr) {
    cuda::add_expert_biases(ctx, gate_up_R2F, biased->gate_up_V, begin_P, {});
    cuda::clamped_swiglu(ctx, hidden_RF, gate_up_R2F, weight_R, biased->gate);
  } else if (experts.is_squared) {
    cuda::squared_relu(ctx, hidden_RF, gate_up_R2F, weight_R);
  } else {
    cuda::swiglu_rows(ctx, hidden_RF, gate_up_R2F, weight_R);
  }
  const ConstTensorView whole_RF = shared.group != nullptr ? shared.group->gather(ctx, shared.rank, hidden_RF) : hidden_RF;
  if (rounds_inputs) {
    codes.stride = down_inputs;
    inputs_to_codes(ctx, codes, whole_RF);
    if (!grouped_codes(ctx, down_RH, codes, experts.down, begin_P)) return false;
  } else if (!cuda::grouped_linear(ctx, down_RH, whole_RF, experts.down, begin_P)) {
    return false;
  }
  if (experts.biased != nullptr) cuda::add_expert_biases(ctx, down_RH, experts.biased->down_V, begin_P, weight_R);
  cuda::sum_rows(ctx, out_TH, down_RH, slot_TK, false);
  return true;
}

bool mix_experts(OpContext& ctx, TensorView out_TH, ConstTensorView x_TH, ConstTensorView ids_TK, ConstTensorView weights_TK,
                 const ExpertMatrices& experts, const SharedLayers& shared) {
  const std::int64_t T = ids_TK.shape.num_rows(), K = ids_TK.shape.num_cols(), R = T * K, H = x_TH.shape.num_cols();
  if (experts.biased != nullptr || experts.is_squared)
    return is_wide(x_TH) && cuda::can_mix_experts(ctx, T, K, experts) &&
           mix_many_rows(ctx, out_TH, x_TH, ids_TK, weights_TK, experts, shared);
  std::optional<Mixture> m = mixture(ctx, T, K, experts);
  const bool rounds_inputs = experts.gate_up[0]->rounds_inputs();
  if (!is_wide(x_TH) || (!m && !(rounds_inputs && cuda::can_mix_experts(ctx, T, K, experts)))) return false;
  const bool has_many_rows = R >= kManyRowsOfExpert * static_cast<std::int64_t>(experts.down.size());
  if ((!m || has_many_rows) && mix_many_rows(ctx, out_TH, x_TH, ids_TK, weights_TK, experts, shared)) return true;
  if (!m) return false;
  PlaceArgs a{};
  std::uint16_t *rows_RH = nullptr, *hidden_RF = nullptr;
  InputCodes codes;  // of rows, and then of what goes into `down`
  const auto carve = [&](void* memory) {
    Carver c(memory);
    a.token = c.take<std::int32_t>(R);
    a.weight = c.take<float>(R);
    a.slot = c.take<std::int32_t>(R);
    a.tiles = c.take<RowTile>(m->rows_of_gate_up.num_tiles);
    rows_RH = c.take<std::uint16_t>(R * H);
    hidden_RF = c.take<std::uint16_t>(R * m->gate_up.out_stride);
    if (rounds_inputs) codes = take_codes(c, R, std::max(H, m->down.K));
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  a.ids = ids_TK.as<std::int32_t>();
  a.weights = weights_TK.as<float>();
  a.num_rows = static_cast<int>(R);
  a.num_active = static_cast<int>(K);
  a.num_experts = static_cast<int>(experts.down.size());
  a.num_tiles = static_cast<int>(m->rows_of_gate_up.num_tiles);
  a.rows_of_tile = m->tile_of_gate_up.rows;
  place(ctx, a);
  if (rounds_inputs) {
    codes.stride = H;
    rows_to_codes(ctx, codes, x_TH, a.token, R);
  } else {
    gather_rows(ctx, rows_RH, x_TH, a.token, R);
  }
  m->rows_of_gate_up.tiles = m->rows_of_down.tiles = a.tiles;
  m->rows_of_gate_up.factors = a.weight;
  m->gate_up.a = rounds_inputs ? static_cast<const void*>(codes.codes) : rows_RH;
  m->gate_up.a_factors = codes.factors;
  m->gate_up.out = hidden_RF;
  few_rows_product(ctx, m->gate_up, m->tile_of_gate_up, {.swiglu = true, .experts = &m->rows_of_gate_up});
  const Device device = ctx.runtime->device();
  ConstTensorView whole_RF{hidden_RF, {R, m->gate_up.out_stride}, DType::kBF16, device, m->gate_up.out_stride};
  if (shared.group != nullptr) whole_RF = shared.group->gather(ctx, shared.rank, whole_RF);
  m->down.a = whole_RF.data;
  if (rounds_inputs) {
    codes.stride = m->down.K;
    inputs_to_codes(ctx, codes, whole_RF);
    m->down.a = codes.codes;
    m->down.a_factors = codes.factors;
  }
  m->down.out = rows_RH;
  few_rows_product(ctx, m->down, m->tile_of_down, {.experts = &m->rows_of_down});
  cuda::sum_rows(ctx, out_TH, ConstTensorView{rows_RH, {R, m->down.out_stride}, DType::kBF16, device, m->down.out_stride},
                 ConstTensorView{a.slot, {T, K}, DType::kI32, device, K}, false);
  return true;
}

}  // namespace prl::ops::cuda
