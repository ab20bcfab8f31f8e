// Adapters in the decoder: tables, exactness between training and serving, gradients, PEFT's files.
#include "nn/adapter.hpp"
#include "base/normal_draws.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <set>

#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/temp_folder.hpp"
#include "nn/decoder.hpp"
#include "nn/peft.hpp"
#include "nn/test_support.hpp"
#include "ops/lm_head.hpp"

namespace prl::nn {
namespace {
using ::testing::HasSubstr;
using testing_support::all_checkpointings;
using testing_support::expect_same_bits;
using testing_support::Packed;
using testing_support::random_packed;
using testing_support::SmallModel;

AdapterConfig config_of(std::vector<std::string> targets, std::int64_t rank = 4) {
  AdapterConfig config;
  config.rank = rank;
  config.alpha = 2.0 * static_cast<double>(rank);
  config.target_modules = std::move(targets);
  config.base_model = "base";
  return config;
}
const std::vector<std::string> kOfAttention = {"q_proj", "k_proj", "v_proj", "o_proj"};
bool has_numbered_experts(const std::string& family) { return family == "mixtral" || family == "minimax_m2"; }
/// The names that the modules of a family have; of one whose experts take no adapters those of attention.
std::vector<std::string> targets_in(const std::string& family, const std::vector<std::string>& targets) {
  using Names = std::map<std::string, std::string>;
  const Names numbered{{"gate_proj", "w1"}, {"up_proj", "w3"}, {"down_proj", "w2"}}, fused{{"q_proj", "qkv_proj"},
                                                                                           {"k_proj", "qkv_proj"},
                                                                                           {"v_proj", "qkv_proj"},
                                                                                           {"gate_proj", "gate_up_proj"},
                                                                                           {"up_proj", "gate_up_proj"}};
  const bool of_latents = family.ends_with(testing_support::kLatents);
  const Names latent{{"q_proj", "q_b_proj"}, {"k_proj", "kv_a_proj_with_mqa"}, {"v_proj", of_latents ? "kv_a_proj_with_mqa" : "kv_b_proj"}};
  const Names names = has_numbered_experts(family)        ? numbered
                      : family == "phi3"                  ? fused
                      : family.starts_with("deepseek_v3") ? latent
                                                          : Names{};
  std::vector<std::string> out;
  for (const std::string& target : targets) {
    if (family == "gpt_oss" && std::ranges::find(kOfAttention, target) == kOfAttention.end()) continue;
    const auto found = names.find(target);
    const std::string& name = found != names.end() ? found->second : target;
    if (std::ranges::find(out, name) == out.end()) out.push_back(name);
  }
  return out;
}
const std::vector<std::string> kAll = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts"};

/// A model with an adapter in training, both halves of which are random.
struct Adapted {
  SmallModel& model;
  AdapterConfig config;
  WeightsPtr base;
  Parameters trained;
  WeightsPtr weights;

  Adapted(SmallModel& m, DType compute, AdapterConfig c, std::uint64_t seed = 1, std::optional<DType> dtype = {})
      : model(m), config(std::move(c)), base(m.weights(compute)), trained(m.ctx().runtime, m.config, make_adapter_table(m.config, config)) {
    init_adapter(trained, seed);
    Rng rng(seed, 77);
    for (NamedParameter& p : trained.named())
      if (is_lora(p.block) && !is_lora_a(p.block))
        draw_normals(rng, {p.value.as<float>(), static_cast<std::size_t>(p.num_elements())}, 0.1f);
    for (NamedParameter& p : trained.named())
      if (!is_lora(p.block)) std::memcpy(p.value.data(), m.parameters->at(p.name).value.data(), p.value.num_bytes());
    refresh(dtype.value_or(compute));
  }
  void refresh(DType dtype) { weights = adapt_weights(model.ctx(), trained, config, dtype, base, PolicyVersion{1}); }
};

std::vector<float> evaluate(Adapted& adapted, const WeightsPtr& weights, const Packed& packed) {
  TrainableModel trainable(adapted.model.ctx(), adapted.trained, {});
  return trainable.evaluate(weights, packed.batch(), packed.targets, packed.temperatures).logp_T;
}

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Serves the sequences of `packed` over a paged cache, `chunk` tokens of each at a time, sequence s with adapters[s] (null: that of the
/// weights).
std::vector<float> serve(SmallModel& model, const WeightsPtr& weights, const Packed& packed, const std::vector<const Adapter*>& adapters,
                         int chunk) {
  const auto num = packed.cu_seqlens.size() - 1;
  constexpr std::int32_t kBlock = 16, kBlocks = 12;
  KvCache cache(model.ctx().runtime, model.config, weights->compute, static_cast<std::int64_t>(num) * kBlocks, kBlock);
  InferenceModel runner(model.ctx());
  std::vector<float> logp(packed.ids.size());
  for (int done = 0;; done += chunk) {
    std::vector<std::int32_t> ids, positions, slots, query_start{0}, context, table, targets;
    std::vector<std::size_t> sources;
    std::vector<std::vector<std::int32_t>> rows(num);
    for (std::size_t s = 0; s < num; ++s) {
      const std::int32_t begin = packed.cu_seqlens[s], length = packed.cu_seqlens[s + 1] - begin;
      const std::int32_t end = std::min(length, done + chunk);
      if (done >= length) continue;
      for (std::int32_t at = done; at < end; ++at) {
        rows[s].push_back(static_cast<std::int32_t>(ids.size()));
        ids.push_back(packed.ids[static_cast<std::size_t>(begin + at)]);
        positions.push_back(at);
        slots.push_back((static_cast<std::int32_t>(s) * kBlocks + at / kBlock) * kBlock + at % kBlock);
        targets.push_back(packed.targets[static_cast<std::size_t>(begin + at)]);
        sources.push_back(static_cast<std::size_t>(begin + at));
      }
      query_start.push_back(static_cast<std::int32_t>(ids.size()));
      context.push_back(end);
      for (std::int32_t b = 0; b < kBlocks; ++b) table.push_back(static_cast<std::int32_t>(s) * kBlocks + b);
    }
    if (ids.empty()) return logp;
    std::vector<AdapterRows> named;
    for (std::size_t s = 0; s < num; ++s)
      if (adapters[s] != nullptr && !rows[s].empty()) named.push_back({adapters[s], rows[s]});
    PagedBatch batch{ids, positions, slots, query_start, context, table, kBlocks};
    batch.adapters = named;
    const TensorView h = runner.forward_paged(*weights, cache, batch);
    const Tensor out = Tensor::empty(model.ctx().runtime, {static_cast<std::int64_t>(ids.size())}, DType::kF32), entropy = out.clone(),
                 lse = out.clone();
    ops::lm_head_logprob(model.ctx(), out, entropy, lse, h, weights->lm_head(), targets, std::vector<float>(ids.size(), 1.0f));
    for (std::size_t i = 0; i < sources.size(); ++i) logp[sources[i]] = out.as<float>()[i];
  }
}

TEST(AdapterTable, PatternsChooseModules) {
  SmallModel model("qwen3", false, 2);
  const auto names = [&](const AdapterConfig& config) {
    std::vector<std::string> out;
    const TensorTablePtr table = make_adapter_table(model.config, config);
    for (const TensorSpec& spec : table->tensors()) out.push_back(spec.name);
    return out;
  };
  EXPECT_THAT(names(config_of({"o_proj"})),
              ::testing::ElementsAre("model.layers.0.self_attn.o_proj.lora_A.weight", "model.layers.0.self_attn.o_proj.lora_B.weight",
                                     "model.layers.1.self_attn.o_proj.lora_A.weight", "model.layers.1.self_attn.o_proj.lora_B.weight",
                                     "model.layers.2.self_attn.o_proj.lora_A.weight", "model.layers.2.self_attn.o_proj.lora_B.weight"));
  EXPECT_EQ(names(config_of({"mlp"})).size(), 3u * 3 * 2);
  EXPECT_EQ(names(config_of({"layers\\.1\\..*_proj$"})).size(), 7u * 2);
  EXPECT_EQ(names(config_of(kAll)).size(), 3u * 7 * 2) << "names of experts are passed over";
  SmallModel sparse("qwen3_moe", false, 2);
  const auto num_of_sparse = [&](const AdapterConfig& config) { return make_adapter_table(sparse.config, config)->tensors().size(); };
  EXPECT_EQ(num_of_sparse(config_of({"experts"})), 3u * 6 * 3 * 2);
  EXPECT_EQ(num_of_sparse(config_of({"experts.4.up_proj"})), 3u * 2) << "one expert of each layer";
  EXPECT_EQ(num_of_sparse(config_of(kAll)), 3u * (4 + 6 * 3) * 2) << "the router takes none";
  SmallModel numbered("mixtral", false, 2);
  EXPECT_EQ(make_adapter_table(numbered.config, config_of(kAll))->tensors().size(), 3u * (4 + 6 * 3) * 2) << "'experts' is all of them";
  EXPECT_EQ(make_adapter_table(numbered.config, config_of({"q_proj", "w2"}))->tensors().size(), 3u * (1 + 6) * 2);
  EXPECT_THAT(error_of([&] {
                make_adapter_table(numbered.config, config_of({"q_proj", "down_proj"}));
              }),
              HasSubstr("'down_proj' matches no module of this model that takes an adapter; there are: q_proj, k_proj, v_proj, o_proj, "
                        "w1, w3, w2"));
  // Of fused projections the fused ones take adapters, under the names that PEFT gives them; their parts are no modules.
  SmallModel fused("phi3", false, 2);
  const TensorTablePtr of_fused = make_adapter_table(fused.config, config_of({"qkv_proj", "gate_up_proj"}));
  EXPECT_EQ(of_fused->tensors()[0].name, "model.layers.0.self_attn.qkv_proj.lora_A.weight");
  EXPECT_EQ(of_fused->blocks()[of_fused->find(Block::kFusedQkvLoraB, 2)].shape, (Shape{256, 4}));
  EXPECT_EQ(of_fused->blocks()[of_fused->find(Block::kFusedGateUpLoraB, 2)].shape, (Shape{160, 4}));
  EXPECT_THAT(
      error_of([&] { make_adapter_table(fused.config, config_of(kAll)); }),
      HasSubstr("'q_proj' matches no module of this model that takes an adapter; there are: qkv_proj, o_proj, gate_up_proj, down_proj"));
  // Experts that are one tensor in files take none, under whatever name.
  SmallModel stacked("gpt_oss", false, 2);
  EXPECT_EQ(make_adapter_table(stacked.config, config_of(kOfAttention))->tensors().size(), 3u * 4 * 2);
  for (const char* name : {"experts", "gate_proj", "down_proj", "mlp.experts.gate_up_proj"})
    EXPECT_THAT(error_of([&] {
                  make_adapter_table(stacked.config, config_of({"q_proj", name}));
                }),
                HasSubstr(fmt::format("lora.target_modules: '{}' names experts, which in a gpt_oss model take no adapters", name)));
  AdapterConfig with_sinks = config_of({"q_proj"});
  with_sinks.modules_to_save = {"sinks"};
  EXPECT_THAT(error_of([&] { make_adapter_table(stacked.config, with_sinks); }),
              HasSubstr("'model.layers.0.self_attn.sinks', which is no module"));
  AdapterConfig dropped = config_of({"experts"});
  dropped.dropout = 0.1;
  EXPECT_THAT(error_of([&] { make_adapter_table(sparse.config, dropped); }), HasSubstr("whose adapters have no dropout"));
  AdapterConfig saved = config_of({"q_proj"});
  saved.modules_to_save = {"lm_head", "input_layernorm"};
  const TensorTablePtr table = make_adapter_table(model.config, saved);
  EXPECT_TRUE(table->has(Block::kLmHead) && table->has(Block::kInputNorm, 1) && !table->has(Block::kEmbedding));
  EXPECT_EQ(table->num_trainable(), table->num_parameters());

  AdapterConfig pattern = config_of({"q_proj", "k_proj"}, 4);
  pattern.rank_pattern = {{"layers.1.self_attn.q_proj", 16}};
  pattern.alpha_pattern = {{"k_proj", 32.0}};
  const TensorTablePtr mixed = make_adapter_table(model.config, pattern);
  const BlockSpec& a = mixed->blocks()[mixed->find(Block::kQkvLoraA, 1)];
  EXPECT_EQ(a.shape, (Shape{20, model.config.hidden_size}));
  EXPECT_EQ(mixed->tensors_of(a)[0].lora_scale, 0.5f);
  EXPECT_EQ(mixed->tensors_of(a)[1].lora_scale, 8.0f);
  pattern.rank_stabilized = true;
  EXPECT_FLOAT_EQ(make_adapter_table(model.config, pattern)->tensors()[0].lora_scale, 4.0f);
}

TEST(AdapterTable, WhatMatchesNothingIsAnErrorThatListsWhatThereIs) {
  SmallModel model("llama", false, 2);
  const auto error = [&](const AdapterConfig& config) { return error_of([&] { make_adapter_table(model.config, config); }); };
  EXPECT_THAT(error(config_of({"q_proj", "c_attn"})),
              HasSubstr("lora.target_modules: 'c_attn' matches no module of this model that takes an adapter; "
                        "there are: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"));
  EXPECT_THAT(error(config_of({"lm_head"})), HasSubstr("that takes an adapter"));
  EXPECT_THAT(error(config_of({"experts"})), HasSubstr("adapts no module"));
  EXPECT_THAT(error(config_of({"("})), HasSubstr("no regular expression"));
  AdapterConfig saved = config_of({"q_proj"});
  saved.modules_to_save = {"score"};
  EXPECT_THAT(error(saved), HasSubstr("lora.modules_to_save: 'score' matches no module of this model; there are: embed_tokens"));
  saved.modules_to_save = {"up_proj"};
  EXPECT_THAT(error(saved), HasSubstr("name all of them"));
}

// The usual list of targets adapts latent attention, too.
TEST(Adapter, ModulesOfLatentAttentionStandForThoseThatOthersHave) {
  const auto modules = [](const std::string& family, const std::vector<std::string>& targets) {
    std::set<std::string> names;
    const ModelConfig config = testing_support::small_config(family, testing_support::small_options(family));
    const TensorTablePtr table = make_adapter_table(config, config_of(targets));
    for (const TensorSpec& spec : table->tensors())
      if (is_lora_a(spec.block) && spec.layer == 1) {
        const std::string module = module_of(module_of(spec.name));
        names.insert(module.substr(module.rfind('.') + 1));
      }
    return names;
  };
  EXPECT_EQ(modules("deepseek_v3", {"q_proj"}), (std::set<std::string>{"q_a_proj", "q_b_proj"}));
  EXPECT_EQ(modules("deepseek_v3_latents", {"v_proj", "o_proj"}), (std::set<std::string>{"kv_a_proj_with_mqa", "o_proj"}));
  const std::string message = error_of([&] { modules("deepseek_v3_latents", {"kv_b_proj"}); });
  EXPECT_THAT(message, HasSubstr("an adapter of 'model.layers.0.self_attn.kv_b_proj'"));
  EXPECT_THAT(message, HasSubstr("latent_attention = \"heads\""));
  EXPECT_EQ(modules("deepseek_v3", {"v_proj", "o_proj"}), (std::set<std::string>{"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}));
  EXPECT_EQ(modules("qwen3", {"q_proj", "v_proj"}), (std::set<std::string>{"q_proj", "v_proj"}));
}

struct AdapterCase {
  std::string family;
  DType compute;
  std::optional<DType> adapter;
};
void PrintTo(const AdapterCase& c, std::ostream* out) {
  *out << c.family << ' ' << to_string(c.compute) << (c.adapter ? " adapter in fp32" : "");
}
class AdapterExactness : public ::testing::TestWithParam<AdapterCase> {};

/// Alone, in a batch of 16 adapters and rows without one, in chunks and token by token: what the trainer computes.
TEST_P(AdapterExactness, ServingEqualsTrainingBitForBit) {
  SmallModel model(GetParam().family, true, 2);
  std::vector<std::unique_ptr<Adapted>> adapted;
  for (std::uint64_t k = 0; k < 16; ++k) {
    AdapterConfig config =
        config_of(targets_in(GetParam().family, k % 3 == 0 ? kAll : std::vector<std::string>{"q_proj", "v_proj", "down_proj"}),
                  1 + static_cast<int>(k) * 3);
    adapted.push_back(std::make_unique<Adapted>(model, GetParam().compute, config, k, GetParam().adapter));
  }
  std::vector<int> lengths;
  for (int s = 0; s < 18; ++s) lengths.push_back(3 + s * 5 % 37);
  const Packed packed = random_packed(model.config.vocab_size, lengths, 3);
  std::vector<const Adapter*> of_sequence;
  std::vector<float> wanted(packed.ids.size());
  const std::vector<float> without = evaluate(*adapted[0], adapted[0]->base, packed);
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    of_sequence.push_back(s < 16 ? adapted[s]->weights->adapter.get() : nullptr);
    const std::vector<float> all = s < 16 ? evaluate(*adapted[s], adapted[s]->weights, packed) : without;
    for (auto i = static_cast<std::size_t>(packed.cu_seqlens[s]); i < static_cast<std::size_t>(packed.cu_seqlens[s + 1]); ++i)
      wanted[i] = all[i];
  }
  EXPECT_NE(wanted, without);
  for (const int chunk : {64, 7, 1})
    expect_same_bits(serve(model, adapted[0]->base, packed, of_sequence, chunk), wanted, "chunks of " + std::to_string(chunk));
  // The policy's own adapter, which rows need not name, beside rows that name another.
  std::vector<const Adapter*> others(lengths.size(), nullptr);
  others[1] = adapted[5]->weights->adapter.get();
  const std::vector<float> own = serve(model, adapted[3]->weights, packed, others, 9),
                           of_own = evaluate(*adapted[3], adapted[3]->weights, packed),
                           of_other = evaluate(*adapted[5], adapted[5]->weights, packed);
  std::vector<float> expected = of_own;
  std::copy(of_other.begin() + packed.cu_seqlens[1], of_other.begin() + packed.cu_seqlens[2], expected.begin() + packed.cu_seqlens[1]);
  expect_same_bits(own, expected, "the policy's adapter");
}

INSTANTIATE_TEST_SUITE_P(Families, AdapterExactness,
                         ::testing::Values(AdapterCase{"llama", DType::kF32, {}}, AdapterCase{"llama", DType::kBF16, {}},
                                           AdapterCase{"qwen2", DType::kBF16, DType::kF32}, AdapterCase{"qwen3", DType::kF32, {}},
                                           AdapterCase{"qwen3", DType::kBF16, {}}, AdapterCase{"qwen3_moe", DType::kF32, {}},
                                           AdapterCase{"qwen3_moe", DType::kBF16, {}}, AdapterCase{"glm4_moe", DType::kF32, {}},
                                           AdapterCase{"glm4_moe", DType::kBF16, {}}, AdapterCase{"smollm3", DType::kBF16, {}},
                                           AdapterCase{"mixtral", DType::kBF16, {}}, AdapterCase{"olmo2", DType::kBF16, {}},
                                           AdapterCase{"phi3", DType::kF32, {}}, AdapterCase{"phi3", DType::kBF16, {}},
                                           AdapterCase{"gpt_oss", DType::kF32, {}}, AdapterCase{"gpt_oss", DType::kBF16, {}},
                                           AdapterCase{"afmoe", DType::kBF16, {}}, AdapterCase{"deepseek_v3", DType::kF32, {}},
                                           AdapterCase{"deepseek_v3", DType::kBF16, {}},
                                           AdapterCase{"deepseek_v3_latents", DType::kF32, {}},
                                           AdapterCase{"deepseek_v3_latents", DType::kBF16, {}},
                                           AdapterCase{"gemma3_text", DType::kF32, {}}, AdapterCase{"gemma3_text", DType::kBF16, {}}));

class AdapterOfFamily : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, AdapterOfFamily,
                         ::testing::Values("qwen3", "qwen3_moe", "glm4_moe", "mixtral", "olmo2", "phi3", "qwen3_5_moe_text", "qwen3_next",
                                           "minimax_m2", "afmoe", "deepseek_v3", "deepseek_v3_latents", "gemma3_text", "nemotron_h"));

TEST(Adapter, StartsAsItsBase) {
  SmallModel model("qwen3", true, 2);
  Adapted adapted(model, DType::kF32, config_of(kAll));
  init_adapter(adapted.trained, 5);
  adapted.refresh(DType::kF32);
  const Packed packed = random_packed(model.config.vocab_size, {20, 9}, 4);
  expect_same_bits(evaluate(adapted, adapted.weights, packed), evaluate(adapted, adapted.base, packed), "B is zero");
  EXPECT_EQ(adapted.base->blocks[3].packed, adapted.weights->blocks[3].packed) << "the base is shared";
  EXPECT_NE(checksum(*adapted.weights).combined, checksum(*adapted.base).combined);
}

TEST_P(AdapterOfFamily, GradientsAreThoseOfFiniteDifferences) {
  SmallModel model(GetParam(), false, 2);
  AdapterConfig config = config_of(targets_in(GetParam(), kAll));
  config.modules_to_save = {"lm_head", GetParam() == "nemotron_h" ? "norm_f" : "post_attention_layernorm"};
  config.dropout = model.config.num_experts > 0 ? 0.0 : 0.3;
  Adapted adapted(model, DType::kF32, config);
  // Tokens of which none is about to change its experts, where the loss has a step.
  const bool takes_other_tokens = model.config.has_score_router || GetParam() == "mixtral";
  Packed packed = random_packed(model.config.vocab_size, {12, 7}, GetParam().starts_with("deepseek_v3") ? 10 : takes_other_tokens ? 7 : 6);
  std::vector<float> dlogp(packed.ids.size());
  Rng rng(8);
  draw_normals(rng, dlogp);
  const auto batch = [&] {
    PackedBatch b = packed.batch();
    b.dropout_seed = 99;
    return b;
  };
  std::vector<std::vector<float>> all_grads;
  for (const ActivationCheckpointing& checkpointing : all_checkpointings()) {
    TrainableModel trainable(model.ctx(), adapted.trained, checkpointing);
    adapted.trained.ensure_grads();
    adapted.trained.zero_grads();
    trainable.forward(adapted.weights, batch(), packed.targets, packed.temperatures);
    trainable.backward(dlogp);
    const Tensor& grads = adapted.trained.all_grads();
    all_grads.emplace_back(grads.as<float>(), grads.as<float>() + grads.num_elements());
    // Overwriting instead of adding to zeros.
    adapted.trained.start_grads();
    trainable.forward(adapted.weights, batch(), packed.targets, packed.temperatures);
    trainable.backward(dlogp);
    all_grads.emplace_back(grads.as<float>(), grads.as<float>() + grads.num_elements());
  }
  for (const auto& grads : all_grads) expect_same_bits(grads, all_grads[0], "checkpointing changes no bit");

  TrainableModel trainable(model.ctx(), adapted.trained, {});
  const auto loss = [&] {
    adapted.refresh(DType::kF32);
    const std::vector<float> logp = trainable.forward(adapted.weights, batch(), packed.targets, packed.temperatures).logp_T;
    double sum = 0;
    for (std::size_t i = 0; i < logp.size(); ++i) sum += static_cast<double>(dlogp[i]) * logp[i];
    return sum;
  };
  for (NamedParameter& p : adapted.trained.named()) {
    SCOPED_TRACE(p.name);
    const std::int64_t i = (p.num_elements() * 7 / 11);
    float& value = p.value.as<float>()[i];
    const float before = value, step = 0.02f;
    value = before + step;
    const double up = loss();
    value = before - step;
    const double down = loss();
    value = before;
    const double numeric = (up - down) / (2 * static_cast<double>(step)), analytic = all_grads[0][static_cast<std::size_t>(p.offset + i)];
    EXPECT_NEAR(analytic, numeric, 0.02 * std::abs(numeric) + 0.01);
  }
}

TEST(Adapter, DropoutDependsOnItsSeedAlone) {
  SmallModel model("llama", true, 2);
  AdapterConfig config = config_of(kAll);
  config.dropout = 0.5;
  Adapted adapted(model, DType::kF32, config);
  const Packed packed = random_packed(model.config.vocab_size, {30}, 6);
  TrainableModel trainable(model.ctx(), adapted.trained, {});
  const auto forward = [&](std::uint64_t seed) {
    PackedBatch batch = packed.batch();
    batch.dropout_seed = seed;
    return trainable.forward(adapted.weights, batch, packed.targets, packed.temperatures).logp_T;
  };
  const std::vector<float> first = forward(1);
  EXPECT_EQ(forward(1), first);
  EXPECT_NE(forward(2), first);
  EXPECT_NE(evaluate(adapted, adapted.weights, packed), first) << "nothing is dropped without a tape";
}

TEST_P(AdapterOfFamily, IsWrittenAndReadBackBitForBit) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    SmallModel model(GetParam(), true, 2);
    const bool has_experts = model.config.num_experts > 0;
    const bool has_parts = model.config.has_single_parts;
    const std::string down = has_parts                          ? "layers.2.mixer.experts.2.down_proj"
                             : has_numbered_experts(GetParam()) ? "layers.1.block_sparse_moe.experts.2.w2"
                             : has_experts                      ? "layers.1.mlp.experts.2.down_proj"
                                                                : "layers.1.mlp.down_proj";
    const std::string query = targets_in(GetParam(), {"q_proj"})[0];
    AdapterConfig config = config_of({query, down}, 8);
    config.rank_pattern = {{targets_in(GetParam(), {"down_proj"})[0], 3}};
    config.alpha_pattern = {{(has_parts ? "layers.1.mixer." : "layers.0.self_attn.") + query, 24.0}};
    config.rank_stabilized = true;
    Adapted adapted(model, dtype, config);
    const prl::testing::TempFolder folder;
    save_peft_adapter(*adapted.weights, *adapted.trained.table(), folder.path());
    const AdapterPtr read = load_peft_adapter(model.ctx(), model.config, folder.path(), dtype);
    EXPECT_EQ(read->max_rank(), 8);
    auto weights = std::make_shared<Weights>(*adapted.base);
    weights->adapter = read;
    EXPECT_EQ(checksum(*weights).combined, checksum(*adapted.weights).combined);
    const Packed packed = random_packed(model.config.vocab_size, {25}, 6);
    expect_same_bits(evaluate(adapted, weights, packed), evaluate(adapted, adapted.weights, packed), "read back");
    // In memory it is the same two files.
    const Tensor image = peft_image(*adapted.weights, *adapted.trained.table());
    EXPECT_LE(image.num_elements(), max_peft_image_bytes(model.config));
    const std::string_view all(image.as<char>(), image.num_bytes());
    EXPECT_EQ(all.substr(8), read_file(folder.path() / kPeftConfig) + read_file(folder.path() / kPeftTensors));
    auto from_image = std::make_shared<Weights>(*adapted.base);
    from_image->adapter = load_peft_adapter(model.ctx(), model.config, {"tcp://node0:1/step_3", image}, dtype);
    EXPECT_EQ(checksum(*from_image).combined, checksum(*adapted.weights).combined);
    const AdapterConfig again = load_peft_config(folder.path());
    EXPECT_THAT(again.target_modules, ::testing::ElementsAre((has_parts ? "backbone." : "model.") + down, query));
    EXPECT_TRUE(again.rank_stabilized && again.rank == 8 && again.alpha == 16.0 && again.base_model == "base");
  }
}

TEST_P(AdapterOfFamily, MergingGivesTheAdaptersModel) {
  SmallModel model(GetParam(), false, 2);
  AdapterConfig config = config_of(targets_in(GetParam(), kAll));
  config.modules_to_save = {"lm_head"};
  Adapted adapted(model, DType::kF32, config);
  for (NamedParameter& p : adapted.trained.named())
    if (p.block == Block::kLmHead) p.value.as<float>()[3] += 0.5f;
  adapted.refresh(DType::kF32);
  const prl::testing::TempFolder folder;
  save_merged(adapted.weights, folder.path() / "model", DType::kF32);
  const WeightsPtr merged = load_weights(model.ctx(), load_model_config(folder.path() / "model"), folder.path() / "model", DType::kF32,
                                         PolicyVersion{2}, nullptr);
  const Packed packed = random_packed(model.config.vocab_size, {25, 30}, 6);
  const std::vector<float> got = evaluate(adapted, merged, packed), wanted = evaluate(adapted, adapted.weights, packed),
                           base = evaluate(adapted, adapted.base, packed);
  double worst = 0, from_base = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    worst = std::max(worst, static_cast<double>(std::abs(got[i] - wanted[i])));
    from_base = std::max(from_base, static_cast<double>(std::abs(base[i] - wanted[i])));
  }
  EXPECT_LT(worst, 1e-4);
  EXPECT_GT(from_base, 1e-2);
}

/// PEFT takes a name of modules_to_save as any end of a module's: "norm" would be "q_norm" too.
TEST(SavedModules, NamesMatchNoOthers) {
  SmallModel model("qwen3", false, 2);
  AdapterConfig config = config_of({"q_proj"});
  config.modules_to_save = {"norm", "layers.1.input_layernorm", "post_attention_layernorm"};
  Adapted adapted(model, DType::kF32, config);
  const prl::testing::TempFolder folder;
  save_peft_adapter(*adapted.weights, *adapted.trained.table(), folder.path());
  EXPECT_THAT(load_peft_config(folder.path()).modules_to_save,
              ::testing::ElementsAre("model.layers.1.input_layernorm", "model.norm", "post_attention_layernorm"));
}

/// Tensor by tensor, from the adapter's files: the values of a model that holds the adapter.
TEST_P(AdapterOfFamily, FilesAreMergedAsTheModelIs) {
  SmallModel model(GetParam(), true, 2);
  Adapted adapted(model, DType::kF32, config_of(targets_in(GetParam(), kAll)));
  const prl::testing::TempFolder folder;
  save_peft_adapter(*adapted.weights, *adapted.trained.table(), folder.path());
  const StoredAdapterPtr stored = read_peft_adapter(model.config, folder.path(), DType::kF32, *model.ctx().pool);
  const std::vector<WeightSource> base = merged_sources(adapted.base), wanted = merged_sources(adapted.weights);
  const auto values_of = [](const WeightSource& source) {
    std::vector<float> values(static_cast<std::size_t>(source.shape.num_elements()));
    source.read(0, values);
    return values;
  };
  std::size_t num_adapted = 0;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const std::vector<float> merged = values_of(merged_source(base[i], stored));
    expect_same_bits(merged, values_of(wanted[i]), base[i].name);
    num_adapted += merged != values_of(base[i]) ? 1 : 0;
  }
  EXPECT_EQ(2 * num_adapted, adapted.trained.named().size());
}

TEST(Peft, AnAdapterKnowsTheWeightsThatItWasTrainedOn) {
  SmallModel model("llama", true, 2);
  Adapted adapted(model, DType::kF32, config_of({"q_proj"}, 8));
  const prl::testing::TempFolder folder;
  const WeightsChecksum base = checksum(*adapted.base);
  const auto error = [&](const BaseIdentity& here) {
    return error_of(
        [&] { load_peft_adapter(model.ctx(), model.config, folder.path(), DType::kF32, {.base = [here](DType) { return here; }}); });
  };
  const auto save = [&] { save_peft_adapter(*adapted.weights, *adapted.trained.table(), folder.path()); };
  save();
  EXPECT_EQ(error({DType::kF32, base.combined + 1}), "no error") << "a file that does not say, as those of others do not";
  auto known = std::make_shared<Weights>(*adapted.weights);
  known->base_checksum = std::make_shared<const WeightsChecksum>(base);
  adapted.weights = known;
  save();
  EXPECT_EQ(error({DType::kF32, base.combined}), "no error");
  EXPECT_EQ(error({DType::kBF16, base.combined + 1}), "no error") << "the same weights have another checksum in another type";
  EXPECT_THAT(error({DType::kF32, base.combined + 1}), ::testing::AllOf(HasSubstr(kPeftTensors), HasSubstr("trained on another base model"),
                                                                        HasSubstr(fmt::format("{:016x}", base.combined))));
  EXPECT_EQ(error_of([&] { load_peft_adapter(model.ctx(), model.config, folder.path(), DType::kF32); }), "no error") << "nobody asks";
}

/// Each fault is named with its file, and what would set it right.
TEST(Peft, FaultsAreNamed) {
  SmallModel model("llama", true, 2), wide("llama", true, 2, true);
  Adapted adapted(model, DType::kF32, config_of({"q_proj"}, 8));
  const prl::testing::TempFolder folder;
  save_peft_adapter(*adapted.weights, *adapted.trained.table(), folder.path());
  const auto file = folder.path() / kPeftTensors, json = folder.path() / kPeftConfig;
  const std::string tensors = read_file(file, 1 << 24), config = read_file(json, 1 << 20);
  const auto error = [&](SmallModel& of, PeftLimits limits = {}) {
    return error_of([&] { load_peft_adapter(of.ctx(), of.config, folder.path(), DType::kF32, limits); });
  };
  const auto with_config = [&](std::string_view from, std::string_view to) {
    std::string changed = config;
    const std::size_t at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    changed.replace(at, from.size(), to);
    write_file_atomic(json, changed);
    const std::string message = error(model);
    write_file_atomic(json, config);
    return message;
  };
  EXPECT_EQ(error(model), "no error");
  EXPECT_THAT(error(wide), HasSubstr("the adapter is of another model"));
  EXPECT_THAT(error(model, {.max_rank = 4}), HasSubstr("has rank 8, the largest that is served is 4 (max_lora_rank)"));
  EXPECT_THAT(with_config("\"use_dora\": false", "\"use_dora\": true"), HasSubstr("DoRA (use_dora)"));
  EXPECT_THAT(with_config("\"LORA\"", "\"IA3\""), HasSubstr("peft_type"));
  EXPECT_THAT(with_config("\"bias\": \"none\"", "\"bias\": \"all\""), HasSubstr("bias"));
  EXPECT_THAT(with_config("\"r\": 8", "\"r\": 16"), HasSubstr("has rank 8, adapter_config.json says 16"));
  EXPECT_THAT(with_config("\"modules_to_save\": null", "\"modules_to_save\": [\"lm_head\"]"), HasSubstr("prl convert"));
  EXPECT_THAT(with_config("{", "["), HasSubstr("no JSON object"));

  adapted.trained.named()[0].value.as<float>()[5] = std::nanf("");
  adapted.refresh(DType::kF32);
  save_peft_adapter(*adapted.weights, *adapted.trained.table(), folder.path());
  EXPECT_THAT(error(model), HasSubstr("holds nan at element 5"));
  std::string damaged = tensors;
  damaged[damaged.size() - 3] ^= 1;
  write_file_atomic(file, damaged);
  EXPECT_THAT(error(model), HasSubstr("checksum"));
  write_file_atomic(file, tensors.substr(0, tensors.size() - 100));
  EXPECT_THAT(error(model), HasSubstr(kPeftTensors));
  std::filesystem::remove(file);
  EXPECT_THAT(error(model), HasSubstr(kPeftTensors));
  std::filesystem::remove(json);
  EXPECT_THAT(error(model), HasSubstr("there is no adapter_config.json"));
}

/// The reader is that of the files, so this is about what is before it.
TEST(Peft, FaultsOfAnImageAreNamedWithWhereItIsFrom) {
  SmallModel model("llama", true, 2), wide("llama", true, 2, true);
  Adapted adapted(model, DType::kF32, config_of({"q_proj"}, 8));
  const Tensor image = peft_image(*adapted.weights, *adapted.trained.table());
  const std::string good(image.as<char>(), image.num_bytes());
  const auto error = [&](const std::string& bytes, SmallModel& of, PeftLimits limits = {}) {
    const Tensor changed = Tensor::empty(make_cpu_runtime(), {static_cast<std::int64_t>(bytes.size())}, DType::kU8);
    std::copy(bytes.begin(), bytes.end(), changed.as<char>());
    return error_of([&] { load_peft_adapter(of.ctx(), of.config, {"tcp://node0:1/alpha/step_3", changed}, DType::kF32, limits); });
  };
  const std::string tensors = "tcp://node0:1/alpha/step_3/adapter_model.safetensors";
  EXPECT_EQ(error(good, model), "no error");
  EXPECT_THAT(error(good, wide), ::testing::AllOf(HasSubstr(tensors), HasSubstr("the adapter is of another model")));
  EXPECT_THAT(error(good, model, {.max_rank = 4}),
              ::testing::AllOf(HasSubstr(tensors), HasSubstr("has rank 8, the largest that is served is 4")));
  std::string damaged = good;
  damaged[damaged.size() - 3] ^= 1;
  EXPECT_THAT(error(damaged, model), ::testing::AllOf(HasSubstr(tensors), HasSubstr("checksum")));
  damaged = good;
  damaged[10] = '!';
  EXPECT_THAT(error(damaged, model), HasSubstr("tcp://node0:1/alpha/step_3/adapter_config.json"));
  damaged = good;
  damaged[7] = 1;
  EXPECT_THAT(error(damaged, model), HasSubstr("its adapter_config.json is said to have"));
  for (std::size_t size = 0; size < good.size(); size += 1 + good.size() / 40)
    EXPECT_THAT(error(good.substr(0, size), model), HasSubstr("tcp://node0:1/alpha/step_3")) << size << " bytes";
  adapted.trained.named()[0].value.as<float>()[5] = std::nanf("");
  adapted.refresh(DType::kF32);
  const Tensor wrong = peft_image(*adapted.weights, *adapted.trained.table());
  EXPECT_THAT(error(std::string(wrong.as<char>(), wrong.num_bytes()), model),
              ::testing::AllOf(HasSubstr(tensors), HasSubstr("holds nan at element 5")));
}

}  // namespace
}  // namespace prl::nn
