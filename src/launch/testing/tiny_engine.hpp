// For tests alone: a model of a few thousand parameters with a byte tokenizer, and an engine that serves it.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "launch/engine_host.hpp"
#include "nn/init_model.hpp"
#include "text/tokenizer_builder.hpp"

namespace prl::launch::testing {

/// A folder with the model, gone after the test. Another `seed` gives other weights.
struct TinyModel {
  std::filesystem::path folder;
  explicit TinyModel(const std::string& name, std::uint64_t seed = 0, std::int64_t num_layers = 1)
      : folder(std::filesystem::temp_directory_path() / fmt::format("prl-launch-{}-{}-{}", ::getpid(), name, seed)) {
    std::filesystem::remove_all(folder);
    nn::InitModelOptions options;
    options.vocab_size = 320;
    options.hidden_size = options.intermediate_size = 32;
    options.num_layers = num_layers;
    options.num_heads = 2;
    options.num_kv_heads = 1;
    options.head_dim = 16;
    options.max_position = 256;
    options.std_dev = 0.2f;
    options.seed = seed;
    nn::init_model(options, folder);
    text::write_byte_level_tokenizer(folder);
  }
  ~TinyModel() { std::filesystem::remove_all(folder); }
  TinyModel(const TinyModel&) = delete;
  TinyModel& operator=(const TinyModel&) = delete;

  config::InferenceConfig config() const {
    config::InferenceConfig config;
    config.model.name = folder.string();
    config.compute.num_threads = 1;
    config.max_num_seqs = 4;
    return config;
  }
};

}  // namespace prl::launch::testing
