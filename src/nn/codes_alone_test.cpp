// Weights with products of 8-bit numbers as they are loaded, beside those that were made from masters: on the CPU, and compiled a second
// time on a GPU, where loaded ones hold codes alone.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "nn/parameters.hpp"
#include "nn/peft.hpp"
#include "nn/test_support.hpp"

namespace prl::nn {
namespace {

using namespace testing_support;

struct CodesAloneCase {
  const char* family;
  ModelSize size;
};
void PrintTo(const CodesAloneCase& c, std::ostream* out) { *out << c.family << (c.size == ModelSize::kEven ? ", even" : ""); }

class CodesAloneTest : public ::testing::TestWithParam<CodesAloneCase> {
 protected:
  CodesAloneTest() {
    config_ = small_config(GetParam().family, small_options(GetParam().family, GetParam().size));
    parameters_ = std::make_unique<Parameters>(session_.context().runtime, config_);
    parameters_->init_random(11, 0.1f);
    parameters_->ensure_grads();
    std::filesystem::remove_all(folder_);
    save_pretrained(*parameters_, folder_, DType::kBF16, {}, std::uint64_t{1} << 30);
  }
  ~CodesAloneTest() override { std::filesystem::remove_all(folder_); }
  ops::OpContext& ctx() { return session_.context(); }
  static std::size_t packed_bytes(const Weights& weights) {
    std::size_t bytes = 0;
    for (const Weights::PackedBlock& block : weights.blocks)
      if (block.packed != nullptr) bytes += block.packed->num_bytes();
    return bytes;
  }
  std::vector<std::vector<float>> step(const WeightsPtr& weights) {
    TrainableModel model(ctx(), *parameters_, {});
    return step_results(ctx(), *parameters_, weights, random_packed(config_.vocab_size, {40, 3, 70}, 5), model);
  }

  TestSession session_{2};
  ModelConfig config_;
  std::unique_ptr<Parameters> parameters_;
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path() / fmt::format("prl-codes-alone-{}", ::getpid());
};

TEST_P(CodesAloneTest, LoadedWeightsHaveTheBitsOfThoseThatWereMade) {
  const WeightsPtr made = make_weights(ctx(), *parameters_, DType::kBF16, PolicyVersion{1}, true, nullptr);
  const WeightsPtr loaded = load_weights(ctx(), config_, folder_, DType::kBF16, PolicyVersion{1}, nullptr, true);
  EXPECT_EQ(checksum(ctx(), *loaded).tensors, checksum(ctx(), *made).tensors);
  const auto wanted = step(made), got = step(loaded);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) expect_same_bits(got[i], wanted[i], fmt::format("result {}", i));
  std::vector<float> of_made, of_loaded;  // row by row, as they are saved
  for (const auto& [weights, to] : {std::pair{made, &of_made}, {loaded, &of_loaded}})
    for (const Weights::PackedBlock& block : weights->blocks) {
      if (block.packed == nullptr) continue;
      std::vector<float> row(static_cast<std::size_t>(block.packed->num_inputs()));
      block.packed->unpack_row(block.packed->num_outputs() - 1, row.data());
      to->insert(to->end(), row.begin(), row.end());
    }
  expect_same_bits(of_loaded, of_made, "rows");
  if (!holds_codes_alone(ctx(), config_, DType::kBF16)) return;
  EXPECT_FALSE(loaded->flat.defined());
  EXPECT_LT(packed_bytes(*loaded), packed_bytes(*made));
  const WeightsPtr with_values = load_weights(ctx(), config_, folder_, DType::kBF16, PolicyVersion{1}, nullptr, true, true);
  EXPECT_TRUE(with_values->flat.defined());
  EXPECT_EQ(packed_bytes(*with_values), packed_bytes(*made));
}

TEST_P(CodesAloneTest, ValuesThatWereSentAreDropped) {
  const WeightsPtr made = make_weights(ctx(), *parameters_, DType::kBF16, PolicyVersion{1}, false, nullptr);
  const WeightsPtr received = load_flat_weights(ctx(), config_, flat_values(ctx(), *parameters_, DType::kBF16), PolicyVersion{1}, nullptr);
  EXPECT_EQ(checksum(ctx(), *received).tensors, checksum(ctx(), *made).tensors);
  EXPECT_EQ(received->flat.defined(), made->flat.defined() && !holds_codes_alone(ctx(), config_, DType::kBF16));
}

INSTANTIATE_TEST_SUITE_P(Models, CodesAloneTest,
                         ::testing::Values(CodesAloneCase{"qwen3_eight_products", ModelSize::kEven},
                                           CodesAloneCase{"qwen3_moe_eight_products", ModelSize::kEven},
                                           CodesAloneCase{"qwen3_moe_eight_products", ModelSize::kSmall},
                                           CodesAloneCase{"gpt_oss_eight_products", ModelSize::kEven}));

}  // namespace
}  // namespace prl::nn
