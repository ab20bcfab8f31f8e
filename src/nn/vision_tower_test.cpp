// Features, log-probabilities and files of a model for text and images, against transformers (tools/make_vision_golden.py).
#include "nn/vision_tower.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>

#include "autograd/arena.hpp"
#include "base/error.hpp"
#include "base/files.hpp"
#include "base/testing/temp_folder.hpp"
#include "io/safetensors.hpp"
#include "nn/decoder.hpp"
#include "nn/feature_cache.hpp"
#include "nn/layers.hpp"
#include "nn/test_support.hpp"
#include "nn/weight_files.hpp"
#include "ops/lm_head.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;
using ::testing::HasSubstr;

/// Both sides compute in fp32 and differ in the order of sums. Measured: 6e-6 and 3e-6.
constexpr float kFeatureBound = 3e-5f, kPromptBound = 3e-5f;

class VisionTowerTest : public ::testing::Test {
 protected:
  VisionTowerTest()
      : folder_(test_source_dir() / "tests" / "golden" / "vision"),
        file_(io::SafetensorsFile::open(folder_ / "expected.safetensors")),
        session_(2),
        config_(load_model_config(folder_)) {}
  ops::OpContext& ctx() { return session_.context(); }
  std::vector<float> floats(const std::string& name) const {
    const io::SafetensorsEntry& entry = file_.at(name);
    std::vector<float> out(static_cast<std::size_t>(entry.num_elements()));
    file_.read_f32(entry, 0, out);
    return out;
  }
  std::vector<std::int32_t> ints(const std::string& name) const {
    const auto bytes = file_.bytes(file_.at(name));
    std::vector<std::int32_t> out(bytes.size() / 4);
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  TowerImage picture(const std::string& name) const {
    const io::SafetensorsEntry& entry = file_.at("bytes." + name);
    const auto bytes = file_.bytes(entry);
    return {.rgb = {reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()},
            .height = entry.shape[0],
            .width = entry.shape[1],
            .mean = {127.5f, 127.5f, 127.5f},
            .deviation = {127.5f, 127.5f, 127.5f}};
  }
  WeightsPtr load(DType compute) { return load_weights(ctx(), config_, folder_, compute, PolicyVersion{0}, nullptr); }
  std::vector<float> host(const Tensor& tensor) {
    const Tensor wide = Tensor::empty(ctx().runtime, tensor.shape(), DType::kF32);
    ops::cast(ctx(), wide, tensor);
    std::vector<float> out(static_cast<std::size_t>(tensor.num_elements()));
    ctx().runtime->copy_to_host(out.data(), wide.data(), wide.num_bytes());
    return out;
  }
  /// The prompt of the golden file: where its two pictures begin, and their features.
  std::vector<FeatureRows> features_of_prompt(const VisionTower& tower) {
    const std::vector<std::int32_t> ids = ints("ids");
    std::vector<FeatureRows> out;
    auto from = ids.begin();
    for (const std::string name : {"colours.png", "photo.jpg"}) {
      kept_.push_back(tower.features(ctx(), picture(name)));
      from = std::find(from, ids.end(), config_.vision->image_token_id);
      out.push_back({.rows_NH = kept_.back().view(), .first = from - ids.begin()});
      from += kept_.back().shape()[0];
    }
    return out;
  }
  std::vector<float> logp_of(const Weights& weights, ConstTensorView h_TH, const std::vector<std::int32_t>& ids) {
    const auto T = static_cast<std::int64_t>(ids.size());
    std::vector<std::int32_t> targets(ids.begin() + 1, ids.end());
    targets.push_back(-1);
    const std::vector<float> temperatures(ids.size(), 1.0f);
    const Tensor logp = Tensor::empty(ctx().runtime, {T}, DType::kF32), entropy = Tensor::empty(ctx().runtime, {T}, DType::kF32),
                 lse = Tensor::empty(ctx().runtime, {T}, DType::kF32);
    ops::lm_head_logprob(ctx(), logp, entropy, lse, h_TH, weights.lm_head(), targets, temperatures);
    return host(logp);
  }
  /// Of the whole prompt at once, without a cache.
  std::vector<float> packed_logp(const Weights& weights, InferenceModel& model) {
    const std::vector<std::int32_t> ids = ints("ids"), positions = ints("positions");
    const std::vector<std::int32_t> rows(positions.begin(), positions.begin() + static_cast<std::ptrdiff_t>(ids.size()));
    const std::int32_t bounds[2] = {0, static_cast<std::int32_t>(ids.size())};
    PackedBatch batch{.ids_T = ids, .positions_T = rows, .cu_seqlens = bounds};
    batch.rope_positions_3T = positions;
    const std::vector<FeatureRows> features = features_of_prompt(*weights.vision);
    batch.features = features;
    return logp_of(weights, model.forward_packed(weights, batch), ids);
  }

  fs::path folder_;
  io::SafetensorsFile file_;
  testing_support::TestSession session_;
  ModelConfig config_;
  std::vector<Tensor> kept_;
};

float worst_of(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  float worst = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) worst = std::max(worst, std::isnan(a[i]) ? 1e9f : std::abs(a[i] - b[i]));
  return worst;
}

TEST_F(VisionTowerTest, FeaturesAreThoseOfTransformers) {
  const WeightsPtr weights = load(DType::kF32);
  ASSERT_NE(weights->vision, nullptr);
  for (const std::string name : {"colours.png", "photo.jpg", "clear.png", "grey.png"}) {
    const std::vector<float> got = host(weights->vision->features(ctx(), picture(name)));
    const float worst = worst_of(got, floats("features." + name));
    EXPECT_LT(worst, kFeatureBound) << name;
    RecordProperty(name, std::to_string(worst));
  }
}

TEST_F(VisionTowerTest, LogProbabilitiesOfAPromptWithTwoPicturesAreThoseOfTransformers) {
  const WeightsPtr weights = load(DType::kF32);
  InferenceModel model(ctx());
  const float worst = worst_of(packed_logp(*weights, model), floats("logp"));
  EXPECT_LT(worst, kPromptBound);
  RecordProperty("worst", std::to_string(worst));
}

/// Parts of any size, through the pictures, over a paged cache: the bits of the whole prompt.
TEST_F(VisionTowerTest, PartsOfAPromptGiveTheBitsOfTheWhole) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const WeightsPtr weights = load(compute);
    InferenceModel model(ctx());
    const std::vector<float> whole = packed_logp(*weights, model);
    const std::vector<std::int32_t> ids = ints("ids"), positions = ints("positions");
    const std::vector<FeatureRows> features = features_of_prompt(*weights->vision);
    const auto T = static_cast<std::int64_t>(ids.size());
    for (const std::int64_t step : {std::int64_t{1}, std::int64_t{7}, std::int64_t{40}}) {
      constexpr std::int64_t kBlock = 16;
      KvCache cache(ctx().runtime, config_, compute, 8, kBlock, false, 1);
      const std::vector<std::int32_t> blocks{5, 0, 3, 7, 1}, states{0};
      const Tensor h = Tensor::empty(ctx().runtime, {T, config_.hidden_size}, compute);
      for (std::int64_t first = 0; first < T; first += step) {
        const std::int64_t count = std::min(step, T - first), end = first + count;
        std::vector<std::int32_t> slots, axes, rows;
        for (std::int64_t t = first; t < end; ++t) {
          slots.push_back(static_cast<std::int32_t>(blocks[static_cast<std::size_t>(t / kBlock)] * kBlock + t % kBlock));
          rows.push_back(positions[static_cast<std::size_t>(t)]);
        }
        for (std::int64_t axis = 0; axis < 3; ++axis)
          for (std::int64_t t = first; t < end; ++t) axes.push_back(positions[static_cast<std::size_t>(axis * T + t)]);
        std::vector<FeatureRows> within;
        for (const FeatureRows& of : features) {
          const std::int64_t from = std::max(first, of.first), to = std::min(end, of.first + of.rows_NH.shape[0]);
          if (from < to) within.push_back({.rows_NH = of.rows_NH.rows(from - of.first, to - from), .first = from - first});
        }
        const std::vector<std::int32_t> query_start{0, static_cast<std::int32_t>(count)}, context{static_cast<std::int32_t>(end)};
        PagedBatch batch{.ids_T = std::span(ids).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)),
                         .positions_T = rows,
                         .slot_T = slots,
                         .query_start = query_start,
                         .context_len = context,
                         .block_table = blocks,
                         .max_blocks = 5,
                         .state_slot = states};
        // Parts of text alone take the other path, of one position for all axes.
        if (!within.empty()) batch.rope_positions_3T = axes;
        batch.features = within;
        const TensorView part = model.forward_paged(*weights, cache, batch);
        ctx().runtime->copy_within(h.slice(first, count).data(), part.data,
                                   static_cast<std::size_t>(count * config_.hidden_size) * size_of(compute));
      }
      EXPECT_EQ(logp_of(*weights, h, ids), whole) << to_string(compute) << ", parts of " << step;
    }
  }
}

TEST_F(VisionTowerTest, FeaturesDependOnThePictureAlone) {
  const WeightsPtr weights = load(DType::kBF16);
  const std::vector<float> first = host(weights->vision->features(ctx(), picture("photo.jpg")));
  weights->vision->features(ctx(), picture("colours.png"));
  EXPECT_EQ(host(weights->vision->features(ctx(), picture("photo.jpg"))), first);
  testing_support::TestSession other(1);
  const Tensor alone = weights->vision->features(other.context(), picture("photo.jpg"));
  EXPECT_EQ(host(alone), first) << "another number of threads";
}

TEST_F(VisionTowerTest, WeightsWithoutATowerLeaveTheOneThatIsThere) {
  const WeightsPtr first = load(DType::kF32);
  EXPECT_EQ(load_flat_weights(ctx(), config_, flat_values(first), PolicyVersion{1}, first)->vision, first->vision);
  EXPECT_EQ(load_weights(ctx(), config_, folder_, DType::kF32, PolicyVersion{0}, nullptr, true)->vision, nullptr) << "of a trainer";
  EXPECT_EQ(checksum(*first).combined, checksum(*load_weights(ctx(), config_, folder_, DType::kF32, {}, nullptr, true)).combined)
      << "a frozen tower is no part of what a trainer and an engine compare";
}

/// The folder that a trainer saves is one for text and images again, with the tower bit for bit and the decoder's tensors as they are.
TEST_F(VisionTowerTest, ASavedFolderKeepsTheTower) {
  Parameters parameters(ctx().runtime, config_);
  load_parameters(parameters, folder_);
  const prl::testing::TempFolder temporary;
  const fs::path saved = temporary.path() / "saved";
  save_pretrained(parameters, saved, DType::kBF16, {.folder = folder_, .chat_template = {}});
  const io::SafetensorsFile before = io::SafetensorsFile::open(folder_ / "model.safetensors"),
                            after = io::SafetensorsFile::open(saved / "model.safetensors");
  EXPECT_EQ(before.entries().size(), after.entries().size());
  for (const io::SafetensorsEntry& entry : before.entries()) {
    const io::SafetensorsEntry& other = after.at(entry.name);
    EXPECT_EQ(other.shape, entry.shape) << entry.name;
    EXPECT_EQ(other.type, entry.type) << entry.name;
    EXPECT_TRUE(std::ranges::equal(before.bytes(entry), after.bytes(other))) << entry.name;
  }
  EXPECT_THAT(read_file(saved / "config.json"), HasSubstr("Qwen3_5ForConditionalGeneration"));
  EXPECT_TRUE(fs::exists(saved / "preprocessor_config.json"));
  const ModelConfig again = load_model_config(saved);
  ASSERT_TRUE(again.vision);
  const WeightsPtr read = load_weights(ctx(), again, saved, DType::kF32, {}, nullptr);
  EXPECT_EQ(host(read->vision->features(ctx(), picture("grey.png"))),
            host(load(DType::kF32)->vision->features(ctx(), picture("grey.png"))));
}

TEST_F(VisionTowerTest, WhatIsWrongIsNamed) {
  const prl::testing::TempFolder temporary;
  const io::SafetensorsFile original = io::SafetensorsFile::open(folder_ / "model.safetensors");
  const auto write = [&](const std::string& without, const std::string& more) {
    std::vector<io::SafetensorsWriter::Spec> specs;
    for (const io::SafetensorsEntry& entry : original.entries())
      if (entry.name != without) specs.push_back({entry.name, entry.type, entry.shape});
    if (!more.empty()) specs.push_back({more, io::StoredType::kBF16, {2}});
    io::SafetensorsWriter writer(temporary.path() / "model.safetensors", specs, {});
    for (const io::SafetensorsWriter::Spec& spec : specs)
      writer.append(spec.name == more ? std::span<const std::byte>(std::vector<std::byte>(4)) : original.bytes(original.at(spec.name)));
    writer.finish();
  };
  const auto expect_said = [&](const std::string& said, const auto& body) {
    try {
      body();
      ADD_FAILURE() << "no error, wanted: " << said;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(said));
    }
  };
  const std::string config = read_file(folder_ / "config.json");
  const auto configured = [&](const std::string& from, const std::string& to) {
    std::string text = config;
    text.replace(text.find(from), from.size(), to);
    std::ofstream(temporary.path() / "config.json") << text;
    return load_model_config(temporary.path());
  };
  const auto load_there = [&] { load_weights(ctx(), config_, temporary.path(), DType::kF32, {}, nullptr); };
  write("model.visual.blocks.1.attn.qkv.bias", "");
  expect_said("'model.visual.blocks.1.attn.qkv.bias' of the vision tower is missing", load_there);
  write("", "model.visual.deepstack_merger_list.0.norm.bias");
  expect_said("'model.visual.deepstack_merger_list.0.norm.bias' is no part of a vision tower", load_there);
  expect_said("num_position_embeddings", [&] { configured(R"("num_position_embeddings": 36)", R"("num_position_embeddings": 37)"); });
  expect_said("out_hidden_size", [&] { configured(R"("out_hidden_size": 48)", R"("out_hidden_size": 44)"); });
  expect_said("mrope_interleaved", [&] { configured(R"("mrope_interleaved": true)", R"("mrope_interleaved": false)"); });
  expect_said("deepstack_visual_indexes", [&] { configured(R"("depth": 2)", R"("deepstack_visual_indexes": [1], "depth": 2)"); });
  fs::remove(temporary.path() / "model.safetensors");
  EXPECT_FALSE(configured("1", "1").vision) << "no files, no tower";
}

TEST_F(VisionTowerTest, FeaturesAreKeptWhileTheyAreUsed) {
  const WeightsPtr weights = load(DType::kF32);
  const TowerImage first = picture("grey.png"), second = picture("photo.jpg");
  FeatureCache cache(ctx(), /*most_bytes=*/1);
  const auto pass = [&](std::initializer_list<int> pictures) {
    cache.begin_pass(weights->vision.get());
    for (const int i : pictures) {
      const std::vector<float> rows = host(cache.features({static_cast<std::uint64_t>(i), 0}, i == 1 ? first : second));
      EXPECT_LT(worst_of(rows, floats(i == 1 ? "features.grey.png" : "features.photo.jpg")), kFeatureBound);
    }
    return cache.num_computed();
  };
  EXPECT_EQ(pass({1, 2, 1}), 2);
  EXPECT_EQ(pass({2}), 2) << "both are those of the last pass";
  EXPECT_EQ(pass({2, 1}), 3) << "the first was not, and there is no room for it";
  FeatureCache wide(ctx());
  wide.begin_pass(weights->vision.get());
  const std::vector<float> rows = host(wide.features({1, 0}, first));
  const VisionTowerPtr other = VisionTower::load(ctx(), *config_.vision, folder_, DType::kF32);
  wide.begin_pass(other.get());
  EXPECT_EQ(host(wide.features({1, 0}, first)), rows);
  EXPECT_EQ(wide.num_computed(), 2) << "of another tower";
}

TEST_F(VisionTowerTest, TrainingGivesTheBitsOfInference) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const WeightsPtr serving = load(compute);
    InferenceModel inference(ctx());
    Parameters parameters(ctx().runtime, config_);
    load_parameters(parameters, folder_);
    parameters.ensure_grads();
    parameters.zero_grads();
    TrainableModel model(ctx(), parameters, {});
    const WeightsPtr weights = make_weights(ctx(), parameters, compute, {}, true, nullptr);
    const std::vector<std::int32_t> ids = ints("ids"), positions = ints("positions");
    const std::vector<std::int32_t> rows(positions.begin(), positions.begin() + static_cast<std::ptrdiff_t>(ids.size()));
    const std::int32_t bounds[2] = {0, static_cast<std::int32_t>(ids.size())};
    std::vector<std::int32_t> targets(ids.begin() + 1, ids.end());
    targets.push_back(-1);
    const std::vector<float> temperatures(ids.size(), 1.0f);
    const std::vector<FeatureRows> features = features_of_prompt(*serving->vision);
    PackedBatch batch{.ids_T = ids, .positions_T = rows, .cu_seqlens = bounds, .rope_positions_3T = positions, .features = features};
    EXPECT_EQ(model.forward(weights, batch, targets, temperatures).logp_T, packed_logp(*serving, inference));
    model.backward(std::vector<float>(ids.size(), 0.1f));
    batch.rope_positions_3T = batch.rope_positions_3T.subspan(1);
    EXPECT_THROW(model.forward(weights, batch, targets, temperatures), Error);
  }
}

}  // namespace
}  // namespace prl::nn
