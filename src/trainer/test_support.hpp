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

#include "base/rng.hpp"
#include "monitor/sinks.hpp"
#include "nn/init_model.hpp"
#include "trainer/gradient_step.hpp"
#include "trainer/policy.hpp"
#include "trainer/state_files.hpp"
#include "wire/training.hpp"

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

/// Larger than the tiny model, so that a matrix has more than one chunk.
inline nn::InitModelOptions model_of_several_chunks() {
  nn::InitModelOptions options = tiny_model();
  options.vocab_size = 2500;
  return options;
}

/// Rows of unequal cost that train by cross entropy; one of them trains on nothing.
inline std::vector<wire::MicroBatch> cross_entropy_rows(std::int64_t step, int num_rows) {
  std::vector<wire::MicroBatch> rows;
  for (int r = 0; r < num_rows; ++r) {
    Rng rng(mix_seed(17, static_cast<std::uint64_t>(step)), static_cast<std::uint64_t>(r));
    wire::MicroBatch row;
    const auto n = static_cast<std::int32_t>(6 + rng.next_below(14));
    for (std::int32_t i = 0; i < n; ++i) {
      row.input_ids.push_back(static_cast<std::int32_t>(rng.next_below(2500)));
      row.position_ids.push_back(i);
    }
    const auto size = static_cast<std::size_t>(n);
    row.sequence_lengths = {n};
    row.env_names = {"env"};
    row.temperatures.assign(size, 1.0f);
    row.loss_mask.assign(size, 1);
    row.advantages.assign(size, 0.0f);
    row.inference_logprobs.assign(size, 0.0f);
    row.rl_weights.assign(size, 0.0f);
    row.ce_weights.assign(size, r == 1 ? 0.0f : 1.0f);
    rows.push_back(std::move(row));
  }
  return rows;
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
  const auto view = [&](ElementRange range) {
    return TensorView{values.data() + range.begin, {range.count()}, DType::kF32, {}, range.count()};
  };
  for (const ElementRange held : parameters.held().ranges()) {
    const Tensor own = parameters.values_in(held);
    own.runtime()->copy_to_host(values.data() + held.begin, own.data(), own.num_bytes());
  }
  for (const ShardPlan::Section& section : step.shard_plan().sections())
    step.shards().all_gather(view(section.range), section.counts(), view(section.parts[static_cast<std::size_t>(step.shards().rank())]));
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
