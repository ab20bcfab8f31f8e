#include "trainer/optim/optimizer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/rng.hpp"
#include "ops/pointwise.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;

void fill_gradients(Policy& policy, std::uint64_t seed) {
  Rng rng(seed);
  for (nn::NamedParameter& p : policy.parameters().named())
    for (std::int64_t i = 0; i < p.grad.num_elements(); ++i)
      p.grad.as<float>()[i] = i % 11 == 7 ? 0.0f : static_cast<float>(rng.next_normal());
}

/// Element-wise rules written once more in fp64 as PyTorch documents them; `state` lives between steps.
using Rule = std::function<double(double p, double g, std::array<double, 2>& state, int step)>;

void expect_follows(const config::OptimConfig& optim, const Rule& rule, const std::function<bool(const nn::NamedParameter&)>& applies,
                    double grad_scale) {
  Scratch scratch("optim");
  const auto policy = make_tiny_policy(scratch.path / "model");
  Optimizer optimizer(policy->context(), policy->parameters(), optim);
  auto wanted = masters(*policy);
  std::vector<std::vector<std::array<double, 2>>> states;
  std::vector<std::vector<double>> exact;
  for (const auto& values : wanted) {
    states.emplace_back(values.size());
    exact.emplace_back(values.begin(), values.end());
  }
  for (int step = 1; step <= 3; ++step) {
    fill_gradients(*policy, static_cast<std::uint64_t>(step));
    for (std::size_t t = 0; t < exact.size(); ++t) {
      const Tensor& grad = policy->parameters().named()[t].grad;
      for (std::size_t i = 0; i < exact[t].size(); ++i)
        exact[t][i] = rule(exact[t][i], grad_scale * grad.as<float>()[i], states[t][i], step);
    }
    optimizer.step(0.01, grad_scale);
  }
  EXPECT_EQ(optimizer.num_steps(), 3);
  int num_compared = 0;
  const auto got = masters(*policy);
  for (std::size_t t = 0; t < got.size(); ++t) {
    if (!applies(policy->parameters().named()[t])) continue;
    ++num_compared;
    for (std::size_t i = 0; i < got[t].size(); ++i)
      ASSERT_NEAR(got[t][i], exact[t][i], 2e-6) << policy->parameters().named()[t].name << " " << i;
  }
  EXPECT_GT(num_compared, 0);
}

Rule adamw_rule(double b1, double b2, double wd) {
  return [=](double p, double g, std::array<double, 2>& s, int step) {
    p -= 0.01 * wd * p;
    s[0] = b1 * s[0] + (1 - b1) * g;
    s[1] = b2 * s[1] + (1 - b2) * g * g;
    const double m = s[0] / (1 - std::pow(b1, step)), v = s[1] / (1 - std::pow(b2, step));
    return p - 0.01 * m / (std::sqrt(v) + 1e-8);
  };
}

bool everything(const nn::NamedParameter&) { return true; }

TEST(Optimizer, AdamWFollowsPyTorch) {
  config::AdamWConfig c;
  c.weight_decay = 0.1;
  expect_follows(c, adamw_rule(0.9, 0.999, 0.1), everything, 0.5);
}

TEST(Optimizer, SgdFollowsPyTorch) {
  for (const bool nesterov : {true, false}) {
    config::SgdConfig c;
    c.weight_decay = 0.05, c.nesterov = nesterov;
    expect_follows(
        c,
        [nesterov](double p, double g, std::array<double, 2>& s, int step) {
          g += 0.05 * p;
          s[0] = step == 1 ? g : 0.9 * s[0] + g;
          return p - 0.01 * (nesterov ? g + 0.9 * s[0] : s[0]);
        },
        everything, 1.0);
  }
}

TEST(Optimizer, SignSgdFollowsItsRule) {
  config::SignSgdConfig c;
  c.weight_decay = 0.1;
  expect_follows(
      c,
      [](double p, double g, std::array<double, 2>&, int) {
        p -= 0.01 * 0.1 * p;
        return p - 0.01 * (g > 0 ? 1.0 : g < 0 ? -1.0 : 0.0);
      },
      everything, 0.25);
}

// Norms, embeddings and head of a Muon run take AdamW; hidden matrices do not.
TEST(Optimizer, MuonLeavesVectorsAndEmbeddingsToAdamW) {
  config::MuonConfig c;
  c.weight_decay = 0.1;
  const auto is_adamw = [](const nn::NamedParameter& p) {
    return p.value.shape().num_dims() < 2 || p.name.find("embed_tokens") != std::string::npos ||
           p.name.find("lm_head") != std::string::npos;
  };
  expect_follows(c, adamw_rule(0.9, 0.95, 0.1), is_adamw, 1.0);
}

// A Muon update has singular values near 1 before its scale of 0.2 sqrt(max(N, K)), whatever the gradient's are.
TEST(Optimizer, MuonUpdateIsNearlyOrthogonal) {
  Scratch scratch("muon");
  const auto policy = make_tiny_policy(scratch.path / "model");
  config::MuonConfig c;
  c.weight_decay = 0;
  Optimizer optimizer(policy->context(), policy->parameters(), c);
  fill_gradients(*policy, 1);
  const auto before = masters(*policy);
  optimizer.step(1.0, 1.0);
  const auto after = masters(*policy);
  int num_matrices = 0;
  for (std::size_t t = 0; t < before.size(); ++t) {
    const nn::NamedParameter& p = policy->parameters().named()[t];
    if (p.name.find("down_proj") == std::string::npos) continue;
    ++num_matrices;
    const std::int64_t n = p.value.shape()[0], k = p.value.shape()[1];
    const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(n, k)));
    double squares = 0;
    for (std::size_t i = 0; i < before[t].size(); ++i) squares += std::pow((static_cast<double>(after[t][i]) - before[t][i]) / scale, 2);
    // Sum of squared singular values over their number; the iteration leaves them within about 0.7 to 1.2.
    EXPECT_NEAR(squares / static_cast<double>(std::min(n, k)), 1.0, 0.35) << p.name;
  }
  EXPECT_EQ(num_matrices, 2);
}

TEST(Optimizer, FrozenBlocksStayAndOthersStepAsEver) {
  config::AdamWConfig adamw;
  config::SgdConfig sgd;
  config::SignSgdConfig sign;
  config::MuonConfig muon;
  adamw.weight_decay = sgd.weight_decay = sign.weight_decay = muon.weight_decay = 0.1;
  for (const config::OptimConfig& optim :
       {config::OptimConfig(adamw), config::OptimConfig(sgd), config::OptimConfig(sign), config::OptimConfig(muon)})
    for (const bool is_on_host : {false, true}) {
      Scratch scratch("optim");
      const auto free = make_tiny_policy(scratch.path / "free"), frozen = make_tiny_policy(scratch.path / "frozen");
      frozen->parameters().freeze(nn::Block::kDown);
      frozen->parameters().freeze(nn::Block::kQNorm);
      const auto before = masters(*frozen);
      Tensor rounded[2];
      int i = 0;
      for (Policy* policy : {free.get(), frozen.get()}) {
        OptimizerMemory memory;
        if (is_on_host) memory.host = make_host_link(policy->context().runtime, false);
        memory.piece_elements = 5000;  // pieces end in the middle of what is frozen
        Optimizer optimizer(policy->context(), policy->parameters(), optim, memory);
        rounded[i] = Tensor::zeros(policy->context().runtime, policy->parameters().all_values().shape(), DType::kBF16);
        for (int step = 1; step <= 2; ++step) {
          fill_gradients(*policy, static_cast<std::uint64_t>(step));
          optimizer.step(0.01, 0.5, rounded[i]);
        }
        ++i;
      }
      const auto of_free = masters(*free), of_frozen = masters(*frozen);
      int num_frozen = 0;
      for (std::size_t t = 0; t < before.size(); ++t) {
        const std::string& name = frozen->parameters().named()[t].name;
        const bool stays = name.find("down_proj") != std::string::npos || name.find("q_norm") != std::string::npos;
        num_frozen += stays ? 1 : 0;
        EXPECT_EQ(of_frozen[t], stays ? before[t] : of_free[t]) << name;
        EXPECT_NE(of_frozen[t], stays ? of_free[t] : before[t]) << name;
      }
      EXPECT_GT(num_frozen, 0);
      Tensor wanted = Tensor::zeros(frozen->context().runtime, rounded[1].shape(), DType::kBF16);
      ops::cast(frozen->context(), wanted, frozen->parameters().all_values());
      for (const nn::NamedParameter& p : frozen->parameters().named())
        for (std::int64_t k = p.offset; k < p.offset + p.num_elements(); ++k)
          ASSERT_EQ(to_f32(rounded[1].as<BFloat16>()[k]), to_f32(wanted.as<BFloat16>()[k])) << p.name << " " << k - p.offset;
    }
}

TEST(Optimizer, StateNamesAndCopies) {
  Scratch scratch("state");
  const auto policy = make_tiny_policy(scratch.path / "model");
  Optimizer optimizer(policy->context(), policy->parameters(), config::AdamWConfig{});
  EXPECT_EQ(optimizer.type_name(), "adamw");
  fill_gradients(*policy, 1);
  optimizer.step(0.01, 1.0);
  const auto state = optimizer.state();
  ASSERT_EQ(state.size(), 2 * policy->parameters().named().size());
  EXPECT_EQ(state[0].name, policy->parameters().named()[0].name + ".exp_avg");
  const auto copy = optimizer.copy_state();
  const float kept = copy[0].tensor.as<float>()[0];
  optimizer.step(0.01, 1.0);
  EXPECT_EQ(copy[0].tensor.as<float>()[0], kept) << "a copy does not follow later steps";
  EXPECT_NE(state[0].tensor.as<float>()[0], kept) << "the state itself does";
  std::size_t bytes = 0;
  for (const auto& named : state) bytes += named.tensor.num_bytes();
  EXPECT_EQ(optimizer.state_bytes(), bytes);
}

TEST(Optimizer, StateIsForetoldByTheByte) {
  Scratch scratch("bytes");
  const auto policy = make_tiny_policy(scratch.path / "model");
  const nn::TensorTable& table = *policy->parameters().table();
  for (const config::OptimConfig& optim : {config::OptimConfig(config::AdamWConfig{}), config::OptimConfig(config::SgdConfig{}),
                                           config::OptimConfig(config::SignSgdConfig{}), config::OptimConfig(config::MuonConfig{})}) {
    const Optimizer optimizer(policy->context(), policy->parameters(), optim);
    EXPECT_EQ(state_bytes_of(optim, DType::kF32, table), optimizer.state_bytes()) << optimizer.type_name();
    EXPECT_EQ(visit_bytes_of(optim, {}, table), 0u);
  }
  const OptimizerMemory on_host{.host = make_host_link(policy->context().runtime, true)};
  std::size_t largest = 0;
  for (const io::NamedTensor& named : Optimizer(policy->context(), policy->parameters(), config::MuonConfig{}).state())
    largest = std::max(largest, named.tensor.num_bytes() * (named.name.ends_with(".momentum") ? 1 : 2));
  EXPECT_EQ(visit_bytes_of(config::MuonConfig{}, on_host, table), 3 * largest) << "whole tensors visit";
}

TEST(GradNorm, NormClippingAndZeros) {
  Scratch scratch("norm");
  const auto policy = make_tiny_policy(scratch.path / "model");
  fill_gradients(*policy, 4);
  double squares = 0, zeros = 0, count = 0;
  for (const nn::NamedParameter& p : policy->parameters().named())
    for (std::int64_t i = 0; i < p.grad.num_elements(); ++i) {
      const double g = p.grad.as<float>()[i];
      squares += g * g, zeros += g == 0, count += 1;
    }
  EXPECT_NEAR(global_grad_norm(policy->context(), policy->parameters()), std::sqrt(squares), 1e-6 * std::sqrt(squares));
  const auto alone = comm::make_local_communicator();
  const nn::Parameters& parameters = policy->parameters();
  EXPECT_DOUBLE_EQ(
      zero_grad_ratio(policy->context(), parameters, parameters.all_grads(), ShardPlan(*parameters.table(), 1, false), *alone).value(),
      zeros / count);
  EXPECT_EQ(clip_scale(0.5, 1.0), 1.0);
  EXPECT_NEAR(clip_scale(4.0, 1.0), 0.25, 1e-6);
  EXPECT_EQ(clip_scale(4.0, std::nullopt), 1.0);
}

}  // namespace
}  // namespace prl::trainer
