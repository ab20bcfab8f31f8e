#pragma once

#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "monitor/sinks.hpp"
#include "nn/init_model.hpp"
#include "trainer/policy.hpp"

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

/// Every master, in the order of named().
inline std::vector<std::vector<float>> masters(Policy& policy) {
  std::vector<std::vector<float>> all;
  for (const nn::NamedParameter& p : policy.parameters().named())
    all.emplace_back(p.value.as<float>(), p.value.as<float>() + p.value.num_elements());
  return all;
}

}  // namespace prl::trainer::testing_support
