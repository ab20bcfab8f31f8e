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

/// A model of a few thousand parameters, made at `folder`.
inline void make_tiny_model(const std::filesystem::path& folder, bool tied = false) {
  nn::InitModelOptions options;
  options.vocab_size = 96;
  options.hidden_size = 32;
  options.intermediate_size = 48;
  options.num_layers = 2;
  options.num_heads = 2;
  options.num_kv_heads = 1;
  options.head_dim = 16;
  options.max_position = 256;
  options.tie_word_embeddings = tied;
  options.std_dev = 0.1f;
  options.seed = 3;
  nn::init_model(options, folder);
}

inline std::unique_ptr<Policy> make_tiny_policy(const std::filesystem::path& folder, DType compute = DType::kF32,
                                                const nn::ActivationCheckpointing& checkpointing = {}) {
  if (!std::filesystem::exists(folder / "config.json")) make_tiny_model(folder);
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
