// Devices that share the layers of a model give the bits of one device.
#include "engine/sharded_runner.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <ranges>
#include <string>

#include "base/normal_draws.hpp"
#include "base/testing/eventually.hpp"
#include "base/testing/temp_folder.hpp"
#include "device/testing/test_runtime.hpp"
#include "engine/adapter_set.hpp"
#include "engine/engine.hpp"
#include "engine/test_support.hpp"
#include "nn/init_model.hpp"
#include "nn/peft.hpp"

namespace prl::engine {
namespace {
using namespace std::chrono_literals;
using prl::testing::kPatience;
using testing::Inbox;

constexpr std::int64_t kVocabSize = 1100;
// Behind a family: with attention to latents, and with weights of 8 bits.
constexpr std::string_view kLatents = "_latents", kEight = "_eight";

/// Names of modules with adapters of every kind that a family has. Two of attention take turns.
std::vector<std::string> adapted_modules(const nn::ModelConfig& config, bool has_first) {
  const std::string first = has_first ? "q_proj" : "k_proj";
  if (config.fuses_projections) return {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"};
  if (config.clamped_swiglu) return {first, "v_proj", "o_proj"};
  if (config.has_single_parts) return {first, "v_proj", "in_proj", "out_proj", "fc2_latent_proj", "up_proj", "down_proj"};
  if (config.expert_names == nn::ExpertNames::kNumbered) return {first, "v_proj", "o_proj", "w1", "w2"};
  std::vector<std::string> names = {first, "v_proj", "o_proj", "gate_proj", "down_proj"};
  if (!config.linear.layers.empty()) names.insert(names.end(), {"in_proj_.*", "out_proj"});
  return names;
}

struct Kind {
  const char* family;
  DType compute;
  std::size_t num_devices;
  std::int64_t window = 0;
  std::int64_t num_kv_heads = 4;
};

/// The same weights whole on one device, and shared by several.
class SharedLayersTest : public ::testing::TestWithParam<Kind> {
 protected:
  SharedLayersTest() {
    const std::string family = GetParam().family;
    const bool is_nemotron = family.starts_with("nemotron");
    config_ = nn::make_model_config({.family = family.substr(0, std::min(family.find(kLatents), family.find(kEight))),
                                     .vocab_size = kVocabSize,
                                     .hidden_size = 128,
                                     .intermediate_size = 192,
                                     .num_layers = is_nemotron ? 4 : 2,
                                     .num_heads = 8,
                                     .num_kv_heads = GetParam().num_kv_heads,
                                     .head_dim = 64,
                                     .max_position = 512,
                                     .sliding_window = GetParam().window,
                                     .tie_word_embeddings = false,
                                     .num_experts = 8,
                                     .num_active_experts = 2,
                                     .expert_size = 64});
    if (is_nemotron) config_.expert_input_size = 64;
    config_.attends_to_latents = family.find(kLatents) != std::string::npos;
    if (family.ends_with(kEight)) config_.eight_bits = nn::EightBits::kWeights;
    for (std::size_t rank = 0; rank < GetParam().num_devices; ++rank)
      sessions_.push_back(std::make_unique<ops::OpSession>(make_test_device(rank), 1));
    for (const auto& session : sessions_) devices_.push_back(&session->context());
  }
  nn::Parameters parameters(std::uint64_t seed) {
    nn::Parameters made(sessions_[0]->context().runtime, config_);
    made.init_random(seed, 0.2f);
    return made;
  }
  Tensor values(std::uint64_t seed) { return nn::flat_values(sessions_[0]->context(), parameters(seed), GetParam().compute); }
  nn::WeightsPtr whole(std::uint64_t seed, std::int64_t version) {
    return nn::load_flat_weights(sessions_[0]->context(), config_, values(seed), PolicyVersion{version}, nullptr);
  }
  nn::WeightsPtr shared(std::uint64_t seed, std::int64_t version, const nn::WeightsPtr& previous = nullptr) {
    return nn::load_shared_weights(devices_, config_, values(seed), PolicyVersion{version}, previous);
  }
  /// An adapter of matrices of attention, MLP and experts, as it comes from a file.
  nn::StoredAdapterPtr adapter(std::uint64_t seed) {
    nn::AdapterConfig wanted;
    wanted.rank = static_cast<std::int64_t>(3 + 5 * (seed % 3));
    wanted.alpha = 16;
    wanted.target_modules = adapted_modules(config_, seed % 2 == 0);
    ops::OpContext& ctx = sessions_[0]->context();
    nn::Parameters trained(ctx.runtime, config_, nn::make_adapter_table(config_, wanted));
    Rng rng(seed);
    for (const nn::NamedParameter& p : trained.named()) {
      trained.write_held(p.offset, normal_draws(rng, p.num_elements(), 0.2f));
    }
    const nn::WeightsPtr with_it = nn::adapt_weights(ctx, trained, wanted, GetParam().compute, whole(7, 1), PolicyVersion{1});
    return nn::read_peft_adapter(config_, {"memory", nn::peft_image(*with_it, *trained.table())}, GetParam().compute, *ctx.pool);
  }
  static EngineOptions options() {
    EngineOptions options;
    options.adapters = std::make_shared<AdapterSet>(2);
    options.max_model_len = 256;
    options.num_blocks = 96;
    options.max_num_seqs = 16;
    options.max_num_batched_tokens = 64;
    options.num_threads = 2;
    return options;
  }
  std::unique_ptr<Engine> engine_of(nn::WeightsPtr weights, const EngineOptions& of_engine = options()) const {
    return std::make_unique<Engine>(sessions_[0]->context().runtime, of_engine, std::move(weights));
  }
  /// With temperatures, penalties, bans, prompt log-probabilities and alternatives.
  static std::vector<wire::GenerateRequest> requests() {
    std::vector<wire::GenerateRequest> all;
    const float temperatures[] = {1.0f, 0.7f, 0.0f, 1.3f};
    for (std::uint64_t i = 0; i < 12; ++i) {
      wire::GenerateRequest request;
      Rng rng(i % 5);
      for (std::uint64_t n = 0; n < 3 + (i * 29) % 80; ++n)
        request.prompt_ids.push_back(static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(kVocabSize))));
      request.sampling.max_tokens = static_cast<std::int32_t>(4 + (i * 11) % 17);
      request.sampling.seed = i;
      request.sampling.temperature = temperatures[i % 4];
      request.sampling.ignore_eos = true;
      if (i % 3 == 0) request.sampling.repetition_penalty = 1.2f;
      if (i % 4 == 1) request.sampling.presence_penalty = 0.5f;
      if (i % 6 == 5) request.sampling.prompt_logprobs = 2;
      if (i % 2 == 0) request.sampling.logprobs = 3;
      all.push_back(std::move(request));
    }
    return all;
  }
  /// `adapters`: names that the requests have in turn; "": the model as it is.
  static std::vector<wire::GenerateOutput> run(Engine& engine, const std::vector<std::string>& adapters = {""}) {
    engine.pause(kPatience);  // so that they meet in one batch
    std::vector<std::shared_ptr<Inbox>> inboxes;
    for (const wire::GenerateRequest& request : requests()) {
      inboxes.push_back(std::make_shared<Inbox>());
      engine.submit(
          request, [inbox = inboxes.back()](const StepEvent& event) { inbox->push(event); },
          adapters[(inboxes.size() - 1) % adapters.size()]);
    }
    engine.resume();
    std::vector<wire::GenerateOutput> outputs;
    for (const auto& inbox : inboxes) outputs.push_back(inbox->wait().output);
    return outputs;
  }
  static std::vector<std::uint32_t> bits(const std::vector<float>& values) {
    std::vector<std::uint32_t> out;
    for (const float value : values) out.push_back(std::bit_cast<std::uint32_t>(value));
    return out;
  }
  static void expect_same(const std::vector<wire::GenerateOutput>& got, const std::vector<wire::GenerateOutput>& wanted) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(got[i].error, "") << i;
      EXPECT_EQ(got[i].token_ids, wanted[i].token_ids) << i;
      EXPECT_EQ(bits(got[i].logprobs), bits(wanted[i].logprobs)) << i;
      EXPECT_EQ(bits(got[i].prompt_logprobs), bits(wanted[i].prompt_logprobs)) << i;
      ASSERT_EQ(got[i].top_logprobs.size(), wanted[i].top_logprobs.size()) << i;
      EXPECT_EQ(wanted[i].token_ids.size(), static_cast<std::size_t>(*requests()[i].sampling.max_tokens)) << i;
    }
  }
  static void expect_same(const WeightProof& got, const WeightProof& wanted) {
    EXPECT_EQ(got.version, wanted.version);
    EXPECT_EQ(got.checksum, wanted.checksum);
    EXPECT_EQ(bits(got.probe_logprobs), bits(wanted.probe_logprobs));
  }

  nn::ModelConfig config_;
  std::vector<std::unique_ptr<ops::OpSession>> sessions_;
  std::vector<ops::OpContext*> devices_;
};

/// What has to do with heads and versions, not with what a layer computes.
class SharedBlocksTest : public SharedLayersTest {};

TEST_P(SharedLayersTest, TokensLogprobsAndProofAreThoseOfOneDevice) {
  const auto one = engine_of(whole(7, 1)), several = engine_of(shared(7, 1));
  expect_same(run(*several), run(*one));
  expect_same(several->proof(kPatience), one->proof(kPatience));
}

TEST_P(SharedLayersTest, GuessesChangeNoBit) {
  EngineOptions guessing = options();
  guessing.drafts.num_tokens = 6;
  const auto one = engine_of(whole(7, 1)), several = engine_of(shared(7, 1), guessing);
  const auto wanted = run(*one);
  expect_same(run(*several), wanted);
  expect_same(run(*several), wanted);
  EXPECT_GT(several->stats().num_accepted_tokens, 10) << "the second time they are known";
}

TEST_P(SharedBlocksTest, EachDeviceKeepsItsPartOfBlocksInHostMemory) {
  EngineOptions small = options();
  small.num_blocks = 16;  // of one sequence
  small.num_host_blocks = 256;
  const auto one = engine_of(whole(7, 1)), several = engine_of(shared(7, 1), small);
  const auto wanted = run(*one);
  expect_same(run(*several), wanted);
  expect_same(run(*several), wanted);
  EXPECT_GT(several->stats().num_host_hit_tokens, 0);
  expect_same(several->update_weights(shared(8, 2, several->weights()), kPatience), one->update_weights(whole(8, 2), kPatience));
  expect_same(run(*several), run(*one));
}

TEST_P(SharedBlocksTest, EachDeviceKeepsItsPartOfBlocksInFiles) {
  const prl::testing::TempFolder folder;
  EngineOptions small = options();
  small.num_blocks = 16;  // of one sequence
  small.num_host_blocks = 12;
  small.num_disk_blocks = 256;
  small.disk_folder = folder.path();
  small.disk_read_timeout = std::chrono::seconds(60);
  const auto one = engine_of(whole(7, 1)), several = engine_of(shared(7, 1), small);
  const auto wanted = run(*one);
  for (int i = 0; i < 3; ++i) expect_same(run(*several), wanted);
  EXPECT_GT(several->stats().num_disk_hit_tokens, 0);
  EXPECT_EQ(several->stats().disk.num_damaged + several->stats().disk.num_late, 0);
  expect_same(several->update_weights(shared(8, 2, several->weights()), kPatience), one->update_weights(whole(8, 2), kPatience));
  expect_same(run(*several), run(*one));
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);  // one device's part of many blocks
    file.seekp(64);
    const std::string noise(std::filesystem::file_size(entry.path()) / 2, 'x');
    file << noise;
    break;
  }
  expect_same(run(*several), run(*one));
}

TEST_P(SharedBlocksTest, NewWeightsTakeEffectOnAllDevices) {
  const auto one = engine_of(whole(7, 1)), several = engine_of(shared(7, 1));
  const auto before = run(*several);
  expect_same(several->update_weights(shared(8, 2, several->weights()), kPatience), one->update_weights(whole(8, 2), kPatience));
  const auto after = run(*several);
  expect_same(after, run(*one));
  EXPECT_NE(before[0].token_ids, after[0].token_ids);
  // Those of one device are no weights for several, and the former ones stay.
  EXPECT_THROW(several->update_weights(whole(9, 3), kPatience), Error);
  expect_same(several->proof(kPatience), one->proof(kPatience));
}

TEST_P(SharedLayersTest, RowsOfAdaptersHaveTheBitsOfOneDevice) {
  const auto one = engine_of(whole(7, 1)), several = engine_of(shared(7, 1));
  const std::vector<std::string> names = {"a", "", "b", "c"};  // of which two are ready at a time
  for (const auto& engine : {one.get(), several.get()})
    for (const std::uint64_t seed : {1, 2, 3})
      engine->adapters().set(names[seed == 1 ? 0 : seed], PolicyVersion{1}, {nullptr, adapter(seed)});
  const auto got = run(*several, names), wanted = run(*one, names);
  expect_same(got, wanted);
  EXPECT_NE(bits(got[0].logprobs), bits(run(*several)[0].logprobs)) << "the adapter changed nothing";
  for (const char* name : {"a", "b", "c"}) expect_same(several->proof_of(name, kPatience), one->proof_of(name, kPatience));
  EXPECT_NE(several->proof_of("a", kPatience).checksum, several->proof(kPatience).checksum);
}

TEST_P(SharedBlocksTest, TheAdapterOfAPolicyIsThatOfOneDevice) {
  const nn::StoredAdapterPtr stored = adapter(2);
  auto of_one = std::make_shared<nn::Weights>(*whole(7, 1)), of_several = std::make_shared<nn::Weights>(*shared(7, 1));
  of_one->adapter = nn::pack_adapter(*devices_[0], config_, *stored);
  of_several->adapter = nn::pack_adapter(devices_, config_, *stored);
  for (std::size_t i = 0; i < of_several->others.size(); ++i) {
    auto part = std::make_shared<nn::Weights>(*of_several->others[i]);
    part->adapter = of_several->adapter->others[i];
    of_several->others[i] = part;
  }
  EXPECT_EQ(nn::checksum(*of_several).tensors, nn::checksum(*of_one).tensors);
  EXPECT_NE(nn::checksum(*of_one).combined, nn::checksum(*whole(7, 1)).combined);
  const auto one = engine_of(of_one), several = engine_of(of_several);
  const auto got = run(*several);
  expect_same(got, run(*one));
  EXPECT_NE(bits(got[0].logprobs), bits(run(*engine_of(shared(7, 1)))[0].logprobs)) << "the adapter changed nothing";
  expect_same(several->proof(kPatience), one->proof(kPatience));
}

TEST_P(SharedLayersTest, PartsAreCopiedFromTheFirstDevice) {
  const Tensor host = values(7), there = Tensor::empty(devices_[0]->runtime, host.shape(), host.dtype());
  there.runtime()->copy_from_host(there.data(), host.data(), host.num_bytes());
  there.runtime()->synchronize();
  const auto of_device = nn::load_shared_weights(devices_, config_, there, PolicyVersion{1}, nullptr);
  EXPECT_EQ(nn::checksum(*of_device).tensors, nn::checksum(*shared(7, 1)).tensors);
}

TEST_P(SharedLayersTest, AFolderIsReadInParts) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "shared_layers_model";
  std::filesystem::remove_all(folder);
  const nn::Parameters masters = parameters(7);
  nn::save_pretrained(masters, folder, DType::kF32);
  const auto one = nn::load_weights(*devices_[0], config_, folder, GetParam().compute, PolicyVersion{1}, nullptr);
  const auto several = nn::load_shared_weights(devices_, config_, folder, GetParam().compute, PolicyVersion{1}, nullptr);
  EXPECT_EQ(nn::checksum(*several).tensors, nn::checksum(*one).tensors);
  EXPECT_EQ(nn::checksum(*several).combined, nn::checksum(*shared(7, 1)).combined);
  expect_same(run(*engine_of(several)), run(*engine_of(one)));
  std::filesystem::remove_all(folder);
}

TEST_P(SharedLayersTest, DamagedValuesAreRefusedByTheirTensor) {
  const Tensor damaged = values(7);
  const nn::TensorTablePtr table = nn::make_tensor_table(config_);
  const auto reversed = table->tensors() | std::views::reverse;
  const auto shared =
      std::ranges::find_if(reversed, [](const nn::TensorSpec& spec) { return spec.is_shared && !spec.is_matrix_in_files(); });
  const nn::TensorSpec& last = *shared;  // its last row is the last device's
  std::memset(damaged.as<char>() + static_cast<std::size_t>(last.offset + last.num_elements() - 1) * size_of(damaged.dtype()), 0xff,
              size_of(damaged.dtype()));
  try {
    nn::load_shared_weights(devices_, config_, damaged, PolicyVersion{1}, nullptr);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(last.name));
  }
}

std::string kind_name(const ::testing::TestParamInfo<Kind>& kind) {
  return std::string(kind.param.family) + (kind.param.compute == DType::kBF16 ? "_bf16_" : "_f32_") +
         std::to_string(kind.param.num_devices) + (kind.param.num_kv_heads != 4 ? "_repeated_heads" : "");
}
INSTANTIATE_TEST_SUITE_P(
    Kinds, SharedLayersTest,
    ::testing::Values(Kind{"llama", DType::kF32, 2}, Kind{"qwen2", DType::kF32, 4}, Kind{"qwen3", DType::kBF16, 2},
                      Kind{"qwen2", DType::kBF16, 4}, Kind{"qwen3_moe", DType::kF32, 2}, Kind{"qwen3_moe", DType::kBF16, 4},
                      Kind{"glm4_moe", DType::kF32, 4}, Kind{"glm4_moe", DType::kBF16, 2}, Kind{"smollm3", DType::kBF16, 2},
                      Kind{"mistral", DType::kBF16, 2, 10}, Kind{"mixtral", DType::kBF16, 2}, Kind{"phi3", DType::kBF16, 2},
                      Kind{"olmo2", DType::kF32, 4}, Kind{"olmo3", DType::kBF16, 2, 10}, Kind{"gemma3_text", DType::kBF16, 2, 10},
                      Kind{"minimax_m2", DType::kBF16, 2}, Kind{"afmoe", DType::kF32, 2}, Kind{"gpt_oss", DType::kBF16, 2},
                      Kind{"deepseek_v2", DType::kF32, 2}, Kind{"deepseek_v3", DType::kBF16, 4},
                      Kind{"deepseek_v3_latents", DType::kBF16, 2}, Kind{"qwen3_5_text", DType::kF32, 2},
                      Kind{"qwen3_5_text", DType::kBF16, 4}, Kind{"qwen3_5_moe_text", DType::kBF16, 2}, Kind{"qwen3_next", DType::kBF16, 2},
                      Kind{"nemotron_h", DType::kBF16, 2}, Kind{"glm4_moe_eight", DType::kBF16, 2}, Kind{"qwen2", DType::kF32, 4, 0, 2},
                      Kind{"glm4_moe", DType::kF32, 2, 0, 1}, Kind{"phi3", DType::kF32, 2, 0, 1},
                      Kind{"deepseek_v3_latents_eight", DType::kBF16, 2}),
    kind_name);
INSTANTIATE_TEST_SUITE_P(Kinds, SharedBlocksTest,
                         ::testing::Values(Kind{"llama", DType::kF32, 2}, Kind{"qwen2", DType::kBF16, 4},
                                           Kind{"qwen3_moe", DType::kBF16, 4}, Kind{"mistral", DType::kBF16, 2, 10},
                                           Kind{"deepseek_v3_latents", DType::kF32, 2}, Kind{"qwen2", DType::kBF16, 4, 0, 2}),
                         kind_name);

}  // namespace
}  // namespace prl::engine
