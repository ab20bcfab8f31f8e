#include <algorithm>
#include <bit>
#include <cmath>

#include "base/rng.hpp"
#include "ops/cuda/blas.hpp"
#include "ops/cuda/bodies.hpp"
#include "ops/cuda/log_softmax.cuh"

// Sampling. Three kernels: statistics of chunks (a warp each), the draw (a block per row), and, where a row asks for it, truncation
// and the best tokens. Masses of truncated rows are integers (weights in units of 2^-44 of the best token's), so the order in which
// threads add them leaves no trace.

namespace prl::ops::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kDrawBlock = kVocabChunk;  ///< a thread per logit of the drawn chunk
static_assert(kDrawBlock == 1024);
constexpr int kMaxChunks = 2048;  ///< of a vocabulary; their masses lie in shared memory
/// Rows that are handed over as arguments of a kernel, at most 32,764 bytes of which there may be.
constexpr int kFewArguments = 32, kMostArguments = 512;

/// One row as the kernels want it.
struct RowParams {
  double uniform;
  float temperature;  ///< 1 for greedy rows
  float top_p, min_p;
  std::int32_t top_k;  ///< 0: all
  std::int32_t num_top;
  bool is_greedy, is_truncated;
};
struct RowOutput {
  std::int32_t token;
  float logprob;
  float lse;         ///< of all tokens
  float normaliser;  ///< log-sum-exp over the tokens that are kept
  float max;
  std::int32_t num_top;
};

/// Rows as arguments of a kernel: a copy of their own would wait between the product that forms the logits and the first kernel here.
template <int kRows>
struct RowArguments {
  RowParams rows[kRows];
  __device__ __forceinline__ const RowParams& operator[](std::int64_t i) const { return rows[i]; }
};

/// `Rows`: const RowParams* or RowArguments.
template <typename Rows>
__global__ void __launch_bounds__(kBlock) stats_kernel(ChunkStats* stats, const float* logits, std::int64_t stride, std::int64_t V,
                                                       int chunks, const __grid_constant__ Rows rows) {
  const int chunk = static_cast<int>(blockIdx.x * (kBlock / kWarp) + threadIdx.x / kWarp);
  if (chunk >= chunks) return;
  const std::int64_t b = blockIdx.y, begin = static_cast<std::int64_t>(chunk) * kVocabChunk;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kVocabChunk), V - begin));
  float x[kChunkVectors][kVec];
  load_chunk(x, logits + b * stride + begin, count, rows[b].temperature);
  const ChunkStats s = chunk_stats(x);
  if (threadIdx.x % kWarp == 0) stats[b * chunks + chunk] = s;
}

/// Finds the chunk in which the running sum of masses passes uniform * total. One thread.
template <typename Mass>
__device__ void choose_chunk(const Mass* masses, int chunks, Mass target, int& chosen, Mass& rest) {
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

/// Sums over the block's weights, one a thread: of those before this thread's, up to and with it, and of all.
template <typename Mass>
struct Running {
  Mass before, upto, total;
};
template <typename Mass>
__device__ Running<Mass> running_sum(Mass weight, Mass* warp_totals) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Mass prefix = weight;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Mass other = __shfl_up_sync(kFullWarp, prefix, step);
    if (lane >= step) prefix += other;
  }
  const Mass left = __shfl_up_sync(kFullWarp, prefix, 1);
  __syncthreads();
  if (lane == kWarp - 1) warp_totals[warp] = prefix;
  __syncthreads();
  Running<Mass> out{0, 0, 0};
#pragma unroll
  for (int w = 0; w < kDrawBlock / kWarp; ++w) {
    if (w == warp) out.before = out.total;
    out.total += warp_totals[w];
  }
  out.upto = out.before + prefix;
  if (lane > 0) out.before += left;
  return out;
}
/// The first thread whose running sum passes `target`; the last one with a positive weight if none does.
template <typename Mass>
__device__ int choose_thread(Mass weight, Mass upto, Mass target, int* first, int* last) {
  if (threadIdx.x == 0) {
    *first = kVocabChunk;
    *last = 0;
  }
  __syncthreads();
  if (weight > 0) {
    if (upto > target) atomicMin(first, static_cast<int>(threadIdx.x));
    atomicMax(last, static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  return *first < kVocabChunk ? *first : *last;
}
template <typename Mass>
__device__ int choose_in_chunk(Mass weight, Mass target, Mass* warp_totals, int* first, int* last) {
  return choose_thread(weight, running_sum(weight, warp_totals).upto, target, first, last);
}

/// LogSumExp of a row by the threads of a block, the same bits as from one thread: scales and scaled sums of the chunks are formed side
/// by side, and what must be done in order is a product and a sum a chunk. `steps` holds one float2 per chunk.
struct RowMaximum {
  float value, max;
};
__device__ RowMaximum log_sum_exp(const ChunkStats* stats, int chunks, float2* steps, float* warp_tops) {
  __shared__ float total;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int per_thread = (chunks + kDrawBlock - 1) / kDrawBlock, begin = min(chunks, static_cast<int>(threadIdx.x) * per_thread);
  const int end = min(chunks, begin + per_thread);
  float top = -INFINITY;
  for (int c = begin; c < end; ++c) top = fmaxf(top, stats[c].max);
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const float other = __shfl_up_sync(kFullWarp, top, step);
    if (lane >= step) top = fmaxf(top, other);
  }
  float before = __shfl_up_sync(kFullWarp, top, 1);
  if (lane == 0) before = -INFINITY;
  if (lane == kWarp - 1) warp_tops[warp] = top;
  __syncthreads();
  float max = -INFINITY;
#pragma unroll
  for (int w = 0; w < kDrawBlock / kWarp; ++w) {
    if (w == warp) before = fmaxf(before, max);
    max = fmaxf(max, warp_tops[w]);
  }
  for (int c = begin; c < end; ++c) {
    const ChunkStats s = stats[c];
    const float m = fmaxf(before, s.max);
    if (s.max == -INFINITY)
      steps[c] = make_float2(1.0f, 0.0f);
    else if (before == -INFINITY)
      steps[c] = make_float2(0.0f, s.sum);  // the first one is taken as it is
    else
      steps[c] = make_float2(expf(before - m), expf(s.max - m) * s.sum);
    before = m;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
#pragma unroll 8
    for (int c = 0; c < chunks; ++c) sum = steps[c].x * sum + steps[c].y;
    total = max + logf(sum);
  }
  __syncthreads();
  return {total, max};
}

/// Log-sum-exp, greedy choice or draw, and log-probability of rows that are not truncated. `drawn`: tokens, or nullptr.
template <typename Rows>
__global__ void __launch_bounds__(kDrawBlock)
    draw_kernel(RowOutput* outputs, std::int32_t* drawn, const ChunkStats* all_stats, const float* logits, std::int64_t stride,
                std::int64_t V, int chunks, const __grid_constant__ Rows rows) {
  extern __shared__ double masses[];  // [chunks], then ChunkStats [chunks]
  __shared__ double warp_totals[kDrawBlock / kWarp];
  __shared__ float warp_tops[kDrawBlock / kWarp];
  __shared__ double rest;
  __shared__ int chosen, first, last;
  const std::int64_t b = blockIdx.x;
  const RowParams r = rows[b];
  auto* stats = reinterpret_cast<ChunkStats*>(masses + chunks);
  for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kDrawBlock) stats[c] = all_stats[b * chunks + c];
  __syncthreads();
  const auto [lse, max] = log_sum_exp(stats, chunks, reinterpret_cast<float2*>(masses), warp_tops);
  RowOutput out{.token = 0, .logprob = 0.0f, .lse = lse, .normaliser = lse, .max = max, .num_top = 0};
  const float* x = logits + b * stride;
  if (isfinite(lse) && r.is_greedy) {
    if (threadIdx.x == 0) {
      chosen = chunks;
      first = kVocabChunk;
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < chunks; c += kDrawBlock)
      if (stats[c].max == max) atomicMin(&chosen, c);
    __syncthreads();
    const std::int64_t i = static_cast<std::int64_t>(chosen) * kVocabChunk + threadIdx.x;
    if (i < V && x[i] == max) atomicMin(&first, static_cast<int>(threadIdx.x));
    __syncthreads();
    out.token = static_cast<std::int32_t>(chosen * kVocabChunk + first);
  } else if (isfinite(lse) && !r.is_truncated) {
    // Neighbouring chunks are a thread's where there are more of them than threads.
    const int per_thread = (chunks + kDrawBlock - 1) / kDrawBlock, begin = min(chunks, static_cast<int>(threadIdx.x) * per_thread);
    const int end = min(chunks, begin + per_thread);
    double mass = 0;
    for (int c = begin; c < end; ++c) {
      masses[c] = stats[c].max == -INFINITY ? 0.0 : static_cast<double>(stats[c].sum) * exp(static_cast<double>(stats[c].max) - max);
      mass += masses[c];
    }
    const Running<double> sums = running_sum(mass, warp_totals);
    const double target = r.uniform * sums.total;
    if (choose_thread(mass, sums.upto, target, &first, &last) == static_cast<int>(threadIdx.x)) {
      choose_chunk(masses + begin, end - begin, fmax(0.0, target - sums.before), chosen, rest);
      chosen += begin;
      rest = rest / masses[chosen] * static_cast<double>(stats[chosen].sum);  // in units of the chunk's own weights
    }
    __syncthreads();
    const std::int64_t i = static_cast<std::int64_t>(chosen) * kVocabChunk + threadIdx.x;
    const double weight = i < V ? static_cast<double>(expf(scaled(x[i], r.temperature) - stats[chosen].max)) : 0.0;
    out.token = static_cast<std::int32_t>(chosen * kVocabChunk + choose_in_chunk(weight, rest, warp_totals, &first, &last));
  }
  if (threadIdx.x != 0) return;
  out.logprob = isfinite(lse) ? scaled(x[out.token], r.temperature) - lse : NAN;
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

constexpr int kBins = 1024;    ///< of width 1/16 in the logit
constexpr int kListed = 2048;  ///< keys of one bin that are kept at hand
constexpr int kTruncateBlock = 1024;

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

/// Truncated draws, and the best tokens of any row. min_p, then top_k, then top_p over what is left.
__global__ void __launch_bounds__(kTruncateBlock)
    truncate_kernel(RowOutput* outputs, std::int32_t* drawn, Key* top, std::int32_t max_top, const float* logits, std::int64_t stride,
                    std::int64_t V, int chunks, const RowParams* rows) {
  extern __shared__ Mass chunk_masses[];  // [chunks]
  __shared__ int chosen, first, last;
  __shared__ Mass rest;
  const std::int64_t b = blockIdx.x;
  const RowParams r = rows[b];
  if (!r.is_truncated && r.num_top == 0) return;
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
  } else {
    ranker.totals(low, count, mass);
  }
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

RowParams params_of(const SampleRow& row, std::int64_t V) {
  RowParams p{};
  p.is_greedy = row.temperature == 0.0f;
  p.is_truncated = !p.is_greedy && (row.top_k > 0 || row.top_p < 1.0f || row.min_p > 0.0f);
  p.uniform = uniform(row);
  p.temperature = p.is_greedy ? 1.0f : row.temperature;
  p.top_p = row.top_p;
  p.min_p = row.min_p;
  p.top_k = std::max(row.top_k, 0);
  p.num_top = static_cast<std::int32_t>(std::min<std::int64_t>(std::max(row.num_top_logprobs, 0), V));
  return p;
}

}  // namespace

void begin_sample(OpContext& ctx, PendingSamples& pending, TensorView drawn_B, ConstTensorView logits_BV,
                  std::span<const SampleRow> rows_B) {
  const auto B = static_cast<std::int64_t>(rows_B.size());
  const std::int64_t V = logits_BV.shape.num_cols();
  const auto chunks = static_cast<int>(ceil_div(V, kVocabChunk));
  thread_local std::vector<RowParams> all_params;  // kept, so that a warm call allocates nothing
  all_params.clear();
  std::int32_t max_top = 0;
  bool needs_ranking = false;
  for (const SampleRow& row : rows_B) {
    all_params.push_back(params_of(row, V));
    max_top = std::max(max_top, all_params.back().num_top);
    needs_ranking = needs_ranking || all_params.back().is_truncated || all_params.back().num_top > 0;
  }
  ChunkStats* stats = nullptr;
  RowOutput* outputs = nullptr;
  Key* top = nullptr;
  const auto carve = [&](void* memory) {
    Carver c(memory);
    stats = c.take<ChunkStats>(B * chunks);
    return c.used();
  };
  carve(ctx.workspace->require(carve(nullptr)));
  // Not in the workspace: the copy to the host holds up no work that is queued later.
  const auto carve_results = [&](void* memory) {
    Carver c(memory);
    outputs = c.take<RowOutput>(B);
    top = c.take<Key>(B * max_top);
    return c.used();
  };
  const std::size_t bytes = carve_results(nullptr);
  if (pending.copy == nullptr) pending.copy = ctx.runtime->make_host_copy();
  if (!pending.memory.defined() || pending.memory.num_bytes() < bytes) {
    (void)pending.copy->finish();
    pending.memory = Tensor::empty(ctx.runtime, {static_cast<std::int64_t>(std::bit_ceil(bytes))}, DType::kU8);
  }
  carve_results(pending.memory.data());
  const cudaStream_t stream = stream_of(ctx);
  if (chunks > kMaxChunks)
    fail(ErrorCode::kNotImplemented, "[sample] a vocabulary of {}; up to {} is supported", V, kMaxChunks * kVocabChunk);
  const auto shared = static_cast<std::size_t>(chunks);  // entries
  const float* logits = logits_BV.as<float>();
  auto* drawn = drawn_B.as<std::int32_t>();

  const auto draw = [&](const auto& rows) {
    using Rows = std::remove_cvref_t<decltype(rows)>;
    const dim3 grid(static_cast<unsigned>(ceil_div(chunks, kBlock / kWarp)), static_cast<unsigned>(B));
    stats_kernel<Rows><<<grid, kBlock, 0, stream>>>(stats, logits, logits_BV.row_stride, V, chunks, rows);
    PRL_CUDA_CHECK(cudaGetLastError());
    draw_kernel<Rows><<<static_cast<unsigned>(B), kDrawBlock, shared*(sizeof(double) + sizeof(ChunkStats)), stream>>>(
        outputs, drawn, stats, logits, logits_BV.row_stride, V, chunks, rows);
    PRL_CUDA_CHECK(cudaGetLastError());
  };
  const auto as_arguments = [&]<int kRows>() {
    RowArguments<kRows> rows;
    std::ranges::copy(all_params, rows.rows);
    draw(rows);
  };
  if (needs_ranking || B > kMostArguments) {
    const RowParams* params = staged<RowParams>(ctx, all_params);
    draw(params);
    if (needs_ranking) {
      truncate_kernel<<<static_cast<unsigned>(B), kTruncateBlock, shared * sizeof(Mass), stream>>>(outputs, drawn, top, max_top, logits,
                                                                                                   logits_BV.row_stride, V, chunks, params);
      PRL_CUDA_CHECK(cudaGetLastError());
    }
  } else if (B > kFewArguments) {
    as_arguments.template operator()<kMostArguments>();
  } else {
    as_arguments.template operator()<kFewArguments>();
  }

  pending.max_top = max_top;
  pending.copy->begin(outputs, bytes);
}

void finish_sample(std::span<SampleResult> out_B, PendingSamples& pending) {
  const std::byte* const bytes = pending.copy->finish();
  Carver c(const_cast<std::byte*>(bytes));
  const RowOutput* outputs = c.take<RowOutput>(pending.num_rows);
  const Key* keys = c.take<Key>(pending.num_rows * pending.max_top);
  thread_local std::vector<Key> best;
  for (std::size_t b = 0; b < out_B.size(); ++b, keys += pending.max_top) {
    const RowOutput& r = outputs[b];
    SampleResult& out = out_B[b];
    out.token = r.token;
    out.logprob = r.logprob;
    out.top_logprobs.clear();
    best.assign(keys, keys + r.num_top);
    std::sort(best.begin(), best.end(), std::greater<>());
    for (const Key key : best) out.top_logprobs.emplace_back(token_of(key), logit_of(key) - r.normaliser);
  }
}

}  // namespace prl::ops::cuda
