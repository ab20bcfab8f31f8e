// Images in samples, rows and messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "wire/checks.hpp"
#include "wire/image_codec.hpp"
#include "wire/packing.hpp"

namespace prl::wire {
namespace {
using ::testing::HasSubstr;

std::shared_ptr<const ImagePixels> random_picture(std::int64_t height, std::int64_t width, std::uint64_t seed) {
  auto out = std::make_shared<ImagePixels>();
  Rng rng(seed);
  for (std::int64_t i = 0; i < 3 * height * width; ++i) out->rgb.push_back(static_cast<std::uint8_t>(rng.next_below(256)));
  out->height = height;
  out->width = width;
  out->mean = {1.5f, 2.5f, 3.5f};
  out->deviation = {4.0f, 5.0f, 6.25f};
  out->hash = hash_of(*out);
  return out;
}

/// `before` tokens, an image of 2 x `cols` tokens for each entry of `pictures`, and `after` tokens, one of which is trained.
TrainingSample seeing_sample(std::size_t before, const std::vector<std::shared_ptr<const ImagePixels>>& pictures, std::size_t after) {
  TrainingSample s;
  s.env_name = "pictures";
  s.token_ids.assign(before, 5);
  for (const auto& pixels : pictures) {
    s.images.push_back({.pixels = pixels, .first = static_cast<std::int64_t>(s.token_ids.size()), .rows = 2, .cols = pixels->width / 2});
    s.token_ids.resize(s.token_ids.size() + static_cast<std::size_t>(s.images.back().num_tokens()), 9);
  }
  s.token_ids.resize(s.token_ids.size() + after, 6);
  const std::size_t n = s.token_ids.size();
  s.mask.assign(n, 0);
  s.mask[n - 1] = after > 0 ? 1 : 0;
  s.logprobs.assign(n, 0.0f);
  s.temperatures.assign(n, 1.0f);
  s.advantages.assign(n, 1.0f);
  return s;
}

TEST(ImageMessages, EachPictureGoesOnceAndComesBackWhole) {
  const auto a = random_picture(4, 6, 1), b = random_picture(4, 4, 2), again = random_picture(4, 6, 1);
  TrainingBatch batch{.step = 4, .ranks = {}};
  batch.ranks = pack({seeing_sample(3, {a, b}, 2), seeing_sample(2, {again}, 4), seeing_sample(1, {}, 4)}, {.seq_len = 24, .num_ranks = 2});
  const std::string bytes = encode(batch);
  const auto json = nlohmann::json::from_msgpack(bytes);
  ASSERT_EQ(json.size(), 3u);
  EXPECT_EQ(json[2].size(), 2u) << "two pictures for three images";
  const TrainingBatch found = decode_training_batch(bytes);
  ASSERT_EQ(found.ranks.size(), batch.ranks.size());
  std::set<const ImagePixels*> pictures;
  for (std::size_t r = 0; r < batch.ranks.size(); ++r) {
    ASSERT_EQ(found.ranks[r].size(), batch.ranks[r].size());
    for (std::size_t i = 0; i < batch.ranks[r].size(); ++i) {
      const MicroBatch &x = batch.ranks[r][i], &y = found.ranks[r][i];
      EXPECT_EQ(x.input_ids, y.input_ids);
      ASSERT_EQ(x.images.size(), y.images.size());
      for (std::size_t k = 0; k < x.images.size(); ++k) {
        EXPECT_EQ(y.images[k].first, x.images[k].first);
        EXPECT_EQ(y.images[k].rows, x.images[k].rows);
        EXPECT_EQ(y.images[k].cols, x.images[k].cols);
        EXPECT_EQ(y.images[k].pixels->rgb, x.images[k].pixels->rgb);
        EXPECT_EQ(y.images[k].pixels->hash, x.images[k].pixels->hash);
        pictures.insert(y.images[k].pixels.get());
      }
    }
  }
  EXPECT_EQ(pictures.size(), 2u);
  EXPECT_EQ(nlohmann::json::from_msgpack(encode(TrainingBatch{.step = 1, .ranks = {{}}})).size(), 2u) << "nothing is added without images";
  PictureTable table;
  EXPECT_EQ(table.number_of(a), 0);
  EXPECT_EQ(table.number_of(b), 1);
  EXPECT_EQ(table.number_of(a), 0);
  const auto alone = decode_pictures(encode_pictures(table));
  ASSERT_EQ(alone.size(), 2u);
  EXPECT_EQ(alone[1]->rgb, b->rgb);
  EXPECT_EQ(alone[1]->hash, b->hash);
}

TEST(ImageMessages, DamageIsAnError) {
  TrainingBatch batch{.step = 4, .ranks = pack({seeing_sample(3, {random_picture(4, 6, 1)}, 2)}, {.seq_len = 16})};
  const std::string bytes = encode(batch);
  for (std::size_t n = 0; n < bytes.size(); ++n) EXPECT_THROW(decode_training_batch(std::string_view(bytes).substr(0, n)), Error) << n;
  Rng rng(3);
  for (int round = 0; round < 5000; ++round) {
    std::string damaged = bytes;
    for (std::uint64_t flips = 1 + rng.next_below(3); flips > 0; --flips)
      damaged[rng.next_below(damaged.size())] = static_cast<char>(rng.next_below(256));
    try {
      for (const auto& rank : decode_training_batch(damaged).ranks)
        for (const MicroBatch& row : rank) check(row);
    } catch (const Error& error) {
      ASSERT_THAT(error.code(), ::testing::AnyOf(ErrorCode::kCorrupt, ErrorCode::kNotImplemented)) << error.what();
    }
  }
}

TEST(ImageMessages, ImagesThatDoNotFitAreNamed) {
  const auto said = [](auto change) -> std::string {
    TrainingSample sample = seeing_sample(3, {random_picture(4, 6, 1), random_picture(4, 4, 2)}, 2);
    change(sample);
    try {
      check(sample);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(said([](auto&) {}), "accepted");
  EXPECT_THAT(said([](auto& s) { s.images[0].rows = 3; }), HasSubstr("does not divide its picture"));
  EXPECT_THAT(said([](auto& s) { s.images[0].pixels = nullptr; }), HasSubstr("does not divide its picture"));
  EXPECT_THAT(said([](auto& s) { s.images[1].first = 8; }), HasSubstr("one at token 8, after 9"));
  EXPECT_THAT(said([](auto& s) { s.images[1].first = 13; }), HasSubstr("ends before its last"));
  MicroBatch row = pack({seeing_sample(3, {random_picture(4, 6, 1)}, 2), seeing_sample(1, {}, 3)}, {.seq_len = 16})[0][0];
  check(row);
  row.images[0].first = 7;  // into the next sample
  EXPECT_THROW(check(row), Error);
}

TEST(ImagePacking, NoImageIsDivided) {
  const auto picture = random_picture(4, 6, 1);  // 6 tokens
  const TrainingSample sample = seeing_sample(3, {picture, picture}, 2);
  const std::map<std::int64_t, std::pair<std::size_t, std::size_t>> wanted{{17, {17, 2}}, {16, {16, 2}}, {15, {15, 2}}, {14, {9, 1}},
                                                                           {9, {9, 1}},   {8, {3, 0}},   {3, {3, 0}},   {2, {2, 0}}};
  for (const auto& [seq_len, left] : wanted) {
    const MicroBatch row = pack({sample}, {.seq_len = seq_len})[0][0];
    EXPECT_EQ(row.input_ids.size(), left.first) << seq_len;
    EXPECT_EQ(row.images.size(), left.second) << seq_len;
    EXPECT_EQ(row.position_ids.size(), left.first);
  }
  const auto longer = seeing_sample(0, {picture}, 2);
  PackLosses losses;
  EXPECT_EQ(pack({longer, seeing_sample(9, {}, 1), seeing_sample(2, {}, 1)}, {.seq_len = 5}, &losses)[0].size(), 2u);
  EXPECT_EQ(losses.num_lost, 1) << "nothing is left of it";
  EXPECT_EQ(losses.num_cut, 1);
  EXPECT_EQ(losses.num_cut_tokens, static_cast<std::int64_t>(longer.token_ids.size()) + 5);
  EXPECT_THROW(pack({longer}, {.seq_len = 5}), Error) << "a batch without a token";
}

TEST(ImagePacking, RowsWithImagesAndOfTextAreTwoGroups) {
  Rng rng(4);
  for (int round = 0; round < 100; ++round) {
    std::vector<TrainingSample> samples;
    std::size_t num_images = 0;
    for (std::uint64_t i = 0; i < 1 + rng.next_below(12); ++i) {
      std::vector<std::shared_ptr<const ImagePixels>> pictures;
      for (std::uint64_t k = rng.next_below(3); k > 0; --k)
        pictures.push_back(random_picture(4, 2 * static_cast<std::int64_t>(1 + rng.next_below(3)), k));
      num_images += pictures.size();
      samples.push_back(seeing_sample(1 + rng.next_below(5), pictures, 1 + rng.next_below(5)));
    }
    const std::int64_t num_ranks = static_cast<std::int64_t>(1 + rng.next_below(3));
    const auto ranks = pack(samples, {.seq_len = 32, .num_ranks = num_ranks, .pad_to_multiple_of = 4});
    std::size_t seen = 0, tokens = 0;
    for (const auto& rank : ranks) {
      ASSERT_EQ(rank.size(), ranks[0].size());
      for (std::size_t i = 0; i < rank.size(); ++i) {
        check(rank[i]);
        ASSERT_EQ(rank[i].images.empty(), ranks[0][i].images.empty()) << "ranks have images side by side";
        ASSERT_LE(i > 0 && rank[i - 1].images.empty(), rank[i].images.empty()) << "those with images come first";
        for (const PromptImage& image : rank[i].images)
          for (std::int64_t t = image.first; t < image.end(); ++t) ASSERT_EQ(rank[i].input_ids[static_cast<std::size_t>(t)], 9);
        if (has_loss(rank[i])) seen += rank[i].images.size();
        tokens += static_cast<std::size_t>(count_loss_tokens(rank[i]).rl);
      }
    }
    EXPECT_EQ(seen, num_images);
    EXPECT_EQ(tokens, samples.size());
  }
}

TEST(RopePositions, TextGoesOnBehindTheLongerSide) {
  const TrainingSample sample = seeing_sample(2, {random_picture(4, 6, 1)}, 2);  // 2 x 3 tokens
  const std::vector<std::int32_t> found = rope_positions(sample.images, 10);
  EXPECT_EQ(found, (std::vector<std::int32_t>{0, 1, 2, 2, 2, 2, 2, 2, 5, 6,    // time
                                              0, 1, 2, 2, 2, 3, 3, 3, 5, 6,    // rows
                                              0, 1, 2, 3, 4, 2, 3, 4, 5, 6}))  // columns
      << "of 2 tokens, an image and 2 tokens";
}

}  // namespace
}  // namespace prl::wire
