#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "nn/decoder.hpp"
#include "nn/peft.hpp"
#include "nn/test_support.hpp"
#include "ops/eight_bit.hpp"

namespace prl::nn {
namespace {

using namespace testing_support;

std::vector<float> eight_bit_row(const ops::LinearWeight& w, std::int64_t n) {
  std::vector<float> row(static_cast<std::size_t>(w.num_inputs()));
  w.unpack_row(n, row.data());
  return row;
}

/// Whether all values of the row are of 8 bits under its own exponent.
bool is_of_eight_bits(const std::vector<float>& row) {
  float greatest = 0;
  for (const float value : row) greatest = std::max(greatest, std::fabs(value));
  const int n = ops::eight_bit_exponent(greatest);
  return std::ranges::all_of(row, [n](float value) { return ops::eight_bit_rounded(value, n) == value; });
}

TEST(EightBitWeights, AreThoseOfTheProductsOfLayersAlone) {
  for (const char* family : {"qwen3_moe_eight", "deepseek_v3_eight", "deepseek_v3_latents_eight", "qwen3_eight"}) {
    SCOPED_TRACE(family);
    SmallModel model(family, false);
    const WeightsPtr weights = model.weights(DType::kBF16);
    int num_eight = 0;
    for (std::size_t i = 0; i < weights->blocks.size(); ++i) {
      const BlockSpec& spec = weights->table->blocks()[i];
      if (weights->blocks[i].packed == nullptr) continue;
      const bool is_kept = spec.kind == Block::kKvUp && model.config.attends_to_latents;
      const bool wanted = spec.kind != Block::kLmHead && spec.kind != Block::kEmbedding && spec.kind != Block::kRouter && !is_kept;
      EXPECT_EQ(spec.is_eight_bit, wanted);
      EXPECT_EQ(is_of_eight_bits(eight_bit_row(*weights->blocks[i].packed, 0)), wanted) << static_cast<int>(spec.kind);
      num_eight += wanted ? 1 : 0;
    }
    EXPECT_GE(num_eight, 12);
  }
}

TEST(EightBitWeights, AdaptersBesideThemStayAsTheyAre) {
  for (const char* family : {"qwen3_eight", "qwen3_moe_eight_products"}) {
    SCOPED_TRACE(family);
    SmallModel model(family, false);
    AdapterConfig config;
    config.rank = 8;
    config.target_modules = {"q_proj", "o_proj", model.config.num_experts > 0 ? "experts" : "down_proj"};
    const TensorTablePtr table = make_adapter_table(model.config, config);
    for (const TensorSpec& spec : table->tensors()) EXPECT_FALSE(spec.is_eight_bit || spec.rounds_inputs) << spec.name;
    Parameters trained(model.ctx().runtime, model.config, table);
    const Tensor& all = trained.all_values();
    for (std::int64_t i = 0; i < all.num_elements(); ++i) all.as<float>()[i] = std::sin(static_cast<float>(i));
    const WeightsPtr weights = adapt_weights(model.ctx(), trained, config, DType::kBF16, model.weights(DType::kBF16), PolicyVersion{1});
    const ops::LoraWeight* adapter = weights->adapter->find(Block::kQkv, 0);
    ASSERT_NE(adapter, nullptr);
    const std::vector<float> row = eight_bit_row(*adapter->a, 1);
    const float* const master = trained.value(Block::kQkvLoraA, 0).as<float>() + row.size();
    for (std::size_t k = 0; k < row.size(); ++k) ASSERT_EQ(row[k], to_f32(to_bf16(master[k]))) << k;
  }
}

TEST(EightBitWeights, EveryWayOfMakingThemGivesTheSame) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    SmallModel model("qwen3_eight", true);
    const WeightsPtr made = model.weights(compute, false);
    const std::uint64_t wanted = checksum(*made).combined;
    // From one array of all masters, rounded or not, and from what was made.
    EXPECT_EQ(checksum(*load_flat_weights(model.ctx(), model.config, flat_values(model.ctx(), *model.parameters, compute), PolicyVersion{1},
                                          nullptr))
                  .combined,
              wanted);
    EXPECT_EQ(checksum(*load_flat_weights(model.ctx(), model.config, flat_values(made), PolicyVersion{1}, nullptr)).combined, wanted);
    // From files of the masters, and of the weights themselves, which a model without 8-bit weights then has too.
    const std::filesystem::path folder = std::filesystem::temp_directory_path() / fmt::format("prl-eight-{}", ::getpid());
    std::filesystem::remove_all(folder);
    save_pretrained(*model.parameters, folder / "masters", compute, {}, std::uint64_t{1} << 30);
    save_merged(made, folder / "made", compute, {}, std::uint64_t{1} << 30);
    for (const char* name : {"masters", "made"}) {
      const ModelConfig config = load_model_config(folder / name, {.eight_bits = EightBits::kWeights});
      EXPECT_EQ(checksum(*load_weights(model.ctx(), config, folder / name, compute, PolicyVersion{1}, nullptr)).combined, wanted) << name;
    }
    const ModelConfig plain = load_model_config(folder / "made");
    EXPECT_EQ(checksum(*load_weights(model.ctx(), plain, folder / "made", compute, PolicyVersion{1}, nullptr)).combined, wanted);
    std::filesystem::remove_all(folder);
  }
}

TEST(EightBitWeights, GradientsAreThoseOfTheRoundedModel) {
  SmallModel model("qwen3_eight", true), rounded("qwen3", true);
  // The same model with masters that have the values of 8 bits.
  const Tensor values = flat_values(model.weights(DType::kF32));
  std::memcpy(rounded.parameters->all_values().data(), values.data(), values.num_bytes());
  const Packed packed = random_packed(model.config.vocab_size, {40, 9, 33}, 3);
  std::vector<float> dlogp(packed.ids.size(), 0.01f);
  std::vector<float> grads[2];
  int i = 0;
  for (SmallModel* side : {&model, &rounded}) {
    TrainableModel trainable(side->ctx(), *side->parameters, {});
    side->parameters->zero_grads();
    trainable.forward(side->weights(DType::kF32), packed.batch(), packed.targets, packed.temperatures);
    trainable.backward(dlogp);
    const Tensor& all = side->parameters->all_grads();
    grads[i++].assign(all.as<float>(), all.as<float>() + all.num_elements());
  }
  EXPECT_EQ(grads[0], grads[1]);
}

}  // namespace
}  // namespace prl::nn
