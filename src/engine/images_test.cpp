// Requests with images: the same bits however their prompts are computed, and blocks that only the same pictures share.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>

#include "base/files.hpp"
#include "base/testing/source_dir.hpp"
#include "engine/engine.hpp"
#include "engine/resolve_request.hpp"
#include "engine/test_support.hpp"
#include "nn/vision_tower.hpp"
#include "ops/lm_head.hpp"

namespace prl::engine {
namespace {
using namespace std::chrono_literals;
using testing::Inbox;

std::shared_ptr<const wire::ImagePixels> noise_picture(std::int64_t height, std::int64_t width, std::uint64_t seed) {
  auto out = std::make_shared<wire::ImagePixels>();
  Rng rng(seed);
  for (std::int64_t i = 0; i < 3 * height * width; ++i) out->rgb.push_back(static_cast<std::uint8_t>(rng.next_below(256)));
  out->height = height;
  out->width = width;
  out->mean = out->deviation = {127.5f, 127.5f, 127.5f};
  out->hash = {hash_bytes(std::as_bytes(std::span(out->rgb))), hash_bytes(std::as_bytes(std::span(out->rgb)), 1)};
  return out;
}

/// The model of tests/golden/vision: tokens of 8 x 8 pixels.
class ImagesTest : public ::testing::TestWithParam<DType> {
 protected:
  static constexpr std::int32_t kPlaceholder = 261;
  ImagesTest() : session_(make_cpu_runtime(), 2), folder_(test_source_dir() / "tests" / "golden" / "vision") {
    config_ = nn::load_model_config(folder_);
    weights_ = nn::load_weights(session_.context(), config_, folder_, GetParam(), PolicyVersion{1}, nullptr);
    model_ = std::make_unique<nn::InferenceModel>(session_.context(), false);
  }
  static EngineOptions options() {
    EngineOptions o;
    o.max_model_len = 200;
    o.num_blocks = 60;
    o.max_num_seqs = 6;
    o.num_state_snapshots = 6;
    o.num_threads = 2;
    return o;
  }
  void make(const EngineOptions& o) { engine_ = std::make_unique<Engine>(session_.context().runtime, o, weights_); }

  /// Text, a picture, text, and so on.
  static wire::GenerateRequest request_with(const std::vector<std::shared_ptr<const wire::ImagePixels>>& pictures, std::size_t num_text,
                                            std::uint64_t seed, std::int32_t max_tokens = 12) {
    wire::GenerateRequest request;
    Rng rng(seed);
    const auto add_text = [&] {
      for (std::size_t i = 0; i < num_text; ++i) request.prompt_ids.push_back(static_cast<std::int32_t>(3 + rng.next_below(60)));
    };
    add_text();
    for (const auto& pixels : pictures) {
      request.images.push_back({.pixels = pixels,
                                .first = static_cast<std::int64_t>(request.prompt_ids.size()),
                                .rows = pixels->height / 8,
                                .cols = pixels->width / 8});
      request.prompt_ids.insert(request.prompt_ids.end(), static_cast<std::size_t>(request.images.back().num_tokens()), kPlaceholder);
      add_text();
    }
    request.sampling.max_tokens = max_tokens;
    request.sampling.seed = seed;
    request.sampling.ignore_eos = true;
    return request;
  }
  std::shared_ptr<Inbox> submit(const wire::GenerateRequest& request) {
    auto inbox = std::make_shared<Inbox>();
    engine_->submit(request, [inbox](const StepEvent& event) { inbox->push(event); });
    return inbox;
  }
  /// Of the output after the prompt, in one pass without a cache.
  std::vector<float> logp_at_once(const wire::GenerateRequest& request, const std::vector<std::int32_t>& output) {
    std::vector<std::int32_t> ids = request.prompt_ids;
    ids.insert(ids.end(), output.begin(), output.end());
    const auto T = static_cast<std::int64_t>(ids.size());
    std::vector<std::int32_t> axes(static_cast<std::size_t>(3 * T)), rows(ids.size());
    for (std::int64_t t = 0; t < T; ++t)
      for (std::int64_t axis = 0; axis < 3; ++axis)
        axes[static_cast<std::size_t>(axis * T + t)] = wire::rope_position(request.images, t)[static_cast<std::size_t>(axis)];
    std::copy_n(axes.begin(), T, rows.begin());
    std::vector<Tensor> kept;
    std::vector<nn::FeatureRows> features;
    for (const wire::PromptImage& image : request.images) {
      const wire::ImagePixels& p = *image.pixels;
      kept.push_back(weights_->vision->features(session_.context(), {p.rgb, p.height, p.width, p.mean, p.deviation}));
      features.push_back({.rows_NH = kept.back().view(), .first = image.first});
    }
    const std::vector<std::int32_t> bounds{0, static_cast<std::int32_t>(T)};
    nn::PackedBatch batch{.ids_T = ids, .positions_T = rows, .cu_seqlens = bounds};
    batch.rope_positions_3T = axes;
    batch.features = features;
    const TensorView h = model_->forward_packed(*weights_, batch);
    std::vector<std::int32_t> targets(ids.begin() + 1, ids.end());
    targets.push_back(-1);
    const std::vector<float> temperatures(ids.size(), 1.0f);
    const Tensor logp = Tensor::empty(session_.context().runtime, {T}, DType::kF32), entropy = logp.clone(), lse = logp.clone();
    ops::lm_head_logprob(session_.context(), logp, entropy, lse, h, weights_->lm_head(), targets, temperatures);
    return {logp.as<float>() + request.prompt_ids.size() - 1, logp.as<float>() + T - 1};
  }
  void expect_exact(const wire::GenerateRequest& request, const wire::GenerateOutput& output, const std::string& what) {
    ASSERT_EQ(output.token_ids.size(), static_cast<std::size_t>(*request.sampling.max_tokens)) << what << output.error;
    EXPECT_EQ(output.logprobs, logp_at_once(request, output.token_ids)) << what;
  }

  ops::OpSession session_;
  std::filesystem::path folder_;
  nn::ModelConfig config_;
  nn::WeightsPtr weights_;
  std::unique_ptr<nn::InferenceModel> model_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(ImagesTest, PromptsInPartsGiveTheBitsOfOnePass) {
  const auto request = request_with({noise_picture(40, 24, 1), noise_picture(16, 64, 2)}, 9, 5);
  for (const std::int64_t budget : {256, 13, 5}) {
    EngineOptions o = options();
    o.max_num_batched_tokens = budget;
    make(o);
    expect_exact(request, submit(request)->wait().output, fmt::format("a budget of {}", budget));
  }
}

TEST_P(ImagesTest, OnlyTheSamePicturesShareBlocks) {
  make(options());
  const auto picture = noise_picture(64, 32, 1), other = noise_picture(64, 32, 2);
  // One block of text before the picture, and the picture's tokens in 2 more.
  const auto first = request_with({picture}, 20, 5), again = request_with({noise_picture(64, 32, 1)}, 20, 5),
             different = request_with({other}, 20, 5);
  ASSERT_EQ(first.prompt_ids, different.prompt_ids);
  const auto output = submit(first)->wait().output;
  expect_exact(first, output, "first");
  const auto hit = submit(again)->wait().output;
  EXPECT_GE(hit.num_cached_tokens, 64) << "all of the prompt's full blocks";
  expect_exact(again, hit, "again");
  EXPECT_EQ(hit.token_ids, output.token_ids);
  const auto miss = submit(different)->wait().output;
  EXPECT_LE(miss.num_cached_tokens, 16) << "the picture begins in the second block";
  expect_exact(different, miss, "another picture");
  EXPECT_NE(miss.logprobs, hit.logprobs);
}

TEST_P(ImagesTest, MixedBatchesAndPreemptionChangeNothing) {
  EngineOptions o = options();
  o.num_blocks = 14;  // of about 30 that all of them want at once
  o.max_num_batched_tokens = 24;
  make(o);
  std::vector<wire::GenerateRequest> requests;
  for (std::uint64_t i = 0; i < 6; ++i) {
    std::vector<std::shared_ptr<const wire::ImagePixels>> pictures;
    for (std::uint64_t p = 0; p < i % 3; ++p)
      pictures.push_back(noise_picture(static_cast<std::int64_t>(16 + 8 * i), static_cast<std::int64_t>(24 + 8 * p), i + p));
    requests.push_back(request_with(pictures, 11 + i, i, 40));
  }
  std::vector<std::shared_ptr<Inbox>> inboxes;
  for (const auto& request : requests) inboxes.push_back(submit(request));
  for (std::size_t i = 0; i < requests.size(); ++i) expect_exact(requests[i], inboxes[i]->wait().output, fmt::format("request {}", i));
  EXPECT_GT(engine_->stats().num_preemptions, 0);
}

TEST_P(ImagesTest, DevicesThatShareLayersGiveTheBitsOfOne) {
  ops::OpSession second(make_cpu_runtime(), 1);
  ops::OpContext* const devices[] = {&session_.context(), &second.context()};
  const nn::WeightsPtr parts = nn::load_shared_weights(devices, config_, folder_, GetParam(), PolicyVersion{1}, nullptr);
  engine_ = std::make_unique<Engine>(session_.context().runtime, options(), parts);
  const auto request = request_with({noise_picture(40, 24, 1), noise_picture(16, 64, 2)}, 9, 5);
  expect_exact(request, submit(request)->wait().output, "two devices");
}

/// A trainer's weights have no tower: the one that is there stays.
TEST_P(ImagesTest, UpdatesWithoutATowerKeepIt) {
  make(options());
  const auto request = request_with({noise_picture(24, 24, 1)}, 7, 3);
  const auto before = submit(request)->wait().output;
  auto trained = std::make_shared<nn::Weights>(*weights_);
  trained->vision = nullptr;
  trained->version = PolicyVersion{2};
  engine_->update_weights(trained, 60s);
  EXPECT_EQ(engine_->weights()->vision, weights_->vision);
  const auto after = submit(request)->wait().output;
  EXPECT_EQ(after.num_cached_tokens, 0);
  EXPECT_EQ(after.logprobs, before.logprobs);
}

TEST_P(ImagesTest, RequestsThatDoNotFitAreRefused) {
  const auto said = [&](wire::GenerateRequest request, const nn::ModelConfig& config) -> std::string {
    try {
      resolve_request(std::move(request), options(), config);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  const auto good = request_with({noise_picture(24, 24, 1), noise_picture(16, 16, 1)}, 7, 3);
  EXPECT_EQ(said(good, config_), "no error");
  nn::ModelConfig text = config_;
  text.vision.reset();
  EXPECT_THAT(said(good, text), ::testing::HasSubstr("no vision tower"));
  const auto changed = [&](const auto& change) {
    wire::GenerateRequest bad = good;
    change(bad);
    return said(bad, config_);
  };
  EXPECT_THAT(changed([](auto& r) { r.prompt_ids[8] = 5; }),
              ::testing::HasSubstr("token 8 of the prompt is id 5, wanted the placeholder 261"));
  EXPECT_THAT(changed([](auto& r) { r.images[1].first = 8; }), ::testing::HasSubstr("does not fit the prompt"));
  EXPECT_THAT(changed([](auto& r) { r.images[1].first = 1000; }), ::testing::HasSubstr("does not fit the prompt"));
  EXPECT_THAT(changed([](auto& r) { r.images[0].rows = 9; }), ::testing::HasSubstr("does not fit its picture"));
  EXPECT_THAT(changed([](auto& r) { r.images[0].pixels = nullptr; }), ::testing::HasSubstr("does not fit its picture"));
}

INSTANTIATE_TEST_SUITE_P(Types, ImagesTest, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& test) { return test.param == DType::kF32 ? "f32" : "bf16"; });

}  // namespace
}  // namespace prl::engine
