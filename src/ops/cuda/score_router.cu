#include "ops/cuda/bodies.hpp"
#include "ops/cuda/chain.cuh"
#include "ops/cuda/device.cuh"
#include "ops/cuda/greatest.cuh"
#include "ops/experts.hpp"

// Experts by scores of their own: one warp per token. What it knows of its experts and groups lies in shared memory, as every lane asks for
// those of others.

namespace prl::ops::cuda {
namespace {

constexpr int kWarps = 4;
constexpr float kScoreSumFloor = 1e-20f;  // of ScoreRule

struct ScoreArgs {
  std::int32_t* ids;
  float *weights, *mass;
  const float *logits, *bias;
  std::int64_t ids_stride, weights_stride, logits_stride;
  int num_tokens, num_experts, num_active, num_parts, num_groups, num_active_groups;
  bool renormalize;
  float scale;
  const std::int32_t* given;  ///< nullptr: none
  std::int64_t given_stride;
};

__device__ __forceinline__ float score_of(float logit) { return 1.0f / (1.0f + expf(-logit)); }

/// Of the numbers values[0 .. count), those behind `last` that are `wanted`.
template <typename Wanted>
__device__ __forceinline__ Candidate next_greatest(const float* values, int count, int lane, Candidate last, const Wanted& wanted) {
  Candidate best{-INFINITY, INT_MAX};
  for (int i = lane; i < count; i += kWarp)
    if (const Candidate c{values[i], i}; wanted(i) && is_behind(c, last)) take_greater(best, c);
  return greatest_of_warp(best);
}

__device__ __forceinline__ float value_of_group(const float* values, int count) {
  float first = fmaxf(values[0], values[1]), second = fminf(values[0], values[1]);
  for (int i = 2; i < count; ++i) {
    second = fmaxf(second, fminf(first, values[i]));
    first = fmaxf(first, values[i]);
  }
  return first + second;
}

__global__ void __launch_bounds__(kWarps* kWarp) route_by_score_kernel(const ScoreArgs a) {
  extern __shared__ float memory[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int t = static_cast<int>(blockIdx.x) * kWarps + warp, of_group = a.num_experts / a.num_groups;
  float* const scores = memory + warp * (2 * a.num_experts + a.num_groups);
  float *const values = scores + a.num_experts, *const groups = values + a.num_experts;
  wait_for_previous();
  let_next_begin();
  if (t >= a.num_tokens) return;
  const float* logits = a.logits + t * a.logits_stride;
  float all = 0.0f;
  for (int e = lane; e < a.num_experts; e += kWarp) {
    float bias = 0.0f;
    for (int p = a.num_parts - 1; p >= 0; --p) bias = a.bias[p * a.num_experts + e] + bias;
    const float score = score_of(logits[e]);
    scores[e] = score;
    values[e] = score + bias;
    all += score;
  }
  all = warp_sum(all);
  __syncwarp();
  Candidate last_group{-INFINITY, INT_MAX};  // all groups come before it
  if (a.num_active_groups < a.num_groups) {
    for (int g = lane; g < a.num_groups; g += kWarp) groups[g] = value_of_group(values + g * of_group, of_group);
    __syncwarp();
    last_group = {};
    for (int i = 0; i < a.num_active_groups; ++i)
      last_group = next_greatest(groups, a.num_groups, lane, last_group, [](int) { return true; });
  }
  const bool has_all_groups = a.num_active_groups == a.num_groups;
  const auto is_active = [&](int e) {
    const int g = e / of_group;
    return has_all_groups || !is_behind({groups[g], g}, last_group);
  };
  Candidate last;
  int mine = 0;
  if (const int given = given_expert(a.given, t * a.given_stride, lane, a.num_active, a.num_experts); given >= 0) {
    mine = given;
  } else {
    for (int k = 0; k < a.num_active; ++k) {
      last = next_greatest(values, a.num_experts, lane, last, is_active);
      if (lane == k) mine = last.index;
    }
  }
  const float score = scores[mine];
  float of_chosen = 0.0f;
  for (int k = 0; k < a.num_active; ++k) of_chosen += __shfl_sync(kFullWarp, score, k);
  if (lane == 0) a.mass[t] = of_chosen / all;
  if (lane < a.num_active) {
    a.ids[t * a.ids_stride + lane] = mine;
    a.weights[t * a.weights_stride + lane] = (a.renormalize ? score / (of_chosen + kScoreSumFloor) : score) * a.scale;
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp)
    route_by_score_backward_kernel(T* dlogits, const float* dweights, std::int64_t dlogits_stride, std::int64_t dweights_stride,
                                   const ScoreArgs a) {
  const int t = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  if (t >= a.num_tokens) return;
  const bool is_mine = lane < a.num_active;
  const int index = is_mine ? a.ids[t * a.ids_stride + lane] : 0;
  const float score = is_mine ? score_of(a.logits[t * a.logits_stride + index]) : 0.0f;
  const float dw = is_mine ? dweights[t * dweights_stride + lane] : 0.0f;
  float sum = kScoreSumFloor, dot = 0.0f;
  for (int k = 0; k < a.num_active; ++k) {
    sum += __shfl_sync(kFullWarp, score, k);
    dot += __shfl_sync(kFullWarp, score * dw, k);
  }
  const float mean = a.renormalize ? dot / sum : 0.0f, divisor = a.renormalize ? sum : 1.0f;
  T* const out = dlogits + t * dlogits_stride;
  for (int e = lane; e < a.num_experts; e += kWarp) out[e] = from_float<T>(0.0f);
  __syncwarp();
  if (is_mine) out[index] = from_float<T>(a.scale * (dw - mean) / divisor * score * (1.0f - score));
}

ScoreArgs args_of(const ConstTensorView& logits_TE, const ConstTensorView& ids_TK, const ScoreRule& rule) {
  ScoreArgs a{};
  a.ids = const_cast<std::int32_t*>(ids_TK.as<std::int32_t>());  // written by the forward pass alone
  a.ids_stride = ids_TK.row_stride;
  a.logits = logits_TE.as<float>();
  a.logits_stride = logits_TE.row_stride;
  a.num_tokens = static_cast<int>(logits_TE.shape.num_rows());
  a.num_experts = static_cast<int>(logits_TE.shape.num_cols());
  a.num_active = static_cast<int>(ids_TK.shape.num_cols());
  a.num_groups = static_cast<int>(rule.num_groups);
  a.num_active_groups = static_cast<int>(rule.num_active_groups);
  a.renormalize = rule.renormalize;
  a.scale = rule.scale;
  return a;
}
unsigned num_blocks(const ScoreArgs& a) { return static_cast<unsigned>((a.num_tokens + kWarps - 1) / kWarps); }

}  // namespace

void route_by_score(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE,
                    ConstTensorView bias_PE, const ScoreRule& rule, ConstTensorView given_TK) {
  ScoreArgs a = args_of(logits_TE, ids_TK, rule);
  a.weights = weights_TK.as<float>();
  a.weights_stride = weights_TK.row_stride;
  a.mass = mass_T.as<float>();
  a.bias = bias_PE.as<float>();
  a.given = given_TK.as<std::int32_t>();
  a.given_stride = given_TK.row_stride;
  a.num_parts = static_cast<int>(bias_PE.shape.num_rows());
  static_assert(kWarps * (2 * kMaxExperts + kMaxExperts / 2) * sizeof(float) <= 48 * 1024, "what a block may have without asking");
  const auto bytes = static_cast<std::size_t>(kWarps * (2 * a.num_experts + a.num_groups)) * sizeof(float);
  launch_chained(stream_of(ctx), route_by_score_kernel, dim3(num_blocks(a)), dim3(kWarps * kWarp), bytes, a);
}

void route_by_score_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE,
                             ConstTensorView ids_TK, const ScoreRule& rule) {
  const ScoreArgs a = args_of(logits_TE, ids_TK, rule);
  with_type(dlogits_TE.dtype, [&](auto t) {
    using T = decltype(t);
    route_by_score_backward_kernel<T><<<num_blocks(a), kWarps * kWarp, 0, stream_of(ctx)>>>(
        dlogits_TE.as<T>(), dweights_TK.as<float>(), dlogits_TE.row_stride, dweights_TK.row_stride, a);
  });
  PRL_CUDA_CHECK(cudaGetLastError());
}

}  // namespace prl::ops::cuda
