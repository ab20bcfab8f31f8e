#include "ops/experts.hpp"

#include <algorithm>
#include <numeric>

#include "ops/test_support.hpp"

namespace prl::ops {
namespace {

using namespace testing;

class ExpertsTest : public OpTest {};

/// The definition in fp64: experts by logit, the lower index first among equals, and their weights.
struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<double> weights;
  double mass = 0;
};
Routed routed(std::span<const float> logits, std::int64_t k, bool renormalize) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::int32_t e) { return logits[static_cast<std::size_t>(e)]; });
  const auto exponential = [&](std::int32_t e) {
    return std::exp(static_cast<double>(logits[static_cast<std::size_t>(e)]) -
                    static_cast<double>(logits[static_cast<std::size_t>(order[0])]));
  };
  double all = 0, of_chosen = 0;
  for (const std::int32_t e : order) all += exponential(e);
  Routed out;
  out.ids.assign(order.begin(), order.begin() + k);
  for (const std::int32_t e : out.ids) of_chosen += exponential(e);
  for (const std::int32_t e : out.ids) out.weights.push_back(exponential(e) / (renormalize ? of_chosen : all));
  out.mass = of_chosen / all;
  return out;
}

struct Sizes {
  std::int64_t T, E, K;
};
constexpr Sizes kExpertSizes[] = {{1, 1, 1}, {7, 8, 2}, {33, 128, 8}, {5, 40, 32}, {3, 1024, 4}};

std::span<const float> row(const Tensor& t, std::int64_t r) {
  return {t.as<float>() + r * t.shape().num_cols(), static_cast<std::size_t>(t.shape().num_cols())};
}

TEST_P(ExpertsTest, RouteFollowsItsDefinition) {
  Session s(kind());
  for (const auto [T, E, K] : kExpertSizes)
    for (const bool renormalize : {false, true}) {
      Tensor logits = s.random({T, E}, DType::kF32, 3, 2.0f);
      for (std::int64_t i = 0; i < logits.num_elements(); i += 5) logits.as<float>()[i] = 0.5f;  // equals
      Tensor ids = s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(T * K), -1)).reshaped({T, K});
      Tensor weights = s.poisoned({T, K}, DType::kF32), mass = s.poisoned({T}, DType::kF32);
      route(s.ctx, ids, weights, mass, logits, renormalize);
      for (std::int64_t t = 0; t < T; ++t) {
        const Routed want = routed(row(logits, t), K, renormalize);
        for (std::int64_t k = 0; k < K; ++k) {
          EXPECT_EQ(ids.as<std::int32_t>()[t * K + k], want.ids[static_cast<std::size_t>(k)]) << E << ": token " << t << ", " << k;
          EXPECT_NEAR(static_cast<double>(weights.as<float>()[t * K + k]), want.weights[static_cast<std::size_t>(k)], 2e-6);
        }
        EXPECT_NEAR(static_cast<double>(mass.as<float>()[t]), want.mass, 2e-6);
      }
      // A token alone has the bits that it has among others.
      Tensor one_id = s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(K), -1)).reshaped({1, K});
      Tensor one_weight = s.poisoned({1, K}, DType::kF32), one_mass = s.poisoned({1}, DType::kF32);
      route(s.ctx, one_id, one_weight, one_mass, logits.view().rows(T - 1, 1), renormalize);
      EXPECT_TRUE(std::equal(one_weight.as<float>(), one_weight.as<float>() + K, weights.as<float>() + (T - 1) * K));
      EXPECT_EQ(one_mass.as<float>()[0], mass.as<float>()[T - 1]);
    }
}

/// [T, K]: the experts of the greatest logits moved on by `by`, modulo E, and rows that give none: every third.
Tensor moved(Session& s, const Tensor& ids, std::int64_t num_experts, std::int32_t by) {
  const std::int64_t T = ids.shape()[0], K = ids.shape()[1];
  std::vector<std::int32_t> out(ids.as<std::int32_t>(), ids.as<std::int32_t>() + T * K);
  for (std::int32_t& id : out) id = static_cast<std::int32_t>((id + by) % num_experts);
  for (std::int64_t t = 0; t < T; t += 3) {
    // In turn: a row of equals, which for one expert is a choice, and one that names no expert.
    const std::int32_t blank = t % 2 == 0 && K > 1 ? 0 : t % 4 == 1 ? -1 : static_cast<std::int32_t>(num_experts);
    std::fill_n(out.begin() + t * K, K, blank);
  }
  return s.ints(out).reshaped({T, K});
}

TEST_P(ExpertsTest, GivenExpertsAreTaken) {
  Session s(kind());
  for (const auto [T, E, K] : kExpertSizes)
    for (const bool renormalize : {false, true}) {
      const Tensor logits = s.random({T, E}, DType::kF32, 3, 2.0f);
      const auto empty = [&] { return s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(T * K), -1)).reshaped({T, K}); };
      Tensor own = empty(), of_own = s.poisoned({T, K}, DType::kF32), mass = s.poisoned({T}, DType::kF32);
      route(s.ctx, own, of_own, mass, logits, renormalize);
      // What a router has chosen itself changes no bit.
      Tensor ids = empty(), weights = s.poisoned({T, K}, DType::kF32), again = s.poisoned({T}, DType::kF32);
      route(s.ctx, ids, weights, again, logits, renormalize, own);
      EXPECT_TRUE(same_bits(ids, own) && same_bits(weights, of_own) && same_bits(again, mass)) << E;
      const Tensor given = moved(s, own, E, 1);
      route(s.ctx, ids, weights, again, logits, renormalize, given);
      for (std::int64_t t = 0; t < T; ++t) {
        const std::span<const float> of_token = row(logits, t);
        double all = 0, of_given = 0;
        const auto exponential = [&](std::int64_t e) { return std::exp(static_cast<double>(of_token[static_cast<std::size_t>(e)])); };
        for (std::int64_t e = 0; e < E; ++e) all += exponential(e);
        for (std::int64_t k = 0; k < K; ++k) {
          const std::int32_t want = t % 3 == 0 ? own.as<std::int32_t>()[t * K + k] : given.as<std::int32_t>()[t * K + k];
          ASSERT_EQ(ids.as<std::int32_t>()[t * K + k], want) << E << ": token " << t << ", " << k;
          of_given += exponential(want);
        }
        for (std::int64_t k = 0; k < K; ++k)
          EXPECT_NEAR(static_cast<double>(weights.as<float>()[t * K + k]),
                      exponential(ids.as<std::int32_t>()[t * K + k]) / (renormalize ? of_given : all), 2e-6);
        EXPECT_NEAR(static_cast<double>(again.as<float>()[t]), of_given / all, 2e-6);
      }
    }
  // Far below the others, where the exponentials of those that are given are 0.
  Tensor logits = s.random({2, 8}, DType::kF32, 5), weights = s.poisoned({2, 2}, DType::kF32), mass = s.poisoned({2}, DType::kF32);
  for (const std::int64_t t : {0, 1}) logits.as<float>()[t * 8] = 300.0f;
  Tensor ids = s.ints({0, 0, 0, 0}).reshaped({2, 2}), dlogits = s.poisoned({2, 8}, DType::kF32);
  const Tensor given = s.ints({5, 2, 7, 1}).reshaped({2, 2}), dweights = s.random({2, 2}, DType::kF32, 6);
  for (const bool renormalize : {false, true}) {
    route(s.ctx, ids, weights, mass, logits, renormalize, given);
    EXPECT_NEAR(static_cast<double>(weights.as<float>()[0] + weights.as<float>()[1]), renormalize ? 1.0 : 0.0, 1e-6);
    EXPECT_EQ(mass.as<float>()[1], 0.0f);
    route_backward(s.ctx, dlogits, dweights, logits, ids, weights, renormalize);
    for (std::int64_t i = 0; i < 16; ++i) EXPECT_TRUE(std::isfinite(dlogits.as<float>()[i])) << i;
  }
}

TEST_P(ExpertsTest, RoutesAreLogged) {
  Session s(kind());
  const std::int64_t T = 5, K = 3, L = 4, S = 9;
  const Tensor ids = s.ints({1, 2, 3, 40, 50, 60, 700, 800, 900, 4, 5, 6, 7, 8, 9}).reshaped({T, K}), slots = s.ints({8, 0, -1, 3, 4});
  Tensor log = Tensor::zeros(s.runtime, {S, 2 * L * K}, DType::kU8);
  log_route(s.ctx, log, ids, slots, 2 * K);
  const auto* found = static_cast<const std::uint16_t*>(static_cast<const void*>(log.data()));
  for (std::int64_t slot = 0; slot < S; ++slot)
    for (std::int64_t i = 0; i < L * K; ++i) {
      const std::int64_t t = slot == 8 ? 0 : slot == 0 ? 1 : slot == 3 ? 3 : slot == 4 ? 4 : -1;
      const bool is_written = t >= 0 && i >= 2 * K && i < 3 * K;
      EXPECT_EQ(found[slot * L * K + i], is_written ? ids.as<std::int32_t>()[t * K + i - 2 * K] : 0) << slot << ", " << i;
    }
  EXPECT_THROW(log_route(s.ctx, log, ids, slots, L * K - 1), Error) << "more entries than a row has";
}

TEST_P(ExpertsTest, RouteBackwardIsTheSlope) {
  Session s(kind());
  for (const auto [T, E, K] : kExpertSizes)
    for (const bool renormalize : {false, true}) {
      Tensor logits = s.random({T, E}, DType::kF32, 4), dweights = s.random({T, K}, DType::kF32, 5);
      Tensor ids = s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(T * K), -1)).reshaped({T, K});
      Tensor weights = s.poisoned({T, K}, DType::kF32), mass = s.poisoned({T}, DType::kF32), dlogits = s.poisoned({T, E}, dtype());
      route(s.ctx, ids, weights, mass, logits, renormalize);
      route_backward(s.ctx, dlogits, dweights, logits, ids, weights, renormalize);
      // Of sum_k dw_k * w_k with the experts as they are.
      for (std::int64_t t = 0; t < T; ++t) {
        std::vector<double> probability(static_cast<std::size_t>(E));
        double all = 0, mean = 0;
        for (std::int64_t e = 0; e < E; ++e)
          all += probability[static_cast<std::size_t>(e)] = std::exp(static_cast<double>(row(logits, t)[static_cast<std::size_t>(e)]));
        std::vector<double> want(static_cast<std::size_t>(E)), dw(static_cast<std::size_t>(E));
        double of_chosen = 0;
        for (std::int64_t k = 0; k < K; ++k) {
          const auto e = static_cast<std::size_t>(ids.as<std::int32_t>()[t * K + k]);
          dw[e] = static_cast<double>(dweights.as<float>()[t * K + k]);
          of_chosen += probability[e];
        }
        for (std::int64_t k = 0; k < K; ++k) {
          const auto e = static_cast<std::size_t>(ids.as<std::int32_t>()[t * K + k]);
          mean += dw[e] * probability[e] / (renormalize ? of_chosen : all);
        }
        for (std::size_t e = 0; e < want.size(); ++e) want[e] = renormalize ? 0 : probability[e] / all * (dw[e] - mean);
        for (std::int64_t k = 0; renormalize && k < K; ++k) {
          const auto e = static_cast<std::size_t>(ids.as<std::int32_t>()[t * K + k]);
          want[e] = probability[e] / of_chosen * (dw[e] - mean);
        }
        for (std::int64_t e = 0; e < E; ++e)
          EXPECT_NEAR(static_cast<double>(get(dlogits, t * E + e)), want[static_cast<std::size_t>(e)],
                      dtype() == DType::kBF16 ? 1e-2 : 1e-5)
              << E << ": token " << t << ", expert " << e;
      }
    }
}

struct ScoreCase {
  std::int64_t T, E, K;
  ScoreRule rule;
};
const ScoreCase kScoreCases[] = {{1, 2, 1, {}},
                                 {7, 8, 2, {.num_groups = 4, .num_active_groups = 2, .renormalize = true, .scale = 2.5f}},
                                 {33, 128, 8, {.renormalize = true, .scale = 1.5f}},
                                 {9, 40, 32, {.num_groups = 5, .num_active_groups = 4, .scale = 0.5f}},
                                 {3, 1024, 4, {.num_groups = 512, .num_active_groups = 3, .renormalize = true}},
                                 {6, 1024, 6, {.num_groups = 2, .num_active_groups = 1}}};

double sigmoid_of_logit(float x) { return 1.0 / (1.0 + std::exp(-static_cast<double>(x))); }

/// The definition in fp64.
Routed routed_by_score(std::span<const float> logits, std::span<const double> bias, std::int64_t k, const ScoreRule& rule) {
  const auto num_groups = static_cast<std::size_t>(rule.num_groups), of_group = logits.size() / num_groups;
  std::vector<double> value;
  for (std::size_t e = 0; e < logits.size(); ++e) value.push_back(sigmoid_of_logit(logits[e]) + bias[e]);
  std::vector<double> of_groups;
  for (std::size_t g = 0; g < num_groups; ++g) {
    std::vector<double> in(value.begin() + static_cast<std::ptrdiff_t>(g * of_group),
                           value.begin() + static_cast<std::ptrdiff_t>((g + 1) * of_group));
    std::ranges::sort(in, std::ranges::greater());
    of_groups.push_back(in[0] + in[1]);
  }
  const auto order_of = [](const std::vector<double>& values) {
    std::vector<std::int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, std::ranges::greater(), [&](std::int32_t i) { return values[static_cast<std::size_t>(i)]; });
    return order;
  };
  std::vector<std::int32_t> groups = order_of(of_groups);
  groups.resize(static_cast<std::size_t>(rule.num_active_groups));
  Routed out;
  double sum = 0, all = 0;
  for (const std::int32_t e : order_of(value))
    if (std::ranges::find(groups, e / static_cast<std::int32_t>(of_group)) != groups.end() && static_cast<std::int64_t>(out.ids.size()) < k)
      out.ids.push_back(e);
  for (const std::int32_t e : out.ids) sum += sigmoid_of_logit(logits[static_cast<std::size_t>(e)]);
  for (const float logit : logits) all += sigmoid_of_logit(logit);
  for (const std::int32_t e : out.ids)
    out.weights.push_back(sigmoid_of_logit(logits[static_cast<std::size_t>(e)]) / (rule.renormalize ? sum : 1.0) *
                          static_cast<double>(rule.scale));
  out.mass = sum / all;
  return out;
}

TEST_P(ExpertsTest, RoutingByScoresFollowsItsDefinition) {
  Session s(kind());
  for (const auto& [T, E, K, rule] : kScoreCases) {
    SCOPED_TRACE(::testing::Message() << T << " tokens, " << K << " of " << E << " experts, " << rule.num_groups << " groups");
    const std::int64_t P = 3;
    Tensor logits = s.random({T, E}, DType::kF32, 3, 2.0f), bias = s.random({P, E}, DType::kF32, 4, 0.2f);
    for (std::int64_t e = 0; e < E; e += 5) {  // equals
      for (std::int64_t p = 0; p < P; ++p) bias.as<float>()[p * E + e] = 0.0625f;
      for (std::int64_t t = 0; t < T; ++t) logits.as<float>()[t * E + e] = 0.5f;
    }
    std::vector<double> sums(static_cast<std::size_t>(E), 0.0);
    for (std::int64_t i = 0; i < P * E; ++i) sums[static_cast<std::size_t>(i % E)] += static_cast<double>(bias.as<float>()[i]);
    Tensor ids = s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(T * K), -1)).reshaped({T, K});
    Tensor weights = s.poisoned({T, K}, DType::kF32), mass = s.poisoned({T}, DType::kF32);
    route_by_score(s.ctx, ids, weights, mass, logits, bias, rule);
    for (std::int64_t t = 0; t < T; ++t) {
      const Routed want = routed_by_score(row(logits, t), sums, K, rule);
      ASSERT_EQ(static_cast<std::int64_t>(want.ids.size()), K);
      for (std::int64_t k = 0; k < K; ++k) {
        EXPECT_EQ(ids.as<std::int32_t>()[t * K + k], want.ids[static_cast<std::size_t>(k)]) << "token " << t << ", " << k;
        EXPECT_NEAR(static_cast<double>(weights.as<float>()[t * K + k]), want.weights[static_cast<std::size_t>(k)], 2e-6);
      }
      EXPECT_NEAR(static_cast<double>(mass.as<float>()[t]), want.mass, 2e-6);
    }
    // Given experts are taken; what the router has chosen itself changes no bit.
    Tensor same = moved(s, ids, E, 0), again = s.poisoned({T, K}, DType::kF32), of_mass = s.poisoned({T}, DType::kF32);
    route_by_score(s.ctx, same, again, of_mass, logits, bias, rule, ids);
    EXPECT_TRUE(same_bits(same, ids) && same_bits(again, weights) && same_bits(of_mass, mass));
    const Tensor given = moved(s, ids, E, 1);
    route_by_score(s.ctx, same, again, of_mass, logits, bias, rule, given);
    for (std::int64_t t = 0; t < T; ++t) {
      double sum = 0;
      const auto score = [&](std::int64_t k) {
        return 1 / (1 + std::exp(-static_cast<double>(row(logits, t)[static_cast<std::size_t>(same.as<std::int32_t>()[t * K + k])])));
      };
      for (std::int64_t k = 0; k < K; ++k) {
        EXPECT_EQ(same.as<std::int32_t>()[t * K + k], (t % 3 == 0 ? ids : given).as<std::int32_t>()[t * K + k]) << "token " << t;
        sum += score(k);
      }
      for (std::int64_t k = 0; k < K; ++k)
        EXPECT_NEAR(static_cast<double>(again.as<float>()[t * K + k]),
                    static_cast<double>(rule.scale) * score(k) / (rule.renormalize ? sum : 1.0), 4e-6);
    }
    // A token alone has the bits that it has among others.
    Tensor one_id = s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(K), -1)).reshaped({1, K});
    Tensor one_weight = s.poisoned({1, K}, DType::kF32), one_mass = s.poisoned({1}, DType::kF32);
    route_by_score(s.ctx, one_id, one_weight, one_mass, logits.view().rows(T - 1, 1), bias, rule);
    EXPECT_TRUE(std::equal(one_weight.as<float>(), one_weight.as<float>() + K, weights.as<float>() + (T - 1) * K));
    EXPECT_EQ(one_mass.as<float>()[0], mass.as<float>()[T - 1]);
  }
}

TEST_P(ExpertsTest, RoutingByScoresHasItsSlope) {
  Session s(kind());
  for (const auto& [T, E, K, rule] : kScoreCases) {
    Tensor logits = s.random({T, E}, DType::kF32, 4), dweights = s.random({T, K}, DType::kF32, 5), bias = s.random({1, E}, DType::kF32, 6);
    Tensor ids = s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(T * K), -1)).reshaped({T, K});
    Tensor weights = s.poisoned({T, K}, DType::kF32), mass = s.poisoned({T}, DType::kF32), dlogits = s.poisoned({T, E}, dtype());
    route_by_score(s.ctx, ids, weights, mass, logits, bias, rule);
    route_by_score_backward(s.ctx, dlogits, dweights, logits, ids, rule);
    // Of sum_k dw_k * w_k with the experts as they are: by differences in fp64.
    for (std::int64_t t = 0; t < T; ++t) {
      const auto id = [&](std::int64_t k) { return ids.as<std::int32_t>()[t * K + k]; };
      const auto value_with = [&](std::int64_t moved, double by) {
        double sum = 0, dot = 0;
        for (std::int64_t k = 0; k < K; ++k) {
          const double x = static_cast<double>(row(logits, t)[static_cast<std::size_t>(id(k))]) + (id(k) == moved ? by : 0.0);
          const double score = 1.0 / (1.0 + std::exp(-x));
          sum += score;
          dot += static_cast<double>(dweights.as<float>()[t * K + k]) * score;
        }
        return static_cast<double>(rule.scale) * (rule.renormalize ? dot / sum : dot);
      };
      for (std::int64_t e = 0; e < E; ++e) {
        const double want = (value_with(e, 1e-4) - value_with(e, -1e-4)) / 2e-4;
        EXPECT_NEAR(static_cast<double>(get(dlogits, t * E + e)), want, dtype() == DType::kBF16 ? 1e-2 : 1e-5)
            << E << ": token " << t << ", expert " << e;
      }
    }
  }
}

TEST_P(ExpertsTest, RowsArePlacedByExpertAndThenByToken) {
  Session s(kind());
  for (const auto [T, E, K] : {Sizes{1, 1, 1}, {1, 8, 2}, {7, 8, 2}, {333, 128, 8}, {5, 40, 32}, {4000, 6, 2}}) {
    Rng rng(static_cast<std::uint64_t>(T * E));
    std::vector<std::int32_t> ids, order(static_cast<std::size_t>(E));
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::size_t e = order.size() - 1; e > 0; --e) std::swap(order[e], order[rng.next_below(e + 1)]);
      ids.insert(ids.end(), order.begin(), order.begin() + K);
    }
    const Tensor weights = s.random({T, K}, DType::kF32, 3);
    const auto nothing = [&](std::int64_t count) { return s.ints(std::vector<std::int32_t>(static_cast<std::size_t>(count), -1)); };
    Tensor begin = nothing(E + 1), token = nothing(T * K), slot = nothing(T * K).reshaped({T, K}),
           weight = s.poisoned({T * K}, DType::kF32);
    place_rows(s.ctx, begin, token, weight, slot, s.ints(ids).reshaped({T, K}), weights);
    std::vector<std::size_t> by_expert(ids.size());
    std::iota(by_expert.begin(), by_expert.end(), std::size_t{0});
    std::ranges::stable_sort(by_expert, {}, [&](std::size_t i) { return ids[i]; });
    for (std::size_t row = 0; row < by_expert.size(); ++row) {
      const std::size_t i = by_expert[row];
      ASSERT_EQ(token.as<std::int32_t>()[row], static_cast<std::int32_t>(i) / K) << T << " tokens of " << E << ": row " << row;
      ASSERT_EQ(weight.as<float>()[row], weights.as<float>()[i]);
      ASSERT_EQ(slot.as<std::int32_t>()[i], static_cast<std::int32_t>(row));
    }
    for (std::int64_t e = 0; e <= E; ++e)
      ASSERT_EQ(begin.as<std::int32_t>()[e], std::ranges::count_if(ids, [e = e](std::int32_t id) { return id < e; })) << e;
  }
}

/// swiglu and a factor a row, and their gradients: the bits of swiglu's own ops.
TEST_P(ExpertsTest, RowsOfSwigluHaveAFactor) {
  Session s(kind());
  for (const std::int64_t F : {1, 8, 37, 1000}) {
    const std::int64_t R = 19;
    const Tensor gate_up = s.random({R, 2 * F}, dtype(), 1), dout = s.random({R, F}, dtype(), 2), factors = s.random({R}, DType::kF32, 3);
    Tensor out = s.poisoned({R, F}, dtype()), plain = s.poisoned({R, F}, dtype()), scaled = s.poisoned({R, F}, dtype());
    Tensor dgate_up = s.poisoned({R, 2 * F}, dtype()), want = s.poisoned({R, 2 * F}, dtype()), dfactors = s.poisoned({R}, DType::kF32);
    swiglu_rows(s.ctx, out, gate_up, factors);
    swiglu_rows_backward(s.ctx, dgate_up, dfactors, dout, gate_up, factors);
    swiglu(s.ctx, plain, gate_up);
    const auto stored = [&](float value) { return dtype() == DType::kBF16 ? to_f32(to_bf16(value)) : value; };
    for (std::int64_t r = 0; r < R; ++r) {
      const float factor = factors.as<float>()[r];
      double dot = 0, magnitude = 0;
      for (std::int64_t c = 0; c < F; ++c) {
        const std::int64_t i = r * F + c;
        EXPECT_EQ(get(out, i), stored(get(plain, i) * factor)) << r << ", " << c;
        Session::set(scaled, i, stored(get(dout, i) * factor));
        const double product = static_cast<double>(get(dout, i)) * static_cast<double>(get(plain, i));
        dot += product;
        magnitude += std::abs(product);
      }
      EXPECT_NEAR(static_cast<double>(dfactors.as<float>()[r]), dot, 1e-6 * magnitude);
    }
    swiglu_backward(s.ctx, want, scaled, gate_up);
    EXPECT_TRUE(same_bits(dgate_up, want)) << F;
    Tensor alone = s.poisoned({1, 2 * F}, dtype()), one = s.poisoned({1}, DType::kF32);
    swiglu_rows_backward(s.ctx, alone, one, dout.slice(R - 1, 1), gate_up.slice(R - 1, 1), factors.slice(R - 1, 1));
    EXPECT_EQ(one.as<float>()[0], dfactors.as<float>()[R - 1]) << "a row does not depend on others";
    EXPECT_TRUE(same_bits(alone, dgate_up.slice(R - 1, 1).clone()));
  }
}

/// The gate of each row in fp64, and its gradients, with rows that lie apart and one alone.
TEST_P(ExpertsTest, GatesOfRowsAndTheirGradients) {
  Session s(kind());
  for (const std::pair<int, int>& sizes : {std::pair(1, 1), {7, 8}, {301, 37}, {19, 2048}, {5, 1003}}) {
    const std::int64_t T = sizes.first, H = sizes.second;
    const Tensor wide = s.random({T, 2 * H}, dtype(), 1), w = s.random({H}, DType::kF32, 2, 0.3f), dgates = s.random({T}, DType::kF32, 3);
    const ConstTensorView x = ConstTensorView(wide.view()).columns(H, H);
    Tensor gates = s.poisoned({T}, DType::kF32), dx = s.poisoned({T, H}, dtype()), dw = s.random({H}, DType::kF32, 4);
    const Tensor before = dw.clone();
    row_gates(s.ctx, gates, x, w);
    row_gates_backward(s.ctx, dx, dw, dgates, gates, x, w, false);
    Tensor more = s.random({T, H}, dtype(), 5);
    const Tensor held = more.clone();
    row_gates_backward(s.ctx, more, {}, dgates, gates, x, w, true);
    std::vector<double> want_dw, want_dx, want_more;
    for (const float v : values(before)) want_dw.push_back(static_cast<double>(v));
    for (std::int64_t t = 0; t < T; ++t) {
      const auto x_at = [&](std::int64_t h) { return static_cast<double>(get(wide, t * 2 * H + H + h)); };
      const auto w_at = [&](std::int64_t h) { return static_cast<double>(w.as<float>()[h]); };
      double logit = 0, size = 0;
      for (std::int64_t h = 0; h < H; ++h) {
        logit += x_at(h) * w_at(h);
        size += std::abs(x_at(h) * w_at(h));
      }
      const double gate = 1.0 / (1.0 + std::exp(-logit)), slope = gate * (1.0 - gate);
      ASSERT_NEAR(static_cast<double>(gates.as<float>()[t]), gate, 1e-6 * (1.0 + slope * size)) << T << " rows of " << H << ": " << t;
      const double dlogit = static_cast<double>(dgates.as<float>()[t]) * slope;
      for (std::int64_t h = 0; h < H; ++h) {
        want_dx.push_back(dlogit * w_at(h));
        want_more.push_back(static_cast<double>(get(held, t * H + h)) + dlogit * w_at(h));
        want_dw[static_cast<std::size_t>(h)] += dlogit * x_at(h);
      }
    }
    EXPECT_LT(worst_error(values(dx), want_dx, 1e-2), tolerance(dtype(), 2e-5)) << T << " rows of " << H;
    EXPECT_LT(worst_error(values(more), want_more, 1.0), tolerance(dtype(), 2e-5)) << T << " rows of " << H;
    EXPECT_LT(worst_error(values(dw), want_dw, 1.0), 2e-5) << T << " rows of " << H;
    Tensor alone = s.poisoned({1}, DType::kF32);
    row_gates(s.ctx, alone, x.rows(T - 1, 1), w);
    EXPECT_EQ(alone.as<float>()[0], gates.as<float>()[T - 1]) << "a row does not depend on others";
    Tensor only = before.clone();
    row_gates_backward(s.ctx, {}, only, dgates, gates, x, w, false);
    EXPECT_TRUE(same_bits(only, dw)) << "without the gradient of x";
  }
  Tensor x = s.random({3, 4}, dtype(), 1), gates = s.poisoned({3}, DType::kF32);
  EXPECT_THROW(row_gates(s.ctx, gates, x, s.random({5}, DType::kF32, 2)), Error) << "five weights for rows of four";
}

/// A gate of GPT-OSS's in fp64, and its slopes.
struct ClampedReference {
  double value, dgate, dup;
  ClampedReference(double gate, double up, const ClampedGate& rule) {
    const double limit = static_cast<double>(rule.limit), alpha = static_cast<double>(rule.alpha);
    const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit) + 1.0, s = 1.0 / (1.0 + std::exp(-alpha * g));
    value = g * s * u;
    dgate = gate > limit ? 0.0 : u * s * (1.0 + alpha * g * (1.0 - s));
    dup = std::abs(up) > limit ? 0.0 : g * s;
  }
};

TEST_P(ExpertsTest, ClampedGatesAndTheirGradients) {
  Session s(kind());
  const ClampedGate rule{.alpha = 1.702f, .limit = 1.25f};
  for (const std::int64_t F : {1, 8, 37, 1000}) {
    const std::int64_t R = 11;
    const Tensor pairs = s.random({R, 2 * F}, dtype(), 1), dout = s.random({R, F}, dtype(), 2), factors = s.random({R}, DType::kF32, 3);
    Tensor out = s.poisoned({R, F}, dtype()), dpairs = s.poisoned({R, 2 * F}, dtype()), dfactors = s.poisoned({R}, DType::kF32);
    clamped_swiglu(s.ctx, out, pairs, factors, rule);
    clamped_swiglu_backward(s.ctx, dpairs, dfactors, dout, pairs, factors, rule);
    const double bound = dtype() == DType::kBF16 ? 1.2e-2 : 4e-6;
    for (std::int64_t r = 0; r < R; ++r) {
      const auto factor = static_cast<double>(factors.as<float>()[r]);
      double dot = 0, magnitude = 0;
      for (std::int64_t c = 0; c < F; ++c) {
        const auto d = static_cast<double>(get(dout, r * F + c));
        const ClampedReference want(static_cast<double>(get(pairs, (r * F + c) * 2)), static_cast<double>(get(pairs, (r * F + c) * 2 + 1)),
                                    rule);
        const auto near = [&](const Tensor& got, std::int64_t i, double wanted) {
          EXPECT_NEAR(static_cast<double>(get(got, i)), wanted, bound * (1.0 + std::abs(wanted))) << F << ": " << r << ", " << c;
        };
        near(out, r * F + c, factor * want.value);
        near(dpairs, (r * F + c) * 2, factor * d * want.dgate);
        near(dpairs, (r * F + c) * 2 + 1, factor * d * want.dup);
        dot += d * want.value;
        magnitude += std::abs(d * want.value);
      }
      EXPECT_NEAR(static_cast<double>(dfactors.as<float>()[r]), dot, bound * (0.1 + magnitude));
    }
    Tensor alone = s.poisoned({1, 2 * F}, dtype()), one = s.poisoned({1}, DType::kF32), first = s.poisoned({1, F}, dtype());
    clamped_swiglu(s.ctx, first, pairs.slice(R - 1, 1), factors.slice(R - 1, 1), rule);
    clamped_swiglu_backward(s.ctx, alone, one, dout.slice(R - 1, 1), pairs.slice(R - 1, 1), factors.slice(R - 1, 1), rule);
    EXPECT_TRUE(same_bits(first, out.slice(R - 1, 1).clone())) << "a row does not depend on others";
    EXPECT_TRUE(same_bits(alone, dpairs.slice(R - 1, 1).clone()));
    EXPECT_EQ(one.as<float>()[0], dfactors.as<float>()[R - 1]);
  }
}

TEST_P(ExpertsTest, WhatIsNoNumberStaysSo) {
  Session s(kind());
  Tensor pairs = s.filled({2, 32}, dtype(), 1.0f), out = s.poisoned({2, 16}, dtype());
  const Tensor factors = s.filled({2}, DType::kF32, 1.0f);
  Session::set(pairs, 6, std::numeric_limits<float>::quiet_NaN());
  Session::set(pairs, 32 + 7, std::numeric_limits<float>::quiet_NaN());
  clamped_swiglu(s.ctx, out, pairs, factors, {});
  for (std::int64_t i = 0; i < 32; ++i) EXPECT_EQ(std::isnan(get(out, i)), i == 3 || i == 16 + 3) << i;
}

TEST_P(ExpertsTest, BiasesAreThoseOfARowsExpert) {
  Session s(kind());
  const std::vector<std::int32_t> begins = {0, 0, 3, 4, 4, 9, 9};
  const std::vector<std::int32_t> tokens = {0, 2, 5, 1, 0, 1, 2, 3, 5};
  const std::int64_t R = 9, E = 6;
  const Tensor begin = s.ints(begins), token = s.ints(tokens);
  const auto expert_of = [&](std::int64_t r) {
    return std::ranges::upper_bound(begins, static_cast<std::int32_t>(r)) - begins.begin() - 1;
  };
  for (const std::int64_t N : {1, 8, 37, 520})
    for (const bool has_factors : {false, true}) {
      const Tensor before = s.random({R, N}, dtype(), 1), biases = s.random({E * N}, DType::kF32, 2),
                   factors = s.random({R}, DType::kF32, 3);
      const ConstTensorView given = has_factors ? ConstTensorView(factors) : ConstTensorView{};
      Tensor y = before.clone(), dbiases = s.filled({E * N}, DType::kF32, 0.5f), dfactors = s.filled({R}, DType::kF32, 0.25f);
      add_expert_biases(s.ctx, y, biases, begin, given);
      expert_biases_backward(s.ctx, dbiases, before, begin, token, given, {1, 3});
      add_bias_dots(s.ctx, dfactors, before, biases, begin);
      std::vector<double> of_biases(static_cast<std::size_t>(E * N), 0.5);
      for (std::int64_t r = 0; r < R; ++r) {
        const float factor = has_factors ? factors.as<float>()[r] : 1.0f;
        const bool is_meant = tokens[static_cast<std::size_t>(r)] >= 1 && tokens[static_cast<std::size_t>(r)] < 4;
        double dot = 0.25, magnitude = 1;
        for (std::int64_t n = 0; n < N; ++n) {
          const std::int64_t at = expert_of(r) * N + n;
          const float sum = get(before, r * N + n) + factor * biases.as<float>()[at];
          EXPECT_EQ(get(y, r * N + n), dtype() == DType::kBF16 ? to_f32(to_bf16(sum)) : sum) << r << ", " << n;
          if (is_meant)
            of_biases[static_cast<std::size_t>(at)] += static_cast<double>(factor) * static_cast<double>(get(before, r * N + n));
          const double product = static_cast<double>(get(before, r * N + n)) * static_cast<double>(biases.as<float>()[at]);
          dot += product;
          magnitude += std::abs(product);
        }
        EXPECT_NEAR(static_cast<double>(dfactors.as<float>()[r]), dot, 1e-6 * magnitude);
      }
      EXPECT_LT(worst_error(values(dbiases), of_biases, 1.0), 1e-6);
    }
}

TEST_P(ExpertsTest, RowsAreSummedInOrder) {
  Session s(kind());
  for (const std::int64_t C : {1, 37, 520, 1100}) {
    const std::int64_t T = 9, K = 3, R = 14;
    Tensor x = s.random({R, C}, dtype(), 1), before = s.random({T, C}, dtype(), 2);
    std::vector<std::int32_t> of_rows;
    Rng rng(7);
    for (std::int64_t i = 0; i < T * K; ++i) of_rows.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(R))));
    const Tensor rows = s.ints(of_rows).reshaped({T, K});
    for (const bool accumulate : {false, true}) {
      Tensor out = accumulate ? before.clone() : s.poisoned({T, C}, dtype());
      sum_rows(s.ctx, out, x, rows, accumulate);
      for (std::int64_t t = 0; t < T; ++t)
        for (std::int64_t c = 0; c < C; ++c) {
          float sum = 0.0f;
          for (std::int64_t k = 0; k < K; ++k) sum += get(x, of_rows[static_cast<std::size_t>(t * K + k)] * C + c);
          if (accumulate) sum = get(before, t * C + c) + sum;
          EXPECT_EQ(get(out, t * C + c), dtype() == DType::kBF16 ? to_f32(to_bf16(sum)) : sum) << t << ", " << c;
        }
    }
  }
}

TEST_P(ExpertsTest, WhatDoesNotFitIsRefused) {
  Session s(kind());
  Tensor logits = s.random({2, 4}, DType::kF32, 1), weights = s.poisoned({2, 5}, DType::kF32), mass = s.poisoned({2}, DType::kF32);
  Tensor ids = s.ints(std::vector<std::int32_t>(10, 0)).reshaped({2, 5});
  EXPECT_THROW(route(s.ctx, ids, weights, mass, logits, false), Error) << "five experts of four";
  const Tensor bias = s.random({1, 4}, DType::kF32, 2);
  Tensor two = s.ints({0, 0, 0, 0}).reshaped({2, 2}), of_two = s.poisoned({2, 2}, DType::kF32);
  const auto by_score = [&](ScoreRule rule) { route_by_score(s.ctx, two, of_two, mass, logits, bias, rule); };
  EXPECT_THROW(by_score({.num_groups = 3}), Error) << "groups of different sizes";
  EXPECT_THROW(by_score({.num_groups = 4, .num_active_groups = 4}), Error) << "groups of one";
  EXPECT_THROW(by_score({.num_groups = 2, .num_active_groups = 3}), Error) << "three groups of two";
  EXPECT_NO_THROW(by_score({.num_groups = 2, .num_active_groups = 1}));
  EXPECT_THROW(route_by_score(s.ctx, two, of_two, mass, logits, s.random({1, 5}, DType::kF32, 2), {}), Error) << "biases of five";
  Tensor x = s.random({3, 4}, dtype(), 1), out = s.poisoned({2, 4}, dtype()), factors = s.random({2}, DType::kF32, 1);
  EXPECT_THROW(swiglu_rows(s.ctx, out, x, factors), Error) << "gate and up of three rows for two";
  EXPECT_THROW(sum_rows(s.ctx, out, x, s.ints({0, 1, 2}).reshaped({3, 1}), false), Error) << "rows of three tokens for two";
}

PRL_OP_TEST_KINDS(ExpertsTest);

}  // namespace
}  // namespace prl::ops
