// The decoder on real device memory, beside the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "nn/test_support.hpp"
#include "ops/hash.hpp"
#include "ops/lm_head.hpp"

namespace prl::nn {
namespace {

using testing_support::all_checkpointings;
using testing_support::ModelSize;
using testing_support::Packed;
using testing_support::random_packed;
using testing_support::small_config;
using testing_support::small_options;
using testing_support::step_results;
using testing_support::to_string;

/// One model with the same random masters on both sides.
struct Side {
  ops::OpSession session;
  std::unique_ptr<Parameters> parameters;
  Side(std::shared_ptr<DeviceRuntime> runtime, const ModelConfig& config, float std_dev) : session(std::move(runtime), 2) {
    parameters = std::make_unique<Parameters>(session.context().runtime, config);
    parameters->init_random(11, std_dev);
  }
  ops::OpContext& ctx() { return session.context(); }
  WeightsPtr weights(DType compute) { return make_weights(ctx(), *parameters, compute, PolicyVersion{1}, true, nullptr); }
  std::vector<float> grad(std::size_t i) {
    const Tensor& g = parameters->named()[i].grad;
    std::vector<float> out(static_cast<std::size_t>(g.num_elements()));
    ctx().runtime->copy_to_host(out.data(), g.data(), g.num_bytes());
    return out;
  }
};

struct Case {
  const char* family;
  DType compute;
  ModelSize size;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.family << ' ' << to_string(c.compute) << (c.size == ModelSize::kWide ? " wide" : c.size == ModelSize::kEven ? " even" : "");
}
class CudaDecoderTest : public ::testing::TestWithParam<Case> {
 protected:
  ModelConfig config_ = small_config(GetParam().family, small_options(GetParam().family, GetParam().size));
  float std_dev_ = GetParam().size == ModelSize::kSmall ? 0.15f : 0.06f;
  Packed packed_ = random_packed(config_.vocab_size, {1, 150, 7, 64, 65, 33}, 3);
};

TEST_P(CudaDecoderTest, TrainsLikeTheCpu) {
  const DType compute = GetParam().compute;
  Side cpu(make_cpu_runtime(), config_, std_dev_), gpu(make_cuda_runtime(), config_, std_dev_);
  std::vector<float> dlogp(packed_.ids.size());
  Rng rng(4);
  for (float& d : dlogp) d = static_cast<float>(rng.next_normal()) / 100.0f;
  TokenStats stats[2];
  int i = 0;
  for (Side* side : {&cpu, &gpu}) {
    TrainableModel model(side->ctx(), *side->parameters, {});
    side->parameters->zero_grads();
    stats[i++] = model.forward(side->weights(compute), packed_.batch(), packed_.targets, packed_.temperatures);
    model.backward(dlogp);
  }
  double error = 0, worst = 0;
  for (std::size_t t = 0; t < packed_.ids.size(); ++t) {
    ASSERT_TRUE(std::isfinite(stats[1].logp_T[t])) << t;
    const double e = std::abs(static_cast<double>(stats[0].logp_T[t]) - stats[1].logp_T[t]);
    error += e / static_cast<double>(packed_.ids.size());
    worst = std::max(worst, e);
  }
  const bool is_f32 = compute == DType::kF32;
  // In bf16 some tokens have other experts on the other side: those whose scores lie close to each other, and many behind linear attention,
  // where roundings add up over a row.
  const bool has_others = config_.num_experts > 0;
  // Inputs that are rounded to 8 bits, 16 times as coarse as bf16: where the two sides differ in a rounding, some fall on the next number.
  const bool has_codes = config_.eight_bits == EightBits::kProducts;
  const double least_cosine = is_f32 ? 0.99999 : has_others ? (has_codes ? 0.65 : 0.85) : has_codes ? 0.975 : 0.995;
  EXPECT_LT(error, (is_f32 ? 1e-5 : has_others ? 0.06 : 0.03) * (has_codes ? 4 : 1));
  EXPECT_LT(worst, is_f32 ? 2e-4 : has_others ? 2.0 : 0.5);
  for (std::size_t p = 0; p < cpu.parameters->named().size(); ++p) {
    const std::vector<float> a = cpu.grad(p), b = gpu.grad(p);
    double dot = 0, aa = 0, bb = 0;
    for (std::size_t k = 0; k < a.size(); ++k) {
      dot += static_cast<double>(a[k]) * b[k];
      aa += static_cast<double>(a[k]) * a[k];
      bb += static_cast<double>(b[k]) * b[k];
    }
    if (aa == 0 && bb == 0) {  // what no gradient reaches
      EXPECT_TRUE(has_others && cpu.parameters->named()[p].name.ends_with("bias")) << cpu.parameters->named()[p].name;
      continue;
    }
    // bf16: each side rounds on its own way; a k bias has a gradient of noise alone, and few numbers show what more would level out.
    const bool is_noise = cpu.parameters->named()[p].name.ends_with("k_proj.bias") || a.size() < 16;
    EXPECT_GT(dot / std::sqrt(aa * bb), !is_f32 && is_noise ? (has_codes ? 0.5 : 0.8) : least_cosine) << cpu.parameters->named()[p].name;
    EXPECT_NEAR(std::sqrt(bb / aa), 1.0,
                is_f32       ? 1e-4
                : is_noise   ? (has_others ? 0.6 : 0.3)
                : has_others ? 0.2
                             : 0.03)
        << cpu.parameters->named()[p].name;
  }
}

TEST_P(CudaDecoderTest, TwoRunsAgreeInAllBits) {
  std::vector<std::vector<float>> first;
  for (int run = 0; run < 2; ++run) {
    Side gpu(make_cuda_runtime(), config_, std_dev_);
    TrainableModel model(gpu.ctx(), *gpu.parameters, {});
    gpu.parameters->zero_grads();
    const WeightsPtr weights = gpu.weights(GetParam().compute);
    std::vector<std::vector<float>> all;
    all.push_back(model.forward(weights, packed_.batch(), packed_.targets, packed_.temperatures).logp_T);
    model.backward(std::vector<float>(packed_.ids.size(), 0.01f));
    for (std::size_t p = 0; p < gpu.parameters->named().size(); ++p) all.push_back(gpu.grad(p));
    if (first.empty()) first = all;
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::size_t others = 0;
      for (std::size_t k = 0; k < all[i].size(); ++k) others += all[i][k] != first[i][k] ? 1 : 0;
      EXPECT_EQ(others, 0u) << "of " << all[i].size() << " numbers of "
                            << (i == 0 ? "the log-probabilities" : gpu.parameters->named()[i - 1].name);
    }
  }
}

TEST_P(CudaDecoderTest, RecomputationChangesNoBit) {
  Side gpu(make_cuda_runtime(), config_, std_dev_);
  const WeightsPtr weights = gpu.weights(GetParam().compute);
  // Few tokens have products of their own, fused with what is around them where nothing is recorded.
  for (const Packed& packed : {packed_, random_packed(config_.vocab_size, {1, 50, 7}, 4)}) {
    const auto results = [&](const ActivationCheckpointing& checkpointing) {
      TrainableModel model(gpu.ctx(), *gpu.parameters, checkpointing);
      step_results(gpu.ctx(), *gpu.parameters, weights, packed, model);  // memory that is taken again must not matter
      return step_results(gpu.ctx(), *gpu.parameters, weights, packed, model);
    };
    const std::vector<std::vector<float>> reference = results({});
    for (const ActivationCheckpointing& checkpointing : all_checkpointings())
      EXPECT_TRUE(results(checkpointing) == reference) << to_string(checkpointing) << ", " << packed.ids.size() << " tokens";
  }
}

/// What an engine samples is what the trainer computes: prefill in chunks, then token by token, alone and with others.
TEST_P(CudaDecoderTest, ServedLogprobsAreTrainedLogprobsBitForBit) {
  Side gpu(make_cuda_runtime(), config_, std_dev_);
  const WeightsPtr weights = gpu.weights(GetParam().compute);
  TrainableModel trainable(gpu.ctx(), *gpu.parameters, {});
  const std::vector<float> wanted = trainable.evaluate(weights, packed_.batch(), packed_.targets, packed_.temperatures).logp_T;
  const auto sequences = static_cast<std::int64_t>(packed_.cu_seqlens.size()) - 1;
  constexpr std::int64_t kBlock = 16, kBlocks = 10;
  KvCache cache(gpu.ctx().runtime, config_, weights->compute, sequences * kBlocks, kBlock, false, sequences);
  InferenceModel model(gpu.ctx());
  std::vector<int> done(static_cast<std::size_t>(sequences), 0);
  std::vector<float> got(wanted.size());
  const Tensor drawn = Tensor::empty(gpu.ctx().runtime, {static_cast<std::int64_t>(wanted.size())}, DType::kI32);
  for (int step = 0;; ++step) {
    std::vector<std::int32_t> ids, positions, slots, start{0}, context, table, states, targets;
    std::vector<std::size_t> sources;
    for (std::int64_t s = 0; s < sequences; ++s) {
      const auto k = static_cast<std::size_t>(s);
      const int begin = packed_.cu_seqlens[k], length = packed_.cu_seqlens[k + 1] - begin;
      // A chunk of the prompt at first, single tokens later, every third step one sequence alone, and in between a few tokens of some.
      const int few = step % 3 == 2 ? 1 + static_cast<int>(s % 3) : 1;
      const int count = std::min(length - done[k], step == 0 ? 20 : step == 1 ? 37 : (step % 3 == 0 && s != step % sequences) ? 0 : few);
      if (count == 0) continue;
      for (int i = 0; i < count; ++i) {
        const int position = done[k]++;
        const auto source = static_cast<std::size_t>(begin + position);
        ids.push_back(packed_.ids[source]);
        positions.push_back(position);
        slots.push_back(static_cast<std::int32_t>((s * kBlocks + position / kBlock) * kBlock + position % kBlock));
        targets.push_back(packed_.targets[source]);
        sources.push_back(source);
      }
      start.push_back(static_cast<std::int32_t>(ids.size()));
      context.push_back(done[k]);
      states.push_back(static_cast<std::int32_t>(sequences - 1 - s));
      for (std::int64_t b = 0; b < kBlocks; ++b) table.push_back(static_cast<std::int32_t>(s * kBlocks + b));
    }
    if (ids.empty()) {
      bool is_finished = true;
      for (std::int64_t s = 0; s < sequences; ++s) {
        const auto k = static_cast<std::size_t>(s);
        is_finished = is_finished && done[k] == packed_.cu_seqlens[k + 1] - packed_.cu_seqlens[k];
      }
      if (is_finished) break;
      continue;
    }
    // Every second token as one that was drawn on the device.
    gpu.ctx().runtime->copy_from_host(drawn.data(), ids.data(), ids.size() * sizeof(std::int32_t));
    for (std::size_t i = 0; i < ids.size(); i += 2) ids[i] = -1 - static_cast<std::int32_t>(i);
    const TensorView h = model.forward_paged(*weights, cache, {ids, positions, slots, start, context, table, kBlocks, states, drawn});
    const std::vector<float> ones(ids.size(), 1.0f);
    const Tensor logp = Tensor::empty(gpu.ctx().runtime, {static_cast<std::int64_t>(ids.size())}, DType::kF32), entropy = logp.clone(),
                 lse = logp.clone();
    ops::lm_head_logprob(gpu.ctx(), logp, entropy, lse, h, weights->lm_head(), targets, ones);
    std::vector<float> values(ids.size());
    gpu.ctx().runtime->copy_to_host(values.data(), logp.data(), logp.num_bytes());
    for (std::size_t i = 0; i < sources.size(); ++i) got[sources[i]] = values[i];
  }
  int different = 0;
  for (std::size_t t = 0; t < wanted.size(); ++t) different += std::memcmp(&got[t], &wanted[t], 4) != 0;
  EXPECT_EQ(different, 0) << "of " << wanted.size();
}

TEST_P(CudaDecoderTest, ChecksumsAreThoseOfTheCpu) {
  Side cpu(make_cpu_runtime(), config_, std_dev_), gpu(make_cuda_runtime(), config_, std_dev_);
  EXPECT_EQ(checksum(gpu.ctx(), *gpu.weights(GetParam().compute)).tensors, checksum(cpu.ctx(), *cpu.weights(GetParam().compute)).tensors);
}

INSTANTIATE_TEST_SUITE_P(
    Models, CudaDecoderTest,
    ::testing::Values(
        Case{"qwen3", DType::kBF16, ModelSize::kSmall}, Case{"qwen3", DType::kF32, ModelSize::kSmall},
        Case{"qwen2", DType::kBF16, ModelSize::kSmall}, Case{"llama", DType::kBF16, ModelSize::kWide},
        Case{"qwen3", DType::kBF16, ModelSize::kWide}, Case{"qwen3", DType::kBF16, ModelSize::kEven},
        Case{"llama", DType::kBF16, ModelSize::kEven}, Case{"qwen2", DType::kBF16, ModelSize::kEven},
        Case{"smollm3", DType::kBF16, ModelSize::kSmall}, Case{"mistral_window", DType::kBF16, ModelSize::kEven},
        Case{"qwen3_window", DType::kBF16, ModelSize::kEven}, Case{"qwen2_window", DType::kF32, ModelSize::kSmall},
        Case{"smollm3", DType::kBF16, ModelSize::kEven}, Case{"olmo2", DType::kBF16, ModelSize::kSmall},
        Case{"olmo2", DType::kBF16, ModelSize::kWide}, Case{"olmo2", DType::kBF16, ModelSize::kEven},
        Case{"olmo2", DType::kF32, ModelSize::kSmall}, Case{"phi3", DType::kBF16, ModelSize::kSmall},
        Case{"phi3", DType::kBF16, ModelSize::kEven}, Case{"qwen3_5_text", DType::kBF16, ModelSize::kSmall},
        Case{"qwen3_5_text", DType::kF32, ModelSize::kSmall}, Case{"qwen3_5_text", DType::kBF16, ModelSize::kEven},
        Case{"qwen3_next", DType::kBF16, ModelSize::kSmall}, Case{"qwen3_next", DType::kF32, ModelSize::kSmall},
        Case{"qwen3_5_moe_text", DType::kBF16, ModelSize::kEven}, Case{"gpt_oss_window", DType::kBF16, ModelSize::kSmall},
        Case{"gpt_oss", DType::kF32, ModelSize::kSmall}, Case{"minimax_m2", DType::kBF16, ModelSize::kSmall},
        Case{"minimax_m2", DType::kF32, ModelSize::kSmall}, Case{"minimax_m2", DType::kBF16, ModelSize::kEven},
        Case{"afmoe_window", DType::kBF16, ModelSize::kSmall}, Case{"afmoe", DType::kF32, ModelSize::kSmall},
        Case{"afmoe_window", DType::kBF16, ModelSize::kEven}, Case{"deepseek_v3", DType::kBF16, ModelSize::kSmall},
        Case{"deepseek_v3", DType::kF32, ModelSize::kSmall}, Case{"deepseek_v3", DType::kBF16, ModelSize::kEven},
        Case{"deepseek_v3_latents", DType::kBF16, ModelSize::kSmall}, Case{"deepseek_v3_latents", DType::kF32, ModelSize::kSmall},
        Case{"deepseek_v3_latents", DType::kBF16, ModelSize::kEven}, Case{"deepseek_v2_latents", DType::kBF16, ModelSize::kEven},
        Case{"gemma3_text_window", DType::kBF16, ModelSize::kSmall}, Case{"gemma3_text", DType::kF32, ModelSize::kSmall},
        Case{"gemma3_text_window", DType::kBF16, ModelSize::kEven}, Case{"qwen3_eight", DType::kBF16, ModelSize::kEven},
        Case{"qwen3_eight", DType::kF32, ModelSize::kSmall}, Case{"qwen3_moe_eight", DType::kBF16, ModelSize::kSmall},
        Case{"nemotron_h", DType::kBF16, ModelSize::kSmall}, Case{"nemotron_h", DType::kF32, ModelSize::kSmall},
        Case{"nemotron_h", DType::kBF16, ModelSize::kEven}, Case{"nemotron_h_narrow", DType::kBF16, ModelSize::kSmall},
        Case{"qwen3_eight_products", DType::kBF16, ModelSize::kEven}, Case{"qwen3_moe_eight_products", DType::kBF16, ModelSize::kEven},
        Case{"qwen3_moe_eight_products", DType::kBF16, ModelSize::kSmall}, Case{"gpt_oss_eight_products", DType::kBF16, ModelSize::kEven},
        Case{"nemotron_h_eight_products", DType::kBF16, ModelSize::kEven}));

}  // namespace
}  // namespace prl::nn
