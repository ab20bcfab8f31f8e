#include <algorithm>
#include <bit>
#include <cmath>

#include "base/rng.hpp"
#include "ops/cuda/blas.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/head_stats.hpp"
#include "ops/cuda/linear_weight.hpp"
#include "ops/cuda/log_softmax.cuh"
#include "ops/cuda/piece_logits.cuh"

// Sampling. Three kernels: statistics of pieces of the logits (four lanes each), the draw (a block per row), and, where a row asks for it,
// truncation and the best tokens. A draw needs the logits of one piece; where none are in memory, because the head left statistics alone
// (head_stats.hpp), it forms these 64 again. Masses of truncated rows are integers (weights in units of 2^-44 of the best token's), so the
// order in which threads add them leaves no trace.

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kDrawBlock = 256;
static_assert(kDrawBlock >= FormedLogits::kThreads);
constexpr int kTruncateBlock = kVocabChunk;  ///< a thread per logit of the drawn chunk
static_assert(kTruncateBlock == 1024);
constexpr int kMaxChunks = 2048;  ///< of a vocabulary; their masses lie in shared memory
/// Rows that are handed over as arguments of a kernel, at most 32,764 bytes of which there may be.
constexpr int kFewArguments = 32, kMostArguments = 512;

/// One row, in the form that the kernels take.
struct RowParams {
  double uniform;
  float temperature;  ///< 1 for greedy rows
  float top_p, min_p;
  std::int32_t top_k;  ///< 0: all
  std::int32_t num_top, num_named;
  bool is_greedy, is_truncated;
};
struct RowOutput {
  std::int32_t token;
  float logprob;
  float lse;         ///< of all tokens
  float normaliser;  ///< log-sum-exp over the tokens that are kept
  float max;
  std::int32_t num_top, num_named;
};

/// Rows as arguments of a kernel: a copy of their own would wait between the product that forms the logits and the first kernel here.
template <int kRows>
struct RowArguments {
  RowParams rows[kRows];
  __device__ __forceinline__ const RowParams& operator[](std::int64_t i) const { return rows[i]; }
};

/// Statistics of a row's pieces. A row has room for whole chunks.
struct RowPieces {
  SoftmaxStats* data;
  int chunks, count;
  __host__ __device__ std::int64_t stride() const { return static_cast<std::int64_t>(chunks) * kPieces; }
  __device__ SoftmaxStats at(std::int64_t row, int piece) const {
    return piece < count ? data[row * stride() + piece] : SoftmaxStats{-INFINITY, 0.0f};
  }
};

/// `Rows`: const RowParams* or RowArguments.
template <typename Rows>
__global__ void __launch_bounds__(kBlock)
    stats_kernel(RowPieces pieces, const float* logits, std::int64_t stride, std::int64_t V, const __grid_constant__ Rows rows) {
  const int chunk = static_cast<int>(blockIdx.x * (kBlock / kWarp) + threadIdx.x / kWarp);
  let_next_begin();
  wait_for_previous();
  if (chunk >= pieces.chunks) return;
  const std::int64_t b = blockIdx.y, begin = static_cast<std::int64_t>(chunk) * kVocabChunk;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kVocabChunk), V - begin));
  WarpChunk chunk_logits;
  chunk_logits.load(logits + b * stride + begin, count, rows[b].temperature);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const SoftmaxStats s = piece_stats<false>(chunk_logits.x[half]);
    if (threadIdx.x % kPieceLanes == 0) pieces.data[b * pieces.stride() + chunk * kPieces + WarpChunk::piece(half)] = s;
  }
}

/// Finds the chunk in which the running sum of masses passes uniform * total. One thread.
template <typename Stored, typename Mass>
__device__ void choose_chunk(const Stored* masses, int chunks, Mass target, int& chosen, Mass& rest) {
  chosen = 0;
  rest = 0;
  for (int c = 0; c < chunks; ++c) {
    if (!(masses[c] > 0)) continue;
    chosen = c;
    rest = target;
    if (target < masses[c]) return;
    target -= masses[c];
  }
  rest = masses[chosen];  // rounding: the last token with any mass
}

/// A choice in index order among a warp's masses, one a lane: the lane in whose share `target` falls, and how far in; where rounding leaves
/// none, the last lane with any mass, and all of its. `kIsShare`: target is that share of all mass.
struct LaneChoice {
  int lane;
  double rest;
};
template <bool kIsShare = false>
__device__ LaneChoice choose_lane(double mass, double target) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  double upto = mass;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const double other = __shfl_up_sync(kFullWarp, upto, step);
    if (lane >= step) upto += other;
  }
  if constexpr (kIsShare) target *= __shfl_sync(kFullWarp, upto, kWarp - 1);
  double before = __shfl_up_sync(kFullWarp, upto, 1);
  if (lane == 0) before = 0;
  const unsigned is_beyond = __ballot_sync(kFullWarp, mass > 0 && upto > target), has_mass = __ballot_sync(kFullWarp, mass > 0);
  const bool is_found = is_beyond != 0;
  const int chosen = is_found ? __ffs(static_cast<int>(is_beyond)) - 1 : has_mass != 0 ? kWarp - 1 - __clz(static_cast<int>(has_mass)) : 0;
  return {chosen, __shfl_sync(kFullWarp, is_found ? fmax(0.0, target - before) : mass, chosen)};
}

/// What the first warp of a row's block finds before it sees a logit. Masses are in units of e^max.
struct PieceChoice {
  float lse, max;
  int piece;    ///< -1: none, for the row is truncated or not finite
  double rest;  ///< how far into the piece's mass the draw falls
};

/// By one warp, `stats` and `masses` [chunks] in shared memory. Code that runs once a step comes from far: it is short rather than
/// unrolled.
template <typename PieceOf>
__device__ PieceChoice choose_piece(const RowParams& r, int chunks, float max, const SoftmaxStats* stats, const float* masses,
                                    PieceOf&& stats_of_piece) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float sum = 0.0f;
#pragma unroll 1
  for (int c = lane; c < chunks; c += kRowSums) sum += masses[c];
  PieceChoice out{log_sum_exp(max, warp_sum(sum)), max, -1, 0.0};
  if (!isfinite(out.lse) || r.is_truncated) return out;
  const auto piece_of = [&](int chunk) { return lane < kPieces ? stats_of_piece(chunk, lane) : SoftmaxStats{-INFINITY, 0.0f}; };
  if (r.is_greedy) {
    int chunk = chunks;
#pragma unroll 1
    for (int c = lane; c < chunks; c += kWarp)
      if (stats[c].max == max) chunk = min(chunk, c);
    chunk = __reduce_min_sync(kFullWarp, chunk);
    out.piece = chunk * kPieces + __ffs(static_cast<int>(__ballot_sync(kFullWarp, piece_of(chunk).max == max))) - 1;
    return out;
  }
  // Neighbouring chunks are a lane's.
  const int each = (chunks + kWarp - 1) / kWarp, begin = min(chunks, lane * each), end = min(chunks, begin + each);
  double mass = 0;
#pragma unroll 1
  for (int c = begin; c < end; ++c) mass += static_cast<double>(masses[c]);
  const LaneChoice of_lanes = choose_lane<true>(mass, r.uniform);
  int chunk = 0;
  double rest = 0;
  if (lane == of_lanes.lane) choose_chunk(masses + begin, end - begin, of_lanes.rest, chunk, rest);
  chunk = __shfl_sync(kFullWarp, begin + chunk, of_lanes.lane);
  rest = __shfl_sync(kFullWarp, rest, of_lanes.lane);
  const double own = static_cast<double>(part_of({piece_of(chunk), 0.0f}, max).sum);
  const LaneChoice of_pieces = choose_lane(own, rest);
  out.piece = chunk * kPieces + of_pieces.lane;
  out.rest = of_pieces.rest;
  return out;
}

/// The token among the logits of its piece, by one warp.
__device__ int choose_in_piece(const RowParams& r, const PieceChoice& choice, const float (&x)[kPiece]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (r.is_greedy) {
    const unsigned low = __ballot_sync(kFullWarp, x[lane] == choice.max), high = __ballot_sync(kFullWarp, x[lane + kWarp] == choice.max);
    return low != 0 ? __ffs(static_cast<int>(low)) - 1 : kWarp + __ffs(static_cast<int>(high)) - 1;
  }
  double even = 0, odd = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    even = odd;
    odd = static_cast<double>(weight_of(scaled(x[2 * lane + i], r.temperature) - choice.max));
  }
  const LaneChoice of_lanes = choose_lane(even + odd, choice.rest);
  return __shfl_sync(kFullWarp, 2 * lane + (odd > 0 && of_lanes.rest >= even ? 1 : 0), of_lanes.lane);
}

/// Log-sum-exp, greedy choice or draw, and log-probability of rows that are not truncated. `drawn`: tokens, or nullptr. A choice is made in
/// index order: of a chunk, of a piece in it, of a logit in that.
template <typename Rows, typename Logits>
__global__ void __launch_bounds__(kDrawBlock) draw_kernel(RowOutput* outputs, std::int32_t* drawn, RowPieces pieces, int stats_at,
                                                          const __grid_constant__ Logits logits, const __grid_constant__ Rows rows) {
  extern __shared__ __align__(1024) unsigned char draw_memory[];  // what `logits` wants, then SoftmaxStats [chunks], masses [chunks]
  __shared__ float x[kPiece];
  __shared__ float tops[kDrawBlock / kWarp];
  __shared__ PieceChoice choice;
  const int chunks = pieces.chunks, thread = static_cast<int>(threadIdx.x);
  auto* stats = reinterpret_cast<SoftmaxStats*>(draw_memory + stats_at);
  auto* masses = reinterpret_cast<float*>(stats + chunks);
  const std::int64_t b = blockIdx.x;
  const RowParams r = rows[b];
  logits.begin();
  wait_for_previous();
  using Quad = QuadChunk<false>;
  constexpr int kAhead = 3, kAtOnce = kDrawBlock / Quad::kLanes;  // loads in flight, and chunks that the block takes side by side
  float top = -INFINITY;
#pragma unroll 1
  for (int base = 0; base < chunks; base += kAhead * kAtOnce) {
    Quad quads[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int p = 0; p < 4; ++p)
        quads[i].pieces[p] = pieces.at(b, (base + i * kAtOnce + thread / Quad::kLanes) * kPieces + Quad::piece(p));
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const SoftmaxStats chunk = quads[i].stats();
      const int c = base + i * kAtOnce + thread / Quad::kLanes;
      if (thread % Quad::kLanes == 0 && c < chunks) stats[c] = chunk;
      top = fmaxf(top, chunk.max);
    }
  }
  top = warp_max(top);
  if (thread % kWarp == 0) tops[thread / kWarp] = top;
  __syncthreads();
  top = tops[0];
  for (const float other : tops) top = fmaxf(top, other);
  for (int c = thread; c < chunks; c += kDrawBlock) masses[c] = part_of({stats[c], 0.0f}, top).sum;
  __syncthreads();
  if (thread < kWarp) {
    const PieceChoice found =
        choose_piece(r, chunks, top, stats, masses, [&](int chunk, int piece) { return pieces.at(b, chunk * kPieces + piece); });
    if (thread == 0) choice = found;
  }
  __syncthreads();
  const int piece = choice.piece;
  if (piece >= 0) logits.load(x, b, piece);
  if (thread >= kWarp) return;
  const PieceChoice found = choice;
  RowOutput out{.token = 0, .logprob = NAN, .lse = found.lse, .normaliser = found.lse, .max = found.max, .num_top = 0, .num_named = 0};
  if (piece >= 0) {
    const int place = choose_in_piece(r, found, x);
    out.token = piece * kPiece + place;
    out.logprob = scaled(x[place], r.temperature) - found.lse;
  }
  if (thread != 0) return;
  outputs[b] = out;
  if (drawn != nullptr) drawn[b] = out.token;
}

using Key = unsigned long long;
/// Orders tokens as they are ranked: by logit, then by lower index.
__device__ __forceinline__ Key key_of(float x, std::int64_t i) {
  const std::uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // -0 equals 0
  const std::uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | static_cast<std::uint32_t>(~static_cast<std::uint32_t>(i));
}
float logit_of(Key key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  const std::uint32_t bits = ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered;
  float x;
  static_assert(sizeof x == sizeof bits);
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
std::int32_t token_of(Key key) { return static_cast<std::int32_t>(~static_cast<std::uint32_t>(key)); }

using Mass = unsigned long long;
/// e^(x - max) in units of 2^-44: 2^18 tokens of the best one's weight still fit.
__device__ __forceinline__ Mass mass_of(float x, float max) { return static_cast<Mass>(expf(x - max) * 0x1.0p44f); }

/// By the threads of a block, a weight each: the first whose running sum passes `target`, the last one with any weight if none does.
__device__ int choose_in_chunk(Mass weight, Mass target, Mass* warp_totals, int* first, int* last) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Mass prefix = weight;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Mass other = __shfl_up_sync(kFullWarp, prefix, step);
    if (lane >= step) prefix += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) warp_totals[warp] = prefix;
  __syncthreads();
  Mass before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kTruncateBlock / kWarp; ++w) {
    if (w == warp) before = total;
    total += warp_totals[w];
  }
  if (threadIdx.x == 0) {
    *first = kVocabChunk;
    *last = 0;
  }
  __syncthreads();
  if (weight > 0) {
    if (before + prefix > target) atomicMin(first, static_cast<int>(threadIdx.x));
    atomicMax(last, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  return *first < kVocabChunk ? *first : *last;
}

constexpr int kBins = 1024;    ///< of width 1/16 in the logit
constexpr int kListed = 2048;  ///< keys of one bin that are kept at hand

/// Shared memory of a block that ranks one row.
struct RankScratch {
  std::uint32_t counts[kBins];
  Mass masses[kBins];
  Key list[kListed];
  Mass warp_masses[kTruncateBlock / kWarp];
  int num_listed;
  int bin;
  Mass wanted;
  Key result;
  std::uint32_t bin_count;
};
/// The block's own. From here, functions that are not inlined know that it is shared memory.
__device__ __forceinline__ RankScratch& rank_scratch() {
  __shared__ RankScratch scratch;
  return scratch;
}

/// One row, ranked by the threads of a block.
class Ranker {
 public:
  __device__ Ranker(const float* logits, std::int64_t V, float temperature, float max)
      : logits_(logits), V_(V), temperature_(temperature), max_(max) {}

  __device__ float at(std::int64_t i) const { return scaled(logits_[i], temperature_); }
  /// body(x, key) for this thread's share of the tokens at or above `low`. Four tokens at a time, two loads in flight.
  template <typename Body>
  __device__ void for_each(Key low, Body&& body) const {
    const auto one = [&](float logit, std::int64_t i) {
      const float x = scaled(logit, temperature_);
      const Key key = key_of(x, i);
      if (key >= low && x != -INFINITY) body(x, key);
    };
    const std::int64_t head =
        min(V_, static_cast<std::int64_t>((16 - reinterpret_cast<std::uintptr_t>(logits_) % 16) % 16 / sizeof(float)));
    const std::int64_t quads = (V_ - head) / 4;
    const auto* wide = reinterpret_cast<const float4*>(logits_ + head);
    const auto four = [&](const float4& v, std::int64_t q) {
      one(v.x, head + 4 * q), one(v.y, head + 4 * q + 1), one(v.z, head + 4 * q + 2), one(v.w, head + 4 * q + 3);
    };
    std::int64_t q = threadIdx.x;
    for (; q + kTruncateBlock < quads; q += 2 * kTruncateBlock) {
      const float4 a = wide[q], b = wide[q + kTruncateBlock];
      four(a, q);
      four(b, q + kTruncateBlock);
    }
    if (q < quads) four(wide[q], q);
    for (std::int64_t i = threadIdx.x; i < head; i += kTruncateBlock) one(logits_[i], i);
    for (std::int64_t i = head + 4 * quads + threadIdx.x; i < V_; i += kTruncateBlock) one(logits_[i], i);
  }

  // These two are called and not inlined: each is a walk or several over a vocabulary, and takes long to compile.

  /// Number and mass of the tokens at or above `low`, the same in every thread.
  __device__ __noinline__ void totals(Key low, std::uint32_t& count, Mass& mass) {
    RankScratch& s = rank_scratch();
    std::uint32_t n = 0;
    Mass m = 0;
    for_each(low, [&](float x, Key) {
      ++n;
      m += mass_of(x, max_);
    });
    mass = block_sum(m, s.warp_masses);
    count = static_cast<std::uint32_t>(block_sum(static_cast<Mass>(n), s.warp_masses));
  }

  /// The lowest key of the best tokens whose number (or mass, if by_mass) first reaches `wanted`, among those at or above `low`.
  /// `wanted` must not be more than there is.
  __device__ __noinline__ Key select(Key low, Mass wanted, bool by_mass) {
    RankScratch& s = rank_scratch();
    // Bins of equal width in the logit keep neighbours of a peaked distribution apart; bin 0 is the best.
    clear();
    for_each(low, [&](float x, Key) {
      const int bin = bin_of(x);
      atomicAdd(&s.counts[bin], 1u);
      if (by_mass) atomicAdd(&s.masses[bin], mass_of(x, max_));
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      take_bin(
          wanted, by_mass, [](int i) { return i; }, kBins);
      s.num_listed = 0;
    }
    __syncthreads();
    const int bin = s.bin;
    const bool is_listed = s.bin_count <= kListed;
    if (is_listed)
      for_each(low, [&](float x, Key key) {
        if (bin_of(x) == bin) s.list[atomicAdd(&s.num_listed, 1)] = key;
      });
    __syncthreads();
    // Within the bin: digits of the key, highest first, until one token is left.
    const auto for_bin = [&](auto&& body) {
      if (is_listed) {
        for (int i = static_cast<int>(threadIdx.x); i < s.num_listed; i += kTruncateBlock) body(s.list[i]);
      } else {
        for_each(low, [&](float x, Key key) {
          if (bin_of(x) == bin) body(key);
        });
      }
    };
    Key prefix = 0;
#pragma unroll 1
    for (int shift = 56; shift >= 0; shift -= 8) {
      const auto matches = [&](Key key) { return shift == 56 || key >> (shift + 8) == prefix; };
      __syncthreads();
      wanted = s.wanted;
      const bool is_found = s.bin_count == 1;
      if (is_found) {
        for_bin([&](Key key) {
          if (matches(key)) s.result = key;
        });
        __syncthreads();
        return s.result;
      }
      __syncthreads();
      clear();
      for_bin([&](Key key) {
        if (!matches(key)) return;
        const int digit = static_cast<int>(key >> shift & 255);
        atomicAdd(&s.counts[digit], 1u);
        if (by_mass) atomicAdd(&s.masses[digit], mass_of(at(static_cast<std::uint32_t>(~static_cast<std::uint32_t>(key))), max_));
      });
      __syncthreads();
      if (threadIdx.x == 0)
        take_bin(
            wanted, by_mass, [](int i) { return 255 - i; }, 256);
      __syncthreads();
      prefix = prefix << 8 | static_cast<Key>(s.bin);
    }
    return prefix;
  }

 private:
  __device__ int bin_of(float x) const { return static_cast<int>(fminf((max_ - x) * 16.0f, static_cast<float>(kBins - 1))); }
  __device__ void clear() {
    RankScratch& s = rank_scratch();
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kTruncateBlock) {
      s.counts[i] = 0;
      s.masses[i] = 0;
    }
    __syncthreads();
  }
  /// The bin, in rank order, in which the running sum reaches `wanted`, and what of it is left for inside. One thread.
  template <typename Order>
  __device__ void take_bin(Mass wanted, bool by_mass, Order order, int count) {
    RankScratch& s = rank_scratch();
    int last = 0;
    for (int i = 0; i < count; ++i) {
      const int bin = order(i);
      if (s.counts[bin] == 0) continue;
      const Mass here = by_mass ? s.masses[bin] : s.counts[bin];
      last = bin;
      if (here >= wanted) break;
      wanted -= here;
    }
    s.bin = last;
    s.bin_count = s.counts[last];
    s.wanted = wanted;
  }

  const float* logits_;
  std::int64_t V_;
  float temperature_, max_;
};

/// Tokens that rows name, and their scaled logits, of which those that cannot be drawn become -infinity. Both are [B, max].
struct NamedTokens {
  const std::int32_t* ids;
  float* logits;
  std::int32_t max;
};

/// Truncated draws, and the best and the named tokens of any row. min_p, then top_k, then top_p over what is left.
__global__ void __launch_bounds__(kTruncateBlock)
    truncate_kernel(RowOutput* outputs, std::int32_t* drawn, Key* top, std::int32_t max_top, NamedTokens named, const float* logits,
                    std::int64_t stride, std::int64_t V, int chunks, const RowParams* rows) {
  extern __shared__ Mass chunk_masses[];  // [chunks]
  __shared__ int chosen, first, last;
  __shared__ Mass rest;
  const std::int64_t b = blockIdx.x;
  const RowParams r = rows[b];
  if (!r.is_truncated && r.num_top == 0 && r.num_named == 0) return;
  RowOutput out = outputs[b];
  if (!isfinite(out.lse)) return;
  const float* x = logits + b * stride;
  RankScratch& scratch = rank_scratch();
  Ranker ranker(x, V, r.temperature, out.max);
  Key low = 0;
  std::uint32_t count = 0;
  Mass mass = 0;
  if (r.is_truncated) {
    if (r.min_p > 0.0f) low = key_of(out.max + logf(r.min_p), 0xffffffff);  // behind every token of that logit
    ranker.totals(low, count, mass);
    if (r.top_k > 0 && static_cast<std::uint32_t>(r.top_k) < count) {
      low = ranker.select(low, static_cast<Mass>(r.top_k), false);
      ranker.totals(low, count, mass);
    }
    if (r.top_p < 1.0f) {
      const Mass wanted = static_cast<Mass>(ceil(static_cast<double>(r.top_p) * static_cast<double>(mass)));
      low = ranker.select(low, min(mass, wanted > 0 ? wanted : Mass{1}), true);
      ranker.totals(low, count, mass);
    }
    // Masses of chunks, then of tokens, in index order.
    for (int c = static_cast<int>(threadIdx.x) / kWarp; c < chunks; c += kTruncateBlock / kWarp) {
      Mass sum = 0;
      for (int i = static_cast<int>(threadIdx.x) % kWarp; i < kVocabChunk; i += kWarp) {
        const std::int64_t at = static_cast<std::int64_t>(c) * kVocabChunk + i;
        if (at >= V) break;
        const float v = ranker.at(at);
        if (v != -INFINITY && key_of(v, at) >= low) sum += mass_of(v, out.max);
      }
      __syncwarp();
      sum = warp_sum(sum);
      if (threadIdx.x % kWarp == 0) chunk_masses[c] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const auto target = static_cast<Mass>(r.uniform * static_cast<double>(mass));
      choose_chunk(chunk_masses, chunks, min(target, mass - 1), chosen, rest);
    }
    __syncthreads();
    const std::int64_t i = static_cast<std::int64_t>(chosen) * kVocabChunk + threadIdx.x;
    Mass weight = 0;
    if (i < V) {
      const float v = ranker.at(i);
      if (v != -INFINITY && key_of(v, i) >= low) weight = mass_of(v, out.max);
    }
    const int place = choose_in_chunk(weight, rest, scratch.warp_masses, &first, &last);
    if (threadIdx.x == 0) {
      out.token = static_cast<std::int32_t>(chosen * kVocabChunk + place);
      if (count != V) out.normaliser = out.max + static_cast<float>(log(static_cast<double>(mass) * 0x1.0p-44));
      out.logprob = ranker.at(out.token) - out.normaliser;
    }
    __syncthreads();
  } else if (r.num_top > 0) {
    ranker.totals(low, count, mass);
  }
  for (int k = static_cast<int>(threadIdx.x); k < r.num_named; k += kTruncateBlock) {
    const std::int64_t at = b * named.max + k;
    const float v = ranker.at(named.ids[at]);
    named.logits[at] = key_of(v, named.ids[at]) >= low ? v : -INFINITY;
  }
  out.num_named = r.num_named;
  if (r.num_top > 0) {
    const auto wanted = min(static_cast<std::uint32_t>(r.num_top), count);
    Key worst = low;
    if (wanted < count) worst = ranker.select(low, wanted, false);
    if (threadIdx.x == 0) scratch.num_listed = 0;
    __syncthreads();
    ranker.for_each(worst, [&](float, Key key) { top[b * max_top + atomicAdd(&scratch.num_listed, 1)] = key; });
    __syncthreads();
    out.num_top = scratch.num_listed;
  }
  if (threadIdx.x != 0) return;
  outputs[b] = out;
  if (drawn != nullptr) drawn[b] = out.token;
}

/// Uniform in [0, 1) with 53 bits: a pure function of the request's seed and the token's index in it.
double uniform(const SampleRow& row) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto r = Rng::philox({low(row.position), low(row.position >> 32), 0, 0}, {low(row.seed), low(row.seed >> 32)});
  return static_cast<double>(((static_cast<std::uint64_t>(r[0]) << 32) | r[1]) >> 11) * 0x1.0p-53;
}

bool is_truncated(const SampleRow& row) { return row.temperature != 0.0f && (row.top_k > 0 || row.top_p < 1.0f || row.min_p > 0.0f); }

bool needs_ranking(const SampleRow& row) { return is_truncated(row) || row.num_top_logprobs > 0 || !row.named_ids.empty(); }

RowParams params_of(const SampleRow& row, std::int64_t V) {
  RowParams p{};
  p.is_greedy = row.temperature == 0.0f;
  p.is_truncated = is_truncated(row);
  p.uniform = uniform(row);
  p.temperature = p.is_greedy ? 1.0f : row.temperature;
  p.top_p = row.top_p;
  p.min_p = row.min_p;
  p.top_k = std::max(row.top_k, 0);
  p.num_top = static_cast<std::int32_t>(std::min<std::int64_t>(std::max(row.num_top_logprobs, 0), V));
  p.num_named = static_cast<std::int32_t>(row.named_ids.size());
  return p;
}

/// The rows' named tokens on the device, `max` for each row; nullptr for none.
const std::int32_t* staged_ids(const OpContext& ctx, std::span<const SampleRow> rows_B, std::int32_t max) {
  if (max == 0) return nullptr;
  thread_local std::vector<std::int32_t> ids;
  ids.assign(rows_B.size() * static_cast<std::size_t>(max), 0);
  for (std::size_t b = 0; b < rows_B.size(); ++b)
    std::ranges::copy(rows_B[b].named_ids, ids.begin() + static_cast<std::ptrdiff_t>(b * static_cast<std::size_t>(max)));
  return staged<std::int32_t>(ctx, ids);
}

/// What a call of these ops has in memory.
struct Drawing {
  std::span<const RowParams> params;
  RowPieces pieces{};
  RowOutput* outputs = nullptr;
  Key* top = nullptr;
  std::int32_t max_top = 0;
  NamedTokens named{};
  bool needs_ranking = false;
  std::size_t result_bytes = 0;
};

Drawing prepare(OpContext& ctx, PendingSamples& pending, std::span<const SampleRow> rows_B, std::int64_t V) {
  const auto B = static_cast<std::int64_t>(rows_B.size());
  thread_local std::vector<RowParams> all_params;  // kept, so that a warm call allocates nothing
  Drawing d;
  all_params.clear();
  for (const SampleRow& row : rows_B) {
    all_params.push_back(params_of(row, V));
    d.max_top = std::max(d.max_top, all_params.back().num_top);
    d.named.max = std::max(d.named.max, all_params.back().num_named);
    d.needs_ranking = d.needs_ranking || needs_ranking(row);
  }
  d.params = all_params;
  d.pieces.chunks = static_cast<int>(ceil_div(V, kVocabChunk));
  d.pieces.count = static_cast<int>(ceil_div(V, kPiece));
  if (d.pieces.chunks > kMaxChunks)
    fail(ErrorCode::kNotImplemented, "[sample] a vocabulary of {}; up to {} is supported", V, kMaxChunks * kVocabChunk);
  const auto carve = [&](void* memory) {
    Carver c(memory);
    d.pieces.data = c.take<SoftmaxStats>(B * d.pieces.stride());
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  // Not in the workspace: the copy to the host holds up no work that is queued later.
  const auto carve_results = [&](void* memory) {
    Carver c(memory);
    d.outputs = c.take<RowOutput>(B);
    d.top = c.take<Key>(B * d.max_top);
    d.named.logits = c.take<float>(B * d.named.max);
    return c.used();
  };
  d.result_bytes = carve_results(nullptr);
  if (pending.link == nullptr) pending.link = make_host_link(ctx.runtime, true);
  if (!pending.memory.defined() || pending.memory.num_bytes() < d.result_bytes) {
    pending.link->wait(pending.copied);
    pending.memory = Tensor::empty(ctx.runtime, {static_cast<std::int64_t>(std::bit_ceil(d.result_bytes))}, DType::kU8);
    pending.host = pending.link->allocate(pending.memory.num_bytes());
  }
  carve_results(pending.memory.data());
  d.named.ids = staged_ids(ctx, rows_B, d.named.max);
  return d;
}

void finish_drawing(PendingSamples& pending, const Drawing& d) {
  pending.max_top = d.max_top;
  pending.max_named = d.named.max;
  pending.copied = pending.link->to_host(pending.host.get(), d.outputs, d.result_bytes);
}

/// use(rows) with the rows as a kernel takes them.
template <typename Use>
void with_rows(const OpContext& ctx, const Drawing& d, Use&& use) {
  const auto as_arguments = [&]<int kRows>() {
    RowArguments<kRows> rows;
    std::ranges::copy(d.params, rows.rows);
    use(rows);
  };
  if (d.needs_ranking || d.params.size() > kMostArguments)
    use(staged<RowParams>(ctx, d.params));
  else if (d.params.size() > kFewArguments)
    as_arguments.template operator()<kMostArguments>();
  else
    as_arguments.template operator()<kFewArguments>();
}

template <typename Rows, typename Logits>
void launch_draw(const OpContext& ctx, const Drawing& d, const TensorView& drawn_B, const Logits& logits, std::size_t logits_bytes,
                 const Rows& rows) {
  constexpr std::size_t kChunkBytes = sizeof(SoftmaxStats) + sizeof(float);
  const std::size_t bytes = logits_bytes + static_cast<std::size_t>(d.pieces.chunks) * kChunkBytes;
  const auto kernel = draw_kernel<Rows, Logits>;
  if constexpr (Logits::kIsProduct)
    PRL_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        FormedLogits::kMaxSlots * FormedLogits::kSlotBytes + kMaxChunks * static_cast<int>(kChunkBytes)));
  // Early: the kernel before it has waited for all that was queued before, and lets this one begin.
  launch_waiting(true, stream_of(ctx), kernel, dim3(static_cast<unsigned>(d.params.size())), dim3(kDrawBlock), bytes, d.outputs,
                 drawn_B.as<std::int32_t>(), d.pieces, static_cast<int>(logits_bytes), logits, rows);
}

}  // namespace

void begin_sample(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView logits_BV,
                  std::span<const SampleRow> rows_B) {
  const std::int64_t V = logits_BV.shape.num_cols();
  const Drawing d = prepare(ctx, pending, rows_B, V);
  const auto B = static_cast<unsigned>(rows_B.size());
  const cudaStream_t stream = stream_of(ctx);
  const StoredLogits logits{logits_BV.as<float>(), logits_BV.row_stride, V};
  with_rows(ctx, d, [&](const auto& rows) {
    using Rows = std::remove_cvref_t<decltype(rows)>;
    const dim3 grid(static_cast<unsigned>(ceil_div(d.pieces.chunks, kBlock / kWarp)), B);
    launch_waiting(true, stream, stats_kernel<Rows>, grid, dim3(kBlock), 0, d.pieces, logits.logits, logits.stride, V, rows);
    launch_draw(ctx, d, drawn_B, logits, 0, rows);
    if constexpr (std::is_pointer_v<Rows>) {
      if (!d.needs_ranking) return;
      truncate_kernel<<<B, kTruncateBlock, static_cast<std::size_t>(d.pieces.chunks) * sizeof(Mass), stream>>>(
          d.outputs, drawn_B.as<std::int32_t>(), d.top, d.max_top, d.named, logits.logits, logits.stride, V, d.pieces.chunks, rows);
      PRL_CUDA_CHECK(cudaGetLastError());
    }
  });
  finish_drawing(pending, d);
}

bool begin_sample_head(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView h_BH, const LinearWeight& lm_head,
                       std::span<const SampleRow> rows_B) {
  const DenseWeight& w = dense(ctx, lm_head);
  const Product p = forward_product(w, h_BH.data, h_BH.row_stride, h_BH.shape.num_rows(), 0, w.num_outputs());
  if (w.has_bias() || !can_form_head(ctx, p)) return false;
  if (std::ranges::any_of(rows_B, needs_ranking)) return false;
  const Drawing d = prepare(ctx, pending, rows_B, p.N);
  thread_local std::vector<float> temperatures;
  temperatures.clear();
  for (const RowParams& r : d.params) temperatures.push_back(r.temperature);
  head_stats(ctx, d.pieces.data, d.pieces.stride(), p, temperatures);
  const FormedLogits logits = FormedLogits::of(p);
  with_rows(ctx, d, [&](const auto& rows) { launch_draw(ctx, d, drawn_B, logits, logits.shared_bytes(), rows); });
  finish_drawing(pending, d);
  return true;
}

void finish_sample(std::span<SampleResult> out_B, PendingSamples& pending) {
  pending.link->wait(pending.copied);
  Carver c(pending.host.get());
  const RowOutput* outputs = c.take<RowOutput>(pending.num_rows);
  const Key* keys = c.take<Key>(pending.num_rows * pending.max_top);
  const float* named = c.take<float>(pending.num_rows * pending.max_named);
  thread_local std::vector<Key> best;
  for (std::size_t b = 0; b < out_B.size(); ++b, keys += pending.max_top, named += pending.max_named) {
    const RowOutput& r = outputs[b];
    SampleResult& out = out_B[b];
    out.token = r.token;
    out.logprob = r.logprob;
    out.top_logprobs.clear();
    best.assign(keys, keys + r.num_top);
    std::sort(best.begin(), best.end(), std::greater<>());
    for (const Key key : best) out.top_logprobs.emplace_back(token_of(key), logit_of(key) - r.normaliser);
    out.named_logprobs.clear();
    for (std::int32_t k = 0; k < r.num_named; ++k) out.named_logprobs.push_back(named[k] - r.normaliser);
  }
}

}  // namespace prl::ops::cuda
