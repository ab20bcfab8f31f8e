// Products of experts at real sizes, beside those of one expert after another.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "device/cuda/cuda_runtime.hpp"
#include "ops/cuda/launch.hpp"
#include "ops/cuda/test_sides.hpp"
#include "ops/experts.hpp"
#include "ops/lora.hpp"
#include "ops/pointwise.hpp"

namespace prl::ops {
namespace {

using namespace testing;

/// Experts of a layer as they lie in a model: gate and up, then down, one expert after another.
struct Experts {
  Tensor all;
  std::vector<LinearWeightPtr> weights;
  std::vector<const LinearWeight*> gate_up, down;
  ExpertMatrices matrices() const { return {gate_up, down}; }

  Experts(Sides& s, std::int64_t E, std::int64_t H, std::int64_t F, WeightUse use = WeightUse::kMatrix) {
    Tensor host = s.random({E * 3 * F * H}, DType::kBF16, 2, 0.05f);
    all = s.to_gpu(host);
    CodeMemory of_gate_up, of_down;
    if (use == WeightUse::kEightBitProduct) {
      of_gate_up = take_code_memory(s.gpu, E, 2 * F, H, DType::kBF16);
      of_down = take_code_memory(s.gpu, E, H, F, DType::kBF16);
    }
    for (std::int64_t e = 0; e < E; ++e) {
      const Tensor first = all.slice(e * 3 * F * H, 2 * F * H).reshaped({2 * F, H}), second = all.slice((e * 3 + 2) * F * H, F * H);
      weights.push_back(share_linear(s.gpu, first, {}, true, use, of_gate_up.of(e, 2 * F)));
      gate_up.push_back(weights.back().get());
      weights.push_back(share_linear(s.gpu, second.reshaped({H, F}), {}, true, use, of_down.of(e, H)));
      down.push_back(weights.back().get());
    }
  }
};
/// Of experts as they are, and of those with products of 8-bit numbers.
class CudaExpertProducts : public ::testing::TestWithParam<WeightUse> {};
INSTANTIATE_TEST_SUITE_P(Uses, CudaExpertProducts, ::testing::Values(WeightUse::kMatrix, WeightUse::kEightBitProduct),
                         [](const auto& test) { return test.param == WeightUse::kMatrix ? "Matrix" : "EightBitProduct"; });

/// By the ops one after another, expert by expert.
Tensor mixed_in_steps(Sides& s, const Experts& experts, const Tensor& x_TH, const Tensor& ids_TK, const Tensor& weights_TK,
                      const BiasedExperts* biased = nullptr) {
  const std::int64_t T = ids_TK.shape().num_rows(), K = ids_TK.shape().num_cols(), R = T * K, H = x_TH.shape().num_cols();
  const auto E = static_cast<std::int64_t>(experts.down.size()), F = experts.down[0]->num_inputs();
  const auto fresh = [&](Shape shape, DType dtype) { return Tensor::empty(s.gpu_runtime, shape, dtype); };
  Tensor begin = fresh({E + 1}, DType::kI32), token = fresh({R}, DType::kI32), weight = fresh({R}, DType::kF32),
         slot = fresh({T, K}, DType::kI32);
  place_rows(s.gpu, begin, token, weight, slot, ids_TK, weights_TK);
  const Tensor begins = s.to_cpu(begin);
  Tensor rows = fresh({R, H}, DType::kBF16), gate_up = fresh({R, 2 * F}, DType::kBF16), hidden = fresh({R, F}, DType::kBF16),
         out = fresh({T, H}, DType::kBF16);
  embedding(s.gpu, rows, x_TH, token.view());
  const auto products = [&](Tensor& to, const Tensor& from, const std::vector<const LinearWeight*>& matrices) {
    for (std::size_t e = 0; e < matrices.size(); ++e)
      if (const std::int32_t first = begins.as<std::int32_t>()[e], count = begins.as<std::int32_t>()[e + 1] - first; count > 0)
        linear(s.gpu, to.slice(first, count), from.slice(first, count), *matrices[e]);
  };
  products(gate_up, rows, experts.gate_up);
  if (biased != nullptr) {
    add_expert_biases(s.gpu, gate_up, biased->gate_up_V, begin, {});
    clamped_swiglu(s.gpu, hidden, gate_up, weight, biased->gate);
  } else {
    swiglu_rows(s.gpu, hidden, gate_up, weight);
  }
  products(rows, hidden, experts.down);
  if (biased != nullptr) add_expert_biases(s.gpu, rows, biased->down_V, begin, weight);
  sum_rows(s.gpu, out, rows, slot, false);
  return s.to_cpu(out);
}

TEST_P(CudaExpertProducts, AMixtureIsItsOpsOneAfterAnother) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  struct Case {
    std::int64_t E, K, H, F;
  };
  std::string different;
  for (const auto& [E, K, H, F] : {Case{128, 8, 512, 256}, {8, 2, 1024, 512}, {6, 2, 64, 64}, {40, 3, 192, 320}, {1, 1, 128, 64}}) {
    if (is_watched() && E * H * F > 3'000'000) continue;
    const Experts experts(s, E, H, F, GetParam());
    for (const std::int64_t T : {1, 2, 3, 8, 9, 33, 64, 200, 513, 2048}) {
      if (is_watched() && T > 33) continue;
      for (const bool is_skewed : {false, true}) {  // skewed: the first experts have most rows, the last ones none
        Tensor x = s.to_gpu(s.random({T, H}, DType::kBF16, 1)), logits = s.random({T, E}, DType::kF32, static_cast<std::uint64_t>(T), 2.0f);
        for (std::int64_t i = 0; is_skewed && i < T * E; ++i) logits.as<float>()[i] -= 0.3f * static_cast<float>(i % E);
        Tensor ids = Tensor::empty(s.gpu_runtime, {T, K}, DType::kI32), weights = Tensor::empty(s.gpu_runtime, {T, K}, DType::kF32),
               mass = Tensor::empty(s.gpu_runtime, {T}, DType::kF32), got = s.to_gpu(s.filled({T, H}, DType::kBF16, kNan));
        route(s.gpu, ids, weights, mass, s.to_gpu(logits), true);
        ASSERT_TRUE(can_mix_experts(s.gpu, T, K, experts.matrices())) << T << " tokens of " << E << " experts";
        ASSERT_TRUE(mix_experts(s.gpu, got, x, ids, weights, experts.matrices()));
        if (!same_bits(s.to_cpu(got), mixed_in_steps(s, experts, x, ids, weights)))
          different += fmt::format(" {} tokens of {} experts", T, E);
      }
    }
  }
  EXPECT_EQ(different, "");
}

TEST_P(CudaExpertProducts, AMixtureOfExpertsWithBiasesIsItsOpsOneAfterAnother) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  struct Case {
    std::int64_t E, K, H, F;
  };
  std::string different;
  for (const auto& [E, K, H, F] : {Case{32, 4, 320, 192}, {6, 2, 64, 64}, {1, 1, 128, 64}}) {
    if (is_watched() && E > 6) continue;
    const Experts experts(s, E, H, F, GetParam());
    const Tensor gate_up_V = s.to_gpu(s.random({E * 2 * F}, DType::kF32, 8)), down_V = s.to_gpu(s.random({E * H}, DType::kF32, 9));
    const BiasedExperts biased{.gate = {.alpha = 1.702f, .limit = 0.8f}, .gate_up_V = gate_up_V, .down_V = down_V};
    ExpertMatrices matrices = experts.matrices();
    matrices.biased = &biased;
    for (const std::int64_t T : {1, 2, 9, 33, 200, 2048}) {
      if (is_watched() && T > 33) continue;
      const Tensor x = s.to_gpu(s.random({T, H}, DType::kBF16, 1)),
                   logits = s.random({T, E}, DType::kF32, static_cast<std::uint64_t>(T), 2.0f);
      Tensor ids = Tensor::empty(s.gpu_runtime, {T, K}, DType::kI32), weights = Tensor::empty(s.gpu_runtime, {T, K}, DType::kF32),
             mass = Tensor::empty(s.gpu_runtime, {T}, DType::kF32), got = s.to_gpu(s.filled({T, H}, DType::kBF16, kNan));
      route(s.gpu, ids, weights, mass, s.to_gpu(logits), true);
      ASSERT_TRUE(can_mix_experts(s.gpu, T, K, matrices)) << T << " tokens of " << E << " experts";
      ASSERT_TRUE(mix_experts(s.gpu, got, x, ids, weights, matrices));
      if (!same_bits(s.to_cpu(got), mixed_in_steps(s, experts, x, ids, weights, &biased)))
        different += fmt::format(" {} tokens of {} experts", T, E);
    }
  }
  EXPECT_EQ(different, "");
}

/// Given experts and their log, beside the CPU's.
TEST(CudaExperts, GivenExpertsAreThoseOfTheCpu) {
  Sides s;
  struct Case {
    std::int64_t T, E, K;
  };
  for (const auto& [T, E, K] : {Case{513, 128, 8}, Case{64, 256, 8}, Case{33, 1024, 32}, Case{5, 3, 1}}) {
    const Tensor logits = s.random({T, E}, DType::kF32, 3, 2.0f), dweights = s.random({T, K}, DType::kF32, 9);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(T * K)), slots(static_cast<std::size_t>(T));
    Rng rng(7);
    for (std::int64_t t = 0; t < T; ++t) {
      const auto first = static_cast<std::int64_t>(rng.next_below(static_cast<std::uint64_t>(E)));
      for (std::int64_t k = 0; k < K; ++k)
        ids[static_cast<std::size_t>(t * K + k)] = static_cast<std::int32_t>(t % 5 == 1 ? -1 : t % 5 == 2 && K > 1 ? 2 : (first + k) % E);
      slots[static_cast<std::size_t>(t)] = t % 7 == 3 ? -1 : static_cast<std::int32_t>(T - 1 - t);
    }
    Tensor given = Tensor::empty(s.cpu_runtime, {T, K}, DType::kI32), slot_T = Tensor::empty(s.cpu_runtime, {T}, DType::kI32);
    std::ranges::copy(ids, given.as<std::int32_t>());
    std::ranges::copy(slots, slot_T.as<std::int32_t>());
    for (const bool renormalize : {false, true}) {
      Tensor chosen[2], weights[2], mass[2], dlogits[2], log[2];
      for (const int on_gpu : {0, 1}) {
        const std::shared_ptr<DeviceRuntime>& runtime = on_gpu == 1 ? s.gpu_runtime : s.cpu_runtime;
        OpContext& ctx = on_gpu == 1 ? s.gpu : s.cpu;
        const auto here = [&](const Tensor& t) { return on_gpu == 1 ? s.to_gpu(t) : t; };
        const Tensor logits_here = here(logits), dweights_here = here(dweights), given_here = here(given), slots_here = here(slot_T);
        chosen[on_gpu] = Tensor::zeros(runtime, {T, K}, DType::kI32);
        weights[on_gpu] = Tensor::zeros(runtime, {T, K}, DType::kF32);
        mass[on_gpu] = Tensor::zeros(runtime, {T}, DType::kF32);
        dlogits[on_gpu] = Tensor::zeros(runtime, {T, E}, DType::kF32);
        log[on_gpu] = Tensor::zeros(runtime, {T, 6 * K}, DType::kU8);
        route(ctx, chosen[on_gpu], weights[on_gpu], mass[on_gpu], logits_here, renormalize, given_here);
        route_backward(ctx, dlogits[on_gpu], dweights_here, logits_here, chosen[on_gpu], weights[on_gpu], renormalize);
        log_route(ctx, log[on_gpu], chosen[on_gpu], slots_here, K);
      }
      EXPECT_TRUE(same_bits(s.to_cpu(chosen[1]), chosen[0])) << E;
      EXPECT_TRUE(same_bits(s.to_cpu(log[1]), log[0])) << E;
      EXPECT_LT(s.difference(weights[1], weights[0]), 2e-6);
      EXPECT_LT(s.difference(mass[1], mass[0]), 2e-6);
      EXPECT_LT(s.difference(dlogits[1], dlogits[0]), 1e-5);
    }
  }
}

/// Experts by scores, at real sizes, beside the CPU's: the same choice, and what follows from it.
TEST(CudaExperts, ScoresRouteAsOnTheCpu) {
  Sides s;
  struct Case {
    std::int64_t T, E, K;
    ScoreRule rule;
  };
  for (const auto& [T, E, K, rule] : {Case{513, 128, 8, {.renormalize = true, .scale = 1.5f}},
                                      Case{64, 256, 8, {.num_groups = 8, .num_active_groups = 4, .renormalize = true, .scale = 2.5f}},
                                      Case{33, 160, 6, {.num_groups = 16, .num_active_groups = 3}},
                                      Case{5, 1024, 32, {.num_groups = 2, .num_active_groups = 1}}, Case{1, 2, 1, {}}}) {
    SCOPED_TRACE(::testing::Message() << T << " tokens, " << K << " of " << E << " experts");
    // Sums of score and bias that are further apart than what two exponentials differ by.
    Tensor logits = s.filled({T, E}, DType::kF32, 0.0f), bias = s.filled({3, E}, DType::kF32, 0.0f);
    std::vector<std::int64_t> order(static_cast<std::size_t>(E));
    std::iota(order.begin(), order.end(), 0);
    Rng rng(7);
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.next_below(i)]);
      for (std::int64_t rank = 0; rank < E; ++rank) {
        const std::int64_t e = order[static_cast<std::size_t>(rank)];
        const double of_expert = static_cast<double>(e % 4) / 8;
        const double score = 0.5 + 0.4 * std::pow(static_cast<double>(rank) / static_cast<double>(E), 1.3) - of_expert;
        logits.as<float>()[t * E + e] = static_cast<float>(std::log(score / (1 - score)));
        bias.as<float>()[e % 3 * E + e] = static_cast<float>(of_expert);
      }
    }
    const Tensor dweights = s.random({T, K}, DType::kF32, 9);
    const auto fresh = [&](const std::shared_ptr<DeviceRuntime>& runtime, Shape shape, DType dtype) {
      return Tensor::zeros(runtime, shape, dtype);
    };
    Tensor ids[2], weights[2], mass[2], dlogits[2];
    for (const int on_gpu : {0, 1}) {
      const std::shared_ptr<DeviceRuntime>& runtime = on_gpu == 1 ? s.gpu_runtime : s.cpu_runtime;
      OpContext& ctx = on_gpu == 1 ? s.gpu : s.cpu;
      const auto here = [&](const Tensor& t) { return on_gpu == 1 ? s.to_gpu(t) : t; };
      ids[on_gpu] = fresh(runtime, {T, K}, DType::kI32);
      weights[on_gpu] = fresh(runtime, {T, K}, DType::kF32);
      mass[on_gpu] = fresh(runtime, {T}, DType::kF32);
      dlogits[on_gpu] = fresh(runtime, {T, E}, DType::kF32);
      const Tensor logits_here = here(logits), bias_here = here(bias), dweights_here = here(dweights);
      route_by_score(ctx, ids[on_gpu], weights[on_gpu], mass[on_gpu], logits_here, bias_here, rule);
      route_by_score_backward(ctx, dlogits[on_gpu], dweights_here, logits_here, ids[on_gpu], rule);
    }
    EXPECT_TRUE(same_bits(s.to_cpu(ids[1]), ids[0]));
    EXPECT_LT(s.difference(weights[1], weights[0]), 2e-6);
    EXPECT_LT(s.difference(mass[1], mass[0]), 2e-6);
    EXPECT_LT(s.difference(dlogits[1], dlogits[0]), 1e-5);
  }
}

/// Where each of `counts` rows begins, and their number.
std::vector<std::int32_t> begins(const std::vector<std::int32_t>& counts) {
  std::vector<std::int32_t> out{0};
  for (const std::int32_t count : counts) out.push_back(out.back() + count);
  return out;
}

/// The grouped products have the bits of the library's where those have one order, and gradients depend on an expert's own rows alone.
TEST_P(CudaExpertProducts, GroupedProductsAreThoseOfEachExpert) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  struct Case {
    std::int64_t H, F;
    std::vector<std::int32_t> counts;
  };
  const std::vector<Case> cases{{64, 64, {1}},
                                {128, 64, {0, 65, 0, 3, 64, 200, 0}},
                                {512, 320, {1, 128, 129, 0, 257, 63, 300, 0, 0, 31}},
                                {192, 320, {2048, 1500, 900, 513, 300, 257, 256, 129, 128, 64, 0}},
                                {1024, 768, std::vector<std::int32_t>(40, 97)}};
  std::string different;
  for (const auto& [H, F, counts] : cases) {
    if (is_watched() && H > 128) continue;
    const auto E = static_cast<std::int64_t>(counts.size());
    const Experts experts(s, E, H, F, GetParam());
    const std::vector<std::int32_t> begin = begins(counts);
    Tensor on_gpu = Tensor::empty(s.gpu_runtime, {E + 1}, DType::kI32);
    s.gpu_runtime->copy_from_host(on_gpu.data(), begin.data(), on_gpu.num_bytes());
    const std::int64_t R = begin.back();
    for (const auto& weights : {experts.gate_up, experts.down}) {
      const std::int64_t N = weights[0]->num_outputs(), K = weights[0]->num_inputs();
      const std::string name = fmt::format(" [{}, {}] x {} rows", N, K, R);
      const Tensor x = s.to_gpu(s.random({R, K}, DType::kBF16, 5)), dy = s.to_gpu(s.random({R, N}, DType::kBF16, 6));
      Tensor y = s.to_gpu(s.filled({R, N}, DType::kBF16, kNan)), want_y = Tensor::empty(s.gpu_runtime, {R, N}, DType::kBF16);
      Tensor dx = s.to_gpu(s.filled({R, K}, DType::kBF16, kNan)), want_dx = Tensor::empty(s.gpu_runtime, {R, K}, DType::kBF16);
      Tensor dw = s.to_gpu(s.filled({E * 2, N * K}, DType::kF32, kNan));  // between them is what is not theirs
      ASSERT_TRUE(grouped_linear(s.gpu, y, x, weights, on_gpu)) << name;
      ASSERT_TRUE(grouped_linear_backward_input(s.gpu, dx, dy, weights, on_gpu)) << name;
      std::vector<TensorView> to;
      for (std::int64_t e = 0; e < E; ++e) to.push_back(dw.slice(2 * e, 1).view().reshaped({N, K}));
      ASSERT_TRUE(grouped_linear_backward_weight(s.gpu, to, dy, x, on_gpu, false)) << name;
      for (std::size_t e = 0; e < counts.size(); ++e) {
        const std::int64_t first = begin[e], count = counts[e];
        const auto view = [&](const Tensor& t) { return t.slice(first, count); };
        const Tensor got = dw.slice(2 * static_cast<std::int64_t>(e), 1).reshaped({N, K});
        if (count == 0) {
          EXPECT_TRUE(same_bits(s.to_cpu(got), s.filled({N, K}, DType::kF32, 0.0f))) << name << ", expert " << e;
          continue;
        }
        linear(s.gpu, view(want_y), view(x), *weights[e]);
        linear_backward_input(s.gpu, view(want_dx), view(dy), *weights[e], false);
        Tensor want = Tensor::empty(s.gpu_runtime, {N, K}, DType::kF32), alone = want.clone();
        linear_backward_weight(s.gpu, want, {}, view(dy), view(x), false);
        EXPECT_LT(s.difference(got, s.to_cpu(want)), 1e-5) << name << ", expert " << e << " of " << count;
        const Tensor whole = s.to_gpu(s.ints({0, static_cast<std::int32_t>(count)}));
        const TensorView only = alone.view();
        ASSERT_TRUE(grouped_linear_backward_weight(s.gpu, std::span(&only, 1), view(dy), view(x), whole, false));
        if (!same_bits(s.to_cpu(alone), s.to_cpu(got))) different += name + fmt::format(", gradient of expert {}", e);
      }
      for (std::size_t e = 0; e < counts.size(); ++e) {
        const auto differs = [&](const Tensor& got, const Tensor& want) {
          return counts[e] > 0 && !same_bits(s.to_cpu(got.slice(begin[e], counts[e])), s.to_cpu(want.slice(begin[e], counts[e])));
        };
        if (differs(y, want_y)) different += name + fmt::format(", forward of expert {} of {}", e, counts[e]);
        if (differs(dx, want_dx)) different += name + fmt::format(", input gradient of expert {} of {}", e, counts[e]);
      }
      Tensor twice = dw.clone();
      std::vector<TensorView> again;
      for (std::int64_t e = 0; e < E; ++e) again.push_back(twice.slice(2 * e, 1).view().reshaped({N, K}));
      ASSERT_TRUE(grouped_linear_backward_weight(s.gpu, again, dy, x, on_gpu, true));
      for (std::int64_t e = 0; e < E; ++e) {
        Tensor doubled = dw.slice(2 * e, 1).clone();
        TensorView view = doubled.view();
        scale(s.gpu, view, 2.0f);
        if (!same_bits(s.to_cpu(twice.slice(2 * e, 1)), s.to_cpu(doubled))) different += name + fmt::format(", expert {} twice", e);
        if (!std::isnan(get(s.to_cpu(dw.slice(2 * e + 1, 1)), 0))) different += name + ", behind its gradient";
      }
    }
  }
  EXPECT_EQ(different, "");
}

/// By our kernels alone, so that a tool can watch them.
TEST(CudaExperts, GroupedProductsGiveTheSameBitsAgain) {
  Sides s;
  if (cuda::properties_of(s.gpu).major != 9) GTEST_SKIP() << "kernels for compute capability 9.0";
  const std::int64_t H = is_watched() ? 128 : 1024, F = is_watched() ? 320 : 768;
  const std::vector<std::int32_t> begin = begins({200, 0, 1, 64, 65, 0, 129});
  const std::int64_t E = static_cast<std::int64_t>(begin.size()) - 1, R = begin.back();
  const Experts experts(s, E, H, F);
  const Tensor on_gpu = s.to_gpu(s.ints(begin)), x = s.to_gpu(s.random({R, H}, DType::kBF16, 5)),
               dy = s.to_gpu(s.random({R, 2 * F}, DType::kBF16, 6));
  std::vector<Tensor> first;
  for (int round = 0; round < 3; ++round) {
    Tensor y = s.to_gpu(s.filled({R, 2 * F}, DType::kBF16, kNan)), dx = s.to_gpu(s.filled({R, H}, DType::kBF16, kNan)),
           dw = s.to_gpu(s.filled({E, 2 * F * H}, DType::kF32, kNan));
    std::vector<TensorView> to;
    for (std::int64_t e = 0; e < E; ++e) to.push_back(dw.slice(e, 1).view().reshaped({2 * F, H}));
    ASSERT_TRUE(grouped_linear(s.gpu, y, x, experts.gate_up, on_gpu));
    ASSERT_TRUE(grouped_linear_backward_input(s.gpu, dx, dy, experts.gate_up, on_gpu));
    ASSERT_TRUE(grouped_linear_backward_weight(s.gpu, to, dy, x, on_gpu, false));
    const std::vector<Tensor> found{s.to_cpu(y), s.to_cpu(dx), s.to_cpu(dw)};
    if (first.empty()) first = found;
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(same_bits(found[i], first[i])) << "product " << i << ", round " << round;
      EXPECT_TRUE(std::ranges::none_of(values(found[i]), [](float v) { return std::isnan(v); })) << "product " << i;
    }
  }
}

/// An adapter of a matrix [N, K] whose outputs are halves with an adapter each.
struct HalvesAdapter {
  LoraWeight weight;
  HalvesAdapter(Sides& s, std::int64_t N, std::int64_t K, std::int64_t rank, std::uint64_t seed) {
    const auto packed = [&](std::int64_t rows, std::int64_t cols, std::uint64_t own) {
      return pack_linear(s.gpu, s.to_gpu(s.random({rows, cols}, DType::kBF16, own, 0.1f)), {}, DType::kBF16, true, WeightUse::kAdapter);
    };
    weight.a = packed(2 * rank, K, seed);
    for (std::int64_t p = 0; p < 2; ++p)
      weight.parts.push_back({.first_output = p * N / 2,
                              .num_outputs = N / 2,
                              .first_rank = p * rank,
                              .rank = rank,
                              .scale = 0.75f,
                              .b = packed(N / 2, rank, seed + 1 + static_cast<std::uint64_t>(p))});
  }
};

TEST(CudaExperts, AdaptersOfGroupsAreThoseOfEachGroup) {
  Sides s;
  if (cuda::properties_of(s.gpu).major < 8) GTEST_SKIP() << "kernels for compute capability 8.0";
  const std::vector<std::int32_t> begin = begins({0, 65, 3, is_watched() ? 64 : 1100, 200, 0, 1});
  const auto E = static_cast<std::int64_t>(begin.size()) - 1, R = static_cast<std::int64_t>(begin.back());
  std::string different;
  for (const auto& [N, K, rank] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{384, 320, 16}, {192, 136, 24}, {64, 64, 4}}) {
    std::vector<HalvesAdapter> adapters;
    std::vector<const LoraWeight*> weights;
    for (std::int64_t e = 0; e < E; ++e) adapters.emplace_back(s, N, K, rank, static_cast<std::uint64_t>(10 * e + 1));
    for (const HalvesAdapter& a : adapters) weights.push_back(&a.weight);
    const Tensor x = s.to_gpu(s.random({R, K}, DType::kBF16, 5)), dy = s.to_gpu(s.random({R, N}, DType::kBF16, 6)),
                 y = s.to_gpu(s.random({R, N}, DType::kBF16, 7)), dx = s.to_gpu(s.random({R, K}, DType::kBF16, 8));
    for (const bool accumulate : {false, true}) {
      Tensor got_y = y.clone(), want_y = y.clone(), got_dx = dx.clone(), want_dx = dx.clone();
      Tensor got_da = s.to_gpu(s.random({E, 2 * rank * K}, DType::kF32, 9)), want_da = got_da.clone();
      Tensor got_db = s.to_gpu(s.random({E * 2, N / 2 * rank}, DType::kF32, 10)), want_db = got_db.clone();
      std::vector<TensorView> da, db;
      for (std::int64_t e = 0; e < E; ++e) da.push_back(got_da.slice(e, 1).view().reshaped({2 * rank, K}));
      for (std::int64_t i = 0; i < 2 * E; ++i) db.push_back(got_db.slice(i, 1).view().reshaped({N / 2, rank}));
      ASSERT_TRUE(add_grouped_lora(s.gpu, got_y, x, weights, begin));
      ASSERT_TRUE(grouped_lora_backward(s.gpu, got_dx, da, db, dy, x, weights, begin, true, accumulate));
      for (std::int64_t e = 0; e < E; ++e) {
        const std::int64_t first = begin[static_cast<std::size_t>(e)], count = begin[static_cast<std::size_t>(e) + 1] - first;
        if (count == 0) {
          if (accumulate) continue;
          s.gpu.runtime->zero(want_da.slice(e, 1).data(), want_da.slice(e, 1).num_bytes());
          s.gpu.runtime->zero(want_db.slice(2 * e, 2).data(), want_db.slice(2 * e, 2).num_bytes());
          continue;
        }
        const auto rows = [&](const Tensor& t) { return t.slice(first, count); };
        const LoraRows all{.weight = weights[static_cast<std::size_t>(e)], .rows = {}};
        add_lora(s.gpu, rows(want_y), rows(x), std::span(&all, 1));
        const std::vector<TensorView> own{want_db.slice(2 * e, 1).view().reshaped({N / 2, rank}),
                                          want_db.slice(2 * e + 1, 1).view().reshaped({N / 2, rank})};
        lora_backward(s.gpu, rows(want_dx), want_da.slice(e, 1).view().reshaped({2 * rank, K}), own, rows(dy), rows(x),
                      *weights[static_cast<std::size_t>(e)], true, accumulate);
      }
      const std::string name = fmt::format(" [{}, {}], rank {}{}", N, K, rank, accumulate ? ", added" : "");
      if (!same_bits(s.to_cpu(got_y), s.to_cpu(want_y))) different += name + " y";
      if (!same_bits(s.to_cpu(got_dx), s.to_cpu(want_dx))) different += name + " dx";
      if (!same_bits(s.to_cpu(got_da), s.to_cpu(want_da))) different += name + " da";
      if (!same_bits(s.to_cpu(got_db), s.to_cpu(want_db))) different += name + " db";
    }
    LoraWeight other = adapters[1].weight;
    other.parts[0].scale = 0.5f;
    std::vector<const LoraWeight*> mixed = weights;
    mixed[1] = &other;
    EXPECT_FALSE(add_grouped_lora(s.gpu, y.clone(), x, mixed, begin)) << "another scale";
  }
  EXPECT_EQ(different, "");
}

/// Weights that do not lie equally far apart, another type or odd sizes go one by one: refused, and nothing is written.
TEST(CudaExperts, ProductsThatCannotBeGroupedAreRefused) {
  Sides s;
  const Tensor begin = s.to_gpu(s.ints({0, 2, 4})), x = s.to_gpu(s.random({4, 128}, DType::kBF16, 1));
  const Tensor all = s.to_gpu(s.random({5 * 64, 128}, DType::kBF16, 2));
  const LinearWeightPtr a = share_linear(s.gpu, all.slice(0, 64), {}, false), b = share_linear(s.gpu, all.slice(64, 64), {}, false),
                        c = share_linear(s.gpu, all.slice(192, 64), {}, false);
  Tensor y = s.to_gpu(s.filled({4, 64}, DType::kBF16, kNan));
  const std::vector<const LinearWeight*> backwards{b.get(), a.get()}, good{a.get(), b.get()};
  EXPECT_FALSE(grouped_linear(s.gpu, y, x, backwards, begin));
  const Tensor x32 = s.to_gpu(s.random({4, 128}, DType::kF32, 1));
  Tensor y32 = s.to_gpu(s.filled({4, 64}, DType::kF32, kNan));
  EXPECT_FALSE(grouped_linear(s.gpu, y32, x32, good, begin)) << "fp32";
  EXPECT_THROW(grouped_linear(s.gpu, y, x, std::vector<const LinearWeight*>{a.get(), b.get(), c.get()}, begin), Error) << "of two groups";
  EXPECT_TRUE(same_bits(s.to_cpu(y), s.filled({4, 64}, DType::kBF16, kNan)));
}

}  // namespace
}  // namespace prl::ops
