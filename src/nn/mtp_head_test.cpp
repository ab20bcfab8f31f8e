// Heads for multi-token prediction: read, computed as published, packed and over a cache, trained, and kept by what is saved
// (tools/make_mtp_golden.py).
#include "nn/mtp_head.hpp"

#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <cmath>
#include <cstring>

#include "base/files.hpp"
#include "base/testing/temp_folder.hpp"
#include "io/safetensors.hpp"
#include "nn/decoder.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {
namespace fs = std::filesystem;

/// As parity_test.cpp has them.
constexpr float kHeadLogitBound = 3e-5f, kHeadGradBound = 1e-5f;

struct HeadCase {
  const char* name;
  const char* key;  ///< of config.json, that says that there is a head
  MtpNames names;
};

/// A model of tests/golden/models with the head of tests/golden/mtp.
class MtpHeadTest : public ::testing::TestWithParam<HeadCase> {
 protected:
  MtpHeadTest() : session_(2) {
    const fs::path golden = testing_support::golden_models().parent_path();
    expected_ = io::SafetensorsFile::open(golden / "mtp" / GetParam().name / "expected.safetensors");
    const fs::path base = golden / "models" / GetParam().name;
    fs::copy_file(base / "model.safetensors", folder() / "model-00001-of-00002.safetensors");
    fs::copy_file(golden / "mtp" / GetParam().name / "head.safetensors", folder() / "model-00002-of-00002.safetensors");
    boost::json::object map;
    for (const char* shard : {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"})
      for (const io::SafetensorsFile file = io::SafetensorsFile::open(folder() / shard); const auto& entry : file.entries())
        map[entry.name] = shard;
    boost::json::object index;
    index["weight_map"] = map;
    write_file_atomic(folder() / "model.safetensors.index.json", boost::json::serialize(index));
    boost::json::object config = boost::json::parse(read_file(base / "config.json")).as_object();
    config[GetParam().key] = 1;
    write_file_atomic(folder() / "config.json", boost::json::serialize(config));
    ids_ = ints("ids");
    targets_ = ints("targets");
    cu_seqlens_ = ints("cu_seqlens");
    for (std::size_t s = 1; s < cu_seqlens_.size(); ++s)
      for (std::int32_t i = cu_seqlens_[s - 1]; i < cu_seqlens_[s]; ++i) positions_.push_back(i - cu_seqlens_[s - 1]);
  }
  fs::path folder() const { return temporary_.path(); }
  ops::OpContext& ctx() { return session_.context(); }
  std::vector<float> floats(const std::string& name) const {
    const io::SafetensorsEntry& entry = expected_->at(name);
    std::vector<float> out(static_cast<std::size_t>(entry.num_elements()));
    expected_->read_f32(entry, 0, out);
    return out;
  }
  std::vector<std::int32_t> ints(const std::string& name) const {
    const auto bytes = expected_->bytes(expected_->at(name));
    std::vector<std::int32_t> out(bytes.size() / 4);
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
  Tensor hidden(DType dtype) {
    const std::vector<float> values = floats("hidden");
    const auto T = static_cast<std::int64_t>(ids_.size());
    const Tensor wide = Tensor::empty(ctx().runtime, {T, static_cast<std::int64_t>(values.size()) / T}, DType::kF32);
    ctx().runtime->copy_from_host(wide.data(), values.data(), values.size() * sizeof(float));
    if (dtype == DType::kF32) return wide;
    const Tensor narrow = Tensor::empty(ctx().runtime, wide.shape(), dtype);
    ops::cast(ctx(), narrow, wide);
    return narrow;
  }
  PackedBatch batch(const Tensor& hidden) const {
    PackedBatch b{ids_, positions_, cu_seqlens_};
    b.hidden_TH = hidden.view();
    return b;
  }
  WeightsPtr model(DType compute, bool with_backward = false) {
    const ModelConfig config = load_model_config(folder());
    const WeightsPtr weights = load_weights(ctx(), config, folder(), compute, PolicyVersion{3}, nullptr, with_backward);
    return with_mtp_head(weights, load_mtp_head(ctx(), *weights, folder(), with_backward));
  }
  static float largest_difference(std::span<const float> a, std::span<const float> b) {
    EXPECT_EQ(a.size(), b.size());
    float out = 0;
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) out = std::max(out, std::abs(a[i] - b[i]));
    return out;
  }

  prl::testing::TempFolder temporary_;
  testing_support::TestSession session_;
  std::optional<io::SafetensorsFile> expected_;
  std::vector<std::int32_t> ids_, targets_, cu_seqlens_, positions_;
};

TEST_P(MtpHeadTest, LogitsAreThoseOfTheDescription) {
  const ModelConfig config = load_model_config(folder());
  ASSERT_TRUE(config.mtp.has_value());
  EXPECT_EQ(config.mtp->names, GetParam().names);
  const WeightsPtr head = model(DType::kF32)->mtp;
  EXPECT_EQ(head->version, PolicyVersion{3});
  InferenceModel computing(ctx());
  const Tensor hidden = this->hidden(DType::kF32);
  const TensorView h_TH = computing.forward_packed(*head, batch(hidden));
  const TensorView logits = computing.logits(*head, h_TH);
  EXPECT_LT(largest_difference({logits.as<float>(), static_cast<std::size_t>(logits.shape.num_elements())}, floats("logits")),
            kHeadLogitBound);
}

TEST_P(MtpHeadTest, GradientsAreThoseOfTheDescription) {
  const WeightsPtr whole = model(DType::kF32, /*with_backward=*/true);
  const ModelConfig config = mtp_head_config(whole->config);
  Parameters parameters(ctx().runtime, config);
  load_parameters(parameters, folder());
  const WeightsPtr head = make_mtp_head(ctx(), parameters, *whole, /*with_backward=*/true);
  TrainableModel training(ctx(), parameters, {});
  parameters.zero_grads();
  const Tensor hidden = this->hidden(DType::kF32);
  const std::vector<float> ones(ids_.size(), 1.0f);
  const TokenStats stats = training.forward(head, batch(hidden), targets_, ones);
  EXPECT_LT(largest_difference(stats.logp_T, floats("logp")), kHeadLogitBound);
  training.backward(floats("weights"));
  std::size_t num_compared = 0;
  for (const NamedParameter& p : parameters.named()) {
    if (p.is_exact()) continue;
    const std::vector<float> wanted = floats("grad." + p.name);
    float largest = 0;
    for (const float value : wanted) largest = std::max(largest, std::abs(value));
    EXPECT_GT(largest, 0.0f) << p.name;
    EXPECT_LT(largest_difference({p.grad.as<float>(), wanted.size()}, wanted), kHeadGradBound * std::max(largest, 0.01f)) << p.name;
    ++num_compared;
  }
  EXPECT_GT(num_compared, 10u);
  EXPECT_FALSE(parameters.grad(Block::kEmbedding).defined()) << "what a head shares with its model is not its to train";
}

TEST_P(MtpHeadTest, RowsOverACacheHaveTheBitsOfPackedOnes) {
  const WeightsPtr head = model(DType::kBF16)->mtp;
  const Tensor hidden = this->hidden(DType::kBF16);
  InferenceModel packed(ctx()), paged(ctx());
  const TensorView h_TH = packed.forward_packed(*head, batch(hidden));
  // The longest sequence in pieces, its hidden states in the slots of another cache, of which the last is what the head makes itself.
  constexpr std::int64_t kBlockSize = 4;
  const std::int32_t begin = cu_seqlens_[1], length = cu_seqlens_[2] - begin;
  const std::int64_t num_blocks = length / kBlockSize + 2;
  KvCache of_model(ctx().runtime, head->config, head->compute, num_blocks, kBlockSize),
      cache(ctx().runtime, head->config, head->compute, num_blocks, kBlockSize);
  of_model.keep_hidden(ctx().runtime, head->config, head->compute, 1);
  cache.share_hidden(of_model);
  std::vector<std::int32_t> slots, table;
  for (std::int32_t i = 0; i < length; ++i) slots.push_back(i);
  for (std::int32_t b = 0; b < num_blocks; ++b) table.push_back(b);
  const Tensor slot_T = Tensor::empty(ctx().runtime, {length}, DType::kI32);
  ctx().runtime->copy_from_host(slot_T.data(), slots.data(), static_cast<std::size_t>(length) * sizeof(std::int32_t));
  ops::store_rows(ctx(), cache.hidden(), hidden.view().rows(begin, length), slot_T);
  for (std::int32_t first = 0; first < length;) {
    const std::int32_t count = std::min(first + 1, length - first);
    const std::vector<std::int32_t> start{0, count}, context{first + count};
    const auto part = [&](const std::vector<std::int32_t>& values, std::int32_t from) {
      return std::span(values).subspan(static_cast<std::size_t>(from + first), static_cast<std::size_t>(count));
    };
    std::vector<std::int32_t> to(static_cast<std::size_t>(count), -1);
    if (first + count == length) to.back() = static_cast<std::int32_t>(cache.num_slots());
    PagedBatch step;
    step.ids_T = part(ids_, begin);
    step.positions_T = part(positions_, begin);
    step.slot_T = step.read_hidden_T = part(slots, 0);
    step.write_hidden_T = to;
    step.query_start = start;
    step.context_len = context;
    step.block_table = table;
    step.max_blocks = static_cast<std::int32_t>(num_blocks);
    const TensorView rows = paged.forward_paged(*head, cache, step);
    const TensorView wanted = h_TH.rows(begin + first, count);
    EXPECT_EQ(std::memcmp(rows.data, wanted.data, static_cast<std::size_t>(count * wanted.shape.num_cols()) * sizeof(BFloat16)), 0)
        << first;
    first += count;
  }
  const std::size_t row_bytes = static_cast<std::size_t>(head->config.hidden_size) * sizeof(BFloat16);
  const TensorView last = h_TH.rows(begin + length - 1, 1);
  EXPECT_EQ(std::memcmp(of_model.hidden().as<std::byte>() + static_cast<std::size_t>(cache.num_slots()) * row_bytes, last.data, row_bytes),
            0);
}

TEST_P(MtpHeadTest, WhatIsSavedHasTheHeadOfTheFolderThatTheModelIsFrom) {
  const ModelConfig config = load_model_config(folder());
  Parameters parameters(ctx().runtime, config);
  load_parameters(parameters, folder());
  const fs::path saved = folder() / "saved";
  save_pretrained(parameters, saved, DType::kBF16);
  const io::SafetensorsFile before = io::SafetensorsFile::open(folder() / "model-00002-of-00002.safetensors"),
                            after = io::SafetensorsFile::open(saved / "model.safetensors");
  for (const io::SafetensorsEntry& entry : before.entries()) {
    const io::SafetensorsEntry& kept = after.at(entry.name);
    EXPECT_EQ(kept.shape, entry.shape) << entry.name;
    EXPECT_EQ(kept.type, entry.type) << entry.name;
    EXPECT_TRUE(std::ranges::equal(before.bytes(entry), after.bytes(kept))) << entry.name;
  }
  const ModelConfig again = load_model_config(saved);
  ASSERT_TRUE(again.mtp.has_value());
  EXPECT_EQ(again.num_skipped_layers, config.num_skipped_layers);
  const WeightsPtr weights = load_weights(ctx(), again, saved, DType::kF32, PolicyVersion{1}, nullptr);
  EXPECT_NO_THROW(static_cast<void>(load_mtp_head(ctx(), *weights, saved)));
}

INSTANTIATE_TEST_SUITE_P(Models, MtpHeadTest,
                         ::testing::Values(HeadCase{"qwen3_5", "mtp_num_hidden_layers", MtpNames::kApart},
                                           HeadCase{"glm4_moe", "num_nextn_predict_layers", MtpNames::kNextLayer},
                                           HeadCase{"deepseek_v3", "num_nextn_predict_layers", MtpNames::kNextLayer}),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(MtpHead, AFolderWithoutOneIsSaidToHaveNone) {
  const fs::path folder = testing_support::golden_models() / "glm4_moe";  // num_nextn_predict_layers is 1, and there are no tensors
  const ModelConfig config = load_model_config(folder);
  EXPECT_FALSE(config.mtp.has_value());
  testing_support::TestSession session(1);
  const WeightsPtr weights = load_weights(session.context(), config, folder, DType::kF32, PolicyVersion{0}, nullptr);
  try {
    static_cast<void>(load_mtp_head(session.context(), *weights, folder));
    FAIL() << "was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string_view(error.what()).find("without a head for multi-token prediction"), std::string_view::npos);
  }
}

}  // namespace
}  // namespace prl::nn
