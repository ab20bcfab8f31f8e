// Rows with images: the values of inference bit for bit, however they are packed, cut and recomputed, and gradients that miss nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "device/testing/test_runtime.hpp"
#include "ops/lm_head.hpp"
#include "text/tokenizer_builder.hpp"
#include "trainer/sft/row_packer.hpp"
#include "trainer/test_support.hpp"

namespace prl::trainer {
namespace {

/// The model of tests/golden/vision: tokens of 8 x 8 pixels.
constexpr std::int32_t kPlaceholderId = 261;

wire::PromptImage picture_at(std::int64_t first, std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
  auto pixels = std::make_shared<wire::ImagePixels>();
  Rng rng(seed);
  for (std::int64_t i = 0; i < 3 * 64 * rows * cols; ++i) pixels->rgb.push_back(static_cast<std::uint8_t>(rng.next_below(256)));
  pixels->height = 8 * rows;
  pixels->width = 8 * cols;
  pixels->mean = pixels->deviation = {127.5f, 127.5f, 127.5f};
  pixels->hash = wire::hash_of(*pixels);
  return {.pixels = pixels, .first = first, .rows = rows, .cols = cols};
}

/// A sample of `num_text` tokens before each of its pictures and behind the last.
struct ImageSample {
  std::vector<std::int32_t> ids;
  std::vector<wire::PromptImage> images;
  ImageSample(std::uint64_t seed, int num_text, std::vector<std::array<std::int64_t, 2>> grids) {
    Rng rng(seed);
    const auto text = [&] {
      for (int i = 0; i < num_text; ++i) ids.push_back(static_cast<std::int32_t>(3 + rng.next_below(60)));
    };
    text();
    for (const auto& [rows, cols] : grids) {
      images.push_back(picture_at(static_cast<std::int64_t>(ids.size()), rows, cols, seed + images.size()));
      ids.insert(ids.end(), static_cast<std::size_t>(rows * cols), kPlaceholderId);
      text();
    }
  }
};

wire::MicroBatch row_with_images(const std::vector<ImageSample>& samples) {
  wire::MicroBatch row;
  for (const ImageSample& sample : samples) {
    for (wire::PromptImage image : sample.images) {
      image.first += static_cast<std::int64_t>(row.input_ids.size());
      row.images.push_back(image);
    }
    for (std::size_t i = 0; i < sample.ids.size(); ++i) row.position_ids.push_back(static_cast<std::int32_t>(i));
    row.input_ids.insert(row.input_ids.end(), sample.ids.begin(), sample.ids.end());
    row.sequence_lengths.push_back(static_cast<std::int32_t>(sample.ids.size()));
    row.env_names.push_back("env");
  }
  row.temperatures.assign(row.input_ids.size(), 1.0f);
  return row;
}

std::vector<std::int32_t> next_ids(const wire::MicroBatch& row) {
  std::vector<std::int32_t> targets(row.input_ids.begin() + 1, row.input_ids.end());
  targets.push_back(-1);
  std::int32_t end = 0;
  for (const std::int32_t n : row.sequence_lengths) targets[static_cast<std::size_t>((end += n) - 1)] = -1;
  return targets;
}

PolicyOptions image_options(DType compute = DType::kF32) {
  PolicyOptions options;
  options.model = test_source_dir() / "tests" / "golden" / "vision";
  options.compute = compute;
  options.num_threads = 2;
  options.takes_images = true;
  return options;
}

std::vector<float> on_host(const Tensor& values) {
  std::vector<float> out(static_cast<std::size_t>(values.num_elements()));
  values.runtime()->copy_to_host(out.data(), values.data(), values.num_bytes());
  return out;
}

std::vector<float> logp_of(Policy& policy, const ImageSample& sample) {
  const wire::MicroBatch row = row_with_images({sample});
  return policy.forward(row, next_ids(row)).logp_T;
}

/// What an engine computes in one pass, which is what it computes in any parts (engine/images_test.cpp).
std::vector<float> logp_without_tape(Policy& policy, const ImageSample& sample) {
  const nn::WeightsPtr weights = policy.weights();
  const auto tower = nn::VisionTower::load(policy.context(), *policy.config().vision, policy.options().model, policy.options().compute);
  const auto T = static_cast<std::int64_t>(sample.ids.size());
  const std::vector<std::int32_t> axes = wire::rope_positions(sample.images, T), bounds{0, static_cast<std::int32_t>(T)};
  std::vector<std::int32_t> positions(axes.begin(), axes.begin() + T);
  std::vector<Tensor> kept;
  std::vector<nn::FeatureRows> features;
  for (const wire::PromptImage& image : sample.images) {
    const wire::ImagePixels& p = *image.pixels;
    kept.push_back(tower->features(policy.context(), {p.rgb, p.height, p.width, p.mean, p.deviation}));
    features.push_back({.rows_NH = kept.back().view(), .first = image.first});
  }
  nn::InferenceModel model(policy.context());
  const TensorView h = model.forward_packed(
      *weights, {.ids_T = sample.ids, .positions_T = positions, .cu_seqlens = bounds, .rope_positions_3T = axes, .features = features});
  const Tensor logp = Tensor::empty(policy.context().runtime, {T}, DType::kF32), entropy = logp.clone(), lse = logp.clone();
  const wire::MicroBatch row = row_with_images({sample});
  ops::lm_head_logprob(policy.context(), logp, entropy, lse, h, weights->lm_head(), next_ids(row), row.temperatures);
  return on_host(logp);
}

std::vector<float> all_grads(Policy& policy) { return on_host(policy.parameters().all_grads()); }

/// Of log-probabilities in an objective: weights that differ, none of placeholders, which no sample trains.
float weight_of(std::size_t token, std::int32_t target) {
  return target < 0 || target == kPlaceholderId ? 0.0f : 0.1f * static_cast<float>(1 + token % 5);
}

std::vector<float> grads_of(Policy& policy, const wire::MicroBatch& row) {
  policy.parameters().zero_grads();
  const std::vector<std::int32_t> targets = next_ids(row);
  policy.forward(row, targets);
  std::vector<float> dlogp;
  for (std::size_t i = 0; i < targets.size(); ++i) dlogp.push_back(weight_of(i, targets[i]));
  policy.backward(dlogp);
  return all_grads(policy);
}

class TrainerImagesTest : public ::testing::TestWithParam<DType> {
 protected:
  const ImageSample one_{1, 6, {{2, 3}, {4, 2}}}, other_{2, 5, {{3, 3}}}, text_{3, 11, {}};
};

TEST_P(TrainerImagesTest, LogProbabilitiesAreThoseOfInference) {
  Policy policy(make_test_runtime(), image_options(GetParam()));
  for (const ImageSample* sample : {&one_, &other_, &text_}) {
    const std::vector<float> wanted = logp_without_tape(policy, *sample);
    EXPECT_EQ(logp_of(policy, *sample), wanted);
    const wire::MicroBatch row = row_with_images({*sample});
    EXPECT_EQ(policy.evaluate(row, next_ids(row)).logp_T, wanted);
  }
  // Another picture of the same shape gives others.
  ImageSample changed = other_;
  changed.images[0] = picture_at(changed.images[0].first, 3, 3, 99);
  EXPECT_NE(logp_of(policy, changed), logp_of(policy, other_));
}

TEST_P(TrainerImagesTest, PackingAndLeavesChangeNoBit) {
  Policy policy(make_test_runtime(), image_options(GetParam()));
  std::vector<float> apart;
  for (const ImageSample* sample : {&one_, &text_, &other_}) {
    const std::vector<float> logp = logp_of(policy, *sample);
    apart.insert(apart.end(), logp.begin(), logp.end());
  }
  const wire::MicroBatch row = row_with_images({one_, text_, other_});
  EXPECT_EQ(policy.forward(row, next_ids(row)).logp_T, apart);
  policy.share_rows({.num_leaves = 4, .num_ranks = 1}, nullptr);
  EXPECT_EQ(policy.forward(row, next_ids(row)).logp_T, apart);
}

TEST_P(TrainerImagesTest, RecomputationChangesNoBitOfAGradient) {
  const wire::MicroBatch row = row_with_images({one_, other_});
  Policy keeping(make_test_runtime(), image_options(GetParam()));
  const std::vector<float> wanted = grads_of(keeping, row);
  PolicyOptions options = image_options(GetParam());
  options.checkpointing.freq = 1;
  Policy recomputing(make_test_runtime(), options);
  EXPECT_EQ(grads_of(recomputing, row), wanted);
  options.checkpointing.parts = {.norm = true, .attn_proj = true, .mlp = true};
  Policy selective(make_test_runtime(), options);
  EXPECT_EQ(grads_of(selective, row), wanted);
}

INSTANTIATE_TEST_SUITE_P(Types, TrainerImagesTest, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& test) { return test.param == DType::kF32 ? "f32" : "bf16"; });

/// The embedding is the head, too: a row of it that images' tokens would wrongly reach shows as a difference to what it truly changes.
TEST(TrainerImages, GradientsAreThoseOfDifferences) {
  Policy policy(make_test_runtime(), image_options());
  const wire::MicroBatch row = row_with_images({ImageSample(1, 6, {{2, 3}, {4, 2}})});
  const std::vector<float> grads = grads_of(policy, row);
  const std::vector<std::int32_t> targets = next_ids(row);
  const auto objective = [&] {
    const std::vector<float> logp = policy.evaluate(row, targets).logp_T;
    double sum = 0;
    for (std::size_t i = 0; i < targets.size(); ++i)
      if (const float weight = weight_of(i, targets[i]); weight != 0) sum += static_cast<double>(weight) * static_cast<double>(logp[i]);
    return sum;
  };
  const std::int64_t H = policy.config().hidden_size;
  int num_checked = 0;
  for (const nn::NamedParameter& p : policy.parameters().named()) {
    const bool is_embedding = p.block == nn::Block::kEmbedding;
    if (!is_embedding && p.num_elements() < 1000) continue;
    // Of the embedding: the placeholder's row.
    const std::int64_t begin = is_embedding ? kPlaceholderId * H : 0, count = is_embedding ? H : p.num_elements();
    const Tensor values = p.value.reshaped({p.num_elements()}).slice(begin, count);
    double wanted = 0;
    for (std::int64_t i = 0; i < count; ++i)
      wanted += std::pow(static_cast<double>(grads[static_cast<std::size_t>(p.offset + begin + i)]), 2);
    const double length = std::sqrt(wanted);
    ASSERT_GT(length, 0) << p.name;
    const std::vector<float> before = on_host(values);
    constexpr double kStep = 3e-3;
    const auto set = [&](double by) {
      std::vector<float> moved = before;
      for (std::size_t i = 0; i < moved.size(); ++i)
        moved[i] += static_cast<float>(by * static_cast<double>(grads[static_cast<std::size_t>(p.offset + begin) + i]) / length);
      values.runtime()->copy_from_host(values.data(), moved.data(), values.num_bytes());
      policy.refresh(PolicyVersion{1});
      return objective();
    };
    const double found = (set(kStep) - set(-kStep)) / (2 * kStep);
    set(0);
    EXPECT_NEAR(found / length, 1.0, 0.03) << p.name;
    ++num_checked;
  }
  EXPECT_GE(num_checked, 5);
}

TEST(TrainerImages, AdaptersTrainBesideAFrozenTower) {
  PolicyOptions options = image_options();
  options.lora = nn::AdapterConfig{.rank = 4,
                                   .alpha = 8,
                                   .target_modules = {"q_proj", "v_proj", "down_proj"},
                                   .modules_to_save = {},
                                   .rank_pattern = {},
                                   .alpha_pattern = {},
                                   .base_model = "golden"};
  Policy whole(make_test_runtime(), image_options()), adapted(make_test_runtime(), options);
  const ImageSample sample(1, 6, {{2, 3}});
  EXPECT_EQ(logp_of(adapted, sample), logp_of(whole, sample));
  const std::vector<float> grads = grads_of(adapted, row_with_images({sample}));
  EXPECT_TRUE(std::ranges::any_of(grads, [](float g) { return g != 0; }));
}

TEST(TrainerImages, RowsThatDoNotFitAreRefused) {
  const auto said = [](Policy& policy, const wire::MicroBatch& row) -> std::string {
    try {
      policy.forward(row, next_ids(row));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  const wire::MicroBatch good = row_with_images({ImageSample(1, 6, {{2, 3}})});
  PolicyOptions options = image_options();
  Policy policy(make_test_runtime(), options);
  EXPECT_EQ(said(policy, good), "no error");
  wire::MicroBatch bad = good;
  bad.input_ids[8] = 5;
  EXPECT_THAT(said(policy, bad), ::testing::HasSubstr("stands on token 8 of a row, which is id 5"));
  bad = good;
  bad.images[0] = picture_at(6, 3, 2, 1);
  bad.images[0].cols = 1;
  EXPECT_THAT(said(policy, bad), ::testing::HasSubstr("brought to its size for another model"));
  options.takes_images = false;
  Policy of_text(make_test_runtime(), options);
  EXPECT_THAT(said(of_text, good), ::testing::HasSubstr("set model.vlm"));
  testing_support::Scratch folder("no-tower");
  nn::init_model(testing_support::tiny_model(), folder.path);
  options.takes_images = true;
  options.model = folder.path;
  EXPECT_THROW(Policy(make_test_runtime(), options), Error);
}

/// Rows of a data file with images beside it.
TEST(TrainerImages, DataHasPicturesInPlaceOfTheirPlaceholders) {
  testing_support::Scratch scratch("image-data");
  const std::filesystem::path golden = image_options().model, folder = scratch.path / "data";
  std::filesystem::create_directories(folder / "pictures");
  std::filesystem::copy(golden / "grey.png", folder / "pictures" / "grey.png");
  std::filesystem::copy(golden / "colours.png", scratch.path / "outside.png");
  text::write_byte_level_tokenizer(scratch.path, {.more_special = {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>"}});
  SftText text;
  text.tokenizer = std::make_shared<const text::Tokenizer>(text::Tokenizer::load(scratch.path));
  text.renderer = text::make_renderer({.name = "qwen3.5"}, text.tokenizer, nullptr);
  const vision::PromptImages::Options options{
      .processor = std::make_shared<const vision::ImageProcessor>(vision::ImageProcessor::load(golden)),
      .placeholder = *text.tokenizer->id_of("<|image_pad|>")};
  const std::string uri = vision::png_data_uri(read_file(golden / "colours.png"));
  const auto row = [](const std::string& images) { return R"({"prompt": "What?", "completion": "Seen", "images": [)" + images + "]}\n"; };
  std::ofstream(folder / "d.jsonl") << row(R"("pictures/grey.png", ")" + uri + '"') << row(R"({"bytes": ")" + uri.substr(22) + R"("})")
                                    << row(R"("../outside.png")") << row(R"("pictures/none.png")")
                                    << row(R"("data:image/gif;base64,AAAA")");
  config::SftDataConfig data;
  data.name = (folder / "d.jsonl").string();
  data.shuffle = false;
  io::HubSettings offline;
  offline.is_offline = true;
  const auto said = [&](std::int64_t at) -> std::string {
    try {
      make_data_stream(data, text, offline)->at(at, 1000);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(said(0), ::testing::HasSubstr("set model.vlm"));
  text.images = std::make_shared<const vision::PromptImages>(options);
  const auto stream = make_data_stream(data, text, offline);
  const std::optional<SftSample> two = stream->at(0, 1000), one = stream->at(1, 1000);
  ASSERT_TRUE(two && one);
  ASSERT_EQ(two->images.size(), 2u);
  EXPECT_EQ(two->mask.size(), two->ids.size());
  std::int64_t num_placeholders = 0, num_trained = std::ranges::count(two->mask, 1);
  for (const std::int32_t id : two->ids) num_placeholders += id == options.placeholder;
  EXPECT_EQ(num_placeholders, two->images[0].num_tokens() + two->images[1].num_tokens());
  EXPECT_EQ(num_trained, std::ranges::count(one->mask, 1));
  for (const wire::PromptImage& image : two->images)
    for (std::int64_t t = image.first; t < image.end(); ++t) EXPECT_EQ(two->mask[static_cast<std::size_t>(t)], 0);
  EXPECT_EQ(two->images[1].pixels->rgb, one->images[0].pixels->rgb);
  EXPECT_EQ(two->images[1].pixels, one->images[0].pixels) << "read once";
  // Cut within the second picture: no token is left to train on.
  EXPECT_FALSE(stream->at(0, two->images[1].first + 3).has_value());
  EXPECT_THAT(said(2), ::testing::AllOf(::testing::HasSubstr("d.jsonl:3"), ::testing::HasSubstr("leads out of")));
  EXPECT_THAT(said(3), ::testing::HasSubstr("none.png"));
  EXPECT_THAT(said(4), ::testing::HasSubstr("image 0: wanted 'data:image/png;base64,'"));
  // The same pictures in the columns of a Parquet file.
  data.name = (test_source_dir() / "tests" / "fixtures" / "parquet" / "images.parquet").string();
  const auto binary = make_data_stream(data, text, offline);
  const std::optional<SftSample> stored = binary->at(1, 1000);
  ASSERT_TRUE(stored.has_value());
  ASSERT_EQ(stored->images.size(), 2u);
  EXPECT_EQ(stored->images[1].pixels, two->images[0].pixels);
  // In a row images stand behind those of the samples before.
  const wire::MicroBatch packed = *RowPacker(*stream, two->ids.size() + one->ids.size()).next_until(2);
  ASSERT_EQ(packed.images.size(), 3u);
  EXPECT_EQ(packed.images[2].first, static_cast<std::int64_t>(two->ids.size()) + one->images[0].first);
}

}  // namespace
}  // namespace prl::trainer
