// Training of low-rank adapters: what is trained, saved, published and counted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/files.hpp"
#include "comm/communicator.hpp"
#include "io/safetensors.hpp"
#include "nn/peft.hpp"
#include "trainer/fake_rollouts.hpp"
#include "trainer/memory.hpp"
#include "trainer/metrics.hpp"
#include "trainer/rl_trainer.hpp"
#include "trainer/test_support.hpp"
#include "weights/collective_channel.hpp"
#include "weights/weight_receiver.hpp"

namespace prl::trainer {
namespace {

using namespace testing_support;
namespace fs = std::filesystem;

PolicyOptions lora_options(const fs::path& folder, double dropout, std::vector<std::string> saved = {}) {
  if (!fs::exists(folder / "config.json")) nn::init_model(tiny_model(), folder);
  PolicyOptions options;
  options.model = folder;
  options.num_threads = 1;
  options.lora = nn::AdapterConfig{.rank = 4,
                                   .alpha = 8,
                                   .dropout = dropout,
                                   .target_modules = {"q_proj", "v_proj", "o_proj", "down_proj", "experts"},
                                   .modules_to_save = std::move(saved),
                                   .rank_pattern = {},
                                   .alpha_pattern = {},
                                   .base_model = "tiny"};
  return options;
}
std::unique_ptr<Policy> make_lora_policy(const fs::path& folder, double dropout = 0, std::vector<std::string> saved = {}) {
  return std::make_unique<Policy>(make_cpu_runtime(), lora_options(folder, dropout, std::move(saved)));
}

RlRunOptions run_options(const fs::path& root, std::int64_t max_steps) {
  config::AdamWConfig adamw;
  adamw.lr = 1e-2;
  RlRunOptions options;
  options.step.optim = adamw;
  options.step.max_steps = max_steps;
  options.seq_len = 48;
  options.checkpoint.emplace();
  options.checkpoint->checkpoints = root / "checkpoints";
  options.checkpoint->weights = root / "weights";
  options.checkpoint->save_adapter = true;
  return options;
}

ReceiverFactory fake_data() {
  return [](std::int64_t first_step) {
    return make_fake_rollouts(
        {.num_micro_batches = 2, .seq_len = 48, .vocab_size = 96, .generate_samples = true, .first_step = first_step, .rank = 0});
  };
}

void train(const RlRunOptions& options, Policy& policy, weights::WeightChannel* channel = nullptr) {
  monitor::Monitor monitor(trainer_metrics());
  run_rl_trainer(options, policy, fake_data(), channel, monitor, {});
}

TEST(LoraTraining, ResumeEqualsUninterruptedBitForBitAndTheBaseStays) {
  for (const bool is_async : {false, true}) {
    Scratch scratch("lora-resume");
    const auto whole = make_lora_policy(scratch.path / "model", 0.1);
    const std::vector<std::vector<float>> start = masters(*whole);
    const nn::WeightsChecksum before = nn::checksum(whole->context(), *whole->weights());
    train(run_options(scratch.path / "a", 6), *whole);

    RlRunOptions options = run_options(scratch.path / "b", 6);
    options.checkpoint->interval = 3;
    options.checkpoint->save_async = is_async;
    auto first = make_lora_policy(scratch.path / "model", 0.1);
    options.step.max_steps = 3;
    train(options, *first);
    first.reset();
    const auto second = make_lora_policy(scratch.path / "model", 0.1);
    options.step.max_steps = 6;
    options.resume.emplace();
    train(options, *second);
    EXPECT_EQ(masters(*whole), masters(*second));
    EXPECT_NE(masters(*whole), start);

    nn::Weights base = *second->weights();
    base.adapter = nullptr;
    base.base_checksum = nullptr;  // formed anew from what lies there
    const nn::WeightsChecksum after = nn::checksum(second->context(), base);
    ASSERT_LT(after.tensors.size(), before.tensors.size());
    for (std::size_t i = 0; i < after.tensors.size(); ++i) EXPECT_EQ(after.tensors[i], before.tensors[i]);

    const auto saved = io::SafetensorsFile::open(scratch.path / "b/checkpoints/step_3/trainer/model.safetensors");
    for (const io::SafetensorsEntry& entry : saved.entries()) EXPECT_THAT(entry.name, ::testing::HasSubstr(".lora_"));
    EXPECT_EQ(saved.entries().size(), second->parameters().named().size());
    options.resume.emplace();
    const auto of_all = make_tiny_policy(scratch.path / "model");
    try {
      train(options, *of_all);
      FAIL() << "a checkpoint of an adapter was read as one of all weights";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("The checkpoint is whole, so it is of another model than model.name"));
    }
  }
}

TEST(LoraTraining, AnAdapterInFloat32LearnsBesideABaseInBfloat16) {
  Scratch scratch("lora-dtype");
  std::vector<std::vector<float>> trained;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const fs::path out = scratch.path / std::string(to_string(dtype));
    PolicyOptions given = lora_options(scratch.path / "model", 0);
    given.compute = DType::kBF16;
    given.adapter_dtype = dtype;
    Policy policy(make_cpu_runtime(), given);
    train(run_options(out, 3), policy);
    const nn::Weights& weights = *policy.weights();
    EXPECT_EQ(weights.compute, DType::kBF16);
    ASSERT_TRUE(weights.adapter);
    EXPECT_EQ(weights.adapter->dtype, dtype);
    const fs::path folder = out / "weights/step_3/lora_adapters";
    const auto stored = dtype == DType::kF32 ? io::StoredType::kF32 : io::StoredType::kBF16;
    for (const io::SafetensorsEntry& entry : io::SafetensorsFile::open(folder / nn::kPeftTensors).entries())
      EXPECT_EQ(entry.type, stored) << entry.name;
    // An engine that reads it computes with the same bits, and knows whose it is.
    nn::Weights read = weights;
    std::string asked;
    read.adapter = nn::load_peft_adapter(policy.context(), policy.config(), folder, dtype, {.base = [&](DType) -> nn::BaseIdentity {
                                           asked = "yes";
                                           return {DType::kBF16, weights.base_checksum->combined};
                                         }});
    EXPECT_EQ(asked, "yes");
    EXPECT_EQ(nn::checksum(policy.context(), read).combined, nn::checksum(policy.context(), weights).combined);
    const std::vector<std::vector<float>> values = masters(policy);
    EXPECT_NE(values, trained) << "both types gave the same";
    trained = values;
  }
}

TEST(LoraTraining, SnapshotsAreTheMergedModelAndTheAdapter) {
  Scratch scratch("lora-saved");
  const auto policy = make_lora_policy(scratch.path / "model", 0, {"post_attention_layernorm"});
  train(run_options(scratch.path, 4), *policy);
  const fs::path folder = scratch.path / "weights/step_4";
  const auto merged = make_tiny_policy(folder);
  wire::MicroBatch row;
  std::vector<std::int32_t> targets;
  for (std::int32_t i = 0; i < 30; ++i) {
    row.input_ids.push_back(i * 7 % 96);
    row.position_ids.push_back(i);
    row.temperatures.push_back(1.0f);
    targets.push_back((i * 7 + 7) % 96);
  }
  row.sequence_lengths = {30};
  const nn::TokenStats wanted = policy->evaluate(row, targets), got = merged->evaluate(row, targets);
  for (std::size_t i = 0; i < targets.size(); ++i) EXPECT_NEAR(got.logp_T[i], wanted.logp_T[i], 1e-4);

  const nn::AdapterPtr adapter = nn::load_peft_adapter(policy->context(), policy->config(), folder / "lora_adapters", DType::kF32,
                                                       {.max_rank = 4, .may_replace_modules = true});
  nn::Weights again = *policy->weights();
  again.adapter = adapter;
  EXPECT_EQ(nn::checksum(policy->context(), again).combined, nn::checksum(policy->context(), *policy->weights()).combined);
  EXPECT_THAT(nn::load_peft_config(folder / "lora_adapters").modules_to_save, ::testing::ElementsAre("post_attention_layernorm"));
}

/// Between processes the adapter alone is sent, and is what the trainer computes with.
TEST(LoraTraining, PublishesTheAdapterAlone) {
  Scratch scratch("lora-published");
  const auto policy = make_lora_policy(scratch.path / "model");
  weights::FileChannelOptions files;
  files.folder = scratch.path / "broadcasts";
  const auto channel = weights::make_file_channel(files);
  RlRunOptions options = run_options(scratch.path, 3);
  options.checkpoint.reset();
  train(options, *policy, channel.get());
  const auto latest = channel->latest();
  ASSERT_TRUE(latest.has_value());
  EXPECT_FALSE(fs::exists(latest->folder / "model.safetensors"));
  nn::Weights held = *policy->weights();
  held.base_checksum = nullptr;
  held.adapter = nn::load_peft_adapter(policy->context(), policy->config(), latest->folder, DType::kF32);
  EXPECT_EQ(nn::checksum(policy->context(), held).combined, latest->manifest.checksum);
}

/// From memory to memory it is the same bytes.
TEST(LoraTraining, PublishesTheAdaptersFilesFromMemory) {
  if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
  Scratch scratch("lora-from-memory");
  const auto policy = make_lora_policy(scratch.path / "model");
  const auto channel =
      weights::make_collective_channel({.folder = scratch.path / "broadcasts", .server = {.timeout = std::chrono::seconds(60)}});
  RlRunOptions options = run_options(scratch.path, 3);
  options.checkpoint.reset();
  train(options, *policy, channel.get());
  const auto latest = channel->latest();
  ASSERT_TRUE(latest.has_value());
  const weights::Received received = weights::WeightReceiver().receive(
      channel->address(), latest->manifest.version, {.adapter = "alpha", .max_adapter_bytes = nn::max_peft_image_bytes(policy->config())},
      std::chrono::seconds(60));
  EXPECT_TRUE(received.is_adapter);
  nn::Weights held = *policy->weights();
  held.base_checksum = nullptr;
  held.adapter = nn::load_peft_adapter(policy->context(), policy->config(), {"memory", received.values}, DType::kF32);
  EXPECT_EQ(nn::checksum(policy->context(), held).combined, latest->manifest.checksum);
  const auto again = make_lora_policy(scratch.path / "model");
  weights::FileChannelOptions files;
  files.folder = scratch.path / "files";
  const auto by_files = weights::make_file_channel(files);
  train(options, *again, by_files.get());
  const std::string_view bytes(received.values.as<char>(), received.values.num_bytes());
  const fs::path folder = by_files->latest()->folder;
  EXPECT_EQ(bytes.substr(sizeof(std::uint64_t)), read_file(folder / nn::kPeftConfig) + read_file(folder / nn::kPeftTensors));
}

TEST(LoraTraining, MemoryAndOperationsAreThoseOfWhatIsTrained) {
  Scratch scratch("lora-memory");
  const PolicyOptions lora = lora_options(scratch.path / "model", 0);
  PolicyOptions all = lora;
  all.lora.reset();
  const nn::ModelConfig model = model_config(lora);
  const nn::TensorTablePtr trained = trained_tensors(lora, model);
  const TrainingBytes of_lora = training_bytes(model, lora, {}), of_all = training_bytes(model, all, {});
  EXPECT_EQ(of_lora.masters, sizeof(float) * static_cast<std::size_t>(trained->num_trainable()));
  EXPECT_EQ(of_lora.optimizer, 2 * of_lora.masters);
  EXPECT_LT(10 * of_lora.gradients, 10 * of_all.gradients);
  EXPECT_EQ(of_lora.weights, of_all.weights + of_lora.masters);

  wire::MicroBatch row;
  row.input_ids.assign(20, 1);
  row.sequence_lengths = {20};
  const std::vector<std::int32_t> targets(20, 2);
  const double head = static_cast<double>(model.vocab_size * model.hidden_size), adapter = static_cast<double>(trained->num_parameters());
  const double body = static_cast<double>(model.num_active_parameters()) - head;
  EXPECT_DOUBLE_EQ(training_flops(model, row, targets) - training_flops(model, row, targets, trained.get()),
                   20 * (2 * body + 2 * head - 6 * adapter));
}

}  // namespace
}  // namespace prl::trainer
