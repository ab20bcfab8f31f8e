#include "launch/memory_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/parse.hpp>

#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "nn/feature_cache.hpp"
#include "nn/init_model.hpp"
#include "nn/tensor_table.hpp"
#include "ops/lm_head.hpp"

namespace prl::launch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// A model whose activations are many times its parameters.
class MemoryPlanTest : public ::testing::Test {
 protected:
  MemoryPlanTest() {
    std::filesystem::remove_all(folder_);
    nn::init_model({.vocab_size = 64,
                    .hidden_size = 64,
                    .intermediate_size = 160,
                    .num_layers = 6,
                    .num_heads = 4,
                    .num_kv_heads = 2,
                    .head_dim = 16,
                    .max_position = 512},
                   folder_);
    policy_.model = folder_;
    policy_.compute = DType::kBF16;
    policy_.num_threads = 1;
  }
  ~MemoryPlanTest() override { std::filesystem::remove_all(folder_); }
  MemoryPlan planned() { return plan_training(*runtime_, {nn::load_model_config(folder_), policy_, step_, kTokens}); }
  MemoryPlan measured() {
    MemoryPlan plan = planned();
    trainer::Policy policy(runtime_, policy_);
    measure_activations(plan, policy, kTokens);
    return plan;
  }

  static constexpr std::int64_t kTokens = 4096;
  std::filesystem::path folder_ = std::filesystem::temp_directory_path() / ("prl-memory-plan-" + std::to_string(::getpid()));
  std::shared_ptr<DeviceRuntime> runtime_ = make_cpu_runtime();
  trainer::PolicyOptions policy_;
  trainer::GradientStepOptions step_;
};

TEST_F(MemoryPlanTest, RanksOnGpusNeedRoomForWhatTheyGatherAndForTheirGroup) {
  step_.num_ranks = 2;
  const nn::ModelConfig model = nn::load_model_config(folder_);
  constexpr std::size_t kAvailable = std::size_t{64} << 30;
  const MemoryPlan two = foretell_training(kAvailable, {model, policy_, step_, kTokens});
  EXPECT_EQ(two.part("new weights"), 2 * static_cast<std::size_t>(model.num_parameters()));
  EXPECT_GT(two.part("group of ranks"), std::size_t{1} << 30);
  EXPECT_LE(two.total(), kAvailable);
  step_.overlaps_exchange = true;
  EXPECT_GT(foretell_training(kAvailable, {model, policy_, step_, kTokens}).part("group of ranks"), two.part("group of ranks"))
      << "a second one, in which weights are gathered beside other work";
  step_.overlaps_exchange = false;
  step_.reduce = trainer::Reduce::kFast;
  const MemoryPlan fast = foretell_training(kAvailable, {model, policy_, step_, kTokens});
  EXPECT_GE(fast.part("gradients"), 4 * static_cast<std::size_t>(model.num_parameters()) * 3 / 2)
      << "of a rank's rows, and its part of the sum";
  step_.reduce = trainer::Reduce::kExact;
  step_.num_replicas = 2;  // each rank makes all weights from masters of its own
  EXPECT_EQ(foretell_training(kAvailable, {model, policy_, step_, kTokens}).part("new weights"), 0u);
  step_.num_ranks = step_.num_replicas = 1;
  EXPECT_EQ(foretell_training(kAvailable, {model, policy_, step_, kTokens}).part("group of ranks"), 0u);
  step_.num_ranks = 2;
  EXPECT_EQ(foretell_training(kAvailable, {model, policy_, step_, kTokens}, false).part("group of ranks"), 0u) << "ranks on CPUs";
}

TEST_F(MemoryPlanTest, GradientsOfLinearAttentionTakeStatesOfEveryChunk) {
  nn::ModelConfig model = nn::make_model_config({.family = "qwen3_5_text", .num_heads = 16, .num_kv_heads = 16, .head_dim = 128});
  constexpr std::size_t kAvailable = std::size_t{64} << 30;
  const auto states = [&](std::int64_t tokens, bool is_on_gpu = true) {
    return foretell_training(kAvailable, {model, policy_, step_, tokens}, is_on_gpu).part("states of gradients");
  };
  // Of 8,192 tokens at least two states for each chunk, and two numbers for each token's values.
  EXPECT_GE(states(8192), std::size_t{2} * (8192 / 64 * 16 * 128 * 128 + 8192 * 16 * 128) * sizeof(float));
  EXPECT_NEAR(static_cast<double>(states(16384)) / static_cast<double>(states(8192)), 2.0, 0.01);
  EXPECT_EQ(states(8192, false), 0u) << "on a CPU";
  model.linear.layers.clear();
  EXPECT_EQ(states(8192), 0u);
}

TEST_F(MemoryPlanTest, ATowerAndFeaturesAreCountedWhereImagesAreTaken) {
  nn::ModelConfig model = nn::load_model_config(folder_);
  EXPECT_EQ(foretell_training(std::size_t{64} << 30, {model, policy_, step_, kTokens}).part("images"), 0u);
  policy_.takes_images = true;
  model.vision = nn::VisionConfig{};
  const std::size_t found = foretell_training(std::size_t{64} << 30, {model, policy_, step_, kTokens}).part("images");
  EXPECT_EQ(found, nn::tower_bytes(*model.vision, DType::kBF16) + nn::FeatureCache::kMostBytes +
                       nn::tower_pass_bytes(*model.vision, kTokens, DType::kBF16));
}

TEST_F(MemoryPlanTest, ATrainerThatSendsWeightsFromItsDeviceKeepsAFormerVersion) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  constexpr std::size_t kAvailable = std::size_t{64} << 30;
  EXPECT_EQ(foretell_training(kAvailable, {model, policy_, step_, kTokens}).part("weights for engines"), 0u);
  TrainingShape shape{model, policy_, step_, kTokens};
  shape.kept_for_engines = 1;
  const std::size_t of_all = foretell_training(kAvailable, shape).part("weights for engines");
  EXPECT_GE(of_all, 2 * static_cast<std::size_t>(model.num_parameters()));
  shape.kept_for_engines = 0.5;  // two copies of a quarter
  EXPECT_LE(foretell_training(kAvailable, shape).part("weights for engines"), of_all - static_cast<std::size_t>(model.num_parameters()));
}

TEST_F(MemoryPlanTest, IsKeptForThePage) {
  const MemoryPlan plan = planned();
  keep_plan(plan, "trainer", folder_);
  std::stringstream text;
  text << std::ifstream(folder_ / "memory/trainer.json").rdbuf();
  const boost::json::object kept = boost::json::parse(text.str()).as_object();
  EXPECT_EQ(kept.at("process"), "trainer");
  EXPECT_EQ(kept.at("available").to_number<std::size_t>(), plan.available);
  EXPECT_EQ(kept.at("total").to_number<std::size_t>(), plan.total());
  std::size_t sum = 0;
  for (const boost::json::value& part : kept.at("parts").as_array()) {
    EXPECT_EQ(part.at("bytes").to_number<std::size_t>(), plan.part(part.at("name").as_string()));
    sum += part.at("bytes").to_number<std::size_t>();
  }
  EXPECT_EQ(sum, plan.total());
  keep_plan(plan, "trainer", folder_ / "config.json");  // a file where the folder would be: a warning
}

TEST_F(MemoryPlanTest, ForetellsWhatADryStepMeasures) {
  const std::vector<nn::ActivationCheckpointing> all{{}, {1}, {3}, {1, {.norm = true}}, {2, {true, true, true}}};
  std::size_t everything = 0;
  for (const nn::ActivationCheckpointing& checkpointing : all) {
    policy_.checkpointing = checkpointing;
    const MemoryPlan plan = measured();
    const auto found = static_cast<double>(plan.part("activations")), foretold = static_cast<double>(plan.foretold_activations);
    // What ops borrow comes on top: the most of it is the LM head's, and does not depend on what layers keep.
    EXPECT_GT(found, 0.99 * foretold);
    EXPECT_LT(found, 1.01 * foretold + (std::size_t{4} << 20));
    EXPECT_THAT(plan.to_string(), HasSubstr("(foretold "));
    if (everything == 0) everything = plan.part("activations");
    EXPECT_EQ(plan.part("activations") < everything, checkpointing.freq > 0);
  }
}

TEST_F(MemoryPlanTest, KnowsWhereTheOptimizersStateIs) {
  const auto n = static_cast<std::size_t>(nn::load_model_config(folder_).num_parameters());
  EXPECT_EQ(planned().part("optimizer"), 8 * n);
  step_.optimizer_memory.dtype = DType::kBF16;
  EXPECT_EQ(planned().part("optimizer"), 4 * n);
  EXPECT_THAT(planned().to_string(), Not(HasSubstr("host")));
  step_.optimizer_memory = {.dtype = DType::kF32, .host = make_host_link(runtime_, true), .piece_elements = 100};
  EXPECT_EQ(planned().part("optimizer"), 3u * 8 * 100);
  ASSERT_EQ(planned().host.size(), 1u);
  EXPECT_EQ(planned().host[0].second, 8 * n);
  EXPECT_THAT(planned().to_string(), HasSubstr("in host memory: optimizer "));
  step_.optim = config::MuonConfig{};
  EXPECT_GT(planned().host[0].second, 4 * n);
  EXPECT_LT(planned().host[0].second, 8 * n) << "matrices have one momentum, everything else two moments";
}

TEST_F(MemoryPlanTest, KnowsWhatActivationsWaitInHostMemory) {
  const std::size_t everything = planned().part("activations");
  policy_.offload = {make_host_link(runtime_, true), 1};
  EXPECT_LT(planned().part("activations"), everything);
  ASSERT_EQ(planned().host.size(), 1u);
  EXPECT_GT(planned().host[0].second, 0u);
  EXPECT_THAT(planned().to_string(), HasSubstr("in host memory: activations "));
  policy_.offload.max_inflight = 5;  // a place for each of six layers
  EXPECT_EQ(planned().part("activations"), everything);
  EXPECT_THAT(planned().host, ::testing::IsEmpty());
}

TEST_F(MemoryPlanTest, LogitsGetASixthOfWhatIsLeftAndNoMoreThanThereAre) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  const auto row = static_cast<std::size_t>(ops::kept_row_bytes(DType::kBF16, model.vocab_size));
  EXPECT_EQ(affordable_logits(model, DType::kBF16, 100, 6 * 100 * row), 100);
  EXPECT_EQ(affordable_logits(model, DType::kBF16, 100, 6 * 500 * row), 100);
  EXPECT_EQ(affordable_logits(model, DType::kBF16, 100, 6 * 100 * row - 1), 99);
  EXPECT_EQ(affordable_logits(model, DType::kBF16, 100, 0), 0);
  EXPECT_EQ(planned().num_kept_logits, 0) << "a CPU keeps none";
}

TEST_F(MemoryPlanTest, AnEngineAloneGivesItsCacheWhatIsLeft) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  config::InferenceConfig inference;
  inference.max_num_seqs = 4;
  const std::size_t gib = std::size_t{1} << 30;
  const MemoryPlan all = plan_engine(gib, inference, model, DType::kBF16, 2);
  EXPECT_EQ(all.num_kv_blocks, 4 * 512 / 32);
  EXPECT_EQ(all.part("weights"), 2 * static_cast<std::size_t>(model.num_parameters()));
  EXPECT_EQ(all.part("weights in flight"), all.part("weights"));
  EXPECT_EQ(plan_engine(gib, inference, model, DType::kBF16, 3).part("weights in flight"), 2 * all.part("weights"));
  const std::size_t others = all.total() - all.part("KV cache"), block = all.part("KV cache") / 64;
  const auto with_room_for = [&](std::int64_t blocks) {
    // Of what is available a fiftieth is left to the driver.
    const double bytes = static_cast<double>(others + static_cast<std::size_t>(blocks) * block + block / 2) / 0.98;
    return plan_engine(static_cast<std::size_t>(bytes), inference, model, DType::kBF16, 2);
  };
  EXPECT_EQ(with_room_for(20).num_kv_blocks, 20);
  EXPECT_EQ(with_room_for(16).num_kv_blocks, 16);
  try {
    (void)with_room_for(15);
    FAIL() << "accepted a cache that does not hold one sequence";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("KV cache"), HasSubstr("gpu_memory_utilization"), HasSubstr("model.max_model_len")));
  }
  inference.model.max_model_len = 513;
  EXPECT_THROW((void)plan_engine(gib, inference, model, DType::kBF16, 2), Error);
}

TEST_F(MemoryPlanTest, DevicesThatShareLayersHoldAPartOfWeightsAndCache) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  config::InferenceConfig inference;
  inference.kv.num_blocks = 64;
  const std::size_t gib = std::size_t{1} << 30;
  const MemoryPlan one = plan_engine(gib, inference, model, DType::kBF16, 2);
  inference.parallel.tp = 2;
  const MemoryPlan two = plan_engine(gib, inference, model, DType::kBF16, 2);
  EXPECT_EQ(two.part("KV cache"), one.part("KV cache") / 2);
  EXPECT_EQ(one.part("exchange"), 0u);
  EXPECT_GT(two.part("exchange"), 0u);
  // Embedding, head and norms are whole on each of them.
  const std::size_t whole = 2 * static_cast<std::size_t>(model.vocab_size * model.hidden_size) * (model.tie_word_embeddings ? 1 : 2);
  EXPECT_NEAR(static_cast<double>(two.part("weights") - whole), static_cast<double>(one.part("weights") - whole) / 2,
              0.02 * static_cast<double>(one.part("weights")));
  EXPECT_EQ(two.part("weights in flight"), two.part("weights"));
  EXPECT_EQ(two.part(kReceivedWeights), 0u) << "files are read in parts";
  inference.weight_broadcast = config::NcclBroadcast{};
  EXPECT_EQ(plan_engine(gib, inference, model, DType::kBF16, 2).part(kReceivedWeights), one.part("weights"));
  nn::ModelConfig large = model;
  large.vocab_size = 100'000;
  large.hidden_size = 4096;
  const MemoryPlan room = plan_engine(16 * gib, inference, large, DType::kBF16, 2);
  const std::size_t all_weights = room.part("weights") + room.part("weights in flight") + room.part(kReceivedWeights);
  EXPECT_GT(room.part(kReceivedWeights), gib / 2);
  EXPECT_EQ(plan_engine(all_weights * 19 / 10, inference, large, DType::kBF16, 2).part(kReceivedWeights), 0u)
      << "they would leave less than half for all else";
}

TEST_F(MemoryPlanTest, BlocksInHostMemoryAreNamedWithTheHostsPart) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  config::InferenceConfig inference;
  const std::size_t gib = std::size_t{1} << 30;
  const MemoryPlan without = plan_engine(gib, inference, model, DType::kBF16, 2);
  EXPECT_TRUE(without.host.empty());
  inference.kv_cache_offload = config::NativeKvOffloadConfig{.cpu = {.num_bytes = 3 << 20}, .disk = {}};
  const MemoryPlan with = plan_engine(gib, inference, model, DType::kBF16, 2);
  EXPECT_EQ(with.host, (std::vector<std::pair<std::string, std::size_t>>{{"KV blocks", 3 << 20}}));
  EXPECT_EQ(with.num_kv_blocks, without.num_kv_blocks);
}

TEST_F(MemoryPlanTest, AdaptersHaveTheirPlacesBesideTheCache) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  config::InferenceConfig inference;
  const std::size_t gib = std::size_t{1} << 30;
  EXPECT_EQ(plan_engine(gib, inference, model, DType::kBF16, 2).part("adapters"), 0u) << "none are served";
  inference.enable_lora = true;
  inference.max_loras = 3;
  inference.max_lora_rank = 12;
  std::size_t values = 0;  // of rank 16, the next size
  for (const nn::TensorSpec& spec : nn::make_tensor_table(model)->tensors())
    if (spec.is_matrix() && nn::lora_b_of(spec.slot)) values += static_cast<std::size_t>(16 * (spec.shape[0] + spec.shape[1]));
  EXPECT_EQ(plan_engine(gib, inference, model, DType::kBF16, 2).part("adapters"), 4 * values * 2);
}

TEST_F(MemoryPlanTest, TheLeastOfAnEngineBesideATrainerIsWhatItsPlanAddsWhenLittleIsLeft) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  config::InferenceConfig inference;
  inference.max_num_seqs = 4;
  const std::size_t of_version = version_bytes(policy_, model);
  EXPECT_EQ(of_version, 2 * static_cast<std::size_t>(model.num_parameters()));
  const std::size_t least = least_engine_bytes(inference, model, DType::kBF16, of_version);
  const auto added_with = [&](std::size_t left) {
    MemoryPlan plan;
    plan.available = static_cast<std::size_t>(static_cast<double>(left) / 0.98) + 8;  // a fiftieth is left to the driver
    add_engine(plan, inference, model, DType::kBF16, of_version);
    return plan.total();
  };
  EXPECT_EQ(added_with(least), least);
  EXPECT_THROW((void)added_with(least - 64), Error);
  EXPECT_GT(added_with(2 * least), least) << "a cache for more sequences";
  inference.kv.num_blocks = 20;  // 16 hold one sequence
  EXPECT_EQ(added_with(2 * least), least_engine_bytes(inference, model, DType::kBF16, of_version));
  EXPECT_GT(least_engine_bytes(inference, model, DType::kBF16, of_version), least);
}

TEST_F(MemoryPlanTest, VersionsOfAnAdapterShareTheirBase) {
  const nn::ModelConfig model = nn::load_model_config(folder_);
  config::InferenceConfig inference;
  inference.max_num_seqs = 4;
  const std::size_t of_all = version_bytes(policy_, model);
  policy_.lora.emplace().target_modules = {"q_proj", "v_proj"};
  const std::size_t of_adapter = version_bytes(policy_, model);
  EXPECT_GT(of_adapter, 0u);
  EXPECT_LT(of_adapter, of_all);
  EXPECT_EQ(least_engine_bytes(inference, model, DType::kBF16, of_all) - least_engine_bytes(inference, model, DType::kBF16, of_adapter),
            2 * (of_all - of_adapter));
}

TEST_F(MemoryPlanTest, CodesOfProductsStandForTheirValues) {
  nn::ModelConfig model = nn::load_model_config(folder_);
  model.eight_bits = nn::EightBits::kProducts;
  if (!nn::gpus_hold_codes_alone(model, DType::kBF16)) GTEST_SKIP() << "another GPU";
  std::size_t of_codes = 0, of_values = 0;
  for (const nn::TensorSpec& spec : nn::make_tensor_table(model)->tensors())
    (spec.rounds_inputs ? of_codes : of_values) +=
        static_cast<std::size_t>(spec.rounds_inputs ? spec.shape[0] * (spec.shape[1] + 4) : 2 * spec.num_elements());
  ASSERT_GT(of_codes, 0u);
  config::InferenceConfig inference;
  inference.max_num_seqs = 4;
  constexpr std::size_t kAvailable = std::size_t{1} << 33;
  const MemoryPlan from_files = plan_engine(kAvailable, inference, model, DType::kBF16, 2);
  EXPECT_EQ(from_files.part("weights"), of_codes + of_values);
  EXPECT_EQ(from_files.part("weights in flight"), of_codes + of_values);
  inference.weight_broadcast = config::NcclBroadcast{};
  const MemoryPlan received = plan_engine(kAvailable, inference, model, DType::kBF16, 2);
  EXPECT_EQ(received.part("weights"), of_codes + of_values);
  EXPECT_EQ(received.part("weights in flight"), 2 * static_cast<std::size_t>(model.num_parameters()) + of_codes) << "values come first";
}

TEST_F(MemoryPlanTest, RefusesWithTheNumbersWhatCannotFit) {
  const MemoryPlan plan = planned();
  EXPECT_EQ(plan.foretold_activations, 0u);
  EXPECT_EQ(plan.part("optimizer"), 2 * plan.part("masters"));
  EXPECT_EQ(plan.part("nothing"), 0u);
  try {
    (void)plan_training(*runtime_, {nn::load_model_config(folder_), policy_, step_, std::int64_t{1} << 40});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("activations"), HasSubstr("model.ac"), HasSubstr("masters")));
  }
}

}  // namespace
}  // namespace prl::launch
