#pragma once

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "monitor/sinks.hpp"
#include "nn/init_model.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"
#include "trainer/state_files.hpp"

namespace prl::trainer::testing_support {

/// A folder that is gone after the test.
struct Scratch {
  std::filesystem::path path;
  explicit Scratch(const std::string& name)
      : path(std::filesystem::temp_directory_path() / fmt::format("prl-trainer-{}-{}", ::getpid(), name)) {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Scratch() { std::filesystem::remove_all(path); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};

/// A model of a few thousand parameters.
inline nn::InitModelOptions tiny_model() {
  return {.vocab_size = 96,
          .hidden_size = 32,
          .intermediate_size = 48,
          .num_layers = 2,
          .num_heads = 2,
          .num_kv_heads = 1,
          .head_dim = 16,
          .max_position = 256,
          .tie_word_embeddings = false,
          .std_dev = 0.1f,
          .seed = 3};
}

inline std::unique_ptr<Policy> make_tiny_policy(const std::filesystem::path& folder, DType compute = DType::kF32,
                                                const nn::ActivationCheckpointing& checkpointing = {}) {
  if (!std::filesystem::exists(folder / "config.json")) nn::init_model(tiny_model(), folder);
  PolicyOptions options;
  options.model = folder;
  options.compute = compute;
  options.num_threads = 1;
  options.checkpointing = checkpointing;
  return std::make_unique<Policy>(make_cpu_runtime(), options);
}

/// Every master, in the order of named(), of a policy that holds all of them.
inline std::vector<std::vector<float>> masters(Policy& policy) {
  std::vector<std::vector<float>> all;
  for (const nn::NamedParameter& p : policy.parameters().named())
    all.emplace_back(p.value.as<float>(), p.value.as<float>() + p.value.num_elements());
  return all;
}

/// The same of ranks that hold a part each; all of them call it.
inline std::vector<std::vector<float>> masters(Policy& policy, const GradientStep& step) {
  const nn::Parameters& parameters = policy.parameters();
  std::vector<float> values(static_cast<std::size_t>(parameters.table()->num_master_elements()));
  const auto n = static_cast<std::int64_t>(values.size());
  step.shards().all_gather({values.data(), {n}, DType::kF32, {}, n}, step.shard_plan().counts(), parameters.held_values().view());
  std::vector<std::vector<float>> all;
  for (const nn::NamedParameter& p : parameters.named())
    all.emplace_back(values.begin() + p.offset, values.begin() + p.offset + p.num_elements());
  return all;
}

/// Masters and AdamW's moments (or whatever states of these names there are) of two trainer checkpoints are the same bits, whoever wrote
/// them.
inline void expect_same_state(const std::filesystem::path& a, const std::filesystem::path& b, const nn::TensorTable& table) {
  StateFiles of_a(a), of_b(b);
  int num_states = 0;
  for (const nn::TensorSpec& spec : table.tensors())
    for (const char* state : {"", "exp_avg", "exp_avg_sq", "momentum"}) {
      const auto read = [&](StateFiles& from) -> std::optional<std::vector<std::uint32_t>> {
        std::vector<std::uint32_t> bits(static_cast<std::size_t>(spec.num_elements()));
        const Tensor values = Tensor::empty(make_cpu_runtime(), {spec.num_elements()}, DType::kF32);
        try {
          from.read(spec, state, 0, values);
        } catch (const Error&) {  // another optimizer's
          return std::nullopt;
        }
        std::memcpy(bits.data(), values.data(), values.num_bytes());
        return bits;
      };
      const auto x = read(of_a), y = read(of_b);
      if (x.has_value()) ++num_states;
      EXPECT_TRUE(x == y) << a << " and " << b << ": " << spec.name << " " << state;
    }
  EXPECT_GE(num_states, 2 * static_cast<int>(table.tensors().size()));
}

}  // namespace prl::trainer::testing_support
