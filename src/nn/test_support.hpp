#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/normal_draws.hpp"
#include "base/testing/source_dir.hpp"
#include "nn/decoder.hpp"
#include "nn/exact_parts.hpp"
#include "nn/init_model.hpp"

// Shared by the tests of this folder; included by *_test.cpp only. Where they test the GPU (tests_gpu()), its memory is such that the host
// sees, and each op is waited for.
namespace prl::nn::testing_support {

struct TestSession {
  explicit TestSession(int num_threads);
  ops::OpContext& context() { return session.context(); }
  ops::OpSession session;
};

inline std::filesystem::path golden_models() { return test_source_dir() / "tests" / "golden" / "models"; }

/// Packed sequences of given lengths with the next token as target.
struct Packed {
  std::vector<std::int32_t> ids, positions, cu_seqlens{0}, targets;
  std::vector<float> temperatures;
  PackedBatch batch() const { return {ids, positions, cu_seqlens}; }
};
inline Packed random_packed(std::int64_t vocab_size, const std::vector<int>& lengths, std::uint64_t seed) {
  Packed p;
  Rng rng(seed);
  for (const int length : lengths) {
    const std::size_t begin = p.ids.size();
    for (int i = 0; i < length; ++i) {
      p.ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(vocab_size))));
      p.positions.push_back(i);
      p.temperatures.push_back(1.0f);
    }
    p.targets.insert(p.targets.end(), p.ids.begin() + static_cast<std::ptrdiff_t>(begin) + 1, p.ids.end());
    p.targets.push_back(-1);
    p.cu_seqlens.push_back(static_cast<std::int32_t>(p.ids.size()));
  }
  return p;
}

/// All that a training step computes: log-probabilities, then every gradient in the order of named(). Through copies, so that device
/// memory will do.
inline std::vector<std::vector<float>> step_results(ops::OpContext& ctx, Parameters& parameters, const WeightsPtr& weights,
                                                    const Packed& packed, TrainableModel& model) {
  std::vector<float> dlogp(packed.ids.size());
  Rng rng(6);
  draw_normals(rng, dlogp);
  parameters.zero_grads();
  std::vector<std::vector<float>> all{model.forward(weights, packed.batch(), packed.targets, packed.temperatures).logp_T};
  model.backward(dlogp);
  for (const NamedParameter& p : parameters.named()) {
    std::vector<float>& out = all.emplace_back(static_cast<std::size_t>(p.grad.num_elements()));
    ctx.runtime->copy_to_host(out.data(), p.grad.data(), p.grad.num_bytes());
  }
  return all;
}

/// Every way to keep less of a layer, whole layers first.
inline std::vector<ActivationCheckpointing> all_checkpointings() {
  std::vector<ActivationCheckpointing> all{{1}, {2}, {7}};
  for (int parts = 1; parts < 8; ++parts) all.push_back({1, {(parts & 1) != 0, (parts & 2) != 0, (parts & 4) != 0}});
  all.push_back({2, {true, true, true}});
  return all;
}
inline std::string to_string(const ActivationCheckpointing& c) {
  return "freq " + std::to_string(c.freq) + (c.parts.norm ? " norm" : "") + (c.parts.attn_proj ? " attn_proj" : "") +
         (c.parts.mlp ? " mlp" : "");
}

/// Sizes of a model for tests. The vocabulary of a wide one passes ops::kVocabChunk and no width of it is a power of two; the widths of
/// an even one are those that a GPU's fused kernels like.
enum class ModelSize { kSmall, kWide, kEven };
inline constexpr std::string_view kEight = "_eight";                   ///< behind the name of a family: with weights of 8 bits
inline constexpr std::string_view kEightProducts = "_eight_products";  ///< and inputs of products
inline constexpr std::string_view kNarrow = "_narrow";                 ///< with experts between two matrices
inline constexpr std::string_view kLatents = "_latents";               ///< with attention to latents; before the others
/// "mistral_window" and its like: with windows of so few keys that most tests' sequences are longer.
inline InitModelOptions small_options(std::string family, ModelSize size = ModelSize::kSmall) {
  for (const std::string_view suffix : {kEight, kEightProducts, kNarrow, kLatents})
    if (family.ends_with(suffix)) family.resize(family.size() - suffix.size());
  constexpr std::string_view kWindow = "_window";
  const bool is_wide = size == ModelSize::kWide, has_window = family.ends_with(kWindow);
  InitModelOptions o;
  o.family = has_window ? family.substr(0, family.size() - kWindow.size()) : family;
  o.sliding_window = has_window ? 6 : 0;
  // A gated norm would divide by outputs near 0, as those of first tokens are, and show rounding alone.
  const bool has_linear_attention = family.starts_with("qwen3_5") || family == "qwen3_next" || family == "nemotron_h";
  if (has_linear_attention) o.rms_norm_eps = 0.03;
  if (size == ModelSize::kEven) {
    o.vocab_size = 512;
    o.hidden_size = 256;
    o.intermediate_size = 320;
    o.num_layers = 4;
    o.num_heads = 4;
    o.num_kv_heads = 2;
    o.head_dim = 128;
    o.max_position = 512;
    return o;
  }
  o.num_experts = 6;
  o.num_active_experts = 2;
  o.expert_size = 40;
  o.vocab_size = is_wide ? 2500 : 97;
  o.hidden_size = is_wide ? 304 : 64;
  o.intermediate_size = is_wide ? 1000 : 80;
  o.num_layers = is_wide ? 2 : 3;
  o.num_heads = is_wide ? 6 : 4;
  o.num_kv_heads = 2;
  o.head_dim = is_wide ? 80 : 32;
  o.max_position = 512;
  if (has_linear_attention) o.head_dim = 64;  // of which it rotates a quarter
  if (family == "nemotron_h") {
    o.head_dim = is_wide ? 80 : 32;
    o.num_layers = 5;
  }
  return o;
}

inline ModelConfig small_config(const std::string& family, const InitModelOptions& options) {
  ModelConfig config = make_model_config(options);
  if (family.ends_with(kEight)) config.eight_bits = EightBits::kWeights;
  if (family.ends_with(kEightProducts)) config.eight_bits = EightBits::kProducts;
  if (family.ends_with(kNarrow)) config.expert_input_size = options.hidden_size / 2;
  config.attends_to_latents = family.find(kLatents) != std::string::npos;
  return config;
}

/// One small model of a family with random weights, biases and norms included.
struct SmallModel {
  explicit SmallModel(const std::string& family, bool tied = true, int num_threads = 2, bool is_wide = false) : session(num_threads) {
    InitModelOptions o = small_options(family, is_wide ? ModelSize::kWide : ModelSize::kSmall);
    o.tie_word_embeddings = tied;
    config = small_config(family, o);
    parameters = std::make_unique<Parameters>(session.context().runtime, config);
    parameters->init_random(11, is_wide ? 0.06f : 0.15f);
    Rng rng(5);
    for (NamedParameter& p : parameters->named())
      if (p.is_exact())
        split_exact(normal_draws(rng, p.num_elements() / p.num_parts, 0.1f),
                    {p.value.as<float>(), static_cast<std::size_t>(p.num_elements())}, p.name);
      else if (p.value.shape().num_dims() == 1)
        for (std::int64_t i = 0; i < p.value.num_elements(); ++i) p.value.as<float>()[i] += 0.2f * static_cast<float>(rng.next_normal());
  }
  ops::OpContext& ctx() { return session.context(); }
  WeightsPtr weights(DType compute, bool with_backward = true) {
    return make_weights(ctx(), *parameters, compute, PolicyVersion{1}, with_backward, nullptr);
  }

  TestSession session;
  ModelConfig config;
  std::unique_ptr<Parameters> parameters;
};

inline void expect_same_bits(const std::vector<float>& got, const std::vector<float>& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  int different = 0;
  float worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &wanted[i], 4) == 0) continue;
    ++different;
    worst = std::max(worst, std::abs(got[i] - wanted[i]));
  }
  EXPECT_EQ(different, 0) << what << ": of " << got.size() << " values, by at most " << worst;
}

}  // namespace prl::nn::testing_support
