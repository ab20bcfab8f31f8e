#include "ops/experts.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "ops/cpu/bodies.hpp"
#include "ops/cpu/parallel.hpp"
#include "ops/cpu/row_access.hpp"
#include "ops/cpu/table.hpp"

namespace prl::ops::cpu {
namespace {

using Chosen = std::array<std::int32_t, kMaxActiveExperts>;

/// The `k` greatest, greatest first; a later one passes only those that are less.
void choose(Chosen& chosen, const float* logits, std::int64_t num_experts, std::int64_t k) {
  std::int64_t count = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    std::int64_t at = count;
    while (at > 0 && logits[e] > logits[chosen[static_cast<std::size_t>(at - 1)]]) --at;
    if (at >= k) continue;
    count = std::min(count + 1, k);
    for (std::int64_t i = count - 1; i > at; --i) chosen[static_cast<std::size_t>(i)] = chosen[static_cast<std::size_t>(i - 1)];
    chosen[static_cast<std::size_t>(at)] = static_cast<std::int32_t>(e);
  }
}

/// Whether the row names `k` experts, which it copies: see route().
bool take_given(Chosen& chosen, const ConstTensorView& given_TK, std::int64_t token, std::int64_t num_experts, std::int64_t k) {
  if (given_TK.data == nullptr) return false;
  const std::int32_t* given = row_of<std::int32_t>(given_TK, token);
  bool are_equal = k > 1;
  for (std::int64_t i = 0; i < k; ++i) {
    if (given[i] < 0 || given[i] >= num_experts) return false;
    are_equal &= given[i] == given[0];
  }
  if (!are_equal) std::copy_n(given, k, chosen.begin());
  return !are_equal;
}

float sum_of_exponentials(const float* logits, std::int64_t num_experts, float most) {
  float sum = 0.0f;
  for (std::int64_t e = 0; e < num_experts; ++e) sum += std::exp(logits[e] - most);
  return sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

/// Of ScoreRule.
constexpr float kScoreSumFloor = 1e-20f;

/// Values of experts whose groups have no place become less than all others.
void keep_active_groups(float* values, std::int64_t num_experts, const ScoreRule& rule) {
  if (rule.num_active_groups == rule.num_groups) return;
  const std::int64_t of_group = num_experts / rule.num_groups;
  std::array<float, kMaxExperts / 2> of_groups{};
  std::array<std::int32_t, kMaxExperts / 2> order{};
  for (std::int64_t g = 0; g < rule.num_groups; ++g) {
    const float* in = values + g * of_group;
    float first = std::max(in[0], in[1]), second = std::min(in[0], in[1]);
    for (std::int64_t e = 2; e < of_group; ++e) {
      second = std::max(second, std::min(first, in[e]));
      first = std::max(first, in[e]);
    }
    of_groups[static_cast<std::size_t>(g)] = first + second;
    order[static_cast<std::size_t>(g)] = static_cast<std::int32_t>(g);
  }
  std::stable_sort(order.begin(), order.begin() + rule.num_groups, [&](std::int32_t a, std::int32_t b) {
    return of_groups[static_cast<std::size_t>(a)] > of_groups[static_cast<std::size_t>(b)];
  });
  for (std::int64_t i = rule.num_active_groups; i < rule.num_groups; ++i)
    std::fill_n(values + order[static_cast<std::size_t>(i)] * of_group, of_group, -std::numeric_limits<float>::infinity());
}

}  // namespace

void route(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE, bool renormalize,
           ConstTensorView given_TK) {
  const std::int64_t T = logits_TE.shape.num_rows(), E = logits_TE.shape.num_cols(), K = ids_TK.shape.num_cols();
  parallel_rows(ctx, T, 4 * E, [&](std::int64_t begin, std::int64_t end) {
    Chosen chosen{};
    for (std::int64_t t = begin; t < end; ++t) {
      const float* logits = row_of<float>(logits_TE, t);
      const bool is_given = take_given(chosen, given_TK, t, E, K);
      if (!is_given) choose(chosen, logits, E, K);
      float most = logits[chosen[0]];
      if (is_given && renormalize)  // of those that are added up, so that their sum is no 0
        for (std::int64_t k = 1; k < K; ++k) most = std::max(most, logits[chosen[static_cast<std::size_t>(k)]]);
      if (is_given && !renormalize) most = *std::max_element(logits, logits + E);
      const float all = sum_of_exponentials(logits, E, most);
      float of_chosen = 0.0f;
      for (std::int64_t k = 0; k < K; ++k) of_chosen += std::exp(logits[chosen[static_cast<std::size_t>(k)]] - most);
      mass_T.as<float>()[t] = of_chosen / all;
      for (std::int64_t k = 0; k < K; ++k) {
        const std::int32_t e = chosen[static_cast<std::size_t>(k)];
        row_of<std::int32_t>(ids_TK, t)[k] = e;
        row_of<float>(weights_TK, t)[k] = std::exp(logits[e] - most) / (renormalize ? of_chosen : all);
      }
    }
  });
}

void route_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE, ConstTensorView ids_TK,
                    ConstTensorView weights_TK, bool renormalize) {
  const std::int64_t T = logits_TE.shape.num_rows(), E = logits_TE.shape.num_cols(), K = ids_TK.shape.num_cols();
  const Kernels& kernels_of_cpu = kernels(ctx);
  parallel_rows(ctx, T, 4 * E, [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kMaxExperts> d{};
    for (std::int64_t t = begin; t < end; ++t) {
      const float* logits = row_of<float>(logits_TE, t);
      const std::int32_t* ids = row_of<std::int32_t>(ids_TK, t);
      const float *w = row_of<float>(weights_TK, t), *dw = row_of<float>(dweights_TK, t);
      float mean = 0.0f;
      for (std::int64_t k = 0; k < K; ++k) mean += w[k] * dw[k];
      if (renormalize) {
        std::fill_n(d.begin(), E, 0.0f);
      } else {
        const float most = *std::max_element(logits, logits + E), sum = sum_of_exponentials(logits, E, most);
        for (std::int64_t e = 0; e < E; ++e) d[static_cast<std::size_t>(e)] = -mean * (std::exp(logits[e] - most) / sum);
      }
      for (std::int64_t k = 0; k < K; ++k) d[static_cast<std::size_t>(ids[k])] = w[k] * (dw[k] - mean);
      kernels_of_cpu.cast(row_bytes(dlogits_TE, t), dlogits_TE.dtype, d.data(), DType::kF32, E);
    }
  });
}

void route_by_score(OpContext& ctx, TensorView ids_TK, TensorView weights_TK, TensorView mass_T, ConstTensorView logits_TE,
                    ConstTensorView bias_PE, const ScoreRule& rule, ConstTensorView given_TK) {
  const std::int64_t T = logits_TE.shape.num_rows(), E = logits_TE.shape.num_cols(), K = ids_TK.shape.num_cols();
  std::array<float, kMaxExperts> bias{};
  for (std::int64_t p = bias_PE.shape.num_rows() - 1; p >= 0; --p)
    for (std::int64_t e = 0; e < E; ++e)
      bias[static_cast<std::size_t>(e)] = row_of<float>(bias_PE, p)[e] + bias[static_cast<std::size_t>(e)];
  parallel_rows(ctx, T, 8 * E, [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kMaxExperts> score{}, value{};
    Chosen chosen{};
    for (std::int64_t t = begin; t < end; ++t) {
      const float* logits = row_of<float>(logits_TE, t);
      float all = 0.0f, of_chosen = 0.0f;
      for (std::size_t e = 0; e < static_cast<std::size_t>(E); ++e) {
        score[e] = sigmoid(logits[e]);
        value[e] = score[e] + bias[e];
        all += score[e];
      }
      if (!take_given(chosen, given_TK, t, E, K)) {
        keep_active_groups(value.data(), E, rule);
        choose(chosen, value.data(), E, K);
      }
      for (std::int64_t k = 0; k < K; ++k) of_chosen += score[static_cast<std::size_t>(chosen[static_cast<std::size_t>(k)])];
      mass_T.as<float>()[t] = of_chosen / all;
      for (std::int64_t k = 0; k < K; ++k) {
        const std::int32_t e = chosen[static_cast<std::size_t>(k)];
        const float weight = score[static_cast<std::size_t>(e)];
        row_of<std::int32_t>(ids_TK, t)[k] = e;
        row_of<float>(weights_TK, t)[k] = (rule.renormalize ? weight / (of_chosen + kScoreSumFloor) : weight) * rule.scale;
      }
    }
  });
}

void route_by_score_backward(OpContext& ctx, TensorView dlogits_TE, ConstTensorView dweights_TK, ConstTensorView logits_TE,
                             ConstTensorView ids_TK, const ScoreRule& rule) {
  const std::int64_t T = logits_TE.shape.num_rows(), E = logits_TE.shape.num_cols(), K = ids_TK.shape.num_cols();
  const Kernels& kernels_of_cpu = kernels(ctx);
  parallel_rows(ctx, T, 4 * E, [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kMaxExperts> d{};
    std::array<float, kMaxActiveExperts> score{};
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t* ids = row_of<std::int32_t>(ids_TK, t);
      const float *logits = row_of<float>(logits_TE, t), *dw = row_of<float>(dweights_TK, t);
      float sum = kScoreSumFloor, dot = 0.0f;
      for (std::size_t k = 0; k < static_cast<std::size_t>(K); ++k) {
        score[k] = sigmoid(logits[ids[k]]);
        sum += score[k];
        dot += score[k] * dw[k];
      }
      // Of scores: those that are divided by their sum have all a part in each weight.
      const float mean = rule.renormalize ? dot / sum : 0.0f, divisor = rule.renormalize ? sum : 1.0f;
      std::fill_n(d.begin(), E, 0.0f);
      for (std::size_t k = 0; k < static_cast<std::size_t>(K); ++k)
        d[static_cast<std::size_t>(ids[k])] = rule.scale * (dw[k] - mean) / divisor * score[k] * (1.0f - score[k]);
      kernels_of_cpu.cast(row_bytes(dlogits_TE, t), dlogits_TE.dtype, d.data(), DType::kF32, E);
    }
  });
}

void log_route(OpContext& ctx, TensorView log_SB, ConstTensorView ids_TK, ConstTensorView slot_T, std::int64_t first_entry) {
  const std::int64_t K = ids_TK.shape.num_cols(), width = log_SB.shape.num_cols() / 2;
  parallel_rows(ctx, ids_TK.shape.num_rows(), K, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int32_t slot = slot_T.as<std::int32_t>()[t];
      if (slot < 0) continue;
      auto* const out = static_cast<std::uint16_t*>(log_SB.data) + slot * width + first_entry;
      for (std::int64_t k = 0; k < K; ++k) out[k] = static_cast<std::uint16_t>(row_of<std::int32_t>(ids_TK, t)[k]);
    }
  });
}

void place_rows(OpContext& /*ctx*/, TensorView begin_P, TensorView token_R, TensorView weight_R, TensorView slot_TK, ConstTensorView ids_TK,
                ConstTensorView weights_TK) {
  const std::int64_t R = ids_TK.shape.num_elements(), K = ids_TK.shape.num_cols(), E = begin_P.shape.num_elements() - 1;
  const std::span ids(ids_TK.as<std::int32_t>(), static_cast<std::size_t>(R));
  const std::span begin(begin_P.as<std::int32_t>(), static_cast<std::size_t>(E) + 1);
  std::ranges::fill(begin, 0);
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= E) fail(ErrorCode::kInvalidArgument, "[place_rows] expert {} of {}", id, E);
    ++begin[static_cast<std::size_t>(id) + 1];
  }
  for (std::size_t e = 1; e < begin.size(); ++e) begin[e] += begin[e - 1];
  std::vector<std::int32_t> next(begin.begin(), begin.end() - 1);
  for (std::int64_t i = 0; i < R; ++i) {
    const std::int32_t row = next[static_cast<std::size_t>(ids[static_cast<std::size_t>(i)])]++;
    slot_TK.as<std::int32_t>()[i] = row;
    token_R.as<std::int32_t>()[row] = static_cast<std::int32_t>(i / K);
    weight_R.as<float>()[row] = weights_TK.as<float>()[i];
  }
}

void swiglu_rows(OpContext& ctx, TensorView out_RF, ConstTensorView gate_up_R2F, ConstTensorView factors_R) {
  const std::int64_t F = out_RF.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, out_RF.shape.num_rows(), 8 * F, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      void* const out = row_bytes(out_RF, r);
      k.swiglu(out, row_bytes(gate_up_R2F, r), row_bytes(gate_up_R2F, r, F), F, out_RF.dtype);
      k.scale_row(out, out, factors_R.as<float>()[r], F, out_RF.dtype);
    }
  });
}

void swiglu_rows_backward(OpContext& ctx, TensorView dgate_up_R2F, TensorView dfactors_R, ConstTensorView dout_RF,
                          ConstTensorView gate_up_R2F, ConstTensorView factors_R) {
  const std::int64_t F = dout_RF.shape.num_cols();
  const DType dtype = dout_RF.dtype;
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, dout_RF.shape.num_rows(), 16 * F, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(F));  // a row of dtype, which has no more bytes
    for (std::int64_t r = begin; r < end; ++r) {
      const void *gate = row_bytes(gate_up_R2F, r), *up = row_bytes(gate_up_R2F, r, F);
      k.swiglu(scratch.data(), gate, up, F, dtype);
      dfactors_R.as<float>()[r] = k.dot_row(row_bytes(dout_RF, r), scratch.data(), F, dtype);
      k.scale_row(scratch.data(), row_bytes(dout_RF, r), factors_R.as<float>()[r], F, dtype);
      k.swiglu_backward(row_bytes(dgate_up_R2F, r), row_bytes(dgate_up_R2F, r, F), scratch.data(), gate, up, F, dtype);
    }
  });
}

void row_gates(OpContext& ctx, TensorView gates_T, ConstTensorView x_TH, ConstTensorView w_H) {
  const std::int64_t H = x_TH.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, x_TH.shape.num_rows(), 2 * H, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t)
      gates_T.as<float>()[t] = sigmoid(k.dot_weights(row_bytes(x_TH, t), w_H.as<float>(), H, x_TH.dtype));
  });
}

void row_gates_backward(OpContext& ctx, TensorView dx_TH, TensorView dw_H, ConstTensorView dgates_T, ConstTensorView gates_T,
                        ConstTensorView x_TH, ConstTensorView w_H, bool accumulate) {
  constexpr std::int64_t kRows = 128;  // per partial sum of dw; part of the order of summation
  const std::int64_t T = x_TH.shape.num_rows(), H = x_TH.shape.num_cols(), blocks = (T + kRows - 1) / kRows;
  const std::int64_t stride = (H + 15) / 16 * 16;
  float* const partial = static_cast<float*>(ctx.workspace->require(static_cast<std::size_t>(blocks * stride) * sizeof(float)));
  const Kernels& k = kernels(ctx);
  parallel(ctx, blocks, [&](std::int64_t b) {
    float* const dw = partial + b * stride;
    std::fill(dw, dw + H, 0.0f);
    for (std::int64_t t = b * kRows; t < std::min(T, (b + 1) * kRows); ++t) {
      const float gate = gates_T.as<float>()[t], dlogit = dgates_T.as<float>()[t] * (gate * (1.0f - gate));
      k.accumulate_scaled(dw, row_bytes(x_TH, t), dlogit, H, x_TH.dtype);
      if (dx_TH.data != nullptr) k.store_scaled(row_bytes(dx_TH, t), w_H.as<float>(), dlogit, H, accumulate, x_TH.dtype);
    }
  });
  for (std::int64_t b = 0; dw_H.data != nullptr && b < blocks; ++b) k.accumulate(dw_H.as<float>(), partial + b * stride, H, DType::kF32);
}

namespace {

/// gate[i], up[i] = pairs[2i], pairs[2i + 1].
void part_pairs(float* gate, float* up, const void* pairs, std::int64_t n, DType dtype) {
  const auto part = [&](const auto* from, const auto& widen) {
    for (std::int64_t i = 0; i < n; ++i) {
      gate[i] = widen(from[2 * i]);
      up[i] = widen(from[2 * i + 1]);
    }
  };
  if (dtype == DType::kBF16)
    part(static_cast<const BFloat16*>(pairs), [](BFloat16 x) { return to_f32(x); });
  else
    part(static_cast<const float*>(pairs), [](float x) { return x; });
}
void join_pairs(void* pairs, const float* gate, const float* up, std::int64_t n, DType dtype) {
  const auto join = [&](auto* to, const auto& narrow) {
    for (std::int64_t i = 0; i < n; ++i) {
      to[2 * i] = narrow(gate[i]);
      to[2 * i + 1] = narrow(up[i]);
    }
  };
  if (dtype == DType::kBF16)
    join(static_cast<BFloat16*>(pairs), [](float x) { return to_bf16(x); });
  else
    join(static_cast<float*>(pairs), [](float x) { return x; });
}

/// body(row, its expert) for all rows, in parallel.
template <typename Body>
void each_row_with_expert(OpContext& ctx, const ConstTensorView& begin_P, std::int64_t num_rows, std::int64_t cost, const Body& body) {
  const auto* const begin = begin_P.as<std::int32_t>();
  const auto* const end = begin + begin_P.shape.num_elements();
  parallel_rows(ctx, num_rows, cost, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t r = first; r < last; ++r) body(r, std::upper_bound(begin, end, static_cast<std::int32_t>(r)) - begin - 1);
  });
}

}  // namespace

void clamped_swiglu(OpContext& ctx, TensorView out_RF, ConstTensorView pairs_RG, ConstTensorView factors_R, const ClampedGate& gate) {
  const std::int64_t F = out_RF.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, out_RF.shape.num_rows(), 8 * F, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> gates(static_cast<std::size_t>(F)), ups(static_cast<std::size_t>(F));
    for (std::int64_t r = begin; r < end; ++r) {
      void* const out = row_bytes(out_RF, r);
      part_pairs(gates.data(), ups.data(), row_bytes(pairs_RG, r), F, pairs_RG.dtype);
      k.clamped_swiglu(out, gates.data(), ups.data(), F, gate.alpha, gate.limit, out_RF.dtype);
      k.scale_row(out, out, factors_R.as<float>()[r], F, out_RF.dtype);
    }
  });
}

void clamped_swiglu_backward(OpContext& ctx, TensorView dpairs_RG, TensorView dfactors_R, ConstTensorView dout_RF, ConstTensorView pairs_RG,
                             ConstTensorView factors_R, const ClampedGate& gate) {
  const std::int64_t F = dout_RF.shape.num_cols();
  const DType dtype = dout_RF.dtype;
  const Kernels& k = kernels(ctx);
  parallel_rows(ctx, dout_RF.shape.num_rows(), 16 * F, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> gates(static_cast<std::size_t>(F)), ups(static_cast<std::size_t>(F));
    std::vector<float> scratch(static_cast<std::size_t>(F));  // a row of dtype, which has no more bytes
    for (std::int64_t r = begin; r < end; ++r) {
      part_pairs(gates.data(), ups.data(), row_bytes(pairs_RG, r), F, dtype);
      k.clamped_swiglu(scratch.data(), gates.data(), ups.data(), F, gate.alpha, gate.limit, dtype);
      dfactors_R.as<float>()[r] = k.dot_row(row_bytes(dout_RF, r), scratch.data(), F, dtype);
      k.scale_row(scratch.data(), row_bytes(dout_RF, r), factors_R.as<float>()[r], F, dtype);
      k.clamped_swiglu_backward(gates.data(), ups.data(), scratch.data(), F, gate.alpha, gate.limit, dtype);
      join_pairs(row_bytes(dpairs_RG, r), gates.data(), ups.data(), F, dtype);
    }
  });
}

void add_expert_biases(OpContext& ctx, TensorView y_RN, ConstTensorView biases_V, ConstTensorView begin_P, ConstTensorView factors_R) {
  const std::int64_t N = y_RN.shape.num_cols();
  const Kernels& k = kernels(ctx);
  each_row_with_expert(ctx, begin_P, y_RN.shape.num_rows(), 2 * N, [&](std::int64_t r, std::int64_t expert) {
    std::vector<float> scaled(static_cast<std::size_t>(N));
    const float* bias = biases_V.as<float>() + expert * N;
    if (factors_R.data != nullptr) {
      k.scale_row(scaled.data(), bias, factors_R.as<float>()[r], N, DType::kF32);
      bias = scaled.data();
    }
    k.store_row(row_bytes(y_RN, r), bias, nullptr, N, /*accumulate=*/true, y_RN.dtype);
  });
}

void expert_biases_backward(OpContext& ctx, TensorView dbiases_V, ConstTensorView dy_RN, ConstTensorView begin_P, ConstTensorView token_R,
                            ConstTensorView factors_R, const TokenRange& tokens) {
  const std::int64_t N = dy_RN.shape.num_cols();
  const Kernels& k = kernels(ctx);
  parallel(ctx, begin_P.shape.num_elements() - 1, [&](std::int64_t expert) {
    std::vector<float> sum(static_cast<std::size_t>(N)), row(static_cast<std::size_t>(N));
    bool has_rows = false;
    for (std::int64_t r = begin_P.as<std::int32_t>()[expert]; r < begin_P.as<std::int32_t>()[expert + 1]; ++r) {
      const std::int64_t token = token_R.as<std::int32_t>()[r];
      if (token < tokens.first || token >= tokens.first + tokens.count) continue;
      has_rows = true;
      k.cast(row.data(), DType::kF32, row_bytes(dy_RN, r), dy_RN.dtype, N);
      if (factors_R.data != nullptr) k.scale(row.data(), factors_R.as<float>()[r], N);
      k.accumulate(sum.data(), row.data(), N, DType::kF32);
    }
    if (has_rows) k.accumulate(dbiases_V.as<float>() + expert * N, sum.data(), N, DType::kF32);
  });
}

void add_bias_dots(OpContext& ctx, TensorView dfactors_R, ConstTensorView dy_RN, ConstTensorView biases_V, ConstTensorView begin_P) {
  const std::int64_t N = dy_RN.shape.num_cols();
  const Kernels& k = kernels(ctx);
  each_row_with_expert(ctx, begin_P, dy_RN.shape.num_rows(), 4 * N, [&](std::int64_t r, std::int64_t expert) {
    std::vector<float> row(static_cast<std::size_t>(N));
    k.cast(row.data(), DType::kF32, row_bytes(dy_RN, r), dy_RN.dtype, N);
    dfactors_R.as<float>()[r] += k.dot_row(row.data(), biases_V.as<float>() + expert * N, N, DType::kF32);
  });
}

void sum_rows(OpContext& ctx, TensorView out_TC, ConstTensorView x_RC, ConstTensorView rows_TK, bool accumulate) {
  constexpr std::int64_t kCols = 512;
  const std::int64_t T = out_TC.shape.num_rows(), C = out_TC.shape.num_cols(), K = rows_TK.shape.num_cols(), R = x_RC.shape.num_rows();
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t k = 0; k < K; ++k)
      if (const std::int32_t r = row_of<std::int32_t>(rows_TK, t)[k]; r < 0 || r >= R)
        fail(ErrorCode::kInvalidArgument, "[sum_rows] entry {} of row {} is {}, wanted 0 to {}", k, t, r, R - 1);
  const Kernels& kernels_of_cpu = kernels(ctx);
  parallel_rows(ctx, T, C * K, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float sum[kCols];
    for (std::int64_t t = begin; t < end; ++t)
      for (std::int64_t first = 0; first < C; first += kCols) {
        const std::int64_t cols = std::min(kCols, C - first);
        std::fill_n(sum, cols, 0.0f);
        for (std::int64_t k = 0; k < K; ++k)
          kernels_of_cpu.accumulate(sum, row_bytes(x_RC, row_of<std::int32_t>(rows_TK, t)[k], first), cols, x_RC.dtype);
        kernels_of_cpu.store_row(row_bytes(out_TC, t, first), sum, nullptr, cols, accumulate, out_TC.dtype);
      }
  });
}

}  // namespace prl::ops::cpu
