#include "launch/engine_host.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json.hpp>

#include <cmath>

#include "base/files.hpp"
#include "comm/communicator.hpp"
#include "launch/testing/tiny_engine.hpp"
#include "nn/decoder.hpp"
#include "nn/peft.hpp"
#include "server/adapter_book.hpp"
#include "trainer/policy.hpp"
#include "weights/collective_channel.hpp"

namespace prl::launch {
namespace {

TEST(EngineHost, OptionsFollowTheConfigurationAndTheModelsLimits) {
  const testing::TinyModel tiny("options");
  const nn::ModelConfig model = nn::load_model_config(tiny.folder);
  const auto runtime = make_cpu_runtime();
  config::InferenceConfig config = tiny.config();
  EXPECT_EQ(context_length(config, model), 256);
  config.model.max_model_len = 64;
  config.max_num_batched_tokens = 2;
  config.kv.block_size = 8;
  const engine::EngineOptions options = engine_options(config, model, *runtime);
  EXPECT_EQ(options.max_model_len, 64);
  EXPECT_EQ(options.max_num_batched_tokens, 4) << "a step has room for a token of each running request";
  EXPECT_EQ(options.num_blocks, 4 * 64 / 8) << "every running request at full length";
  config.kv.num_blocks = 11;
  EXPECT_EQ(engine_options(config, model, *runtime).num_blocks, 11);
  config.model.max_model_len = 257;
  try {
    context_length(config, model);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("inference.model.max_model_len 257"), std::string::npos) << error.what();
  }
}

TEST(EngineHost, LoadsOtherWeightsOfTheSameModelAndRefusesAnotherModel) {
  const testing::TinyModel first("first", 1), second("second", 2), deeper("deeper", 3, 2);
  EngineHost host(first.config(), make_cpu_runtime());
  const wire::WeightProof before = host.engine().proof(std::chrono::seconds(60));
  const nn::WeightsPtr weights = host.load(second.folder, PolicyVersion{4}, nullptr);
  EXPECT_EQ(weights->version.value, 4);
  const wire::WeightProof after = host.engine().update_weights(weights, std::chrono::seconds(60));
  EXPECT_EQ(after.version.value, 4);
  EXPECT_NE(after.checksum, before.checksum);
  EXPECT_NE(after.probe_logprobs, before.probe_logprobs);
  EXPECT_THROW(host.load(deeper.folder, PolicyVersion{5}, weights), Error);
  host.engine().shutdown();
}

TEST(EngineHost, AnOverrideOfTheRotaryScalingIsAModelWhoseFileHasIt) {
  const testing::TinyModel plain("plain", 1), scaled("scaled", 1), other("other", 2);
  const std::filesystem::path file = scaled.folder / "config.json";
  boost::json::object object = boost::json::parse(read_file(file)).as_object();
  object["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  write_file_atomic(file, boost::json::serialize(object));
  config::InferenceConfig config = plain.config();
  config.model.rope_scaling = config::Value::table();
  config.model.rope_scaling.set("rope_type", config::Value("yarn"));
  config.model.rope_scaling.set("factor", config::Value(4.0));
  config.model.rope_scaling.set("original_max_position_embeddings", config::Value(std::int64_t{64}));
  const auto probes = [](EngineHost& host) { return host.engine().proof(std::chrono::seconds(60)).probe_logprobs; };
  EngineHost own(plain.config(), make_cpu_runtime()), overridden(config, make_cpu_runtime()), written(scaled.config(), make_cpu_runtime());
  EXPECT_EQ(probes(overridden), probes(written));
  EXPECT_NE(probes(overridden), probes(own));
  // Checkpoints of the model, as evaluations load them, are rotated in the same way.
  const nn::WeightsPtr next = overridden.load(other.folder, PolicyVersion{1}, overridden.engine().weights());
  EXPECT_EQ(next->config.yarn, written.engine().model_config().yarn);
  EXPECT_THROW(written.load(other.folder, PolicyVersion{1}, written.engine().weights()), Error) << "without an override both must agree";
  config.model.rope_scaling.set("original_max_position_embeddings", config::Value(std::int64_t{256}));
  EngineHost longer(config, make_cpu_runtime());
  EXPECT_EQ(longer.engine().options().max_model_len, 1024) << "4 times what the model was trained on";
  for (EngineHost* host : {&own, &overridden, &written, &longer}) host->engine().shutdown();
}

TEST(EngineHost, AHeadForMultiTokenPredictionComesWithTheWeightsThatHaveOne) {
  const testing::TinyModel plain("no-head", 1);
  // As a trainer saves them.
  const auto save = [&](const char* name, std::uint64_t seed) {
    trainer::PolicyOptions options;
    options.model = plain.folder;
    options.num_threads = 1;
    options.seed = seed;
    options.mtp = trainer::MtpTrainingOptions{.init = true};
    const std::filesystem::path folder = plain.folder / name;
    trainer::Policy(make_cpu_runtime(), options).save(folder, {.folder = plain.folder, .chat_template = {}}, 1 << 30);
    return folder;
  };
  const std::filesystem::path first = save("first", 1), second = save("second", 2);
  config::InferenceConfig config = plain.config();
  config.speculative.method = config::DraftMethod::kMtp;
  config.speculative.num_tokens = 2;
  EXPECT_THROW(EngineHost(config, make_cpu_runtime()), Error) << "its model has none";
  config.model.name = first.string();
  EngineHost host(config, make_cpu_runtime());
  const nn::WeightsPtr before = host.engine().weights();
  ASSERT_NE(before->mtp, nullptr);
  const auto hash_of_head = [](const nn::WeightsPtr& weights) { return nn::checksum(*weights->mtp).combined; };
  EXPECT_NE(hash_of_head(before), hash_of_head(host.load(second, PolicyVersion{1}, before)));
  const nn::WeightsPtr with_head = host.load(second, PolicyVersion{1}, before), without = host.load(plain.folder, PolicyVersion{2}, before);
  ASSERT_NE(with_head->mtp, nullptr);
  EXPECT_EQ(without->mtp, nullptr);
  host.engine().update_weights(with_head, std::chrono::seconds(60));
  EXPECT_EQ(host.engine().weights()->mtp, with_head->mtp);
  host.engine().update_weights(without, std::chrono::seconds(60));
  ASSERT_NE(host.engine().weights()->mtp, nullptr) << "the one there stays";
  EXPECT_EQ(host.engine().weights()->mtp->version, PolicyVersion{2});
  EXPECT_EQ(hash_of_head(host.engine().weights()), hash_of_head(with_head));
  host.engine().shutdown();
}

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A trainer of an adapter that publishes from its memory, and an engine.
class AdapterFromMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!comm::has_gloo()) GTEST_SKIP() << "this build has no Gloo";
    std::filesystem::remove_all(folder_);
    channel_ = weights::make_collective_channel({.folder = folder_, .server = {.timeout = 60s}});
    config::InferenceConfig config = base_.config();
    config.enable_lora = true;
    config.model.dtype = config::ComputeDType::kFloat32;  // the trainer's, also on a CPU where an engine would choose bfloat16
    host_ = std::make_unique<EngineHost>(config, make_cpu_runtime());
    book_ = std::make_unique<server::AdapterBook>(
        host_->engine().adapters(),
        [this](const std::string& name, const server::WeightSource& source, PolicyVersion version) {
          return host_->receive_adapter(source.store, name, version, max_rank_, 60s);
        },
        4);
  }
  void TearDown() override {
    if (host_ != nullptr) host_->engine().shutdown();
    channel_.reset();
    std::filesystem::remove_all(folder_);
  }
  static std::unique_ptr<trainer::Policy> trainer_on(const testing::TinyModel& base, std::int64_t rank) {
    trainer::PolicyOptions options;
    options.model = base.folder;
    options.num_threads = 1;
    options.lora = nn::AdapterConfig{.rank = rank,
                                     .alpha = 8,
                                     .target_modules = {"q_proj", "down_proj"},
                                     .modules_to_save = {},
                                     .rank_pattern = {},
                                     .alpha_pattern = {},
                                     .base_model = base.folder.string()};
    return std::make_unique<trainer::Policy>(make_cpu_runtime(), std::move(options));
  }
  /// A step of training.
  static void change(trainer::Policy& policy, std::int64_t version, float by = 0.25f) {
    for (const nn::NamedParameter& parameter : policy.parameters().named()) parameter.value.as<float>()[1] += by;
    policy.refresh(PolicyVersion{version});
  }
  weights::WeightManifest publish(trainer::Policy& policy, const std::function<void(Tensor&)>& damage = {}) {
    weights::Publication publication;
    const weights::WeightManifest manifest = publication.manifest = policy.manifest();
    publication.is_adapter = true;
    publication.flat = [&] {
      Tensor image = nn::peft_image(*policy.weights(), *policy.parameters().table());
      if (damage) damage(image);
      return image;
    };
    channel_->publish(std::move(publication));
    return manifest;
  }
  void load(std::int64_t version) { book_->load("alpha", {.folder = {}, .store = channel_->address()}, true, PolicyVersion{version}); }
  std::string refusal(std::int64_t version, ErrorCode code) {
    try {
      load(version);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "nothing was refused";
  }
  /// What is wrong with what the engine holds.
  std::string doubt(const weights::WeightManifest& manifest) {
    const auto error = weights::verify_proof(manifest, host_->engine().proof_of("alpha", 60s));
    return error ? error->what() : "";
  }

  const testing::TinyModel base_{"adapter-base", 1};
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / fmt::format("prl-adapter-memory-{}", ::getpid());
  std::int64_t max_rank_ = 8;
  std::shared_ptr<weights::CollectiveChannel> channel_;
  std::unique_ptr<EngineHost> host_;
  std::unique_ptr<server::AdapterBook> book_;
};

TEST_F(AdapterFromMemory, ProvesToBeTheTrainersBesideOthersAndAsTheModel) {
  const auto policy = trainer_on(base_, 4);
  std::uint64_t before = 0;
  for (const std::int64_t version : {1, 2}) {
    change(*policy, version);
    const weights::WeightManifest manifest = publish(*policy);
    load(version);
    EXPECT_EQ(doubt(manifest), "");
    EXPECT_NE(manifest.checksum, before);
    before = manifest.checksum;
    const nn::WeightsPtr whole = host_->receive(channel_->address(), PolicyVersion{version}, host_->engine().weights(), 60s);
    EXPECT_FALSE(weights::verify_proof(manifest, host_->engine().update_weights(whole, 60s)));
    EXPECT_EQ(doubt(manifest), "") << "the base of adapters by name is not the adapter that took the model's name";
  }
}

TEST_F(AdapterFromMemory, AWrongOneIsRefusedAndTheFormerIsServed) {
  const testing::TinyModel other("adapter-other", 2), deeper("adapter-deeper", 1, 2);
  const auto policy = trainer_on(base_, 4);
  change(*policy, 3);
  const weights::WeightManifest good = publish(*policy);
  load(3);
  const auto on_others = trainer_on(other, 4), on_deeper = trainer_on(deeper, 4), of_high_rank = trainer_on(base_, 16);
  change(*on_others, 4);
  publish(*on_others);
  EXPECT_THAT(refusal(4, ErrorCode::kInvalidArgument),
              AllOf(HasSubstr(channel_->address()), HasSubstr("alpha/step_4"), HasSubstr("another base model")));
  change(*on_deeper, 5);
  publish(*on_deeper);
  EXPECT_THAT(refusal(5, ErrorCode::kInvalidArgument), HasSubstr("none of this"));
  change(*of_high_rank, 6);
  publish(*of_high_rank);
  EXPECT_THAT(refusal(6, ErrorCode::kInvalidArgument), HasSubstr("rank 16, the largest that is served is 8"));
  change(*policy, 7);
  publish(*policy, [](Tensor& image) { image.as<std::uint8_t>()[image.num_elements() - 5] ^= 1; });
  EXPECT_THAT(refusal(7, ErrorCode::kCorrupt), HasSubstr("checksum"));
  EXPECT_THAT(refusal(4, ErrorCode::kNotFound), HasSubstr("no policy v4 of adapter 'alpha' any more; its newest is v7"));
  EXPECT_EQ(doubt(good), "") << "after all of these";
  EXPECT_EQ(book_->list().front().version.value, 3);
  change(*policy, 8);
  const weights::WeightManifest better = publish(*policy);
  load(8);
  EXPECT_EQ(doubt(better), "");
  // What is proven is what came, not what was said of it.
  EXPECT_THAT(doubt(good), HasSubstr("the engine holds version 8"));
}

}  // namespace
}  // namespace prl::launch
