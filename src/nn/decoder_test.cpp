// Training, prefill and decode give the same bits; gradients are those of finite differences.
#include "nn/decoder.hpp"
#include "base/normal_draws.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/error.hpp"
#include "nn/test_support.hpp"
#include "ops/lm_head.hpp"

namespace prl::nn {
namespace {
using testing_support::all_checkpointings;
using testing_support::expect_same_bits;
using testing_support::Packed;
using testing_support::random_packed;
using testing_support::SmallModel;
using testing_support::step_results;
using testing_support::to_string;

/// Serves sequences over a paged cache as an engine does, in steps the test chooses, and collects log-probabilities.
class PagedRunner {
 public:
  PagedRunner(SmallModel& model, const WeightsPtr& weights, const Packed& packed, std::int64_t block_size)
      : model_(model),
        weights_(weights),
        packed_(packed),
        block_size_(block_size),
        max_blocks_(static_cast<std::int32_t>(256 / block_size)),
        cache_(model.ctx().runtime, model.config, weights->compute, num_sequences() * max_blocks_ + 3, block_size, false,
               num_sequences() + 1),
        runner_(model.ctx()),
        logp_(packed.ids.size(), 0.0f),
        done_(static_cast<std::size_t>(num_sequences()), 0) {
    // Blocks of a sequence are scattered: block j of sequence s is one of a shuffled list.
    std::vector<std::int32_t> free;
    for (std::int32_t b = 0; b < cache_.num_blocks(); ++b) free.push_back(b);
    Rng rng(99);
    for (std::size_t i = free.size(); i > 1; --i) std::swap(free[i - 1], free[rng.next_below(i)]);
    table_.assign(free.begin(), free.begin() + num_sequences() * max_blocks_);
    // What lies behind the context must not matter, not even a NaN.
    const CacheLayers layers = cache_.layers();
    for (std::size_t i = 0; i < layers.kv.size(); ++i)
      for (const TensorView& view : {layers.kv[i].k, layers.kv[i].v, layers.states[i].inputs_SWC, layers.states[i].state_SF})
        if (view.data != nullptr) std::memset(view.data, 0xff, static_cast<std::size_t>(view.shape.num_elements()) * size_of(view.dtype));
  }
  int num_sequences() const { return static_cast<int>(packed_.cu_seqlens.size()) - 1; }
  int length(int s) const { return packed_.cu_seqlens[static_cast<std::size_t>(s) + 1] - packed_.cu_seqlens[static_cast<std::size_t>(s)]; }
  int left(int s) const { return length(s) - done_[static_cast<std::size_t>(s)]; }
  bool is_finished() const {
    for (int s = 0; s < num_sequences(); ++s)
      if (left(s) > 0) return false;
    return true;
  }
  /// Runs the next `counts[i]` tokens of sequence `order[i]`, all in one batch.
  void step(const std::vector<int>& order, const std::vector<int>& counts) {
    std::vector<std::int32_t> ids, positions, slots, query_start{0}, context, table, rows, targets, states;
    std::vector<std::size_t> sources;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const int s = order[i];
      const auto begin = static_cast<std::size_t>(packed_.cu_seqlens[static_cast<std::size_t>(s)]);
      for (int k = 0; k < counts[i]; ++k) {
        const int position = done_[static_cast<std::size_t>(s)]++;
        const std::size_t source = begin + static_cast<std::size_t>(position);
        ids.push_back(packed_.ids[source]);
        positions.push_back(position);
        const auto block = table_[static_cast<std::size_t>(s * max_blocks_ + position / static_cast<int>(block_size_))];
        slots.push_back(static_cast<std::int32_t>(block * block_size_ + position % block_size_));
        targets.push_back(packed_.targets[source]);
        sources.push_back(source);
      }
      query_start.push_back(static_cast<std::int32_t>(ids.size()));
      context.push_back(done_[static_cast<std::size_t>(s)]);
      table.insert(table.end(), table_.begin() + s * max_blocks_, table_.begin() + (s + 1) * max_blocks_);
      states.push_back(num_sequences() - s);
    }
    // Every second token as one that was drawn on the device.
    const Tensor drawn = Tensor::empty(model_.ctx().runtime, {static_cast<std::int64_t>(ids.size())}, DType::kI32);
    std::ranges::copy(ids, drawn.as<std::int32_t>());
    for (std::size_t i = 0; i < ids.size(); i += 2) ids[i] = -1 - static_cast<std::int32_t>(i);
    const TensorView h =
        runner_.forward_paged(*weights_, cache_, {ids, positions, slots, query_start, context, table, max_blocks_, states, drawn});
    const std::vector<float> temperatures(ids.size(), 1.0f);
    const Shape shape{static_cast<std::int64_t>(ids.size())};
    const auto& runtime = model_.ctx().runtime;
    const Tensor logp = Tensor::empty(runtime, shape, DType::kF32), entropy = logp.clone(), lse = logp.clone();
    ops::lm_head_logprob(model_.ctx(), logp, entropy, lse, h, weights_->lm_head(), targets, temperatures);
    for (std::size_t i = 0; i < sources.size(); ++i) logp_[sources[i]] = logp.as<float>()[i];
  }
  const std::vector<float>& logp() const { return logp_; }

 private:
  SmallModel& model_;
  WeightsPtr weights_;
  const Packed& packed_;
  std::int64_t block_size_;
  std::int32_t max_blocks_;
  KvCache cache_;
  InferenceModel runner_;
  std::vector<float> logp_;
  std::vector<int> done_;
  std::vector<std::int32_t> table_;
};

struct ExactCase {
  std::string family;
  DType compute;
  bool is_wide = false;
};
void PrintTo(const ExactCase& c, std::ostream* out) { *out << c.family << ' ' << to_string(c.compute) << (c.is_wide ? " wide" : ""); }
class ExactnessTest : public ::testing::TestWithParam<ExactCase> {};

TEST_P(ExactnessTest, PagedEqualsTrainingBitForBit) {
  SmallModel model(GetParam().family, true, 2, GetParam().is_wide);
  const WeightsPtr weights = model.weights(GetParam().compute);
  const bool is_wide = GetParam().is_wide;  // fewer steps, as each costs more
  const Packed packed =
      random_packed(model.config.vocab_size, is_wide ? std::vector<int>{70, 7, 65} : std::vector<int>{1, 150, 7, 64, 65, 33}, 3);
  TrainableModel trainable(model.ctx(), *model.parameters, {});
  const std::vector<float> wanted = trainable.evaluate(weights, packed.batch(), packed.targets, packed.temperatures).logp_T;
  for (const float v : wanted) ASSERT_TRUE(std::isfinite(v));
  expect_same_bits(trainable.forward(weights, packed.batch(), packed.targets, packed.temperatures).logp_T, wanted, "forward with a tape");

  for (const std::int64_t block_size : is_wide ? std::vector<std::int64_t>{16} : std::vector<std::int64_t>{8, 16, 64}) {
    const auto name = [&](const char* what) { return std::string(what) + ", blocks of " + std::to_string(block_size); };
    PagedRunner whole(model, weights, packed, block_size);
    for (int s = 0; s < whole.num_sequences(); ++s) whole.step({s}, {whole.left(s)});
    expect_same_bits(whole.logp(), wanted, name("whole prefill, alone"));

    PagedRunner together(model, weights, packed, block_size);
    std::vector<int> order, counts;
    for (int s = together.num_sequences() - 1; s >= 0; --s) {
      order.push_back(s);
      counts.push_back(together.left(s));
    }
    together.step(order, counts);
    expect_same_bits(together.logp(), wanted, name("whole prefill, together"));

    for (const int chunk : is_wide ? std::vector<int>{17} : std::vector<int>{5, 17, 64}) {
      PagedRunner chunked(model, weights, packed, block_size);
      for (int s = 0; s < chunked.num_sequences(); ++s)
        while (chunked.left(s) > 0) chunked.step({s}, {std::min(chunk, chunked.left(s))});
      expect_same_bits(chunked.logp(), wanted, name("chunked prefill") + ", chunks of " + std::to_string(chunk));
    }
  }
}

TEST_P(ExactnessTest, DecodeAndMixedBatchesEqualTraining) {
  SmallModel model(GetParam().family, true, 2, GetParam().is_wide);
  const WeightsPtr weights = model.weights(GetParam().compute);
  const Packed packed = random_packed(model.config.vocab_size, {70, 5, GetParam().is_wide ? 10 : 90, 20}, 4);
  TrainableModel trainable(model.ctx(), *model.parameters, {});
  const std::vector<float> wanted = trainable.evaluate(weights, packed.batch(), packed.targets, packed.temperatures).logp_T;

  PagedRunner decode(model, weights, packed, 16);
  while (!decode.is_finished()) {
    std::vector<int> order, counts;
    for (int s = 0; s < decode.num_sequences(); ++s)
      if (decode.left(s) > 0) order.push_back(s), counts.push_back(1);
    decode.step(order, counts);
  }
  expect_same_bits(decode.logp(), wanted, "one token at a time");

  // Some sequences decode while others prefill in chunks, in changing order and company.
  PagedRunner mixed(model, weights, packed, 16);
  Rng rng(8);
  while (!mixed.is_finished()) {
    std::vector<int> order, counts;
    for (int s = 0; s < mixed.num_sequences(); ++s) {
      if (mixed.left(s) == 0 || rng.next_below(4) == 0) continue;
      order.insert(order.begin() + static_cast<std::ptrdiff_t>(rng.next_below(order.size() + 1)), s);
    }
    if (order.empty()) continue;
    for (const int s : order)
      counts.push_back(std::min(mixed.left(s), rng.next_below(2) == 0 ? 1 : 1 + static_cast<int>(rng.next_below(40))));
    mixed.step(order, counts);
  }
  expect_same_bits(mixed.logp(), wanted, "mixed batches");

  // The same sequence alone, and with another number of threads.
  const Packed alone = [&] {
    Packed p;
    p.ids.assign(packed.ids.begin(), packed.ids.begin() + 70);
    p.positions.assign(packed.positions.begin(), packed.positions.begin() + 70);
    p.targets.assign(packed.targets.begin(), packed.targets.begin() + 70);
    p.temperatures.assign(70, 1.0f);
    p.cu_seqlens = {0, 70};
    return p;
  }();
  SmallModel single(GetParam().family, true, 1, GetParam().is_wide);
  TrainableModel trainable1(single.ctx(), *single.parameters, {});
  expect_same_bits(trainable1.evaluate(single.weights(GetParam().compute), alone.batch(), alone.targets, alone.temperatures).logp_T,
                   {wanted.begin(), wanted.begin() + 70}, "alone, one thread");
}

TEST_P(ExactnessTest, SampledLogProbabilityEqualsTheTrainers) {
  SmallModel model(GetParam().family, true, 2, GetParam().is_wide);
  const WeightsPtr weights = model.weights(GetParam().compute);
  Packed packed = random_packed(model.config.vocab_size, {40}, 4);
  InferenceModel inference(model.ctx());
  const TensorView h = inference.forward_packed(*weights, packed.batch());
  const std::vector<std::int32_t> rows{0, 3, 17, 39};
  const std::vector<float> temperatures{1.0f, 0.7f, 1.3f, 1.0f};
  const TensorView logits = inference.logits(*weights, h, rows);
  std::vector<ops::SampleRow> settings(rows.size());
  std::vector<ops::SampleResult> sampled(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    settings[i].temperature = temperatures[i];
    settings[i].seed = 7 + i;
  }
  ops::sample(model.ctx(), sampled, logits, settings);
  std::fill(packed.targets.begin(), packed.targets.end(), -1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    packed.targets[static_cast<std::size_t>(rows[i])] = sampled[i].token;
    packed.temperatures[static_cast<std::size_t>(rows[i])] = temperatures[i];
  }
  TrainableModel trainable(model.ctx(), *model.parameters, {});
  const TokenStats stats = trainable.evaluate(weights, packed.batch(), packed.targets, packed.temperatures);
  for (std::size_t i = 0; i < rows.size(); ++i)
    EXPECT_EQ(sampled[i].logprob, stats.logp_T[static_cast<std::size_t>(rows[i])]) << "row " << rows[i];
}

TEST_P(ExactnessTest, RecomputationAndKeptLogitsChangeNoGradient) {
  SmallModel model(GetParam().family, false, 2, GetParam().is_wide);
  const WeightsPtr weights = model.weights(GetParam().compute);
  const Packed packed =
      random_packed(model.config.vocab_size, GetParam().is_wide ? std::vector<int>{30, 3} : std::vector<int>{40, 3, 70}, 5);
  const auto results = [&](const ActivationCheckpointing& checkpointing, std::int64_t num_kept_logits = 0) {
    TrainableModel trainable(model.ctx(), *model.parameters, checkpointing);
    trainable.keep_logits(num_kept_logits);
    step_results(model.ctx(), *model.parameters, weights, packed, trainable);  // memory that is taken again must not matter
    return step_results(model.ctx(), *model.parameters, weights, packed, trainable);
  };
  const std::vector<std::vector<float>> reference = results({});
  std::vector<ActivationCheckpointing> all = all_checkpointings();
  if (GetParam().is_wide) all = {{1}, {1, {true, true, true}}};  // each costs more
  const auto expect_reference = [&](const std::vector<std::vector<float>>& got, const std::string& what) {
    expect_same_bits(got[0], reference[0], "log-probabilities, " + what);
    for (std::size_t i = 1; i < got.size(); ++i)
      expect_same_bits(got[i], reference[i], model.parameters->named()[i - 1].name + ", " + what);
  };
  for (const ActivationCheckpointing& checkpointing : all) expect_reference(results(checkpointing), to_string(checkpointing));
  for (const std::int64_t kept : {20, 200}) expect_reference(results({}, kept), fmt::format("logits of up to {} tokens kept", kept));
}

TEST_P(ExactnessTest, GradientsAccumulateAndRepeat) {
  SmallModel model(GetParam().family, true, 2, GetParam().is_wide);
  const WeightsPtr weights = model.weights(GetParam().compute);
  const Packed packed = random_packed(model.config.vocab_size, {30, 12}, 5);
  const std::vector<float> dlogp(packed.ids.size(), 0.25f);
  TrainableModel trainable(model.ctx(), *model.parameters, {});
  const auto run = [&](int times) {
    model.parameters->zero_grads();
    for (int i = 0; i < times; ++i) {
      trainable.forward(weights, packed.batch(), packed.targets, packed.temperatures);
      trainable.backward(dlogp);
    }
    const Tensor& grad = model.parameters->named()[2].grad;
    return std::vector<float>(grad.as<float>(), grad.as<float>() + grad.num_elements());
  };
  const std::vector<float> once = run(1);
  expect_same_bits(run(1), once, "the same step again");
  const std::vector<float> twice = run(2);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_NEAR(twice[i], 2 * once[i], 1e-5f * std::max(1.0f, std::abs(once[i])));
}

// start_grads() leaves what earlier steps wrote where a backward pass will overwrite it: the sums are those that start from zeros.
TEST_P(ExactnessTest, StartedGradientsAreThoseOfZeroedOnes) {
  for (const bool is_tied : {true, false}) {
    if (is_tied && GetParam().is_wide) continue;  // wide matrices are those of layers
    SmallModel model(GetParam().family, is_tied, 2, GetParam().is_wide);
    const WeightsPtr weights = model.weights(GetParam().compute);
    const Packed packed = random_packed(model.config.vocab_size, {30, 12}, 5);
    const std::vector<float> dlogp(packed.ids.size(), 0.25f);
    Parameters& parameters = *model.parameters;
    for (const int freq : {0, 1}) {
      if (freq == 1 && GetParam().is_wide) continue;  // the same products
      TrainableModel trainable(model.ctx(), parameters, {freq});
      const auto run = [&](bool is_started, std::span<const std::int32_t> targets, int times) {
        parameters.ensure_grads();
        float* all = parameters.all_grads().as<float>();
        std::fill(all, all + parameters.all_grads().num_elements(), 7.0f);
        is_started ? parameters.start_grads() : parameters.zero_grads();
        for (int i = 0; i < times; ++i) {
          trainable.forward(weights, packed.batch(), targets, packed.temperatures);
          trainable.backward(dlogp);
        }
        parameters.settle_grads();
        std::vector<float> grads;
        for (const NamedParameter& p : parameters.named())
          grads.insert(grads.end(), p.grad.as<float>(), p.grad.as<float>() + p.grad.num_elements());
        for (float& g : grads) g += 0.0f;  // -0 becomes 0
        return grads;
      };
      const std::vector<std::int32_t> none(packed.targets.size(), -1);
      for (const int times : {0, 1, 2}) expect_same_bits(run(true, packed.targets, times), run(false, packed.targets, times), "passes");
      expect_same_bits(run(true, none, 1), run(false, none, 1), "no token takes part");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Families, ExactnessTest,
    ::testing::Values(ExactCase{"llama", DType::kF32}, ExactCase{"llama", DType::kBF16}, ExactCase{"qwen2", DType::kF32},
                      ExactCase{"qwen2", DType::kBF16}, ExactCase{"qwen3", DType::kF32}, ExactCase{"qwen3", DType::kBF16},
                      ExactCase{"qwen3_moe", DType::kF32}, ExactCase{"qwen3_moe", DType::kBF16}, ExactCase{"glm4_moe", DType::kF32},
                      ExactCase{"glm4_moe", DType::kBF16}, ExactCase{"smollm3", DType::kF32}, ExactCase{"smollm3", DType::kBF16},
                      ExactCase{"mixtral", DType::kBF16}, ExactCase{"olmo2", DType::kF32}, ExactCase{"olmo2", DType::kBF16},
                      ExactCase{"phi3", DType::kBF16}, ExactCase{"olmo2", DType::kBF16, true}, ExactCase{"qwen3", DType::kF32, true},
                      ExactCase{"llama", DType::kBF16, true}, ExactCase{"mistral_window", DType::kBF16},
                      ExactCase{"qwen3_window", DType::kF32}, ExactCase{"olmo3_window", DType::kBF16},
                      ExactCase{"qwen3_5_text", DType::kF32}, ExactCase{"qwen3_5_text", DType::kBF16},
                      ExactCase{"gpt_oss_window", DType::kF32}, ExactCase{"gpt_oss_window", DType::kBF16},
                      ExactCase{"gpt_oss", DType::kBF16}, ExactCase{"qwen3_5_moe_text", DType::kBF16}, ExactCase{"qwen3_next", DType::kF32},
                      ExactCase{"qwen3_next", DType::kBF16}, ExactCase{"minimax_m2", DType::kF32}, ExactCase{"minimax_m2", DType::kBF16},
                      ExactCase{"afmoe", DType::kBF16}, ExactCase{"afmoe_window", DType::kF32}, ExactCase{"afmoe_window", DType::kBF16},
                      ExactCase{"afmoe", DType::kBF16, true}, ExactCase{"deepseek_v3", DType::kF32}, ExactCase{"deepseek_v3", DType::kBF16},
                      ExactCase{"deepseek_v3", DType::kBF16, true}, ExactCase{"deepseek_v3_latents", DType::kF32},
                      ExactCase{"deepseek_v3_latents", DType::kBF16}, ExactCase{"deepseek_v3_latents", DType::kBF16, true},
                      ExactCase{"deepseek_v2_latents", DType::kBF16}, ExactCase{"deepseek_v3_latents_eight_products", DType::kBF16},
                      ExactCase{"gemma3_text", DType::kBF16}, ExactCase{"gemma3_text_window", DType::kF32},
                      ExactCase{"gemma3_text_window", DType::kBF16}, ExactCase{"gemma3_text", DType::kBF16, true},
                      ExactCase{"qwen3_eight", DType::kBF16}, ExactCase{"qwen3_moe_eight", DType::kF32},
                      ExactCase{"nemotron_h", DType::kF32}, ExactCase{"nemotron_h", DType::kBF16},
                      ExactCase{"nemotron_h", DType::kBF16, true}, ExactCase{"nemotron_h_narrow", DType::kBF16},
                      ExactCase{"nemotron_h_eight", DType::kBF16}, ExactCase{"qwen3_eight_products", DType::kF32},
                      ExactCase{"qwen3_eight_products", DType::kBF16}, ExactCase{"qwen3_eight_products", DType::kBF16, true},
                      ExactCase{"qwen3_moe_eight_products", DType::kF32}, ExactCase{"qwen3_moe_eight_products", DType::kBF16},
                      ExactCase{"gpt_oss_eight_products", DType::kBF16}, ExactCase{"nemotron_h_eight_products", DType::kBF16}),
    [](const auto& test) {
      return test.param.family + (test.param.is_wide ? "_wide" : "") + (test.param.compute == DType::kF32 ? "_f32" : "_bf16");
    });

class FamilyTest : public ::testing::TestWithParam<std::string> {};

TEST_P(FamilyTest, GradientsAreThoseOfFiniteDifferences) {
  SmallModel model(GetParam());
  // Tokens of which none is between two experts: a step to each side would send it to another.
  const Packed packed = random_packed(model.config.vocab_size, {9, 4}, GetParam().starts_with("deepseek_v3") ? 3 : 1);
  std::vector<float> dlogp(packed.ids.size());
  Rng rng(2);
  draw_normals(rng, dlogp);
  TrainableModel trainable(model.ctx(), *model.parameters, {1});
  model.parameters->zero_grads();
  trainable.forward(model.weights(DType::kF32), packed.batch(), packed.targets, packed.temperatures);
  trainable.backward(dlogp);
  const auto loss = [&] {
    const TokenStats stats = trainable.evaluate(model.weights(DType::kF32, false), packed.batch(), packed.targets, packed.temperatures);
    double sum = 0;
    for (std::size_t i = 0; i < dlogp.size(); ++i) sum += static_cast<double>(dlogp[i]) * static_cast<double>(stats.logp_T[i]);
    return sum;
  };
  // Along a random direction in each tensor, so that every entry takes part.
  for (NamedParameter& p : model.parameters->named()) {
    const std::int64_t n = p.value.num_elements();
    std::vector<float> direction(static_cast<std::size_t>(n)), saved(p.value.as<float>(), p.value.as<float>() + n);
    double slope = 0, norm = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      direction[at] = static_cast<float>(rng.next_normal());
      norm += static_cast<double>(direction[at]) * static_cast<double>(direction[at]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      direction[static_cast<std::size_t>(i)] /= static_cast<float>(std::sqrt(norm));
      slope += static_cast<double>(direction[static_cast<std::size_t>(i)]) * static_cast<double>(p.grad.as<float>()[i]);
    }
    const auto at = [&](float step) {
      for (std::int64_t i = 0; i < n; ++i)
        p.value.as<float>()[i] = saved[static_cast<std::size_t>(i)] + step * direction[static_cast<std::size_t>(i)];
      return loss();
    };
    constexpr float kStep = 4e-3f;
    const double numeric = (at(kStep) - at(-kStep)) / (2.0 * static_cast<double>(kStep));
    std::copy(saved.begin(), saved.end(), p.value.as<float>());
    EXPECT_NEAR(slope, numeric, 3e-3 * std::max(1.0, std::abs(numeric))) << p.name;
  }
}
INSTANTIATE_TEST_SUITE_P(Families, FamilyTest,
                         ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "smollm3", "mixtral", "olmo2", "phi3",
                                           "qwen2_window", "qwen3_5_text", "gpt_oss", "gpt_oss_window", "qwen3_5_moe_text", "qwen3_next",
                                           "minimax_m2", "afmoe", "afmoe_window", "deepseek_v3", "deepseek_v3_latents", "gemma3_text",
                                           "gemma3_text_window", "nemotron_h", "nemotron_h_narrow"));

// Each sequence needs a state of the cache, be its step recorded or not.
TEST(Decoder, RefusesSequencesWithoutStates) {
  SmallModel model("qwen3_5_text");
  const WeightsPtr weights = model.weights(DType::kF32);
  KvCache cache(model.ctx().runtime, model.config, DType::kF32, 4, 16, false, 1);
  InferenceModel runner(model.ctx());
  const std::vector<std::int32_t> ids{3}, positions{0}, slots{0}, start{0, 1}, context{1}, table{0}, good{0}, outside{1};
  const auto run = [&](std::span<const std::int32_t> states) {
    runner.forward_paged(*weights, cache, {ids, positions, slots, start, context, table, 1, states});
  };
  run(good);
  for (const std::span<const std::int32_t> states : {std::span<const std::int32_t>{}, std::span<const std::int32_t>(outside)}) {
    try {
      run(states);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kShape) << error.what();
    }
  }
}

TEST(Decoder, RefusesBadBatches) {
  SmallModel model("llama");
  const WeightsPtr weights = model.weights(DType::kF32);
  TrainableModel trainable(model.ctx(), *model.parameters, {});
  const Packed good = random_packed(model.config.vocab_size, {4}, 1);
  const auto expect = [&](Packed bad, ErrorCode code) {
    try {
      trainable.evaluate(weights, bad.batch(), bad.targets, bad.temperatures);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
    }
  };
  Packed bad = good;
  bad.ids[1] = 97;
  expect(bad, ErrorCode::kInvalidArgument);
  bad = good;
  bad.positions[3] = 512;
  expect(bad, ErrorCode::kOverlong);
  bad = good;
  bad.cu_seqlens = {0, 3};
  expect(bad, ErrorCode::kShape);
  bad = good;
  bad.targets[0] = 97;
  expect(bad, ErrorCode::kInvalidArgument);
  bad = good;
  bad.temperatures[0] = 0.0f;
  expect(bad, ErrorCode::kInvalidArgument);
  bad = good;
  bad.temperatures.pop_back();
  expect(bad, ErrorCode::kShape);
  EXPECT_THROW(TrainableModel(model.ctx(), *model.parameters, {-1}), Error);
}

TEST(Decoder, ProbeTellsWeightsApart) {
  SmallModel model("qwen3");
  InferenceModel inference(model.ctx());
  const std::vector<std::int32_t> prompt = probe_prompt(model.config.vocab_size);
  EXPECT_EQ(prompt, probe_prompt(model.config.vocab_size));
  ASSERT_EQ(prompt.size(), 32u);
  const WeightsPtr weights = model.weights(DType::kBF16);
  const std::vector<float> before = probe_logprobs(inference, model.ctx(), *weights, prompt);
  EXPECT_EQ(before.size(), 31u);
  EXPECT_EQ(probe_logprobs(inference, model.ctx(), *weights, prompt), before);
  model.parameters->at("model.layers.1.mlp.down_proj.weight").value.as<float>()[17] += 0.5f;
  EXPECT_NE(probe_logprobs(inference, model.ctx(), *model.weights(DType::kBF16), prompt), before);
  EXPECT_EQ(probe_logprobs(inference, model.ctx(), *weights, prompt), before) << "packed weights do not follow the masters";
}

TEST(Decoder, StepsTakeNoMemoryAfterWarmUp) {
  SmallModel model("qwen3");
  const WeightsPtr weights = model.weights(DType::kBF16);
  const Packed packed = random_packed(model.config.vocab_size, {100, 60}, 2);
  const std::vector<float> dlogp(packed.ids.size(), 1.0f);
  TrainableModel trainable(model.ctx(), *model.parameters, {2});
  std::size_t in_use = 0;
  for (int i = 0; i < 5; ++i) {
    trainable.forward(weights, packed.batch(), packed.targets, packed.temperatures);
    trainable.backward(dlogp);
    if (i == 2) in_use = model.ctx().runtime->bytes_in_use();
    if (i > 2) {
      EXPECT_EQ(model.ctx().runtime->bytes_in_use(), in_use);
    }
  }
}

/// Bytes that a model's buffers take for one step. The scratch memory of ops, which they share, is there already.
std::size_t step_bytes(SmallModel& model, const Packed& packed, const ActivationCheckpointing& checkpointing,
                       std::int64_t num_kept_logits = 0) {
  const WeightsPtr weights = model.weights(DType::kBF16);
  const std::size_t before = model.ctx().runtime->bytes_in_use();
  TrainableModel trainable(model.ctx(), *model.parameters, checkpointing);
  trainable.keep_logits(num_kept_logits);
  step_results(model.ctx(), *model.parameters, weights, packed, trainable);
  trainable.fit_memory();
  return model.ctx().runtime->bytes_in_use() - before;
}
/// 400 tokens, and memory for what their steps share.
Packed packed_for_sizes(SmallModel& model) {
  Packed packed = random_packed(model.config.vocab_size, {150, 150, 100}, 2);
  model.parameters->ensure_grads();
  step_bytes(model, packed, {});
  return packed;
}

TEST(Decoder, StepsAfterAFitTakeNoMemoryAndAreTheSame) {
  SmallModel model("qwen3");
  const WeightsPtr weights = model.weights(DType::kBF16);
  const Packed packed = packed_for_sizes(model);
  TrainableModel trainable(model.ctx(), *model.parameters, {1, {.norm = true, .attn_proj = true}});
  const auto wanted = step_results(model.ctx(), *model.parameters, weights, packed, trainable);
  const std::size_t grown = model.ctx().runtime->bytes_in_use();
  trainable.fit_memory();
  const std::size_t fitted = model.ctx().runtime->bytes_in_use();
  EXPECT_LT(fitted, grown);
  EXPECT_TRUE(step_results(model.ctx(), *model.parameters, weights, packed, trainable) == wanted);
  EXPECT_EQ(model.ctx().runtime->bytes_in_use(), fitted);
}

// Each part that is not kept leaves its values out of all layers but one.
TEST(Decoder, PartsThatAreMadeAgainTakeNoMemory) {
  SmallModel model("qwen3");
  const Packed packed = packed_for_sizes(model);
  const auto tokens = static_cast<double>(packed.ids.size());
  const ModelConfig& c = model.config;
  const double H = static_cast<double>(c.hidden_size), Q = static_cast<double>(c.num_heads * c.head_dim),
               K = static_cast<double>(c.num_kv_heads * c.head_dim), F = static_cast<double>(c.intermediate_size);
  const double everything = static_cast<double>(step_bytes(model, packed, {}));
  const auto saved = [&](const LayerParts& parts, int freq) {
    return (everything - static_cast<double>(step_bytes(model, packed, {freq, parts}))) / (2 * tokens);  // bf16 values per token
  };
  const double others = static_cast<double>(c.num_layers - 1), slack = 0.01 * everything / (2 * tokens);
  EXPECT_NEAR(saved({.norm = true}, 1), others * (2 * H + Q + K), slack);
  EXPECT_NEAR(saved({.attn_proj = true}, 1), others * (2 * Q + 3 * K), slack);
  EXPECT_NEAR(saved({.mlp = true}, 1), others * 3 * F, slack);
  EXPECT_NEAR(saved({.norm = true, .attn_proj = true, .mlp = true}, 1), others * (2 * H + 2 * Q + 3 * K + 3 * F), slack);
}

TEST(Decoder, ActivationsTakeWhatIsForetold) {
  for (const char* family : {"qwen3", "llama", "olmo2", "phi3", "minimax_m2", "afmoe", "deepseek_v3", "gemma3_text"}) {
    SmallModel model(family);
    const Packed packed = packed_for_sizes(model);
    std::vector<ActivationCheckpointing> all = all_checkpointings();
    all.push_back({});
    // Every sequence's last token predicts nothing.
    const std::vector<std::int64_t> kept =
        ops::keeps_logits(model.ctx()) ? std::vector<std::int64_t>{0, 390} : std::vector<std::int64_t>{0};
    for (const ActivationCheckpointing& checkpointing : all)
      for (const std::int64_t num_kept : kept) {
        const auto foretold = static_cast<double>(activation_bytes(model.config, DType::kBF16, 400, checkpointing, {}, num_kept).device);
        EXPECT_NEAR(static_cast<double>(step_bytes(model, packed, checkpointing, num_kept)) / foretold, 1.0, 0.01)
            << family << ' ' << to_string(checkpointing) << ", logits of " << num_kept << " tokens";
      }
  }
}

// As transformers rounds the scale of Gemma 3's embedding to the type of its weights: of 48 elements 6.9375 in place of 6.928.
TEST(Decoder, TheScaleOfEmbeddingsIsRoundedToTheTypeThatIsComputedIn) {
  const std::filesystem::path folder = testing_support::golden_models() / "gemma3";
  testing_support::TestSession session(2);
  const ModelConfig of_model = load_model_config(folder);
  EXPECT_EQ(of_model.embedding_scale, std::sqrt(48.0));
  const Packed packed = random_packed(of_model.vocab_size, {9, 4}, 1);
  const auto states = [&](DType compute, bool is_rounded, double scale) {
    ModelConfig config = of_model;
    config.rounds_embedding_scale = is_rounded;
    config.embedding_scale = scale;
    Parameters parameters(session.context().runtime, config);
    load_parameters(parameters, folder);
    InferenceModel model(session.context());
    const WeightsPtr weights = make_weights(session.context(), parameters, compute, PolicyVersion{1}, false, nullptr);
    const TensorView h_TH = model.forward_packed(*weights, packed.batch());
    std::vector<std::byte> bytes(static_cast<std::size_t>(h_TH.shape.num_elements()) * size_of(h_TH.dtype));
    session.context().runtime->copy_to_host(bytes.data(), h_TH.data, bytes.size());
    return bytes;
  };
  const double scale = std::sqrt(48.0);
  EXPECT_EQ(states(DType::kBF16, true, scale), states(DType::kBF16, false, 6.9375));
  EXPECT_NE(states(DType::kBF16, true, scale), states(DType::kBF16, false, scale));
  EXPECT_EQ(states(DType::kF32, true, scale), states(DType::kF32, false, scale));
}

TEST(KvCache, SizesAreThoseOfItsBlocks) {
  SmallModel model("llama");
  const std::size_t before = model.ctx().runtime->bytes_in_use();
  const KvCache cache(model.ctx().runtime, model.config, DType::kBF16, 10, 16);
  EXPECT_EQ(KvCache::bytes_per_block(model.config, DType::kBF16, 16), static_cast<std::size_t>(2 * 3 * 2 * 32 * 16 * 2));
  EXPECT_EQ(model.ctx().runtime->bytes_in_use() - before, 10 * KvCache::bytes_per_block(model.config, DType::kBF16, 16));
  EXPECT_EQ(cache.layer(2).k.shape, (Shape{10, 2, 16, 32}));
}

TEST(KvCache, OfLatentsHasOneKeyOfATokenAndNoValues) {
  SmallModel model("deepseek_v3_latents");
  const ModelConfig& config = model.config;
  const std::int64_t width = config.latent->kv_rank + config.latent->rotary_dim;
  const std::size_t before = model.ctx().runtime->bytes_in_use(), bytes = KvCache::bytes_per_block(config, DType::kBF16, 16);
  const KvCache cache(model.ctx().runtime, config, DType::kBF16, 10, 16);
  EXPECT_EQ(bytes, static_cast<std::size_t>(config.num_layers * width * 16 * 2));
  EXPECT_EQ(model.ctx().runtime->bytes_in_use() - before, 10 * bytes);
  EXPECT_EQ(cache.layer(2).k.shape, (Shape{10, 1, 16, width}));
  EXPECT_EQ(cache.layer(2).v.data, nullptr);
}

// What no device has attention to is attended to as heads, whatever is asked for.
TEST(KvCache, OfLatentsIsForSizesThatDevicesHaveAttentionFor) {
  const std::filesystem::path folder = testing_support::golden_models() / "deepseek_v3";
  EXPECT_FALSE(load_model_config(folder, {.attends_to_latents = true}).attends_to_latents) << "kv_lora_rank 24";
  EXPECT_FALSE(load_model_config(testing_support::golden_models() / "qwen3_tied", {.attends_to_latents = true}).attends_to_latents);
  EXPECT_TRUE(load_model_config(testing_support::golden_models() / "glm4_moe_lite", {.attends_to_latents = true}).attends_to_latents);
  EXPECT_FALSE(load_model_config(testing_support::golden_models() / "glm4_moe_lite").attends_to_latents);
}

}  // namespace
}  // namespace prl::nn
