#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "comm/mesh.hpp"
#include "comm/store.hpp"
#include "comm/testing/lazy_communicator.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"
#include "trainer/test_support.hpp"

// Training on one rank or several, and what it leaves, to be compared bit for bit.

namespace prl::trainer::testing_support {

inline std::unique_ptr<Policy> make_policy(const std::filesystem::path& folder, DType compute, bool offloads_masters = false,
                                           bool gathers_layers = false, const nn::ActivationCheckpointing& checkpointing = {},
                                           bool divides_experts = false, const std::optional<nn::AdapterConfig>& lora = {}) {
  PolicyOptions options;
  options.gathers_layers = gathers_layers || divides_experts;
  options.share.divides_experts = divides_experts;
  options.checkpointing = checkpointing;
  options.lora = lora;
  if (offloads_masters) options.masters_host = make_host_link(make_cpu_runtime(), true);
  options.model = folder;
  options.compute = compute;
  options.num_threads = 1;
  return std::make_unique<Policy>(make_cpu_runtime(), options);
}

struct TrainingCase {
  config::OptimConfig optim = config::AdamWConfig{};
  DType compute = DType::kF32;
  int num_rows = 7, num_steps = 3;
  Reduce reduce = Reduce::kExact;
  int num_replicas = 1;
  bool offloads_masters = false;
  bool overlaps = false;
  bool gathers_layers = false;
  bool divides_experts = false;  ///< among ranks, if there are several
  nn::ActivationCheckpointing checkpointing = {};
  std::optional<nn::AdapterConfig> lora = {};
};

using Weights = std::vector<std::vector<float>>;

/// Where two sets of weights differ first; empty if nowhere.
inline std::string difference(const Weights& a, const Weights& b) {
  if (a.size() != b.size()) return fmt::format("{} and {} tensors", a.size(), b.size());
  for (std::size_t t = 0; t < a.size(); ++t)
    for (std::size_t i = 0; i < a[t].size(); ++i)
      if (std::bit_cast<std::uint32_t>(a[t][i]) != std::bit_cast<std::uint32_t>(b[t][i]))
        return fmt::format("element {} of tensor {}: {} and {}", i, t, a[t][i], b[t][i]);
  return {};
}

/// What a run leaves: masters of a rank, its losses and norms.
struct Trace {
  Weights weights;
  std::uint64_t checksum = 0;  ///< of the packed weights
  std::vector<float> probe;    ///< what they compute
  double share = 0;            ///< of the masters that the rank holds
  std::vector<double> losses, norms;
};

inline void expect_equal(const Trace& a, const Trace& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.norms, b.norms) << what;
  EXPECT_EQ(difference(a.weights, b.weights), "") << what;
  EXPECT_EQ(a.checksum, b.checksum) << what;
  EXPECT_EQ(a.probe, b.probe) << what;
}

inline Trace train(const TrainingCase& run, const std::filesystem::path& model, comm::Mesh* mesh) {
  const auto policy = make_policy(model, run.compute, run.offloads_masters, run.gathers_layers && (mesh != nullptr || !run.lora),
                                  run.checkpointing, run.divides_experts && mesh != nullptr, run.lora);
  GradientStepOptions options;
  options.optim = run.optim;
  options.mesh = mesh;
  options.reduce = run.reduce;
  options.num_replicas = run.num_replicas;
  options.overlaps_exchange = run.overlaps;
  if (run.offloads_masters)
    options.optimizer_memory = {
        .dtype = DType::kF32, .host = policy->options().masters_host, .piece_elements = 5000, .holds_masters = true};
  GradientStep step(*policy, options);
  Trace trace;
  for (std::int64_t i = 1; i <= run.num_steps; ++i) {
    const GradientStepResult result = step.run(cross_entropy_rows(i, run.num_rows), PolicyVersion{i});
    trace.losses.push_back(result.loss);
    trace.norms.push_back(result.grad_norm.value_or(0));
    trace.norms.push_back(result.zero_grad_ratio.value_or(0));
    EXPECT_EQ(result.pool.values("loss").size(), static_cast<std::size_t>(std::max(0, run.num_rows - (run.num_rows > 1 ? 1 : 0))));
  }
  trace.weights = masters(*policy, step);
  const weights::WeightManifest manifest = policy->manifest();
  trace.checksum = manifest.checksum;
  trace.probe = manifest.probe_logprobs;
  const auto num_elements = static_cast<double>(policy->parameters().table()->num_master_elements());
  trace.share = static_cast<double>(policy->parameters().held_values().num_elements()) / num_elements;
  return trace;
}

/// One trace per rank; ranks are threads. `is_lazy`: what they start runs when it is joined, and what it brings is spoilt until then.
inline std::vector<Trace> train_on(int size, const TrainingCase& run, const std::filesystem::path& model, bool is_lazy = false) {
  std::vector<Trace> traces(static_cast<std::size_t>(size));
  const auto store = comm::make_memory_store();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      comm::CommOptions options;
      options.rank = rank;
      options.size = size;
      options.store = store;
      std::unique_ptr<comm::Communicator> group = comm::make_threads_communicator(options);
      if (is_lazy) group = std::make_unique<comm::testing::LazyCommunicator>(std::move(group));
      comm::Mesh mesh(std::move(group), comm::replicated_shape(size, run.num_replicas));
      traces[static_cast<std::size_t>(rank)] = train(run, model, &mesh);
    });
  for (std::thread& thread : threads) thread.join();
  return traces;
}

template <typename Config>
config::OptimConfig with_lr(double lr) {
  Config config;
  config.lr = lr;
  return config;
}

}  // namespace prl::trainer::testing_support
