#include "ops/cuda/attention/forward_hopper.cuh"
#include "ops/cuda/attention/plain.hpp"

// Attention to latents with warpgroup products, for latents of 512 elements and 64 rotated ones. A warp copies tiles of 64 keys; two
// warpgroups share a block of 64 rows: each forms the scores of half of a tile's keys, and then the sums of half of the columns, to which
// all weights of the tile go by shared memory. The arithmetic of a row is latent_forward.cu's.

namespace prl::ops::cuda::hopper {
namespace {

template <bool kPaged_>
struct LatentShape {
  static constexpr int kL = kMaxLatent, kD = kL + kMaxLatentRotary;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kWarpgroups = 1;  ///< blocks of rows
  static constexpr int kTile = forward_tile(kD), kBlocks = kD / 64, kTilesPerChunk = kChunkKeys / kTile;
  static constexpr int kSlotBlock = kTile * 128, kSlotBytes = kBlocks * kSlotBlock, kSlots = 2;
  static constexpr int kQBlock = 64 * 128, kQGroup = kBlocks * kQBlock, kQBytes = kQGroup;
  static constexpr int kParts = 2, kPartKeys = kTile / kParts, kGroups = kTile / 8;
  static constexpr int kWeightsAt = kQBytes + kSlots * kSlotBytes, kTopsAt = kWeightsAt + 64 * 128, kSumsAt = kTopsAt + 64 * kParts * 4;
  static constexpr int kBarriersAt = kSumsAt + 64 * kGroups * 4, kSharedBytes = kBarriersAt + (2 * kSlots + 2) * 8;
  static constexpr int kThreads = (kParts + 1) * 128, kCopyRegisters = 40, kRegisters = 232;
};

#if PRL_HOPPER

template <typename F>
__device__ __forceinline__ void latent_copies(const ForwardParams& p, const ForwardMemory<F>& m) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPlace<F::kSlots> place;
  std::uint32_t q_phase = 0;
  if (lane == 0) {
    prefetch_map(&p.q);
    prefetch_map(&p.k);
  }
  for_each_item(p.units, num_units_of(p), p.packing.num_groups, [&](const AttentionUnit& u, int group) {
    barrier_wait(m.q_empty, q_phase ^ 1);
    q_phase ^= 1;
    if (lane == 0) copy_queries<F>(p, m, u, group);
    TileCopies<F>{p, m, u, kv_head_of(p.packing, group)}.keys(place);
  });
}

template <typename F>
struct LatentWarpgroup {
  static constexpr int kPartGroups = F::kPartKeys / 8, kOuts = F::kL / F::kParts / 2;

  const ForwardParams& p;
  const ForwardMemory<F>& m;
  unsigned char* const shared;
  const int part = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = static_cast<int>(threadIdx.x % 128) / 32 * 16 + lane / 4;  ///< of this lane's two, 8 apart
  RingPlace<F::kSlots> place;
  std::uint32_t q_phase = 0;
  float out[kOuts], scores[4 * kPartGroups];
  RowPair rows, total;

  __device__ __forceinline__ unsigned char* slot() const { return m.ring + place.slot * F::kSlotBytes; }
  __device__ __forceinline__ float* tops_of(int row) const { return reinterpret_cast<float*>(shared + F::kTopsAt) + row * F::kParts; }
  __device__ __forceinline__ float* sums_of(int row) const { return reinterpret_cast<float*>(shared + F::kSumsAt) + row * F::kGroups; }

  __device__ __forceinline__ void form_scores() {
    pin(scores);
    products_begin();
    multiply_rows<F::kD>(scores, shared_address(m.q), F::kQBlock,
                         shared_address(slot()) + static_cast<std::uint32_t>(part * F::kPartKeys * 128), F::kSlotBlock);
    products_commit();
    products_wait<0>();
    pin(scores);
  }
  __device__ __forceinline__ void form_sums(int accumulate) {
    pin(out);
    products_begin();
    const std::uint64_t a = along_rows(shared_address(shared + F::kWeightsAt));
    const std::uint64_t b =
        down_rows(shared_address(slot()) + static_cast<std::uint32_t>((1 + part * F::kL / F::kParts / 64) * F::kSlotBlock), F::kSlotBlock);
#pragma unroll
    for (int step = 0; step < F::kTile / 16; ++step)
      product<1>(out, a + (step * 32 >> 4), b + (step * 2048 >> 4), step > 0 ? 1 : accumulate);
    products_commit();
    products_wait<0>();
    pin(out);
  }
  /// Scores become weights, which all see. True if no row of the warp is to be rescaled.
  __device__ __forceinline__ bool weigh(float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = kMinusInfinity;
#pragma unroll
      for (int i = 2 * r; i < 4 * kPartGroups; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
      top = quad_max(top);
      if (lane % 4 == 0) tops_of(first_row + 8 * r)[part] = top;
    }
    named_sync<256>(1);
    bool same = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 8 * r;
      const float2 both = *reinterpret_cast<const float2*>(tops_of(row));
      const float tile_top = fmaxf(both.x, both.y) * p.scale_log2, before = rows.top[r];
      const float top = tile_top - before > kSlack ? tile_top : before;
      rescale[r] = top == before ? 1.0f : power_of_two(before - top);
      rows.top[r] = top;
      same = same && top == before;
      const float minus_top = top == kMinusInfinity ? 0.0f : -top;
      unsigned char* const to = shared + F::kWeightsAt + row * 128 + lane % 4 * 4;
#pragma unroll
      for (int g = 0; g < kPartGroups; ++g) {
        float* const s = scores + 4 * g + 2 * r;
        s[0] = power_of_two(fmaf(s[0], p.scale_log2, minus_top));
        s[1] = power_of_two(fmaf(s[1], p.scale_log2, minus_top));
        const float sum = quad_sum(s[0] + s[1]);
        if (lane % 4 == 0) sums_of(row)[part * kPartGroups + g] = sum;
        *reinterpret_cast<std::uint32_t*>(to + ((part * kPartGroups + g) ^ (row % 8)) * 16) = pack_bf16(s[0], s[1]);
      }
    }
    async_fence();
    return __all_sync(0xffffffffu, same);
  }
  /// Keys that are not there weigh nothing, but 0 times NaN is NaN: this warpgroup's columns of them become zero.
  __device__ __forceinline__ void clear_rest(int valid) {
    constexpr int kMine = (F::kBlocks - 1) / F::kParts;
    for (int b = 0; b < kMine; ++b)
      for (int i = valid * 8 + static_cast<int>(threadIdx.x % 128); i < F::kTile * 8; i += 128)
        *reinterpret_cast<uint4*>(slot() + (1 + part * kMine + b) * F::kSlotBlock + i * 16) = make_uint4(0, 0, 0, 0);
    async_fence();
  }
  __device__ __forceinline__ void add_sums(const float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float4* const groups = reinterpret_cast<const float4*>(sums_of(first_row + 8 * r));
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < F::kGroups / 4; ++i) {
        const float4 g = groups[i];
        sum = sum + g.x + g.y + g.z + g.w;
      }
      rows.sum[r] = fmaf(rows.sum[r], rescale[r], sum);
    }
  }

  __device__ __forceinline__ void compute(const AttentionUnit& u, int group) {
    const LaneRows mine = lane_rows(p.packing, 0, u.num_tokens, num_heads_of(p.packing, group));
    // Of earlier chunks: in local memory, as registers hold `out`.
    float total_memory[kOuts];
    float* total_out = total_memory;
    asm volatile("" : "+l"(total_out)::"memory");
    bool is_first = true;
    int accumulate = 0;
    rows.clear();
    barrier_wait(m.q_full, q_phase);
    q_phase ^= 1;
    for (int t = u.tile_begin; t < u.tile_end; ++t) {
      const bool is_last = t + 1 == u.tile_end;
      barrier_wait(m.full + place.slot, place.phase);
      form_scores();
      if (is_last) arrive_once_per_warp(m.q_empty);
      const int position = u.position - t * F::kTile - part * F::kPartKeys;
      if (position < F::kPartKeys - 1) ban_after(scores, position + mine.token[0], position + mine.token[1]);
      const int hidden = position - p.window + 1;
      if (hidden + u.num_tokens - 1 > 0) ban_before(scores, hidden + mine.token[0], hidden + mine.token[1]);
      float rescale[2];
      const bool same = weigh(rescale);
      if (const int valid = u.num_keys - t * F::kTile; valid < F::kTile) clear_rest(valid);
      named_sync<256>(2);
      add_sums(rescale);
      if (accumulate != 0 && !same) {
#pragma unroll
        for (int i = 0; i < kOuts; ++i) out[i] *= rescale[(i & 2) / 2];
      }
      form_sums(accumulate);
      arrive_once_per_warp(m.empty + place.slot);
      place.advance();
      accumulate = 1;
      if (!is_last && (t + 1) % F::kTilesPerChunk == 0) {
        join_total(total_out, is_first);
        is_first = false;
        accumulate = 0;
      }
    }
    if (!is_first) end_total(total_out);
    store(u, group, mine);
  }
  /// The chunk in `out` joins those before it.
  __device__ __forceinline__ void join_total(float* total_out, bool is_first) {
    ChunkWeights w[2] = {};
    if (is_first)
      total = rows;
    else
#pragma unroll
      for (int r = 0; r < 2; ++r) w[r] = merge_rows<__nv_bfloat16>(total.top[r], total.sum[r], rows.top[r], rows.sum[r]);
#pragma unroll
    for (int i = 0; i < kOuts; ++i) total_out[i] = is_first ? out[i] : merge_out(total_out[i], out[i], w[(i & 2) / 2]);
    rows.clear();
  }
  /// And the last one: all of it is in `out` and `rows`.
  __device__ __forceinline__ void end_total(const float* total_out) {
    ChunkWeights w[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) w[r] = merge_rows<__nv_bfloat16>(total.top[r], total.sum[r], rows.top[r], rows.sum[r]);
#pragma unroll
    for (int i = 0; i < kOuts; ++i) out[i] = merge_out(total_out[i], out[i], w[(i & 2) / 2]);
    rows = total;
  }
  __device__ __forceinline__ void store(const AttentionUnit& u, int group, const LaneRows& mine) {
    const int column = part * F::kL / F::kParts + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!mine.valid[r]) continue;
      if (u.state >= 0) {
        const std::int64_t state = (static_cast<std::int64_t>(u.state) * p.packing.num_groups + group) * p.state_rows +
                                   mine.token[r] * p.packing.heads + mine.head[r];
#pragma unroll
        for (int i = 2 * r; i < kOuts; i += 4)
          *reinterpret_cast<float2*>(p.state_out + state * F::kL + column + 2 * (i - 2 * r)) = make_float2(out[i], out[i + 1]);
        if (part == 0 && lane % 4 == 0) p.state_sums[state] = make_float2(rows.top[r], rows.sum[r]);
        continue;
      }
      const int head = first_head_of(p.packing, group) + mine.head[r];
      const std::int64_t at = static_cast<std::int64_t>(u.token + mine.token[r]) * p.num_q_heads + head;
      const RowEnd end = end_row<__nv_bfloat16>(rows.top[r], rows.sum[r], p.sinks, head);
#pragma unroll
      for (int i = 2 * r; i < kOuts; i += 4)
        *reinterpret_cast<std::uint32_t*>(p.out + at * F::kL + column + 2 * (i - 2 * r)) =
            pack_bf16(finish_out(out[i], end.scale), finish_out(out[i + 1], end.scale));
      if (p.lse != nullptr && part == 0 && lane % 4 == 0) p.lse[at] = log_sum(end.top, end.sum);
    }
  }
};

#endif  // PRL_HOPPER

template <typename F>
__global__ void __launch_bounds__(F::kThreads, 1) latent_hopper_kernel(const __grid_constant__ ForwardParams p) {
#if PRL_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardMemory<F> m(shared);
  constexpr int kComputingWarps = 4 * F::kParts;
  if (threadIdx.x == 0) {
    if (shared_address(shared) % 1024 != 0) __trap();
    for (int i = 0; i < F::kSlots; ++i) {
      barrier_init(m.full + i, 1);
      barrier_init(m.empty + i, kComputingWarps);
    }
    barrier_init(m.q_full, 1);
    barrier_init(m.q_empty, kComputingWarps);
    barrier_init_fence();
  }
  __syncthreads();
  let_next_begin();
  wait_for_previous();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= kComputingWarps) {
    registers_down<F::kCopyRegisters>();
    if (warp == kComputingWarps) latent_copies<F>(p, m);
  } else {
    registers_up<F::kRegisters>();
    LatentWarpgroup<F> group{p, m, shared};
    for_each_item(p.units, num_units_of(p), p.packing.num_groups, [&](const AttentionUnit& u, int g) { group.compute(u, g); });
  }
#endif
}

template <typename F>
void launch_latent_shape(const ForwardParams& p, int num_blocks, cudaStream_t stream) {
  static_assert(F::kSharedBytes <= 227 * 1024 && F::kWeightsAt % 1024 == 0 && F::kTile == kPlainTile);
  PRL_CUDA_CHECK(cudaFuncSetAttribute(latent_hopper_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::kSharedBytes));
  launch_chained(stream, latent_hopper_kernel<F>, dim3(static_cast<unsigned>(num_blocks)), dim3(F::kThreads), F::kSharedBytes, p);
}

}  // namespace

void launch_latent(const ForwardParams& p, bool paged, int num_items, int num_multiprocessors, cudaStream_t stream) {
  const int num_blocks = std::min(num_items, num_multiprocessors);
  if (paged)
    launch_latent_shape<LatentShape<true>>(p, num_blocks, stream);
  else
    launch_latent_shape<LatentShape<false>>(p, num_blocks, stream);
}

}  // namespace prl::ops::cuda::hopper
